"""The study of LIPS that freezes the middle layers, to show that they had stagnated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Kept, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, Outline, Server, Training
from fedstrata.methods.mechanisms.layer_choice import weights_of
from fedstrata.methods.transient import Transient
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("freeze-middle")
@dataclass(frozen=True)
class FreezeMiddle(Part):
    """From some round on, every client's middle layers stay as they are; first and last layers go on being aggregated.

    This is the experiment of LIPS's Table 1 (w/.fix, with FedBN): accuracy hardly changes, so the middle layers had
    stopped to contribute. Frozen weights do not travel any more.
    """

    facts: ClassVar[Facts] = Transient.facts
    touches: ClassVar[Touches] = Touches(decides=(Decision.TRAVEL, Decision.WEIGHTS), relies_on=(Matter.SHARING,))

    after: int = parameter(50, "The last round in which the middle layers move.", low=0)
    layers: str = parameter("middle", "Which layers: a role, 'all', or names with wildcards joined by '|'.")

    def keeps(self, layers: LayerMap) -> Kept:
        """Clients keep their own middle layers."""
        return Kept(resident=weights_of(layers, self.layers))

    def broadcast(self, server: Server, message: Message) -> Message:
        """Do not send what is frozen."""
        return message.without(self._frozen(server))

    def gradients(self, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        """Hide what is frozen from the optimiser: no step, no decay, no part in the gradient's norm."""
        frozen = set(self._frozen(clients))
        return {name: gradient for name, gradient in gradients.items() if name not in frozen}

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Do not send what is frozen."""
        return message.without(self._frozen(clients))

    def _frozen(self, view: Clients | Server) -> list[str]:
        return weights_of(view.layers, self.layers) if view.round > self.after else []

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such layers nothing is frozen."""
        if not weights_of(outline.layers, self.layers):
            yield f"The model has no weights in '{self.layers}' layers, so 'freeze-middle' freezes nothing."
