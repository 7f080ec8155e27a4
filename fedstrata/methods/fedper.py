"""FedPer: a shared body under a head of each client's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.part import Kept
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.mechanisms.heads import BodyAndHead


@methods.register("fedper")
@dataclass(frozen=True)
class FedPer(BodyAndHead):
    r"""FedAvg on the body; every client keeps a head of its own and trains both together.

    With body :math:`\phi` and heads :math:`h_k`, each client makes its local steps on :math:`f_k(\phi, h_k)` and sends
    :math:`\phi`; heads never leave a client. Norm layers and their running statistics belong to the body and are
    averaged, unless ``fedbn`` keeps them.

    Defaults:
        head_layers: lgcollins/FedRep, main_fedrep.py, which compares with FedPer.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Arivazhagan et al., Federated Learning with Personalization Layers, 2019",
        "https://arxiv.org/abs/1912.00818",
    )

    def keeps(self, layers: LayerMap) -> Kept:
        """Keep the head."""
        return Kept(personal=self.head(layers))
