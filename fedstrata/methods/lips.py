"""LIPS: local norm layers, and transient sparsity on the middle layers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.fedbn import FedBN
from fedstrata.methods.transient import Transient
from fedstrata.spec import parameter


@methods.register("lips")
@dataclass(frozen=True)
class Lips(Transient):
    """Local norm layers and transient sparsity on the middle layers: ``fedbn+transient``.

    The parameters are those of ``transient``, and ``biases`` of ``fedbn``: the paper keeps nothing but norm layers at
    the clients, the released code every bias too (``biases=local``).

    Defaults:
        biases: paper, Algorithm 1 (excluding BN layers).
    """

    biases: str = parameter(
        "shared",
        "What becomes of the biases of layers that are no norms; 'local' as released.",
        choices=("shared", "local"),
    )

    def parts(self) -> tuple[Part, ...]:
        """Stand for FedBN and transient sparsity."""
        own = {field.name: getattr(self, field.name) for field in fields(Transient)}
        return FedBN(biases=self.biases), Transient(**own)
