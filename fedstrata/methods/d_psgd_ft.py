"""D-PSGD followed by local fine-tuning of the mean of all models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, Phase, Server
from fedstrata.methods.d_psgd import DPSGD
from fedstrata.methods.mechanisms.peers import NO_SERVER
from fedstrata.methods.mechanisms.shared import equal_shares
from fedstrata.spec import parameter
from fedstrata.stack import weighted_means


@methods.register("d-psgd-ft")
@dataclass(frozen=True)
class DPSGDFineTuning(DPSGD):
    """D-PSGD; after the last round every client fine-tunes the mean of all models on its own data.

    After the last round everybody gets the plain mean of all clients' models, which is what ``client_after`` then
    tests, and trains it at the initial learning rate (``client_adapted``), as the comparisons in SSFL (Table 1) do.

    Defaults:
        epochs: rong-dai/DisPFL, fedml_api/standalone/dpsgd/dpsgd_api.py.
    """

    facts: ClassVar[Facts] = Facts(
        "decentralised", DPSGD.facts.paper + "; fine-tuned as in SSFL, Table 1", DPSGD.facts.link, NO_SERVER
    )

    epochs: int | None = parameter(None, "Epochs of fine-tuning; none: as many as in a round.", low=1)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Relay the neighbours' models; after the last round, send the mean of all."""
        if server.round <= server.rounds:
            return super().broadcast(server, message)
        shares = equal_shares(server.clients, server.sizes.device)
        mean = {name: own[None] for name, own in weighted_means(server.memory.group("last"), shares).items()}
        return message.plus(mean)

    def adaptation(self) -> Phase:
        """Train the mean of all models."""
        return Phase(epochs=self.epochs)
