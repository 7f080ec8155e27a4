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
from fedstrata.methods.mechanisms.layer_choice import weights_elsewhere, weights_of
from fedstrata.methods.transient import Transient
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("freeze-middle")
@dataclass(frozen=True)
class FreezeMiddle(Part):
    """From some round on, every client's middle layers stay as they are; first and last layers go on being aggregated.

    This is the experiment of LIPS's Table 1 (w/.fix, with FedBN): accuracy hardly changes, so the middle layers had
    stopped to contribute. The paper fixes them "on each client after certain communication rounds" and does not say at
    which values. A round of its Algorithm 1 ends with the aggregate at every client, so that is what is frozen;
    ``freezes=own`` takes what each client had trained itself in that round.

    Frozen weights are not sent to the server any more, and own ones not to clients either. The aggregate is, so that
    clients that were absent get it too.

    Defaults:
        after: paper, Section 3.
        freezes: paper, Algorithm 1; Section 3 leaves it open.
        layers: paper, Section 3 (middle layers).
    """

    facts: ClassVar[Facts] = Transient.facts
    touches: ClassVar[Touches] = Touches(decides=(Decision.TRAVEL, Decision.WEIGHTS), relies_on=(Matter.SHARING,))

    after: int = parameter(50, "The last round in which the middle layers move.", low=0)
    freezes: str = parameter(
        "aggregate", "At which values: the aggregate of that round, or each client's own.", choices=("aggregate", "own")
    )
    layers: str = parameter("middle", "Which layers: a role, 'all', or names with wildcards joined by '|'.")

    def keeps(self, layers: LayerMap) -> Kept:
        """Clients keep middle layers of their own, if those are frozen."""
        return Kept(resident=weights_of(layers, self.layers) if self.freezes == "own" else ())

    def broadcast(self, server: Server, message: Message) -> Message:
        """Do not send what clients froze at values of their own."""
        return message.without(self._frozen(server)) if self.freezes == "own" else message

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
        """Say that without such layers, or rounds after the last in which they move, nothing is frozen."""
        if not weights_of(outline.layers, self.layers):
            yield f"The model has no weights in '{self.layers}' layers, so 'freeze-middle' freezes nothing."
        elif outline.rounds <= self.after:
            yield (
                f"'freeze-middle' lets the layers move up to round {self.after}, and the run has {outline.rounds}, so "
                "it freezes nothing; give a smaller 'after', or more rounds."
            )
        yield from (
            f"{so}, so 'freeze-middle' does not freeze it." for so in weights_elsewhere(outline.layers, self.layers)
        )
