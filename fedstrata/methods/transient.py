"""Transient sparsity: wake stagnant middle layers by zeroing some of their weights once (LIPS)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import keep_mask, sensitivity, sparsity_at
from fedstrata.methods.contract.declarations import Decision, Facts, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, ModelAndMemory, Outline, Training
from fedstrata.methods.mechanisms.layer_choice import weights_of
from fedstrata.methods.mechanisms.masking import everything
from fedstrata.rng import uniform
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, align, under


@methods.register("transient")
@dataclass(frozen=True)
class Transient(Part):
    r"""Every few rounds, zero the least sensitive weights of the middle layers once, after aggregation.

    After round t, if k divides t, each client ranks the weights of each middle layer by their sensitivity in the round
    just ended, :math:`s = |\Delta w \cdot w|` (Eq. 3), and starts the next round from the aggregated weights with the
    lowest :math:`\tau(t) = \tau_0 (1 - t/T)` of them (Eq. 6) set to zero (Eq. 5). Training itself is dense: the zeroed
    weights grow back. Nothing more travels than in FedAvg.

    The paper's text counts rounds from 1 and ranks by the update; the released code counts from 0, so that its first
    event comes after the very first round with the full :math:`\tau_0` (``schedule=released``), and ranks by the last
    minibatch's gradient times the aggregated weight (``criterion=gradient``). ``magnitude`` and ``random`` are the
    paper's ablations (Table 4). Biases and norms are never masked.

    Where not everybody takes part, a client ranks by the last round in which it trained; before its first, nothing is
    masked.
    """

    facts: ClassVar[Facts] = Facts(
        "layers", "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning (LIPS)"
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.WEIGHTS,))

    tau0: float = parameter(0.7, "The fraction of weights that the first event zeroes.", low=0, below=1)
    every: int = parameter(5, "The number of rounds from one event to the next (k).", low=1)
    criterion: str = parameter(
        "update", "What makes a weight sensitive.", choices=("update", "gradient", "magnitude", "random")
    )
    refill: str = parameter(
        "zero", "What a masked weight restarts from: zero, or its initial value (Table 5).", choices=("zero", "init")
    )
    layers: str = parameter("middle", "Which layers: a role, 'all', or names with wildcards joined by '|'.")
    local_sparsity: bool = parameter(False, "Keep the mask during the local training that follows (Table 7).")
    schedule: str = parameter(
        "paper", "How rounds are counted: from 1, or from 0 as released.", choices=("paper", "released")
    )

    @property
    def needs(self) -> Needs:
        """The released criterion needs the last minibatch's gradient."""
        return Needs(last_gradients=self.criterion == "gradient")

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep the mask of a round, and what the criterion and the refill need."""
        weights = self._weights(clients, model)
        memory = under("mask", everything(weights))
        if self._ranks_by_training():
            scores = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            memory |= under("score", scores) | {"trained": torch.zeros_like(clients.sizes, dtype=torch.bool)}
        return memory | under("init", weights) if self.refill == "init" else memory

    def _weights(self, clients: Clients, model: Tensors) -> Tensors:
        return {name: model[name] for name in weights_of(clients.layers, self.layers)}

    def _ranks_by_training(self) -> bool:
        return self.criterion in ("update", "gradient")

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Zero, once, what was least sensitive in the round before."""
        drop = self.drop_after(clients.round - 1, clients.rounds)
        masks = {
            name: self._mask(clients, name, weight, drop) for name, weight in self._weights(clients, model).items()
        }
        return self._masked(clients, model, masks), clients.memory | under("mask", masks)

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
        if not self.local_sparsity:
            return gradients
        masks = clients.memory.group("mask")
        return {**gradients, **{name: gradients[name] * mask for name, mask in masks.items() if name in gradients}}

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """With local sparsity, hold masked weights where they restarted."""
        masks = clients.memory.group("mask") if self.local_sparsity else Stack()
        return self._masked(clients, parameters, masks), clients.memory

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Note how sensitive the weights were in this round; its mask ends with it."""
        start, trained = self._weights(clients, training.start), self._weights(clients, training.trained)
        memory = clients.memory | under("mask", everything(trained))
        if self.criterion == "update":
            memory |= under("score", {name: sensitivity(start[name], weight) for name, weight in trained.items()})
        elif self.criterion == "gradient":
            memory |= under("score", {name: training.gradients[name] for name in trained if name in training.gradients})
        if self._ranks_by_training():
            memory |= {"trained": torch.ones_like(memory["trained"])}
        return training.trained, memory

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such layers nothing is masked."""
        if not weights_of(outline.layers, self.layers):
            yield f"The model has no weights in '{self.layers}' layers, so '{self.name}' masks nothing."
