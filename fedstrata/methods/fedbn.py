"""FedBN: normalisation layers stay at the client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.part import Kept, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Outline
from fedstrata.methods.mechanisms.layer_choice import biases_of
from fedstrata.spec import parameter


@methods.register("fedbn")
@dataclass(frozen=True)
class FedBN(Part):
    """FedAvg, but the parameters and running statistics of norm layers never leave a client.

    Norm layers are found by their type, so a norm in a residual shortcut is personal too.

    With ``biases=local`` the biases of all other layers, the classifier's included, stay at the client as well: the
    released code of LIPS synchronises nothing but the weights of convolutions and linear layers.

    Defaults:
        biases: med-air/FedBN, federated/fed_digits.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021",
        "https://arxiv.org/abs/2102.07623",
    )

    touches: ClassVar[Touches] = Touches(
        relies_on=(Matter.SHARING, Matter.SHARED_NORMS), takes_away=(Matter.SHARED_NORMS,)
    )

    biases: str = parameter("shared", "What becomes of other layers' biases.", choices=("shared", "local"))

    def keeps(self, layers: LayerMap) -> Kept:
        """Keep every tensor of every norm layer, and maybe every bias."""
        return Kept(personal=(*layers.norm_names, *(biases_of(layers) if self.biases == "local" else ())))

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without anything to keep this is FedAvg."""
        if not self.keeps(outline.layers).personal:
            yield "The model has no normalisation layers, so 'fedbn' does exactly what 'fedavg' does."
