"""Transient sparsity: wake stagnant middle layers by zeroing some of their weights once (LIPS)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import keep_mask, sensitivity, sparsity_at
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, ModelAndMemory, Outline, Training
from fedstrata.methods.mechanisms.layer_choice import weights_elsewhere, weights_of
from fedstrata.methods.mechanisms.masking import everything, keep
from fedstrata.rng import client_keys, drawn_among, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, under


@methods.register("transient")
@dataclass(frozen=True)
class Transient(Part):
    r"""Every few rounds, zero the least sensitive weights of the middle layers once, after aggregation.

    After round t, if k divides t, each client ranks the weights of each middle layer by their sensitivity in the round
    just ended, :math:`s = |\Delta w \cdot w|` (Eq. 3), and starts the next round from the aggregated weights with the
    lowest :math:`\tau(t) = \tau_0 (1 - t/T)` of them (Eq. 6) set to zero (Eq. 5). Training itself is dense: the zeroed
    weights grow back. Nothing more travels than in FedAvg. Biases and norms are never masked.

    The paper's text counts rounds from 1, so that the first event zeroes :math:`\tau(k)`, a little less than
    :math:`\tau_0`, and ranks by the update. The released code counts from 0, so that its first event comes after the
    very first round with the full :math:`\tau_0` (``schedule=released``), and ranks by the last minibatch's gradient
    times the aggregated weight (``criterion=gradient``). ``magnitude`` is the ablation of Table 4; ``random`` stands in
    the released code only.

    Masked weights restart at zero, or (Table 5) at initial values: with ``refill=init`` at those of the common model,
    near which the weights of a layer with inertia still are, so that little changes. In the released code each client
    restores the first draw of its own model, from before it received the common one (``refill=own-init``): values that
    are no two clients' and never were trained. Here they are drawn for each client among the layer's initial ones.

    ``local_sparsity`` is the comparison of Table 7, where masks hold in local training too: ``until-next`` in all
    rounds from one event to the next, which is what saves work, ``round`` only in the one round after each event. A
    weight that was held has not moved, so Eq. 3 cannot rank it: it keeps the sensitivity that it had when it last
    moved. What a client is tested with is the aggregate, without a mask.

    Where not everybody takes part, a client ranks by the last round in which it trained; before its first, nothing is
    masked. With ``until-next``, who was absent right after an event draws up its mask when it trains next.

    Defaults:
        tau0: paper, Section 5.2, for CIFAR-100 and Tiny ImageNet; 0.5 for CIFAR-10.
        every: paper, Section 5.2.
        criterion: paper, Eq. 3.
        refill: paper, Section 5.2 (zero initialisation).
        layers: paper, Section 4.3 (only the middle layers).
        local_sparsity: paper, Section 4.1 (dense local training).
        schedule: paper, Algorithm 1.
    """

    facts: ClassVar[Facts] = Facts(
        "layers", "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning (LIPS)"
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.WEIGHTS,))

    tau0: float = parameter(
        0.7, "The fraction of weights to zero at round 0, from which it falls to none at the last.", low=0, below=1
    )
    every: int = parameter(5, "The number of rounds from one event to the next (k).", low=1)
    criterion: str = parameter(
        "update", "What makes a weight sensitive.", choices=("update", "gradient", "magnitude", "random")
    )
    refill: str = parameter(
        "zero",
        "What a masked weight restarts from: zero, its initial value, or the client's own draw of one as released.",
        choices=("zero", "init", "own-init"),
    )
    layers: str = parameter("middle", "Which layers: a role, 'all', or names with wildcards joined by '|'.")
    local_sparsity: str = parameter(
        "off",
        "Hold masked weights in local training: not at all, in the round after each event, or until the next event.",
        choices=("off", "round", "until-next"),
    )
    schedule: str = parameter(
        "paper", "How rounds are counted: from 1, or from 0 as released.", choices=("paper", "released")
    )

    @property
    def needs(self) -> Needs:
        """The released criterion needs the last minibatch's gradient."""
        return Needs(last_gradients=self.criterion == "gradient")

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep what the criterion and the refill need, and the mask where it holds in training."""
        weights = self._weights(clients, model)
        memory = under("init", self._initial(clients, weights))
        if self._ranks_by_training():
            scores = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            memory |= under("score", scores) | {"trained": torch.zeros_like(clients.sizes, dtype=torch.bool)}
        if self.local_sparsity != "off":
            memory |= under("mask", everything(weights))
        if self.local_sparsity == "until-next":
            memory |= {"event": torch.zeros_like(clients.sizes)}
        return memory

    def _initial(self, clients: Clients, weights: Tensors) -> Tensors:
        """The values that masked weights restart from, where that is not zero."""
        if self.refill != "own-init":
            return weights if self.refill == "init" else {}
        device = clients.sizes.device
        return {
            name: drawn_among(client_keys(clients.seed, 0, clients.ids, f"transient/init/{name}", device), weight)
            for name, weight in weights.items()
        }

    def masked(self, layers: LayerMap) -> list[str]:
        """Name what is masked."""
        return weights_of(layers, self.layers) if self.tau0 > 0 else []

    def _weights(self, clients: Clients, model: Tensors) -> Tensors:
        return {name: model[name] for name in weights_of(clients.layers, self.layers)}

    def _ranks_by_training(self) -> bool:
        return self.criterion in ("update", "gradient")

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Zero what was least sensitive in the round before: once, or as long as the mask holds."""
        event, memory = self._event_before(clients.round), clients.memory
        drop = self.drop_after(event, clients.rounds)
        if drop == 0 and self.local_sparsity == "off":
            return model, memory
        masks = {
            name: self._mask(clients, name, weight, drop) for name, weight in self._weights(clients, model).items()
        }
        if self.local_sparsity == "until-next":
            drawn, held = memory["event"] == event, memory.group("mask")
            masks = {name: torch.where(align(drawn, mask), held[name], mask) for name, mask in masks.items()}
            memory |= {"event": torch.full_like(memory["event"], event)}
        if self.local_sparsity != "off":
            memory |= under("mask", masks)
        return self._masked(clients, model, masks), memory

    def _event_before(self, round: int) -> int:
        """Tell after which earlier round a mask may come that this one starts with; 0 where there is none."""
        if self.local_sparsity != "until-next":
            return round - 1
        first = 0 if self.schedule == "paper" else 1
        return max(0, (round - 1 - first) // self.every * self.every + first)

    @property
    def plans_ahead(self) -> str | None:
        """What depends on how many rounds there are in all."""
        return "its sparsity falls to zero over all rounds" if self.tau0 > 0 else None

    def drop_after(self, round: int, rounds: int) -> float:
        """Return the fraction that is zeroed after a round, counted from 1; zero where there is no event."""
        counted = round if self.schedule == "paper" else round - 1
        return sparsity_at(counted, rounds, self.tau0) if round >= 1 and counted % self.every == 0 else 0.0

    def _mask(self, clients: Clients, name: str, aggregated: Tensor, drop: float) -> Tensor:
        if drop == 0:
            return torch.ones_like(aggregated, dtype=torch.bool)
        kept = keep_mask(self._scores(clients, name, aggregated), drop, batched=True)
        return kept | align(~clients.memory["trained"], kept) if self._ranks_by_training() else kept

    def _scores(self, clients: Clients, name: str, aggregated: Tensor) -> Tensor:
        if self.criterion == "update":
            return clients.memory[f"score/{name}"]
        if self.criterion == "gradient":
            return (clients.memory[f"score/{name}"] * aggregated).abs()
        if self.criterion == "magnitude":
            return aggregated.abs()
        return uniform(clients.keys(f"transient/{name}"), aggregated.shape[1:])

    def _masked(self, clients: Clients, model: Tensors, masks: Tensors) -> Tensors:
        """Zero what the mask does not keep, or put it back to its initial value."""
        initial = clients.memory.group("init")
        masked = {
            name: model[name].where(mask, initial.get(name, model[name].new_zeros(()))) for name, mask in masks.items()
        }
        return {**model, **masked}

    def gradients(self, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        """With local sparsity, let masked weights have no part in the gradient's norm and in the momentum."""
        return keep(gradients, clients.memory.group("mask"))

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """With local sparsity, hold masked weights where they restarted."""
        return self._masked(clients, parameters, clients.memory.group("mask")), clients.memory

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Note how sensitive the weights were in this round; a mask that holds no longer than a round ends with it."""
        start, trained = self._weights(clients, training.start), self._weights(clients, training.trained)
        memory = clients.memory
        if self.criterion == "update":
            scores = {name: sensitivity(start[name], weight) for name, weight in trained.items()}
            kept, before = memory.group("mask"), memory.group("score")
            moved = {name: torch.where(mask, scores[name], before[name]) for name, mask in kept.items()}
            memory |= under("score", scores | moved)
        elif self.criterion == "gradient":
            memory |= under("score", {name: training.gradients[name] for name in trained if name in training.gradients})
        if self._ranks_by_training():
            memory |= {"trained": torch.ones_like(memory["trained"])}
        if self.local_sparsity == "round":
            memory |= under("mask", everything(trained))
        return training.trained, memory

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such layers, or without an event before the last round, nothing is masked."""
        if not weights_of(outline.layers, self.layers):
            yield f"The model has no weights in '{self.layers}' layers, so '{self.name}' masks nothing."
        elif self.tau0 > 0 and not any(self.drop_after(round, outline.rounds) for round in range(outline.rounds)):
            yield (
                f"'{self.name}' acts every {self.every} rounds and a run of {outline.rounds} ends before a first time, "
                "so it masks nothing; give a smaller 'every', or more rounds."
            )
        yield from (
            f"{so}, so '{self.name}' does not mask it." for so in weights_elsewhere(outline.layers, self.layers)
        )
