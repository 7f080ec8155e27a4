"""FedRep: like FedPer, but head and body are trained one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Phase
from fedstrata.methods.fedper import FedPer
from fedstrata.spec import parameter


@methods.register("fedrep")
@dataclass(frozen=True)
class FedRep(FedPer):
    r"""Like FedPer, but a client first trains its head on the body received, then the body under it.

    With the body frozen, the head :math:`h_k` is trained for ``head_epochs``; with this head frozen, the body
    :math:`\phi` is trained for ``body_epochs`` and sent. The local epochs of the experiment are those of the head, and
    the body is trained for a single one: the authors' scripts have ten for the head and one or five for the body. Their
    last round trains the heads of all clients and no body, which is not done here. Running statistics follow the data
    in both phases.

    Defaults:
        head_layers: lgcollins/FedRep, main_fedrep.py.
        head_epochs: ours; the scripts of lgcollins/FedRep have ten.
        body_epochs: lgcollins/FedRep, utils/options.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021",
        "https://arxiv.org/abs/2102.07089",
    )

    head_epochs: int | None = parameter(None, "Epochs for the head; none: as the experiment says.", low=1)
    body_epochs: int | None = parameter(1, "Epochs for the body; none: as the experiment says.", low=1)

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the head, then the body."""
        return (
            Phase(trains=self.head, epochs=self.head_epochs, name="head"),
            Phase(trains=self.body, epochs=self.body_epochs, name="body"),
        )
