"""LIPS: local norm layers, and transient sparsity on the middle layers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.fedbn import FedBN
from fedstrata.methods.transient import Transient


@methods.register("lips")
@dataclass(frozen=True)
class Lips(Transient):
    """Local norm layers and transient sparsity on the middle layers: ``fedbn+transient``.

    The parameters are those of ``transient``.
    """

    def parts(self) -> tuple[Part, ...]:
        """Stand for FedBN and transient sparsity."""
        return FedBN(), Transient(**{field.name: getattr(self, field.name) for field in fields(self)})
