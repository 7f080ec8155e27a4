"""FedBABU: only the body is trained, under a fixed random head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Server, Training
from fedstrata.methods.mechanisms.heads import BodyAndHead
from fedstrata.spec import parameter


@methods.register("fedbabu")
@dataclass(frozen=True)
class FedBABU(BodyAndHead):
    r"""Train and average only the body under a fixed random head; fine-tune for each client at the end.

    The head stays at its common initial values, which everybody knows, so that it never travels; all clients learn a
    body for the same head. After the last round each client fine-tunes its copy: the whole model (``tune=full``, the
    authors' choice), or its ``body`` or ``head`` alone, at a hundredth of the initial learning rate, where the authors'
    schedule ends. PLayer-FL's variant is ``fedbabu(head_layers=2, tune=head, epochs=1, rate=1)``. Before that,
    everybody uses the same global model.

    Defaults:
        head_layers: jhoon-oh/FedBABU, models/Update.py.
        tune, epochs, rate: jhoon-oh/FedBABU, analysis.ipynb.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022",
        "https://arxiv.org/abs/2106.06042",
    )
    touches: ClassVar[Touches] = BodyAndHead.touches.also(
        decides=(Decision.TRAVEL, Decision.USE), relies_on=(Matter.UNMASKED_HEAD,)
    )

    tune: str = parameter("full", "What is fine-tuned at the end.", choices=("full", "body", "head"))
    epochs: int | None = parameter(5, "Epochs of fine-tuning; none: as many as in a round.", low=1)
    rate: float = parameter(0.01, "What the initial learning rate is multiplied by for fine-tuning.", above=0)

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the body."""
        return (Phase(trains=self.body),)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the body."""
        return message.without(self.head(server.layers))

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the body."""
        return message.without(self.head(clients.layers))

    def adaptation(self) -> Phase:
        """Fine-tune the model, or a part of it."""
        trains = {"full": None, "body": self.body, "head": self.head}[self.tune]
        return Phase(trains=trains, epochs=self.epochs, rate=self.rate)
