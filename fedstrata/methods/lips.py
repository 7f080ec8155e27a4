"""LIPS: wake stagnant middle layers with transient sparsity. Also the study that shows that they stagnate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import keep_mask, sensitivity, sparsity_at
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Server, Step, Training
from fedstrata.methods.fedbn import FedBN
from fedstrata.methods.mechanisms.layer_choice import CHOOSES_WHAT_TRAVELS, SETS_WEIGHTS, weights_of
from fedstrata.rng import uniform
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align

_FACTS = Facts(
    "layers", "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning (LIPS)"
)


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

    facts: ClassVar[Facts] = _FACTS
    claims: ClassVar[tuple[str, ...]] = (SETS_WEIGHTS,)

    tau0: float = parameter(0.7, "The fraction of weights that the first event zeroes.", low=0, below=1)
    every: int = parameter(5, "An event after every so many rounds (k).", low=1)
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

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep a mask of this round, and what the criterion and the refill need."""
        names = weights_of(clients.layers, self.layers)
        memory = {f"mask/{name}": torch.ones_like(model[name], dtype=torch.bool) for name in names}
        if self._ranks_by_training():
            memory |= {f"score/{name}": torch.zeros_like(model[name]) for name in names}
            memory["trained"] = torch.zeros_like(clients.sizes, dtype=torch.bool)
        if self.refill == "init":
            memory |= {f"init/{name}": model[name] for name in names}
        return memory

    def begin(self, clients: Clients, received: Tensors, message: Message) -> Tensors:
        """Decide this round's masks from the sensitivity in the round before."""
        drop = self.drop_after(clients.round - 1, clients.rounds)
        names = weights_of(clients.layers, self.layers)
        return {**clients.memory, **{f"mask/{name}": self._mask(clients, name, received[name], drop) for name in names}}

    def _mask(self, clients: Clients, name: str, aggregated: Tensor, drop: float) -> Tensor:
        if drop == 0:
            return torch.ones_like(aggregated, dtype=torch.bool)
        kept = keep_mask(self._scores(clients, name, aggregated), drop, batched=True)
        return kept | align(~clients.memory["trained"], kept) if self._ranks_by_training() else kept

    def _ranks_by_training(self) -> bool:
        return self.criterion in ("update", "gradient")

    def drop_after(self, round: int, rounds: int) -> float:
        """Return the fraction that is zeroed after a round, counted from 1; zero where there is no event."""
        counted = round if self.schedule == "paper" else round - 1
        return sparsity_at(counted, rounds, self.tau0) if round >= 1 and counted % self.every == 0 else 0.0

    def _scores(self, clients: Clients, name: str, aggregated: Tensor) -> Tensor:
        if self.criterion == "update":
            return clients.memory[f"score/{name}"]
        if self.criterion == "gradient":
            return (clients.memory[f"score/{name}"] * aggregated).abs()
        if self.criterion == "magnitude":
            return aggregated.abs()
        return uniform(clients.keys(f"transient/{name}"), aggregated.shape[1:])

    def perturb(self, clients: Clients, start: Tensors) -> Tensors:
        """Zero what the mask does not keep, or put it back to its initial value."""
        memory = clients.memory
        masked = {
            name: start[name].where(memory[f"mask/{name}"], memory.get(f"init/{name}", start[name].new_zeros(())))
            for name in weights_of(clients.layers, self.layers)
        }
        return {**start, **masked}

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """With local sparsity, let masked weights have no part in the gradient's norm and in the momentum."""
        if not self.local_sparsity:
            return gradients
        names = [name for name in weights_of(clients.layers, self.layers) if name in gradients]
        return {**gradients, **{name: gradients[name] * clients.memory[f"mask/{name}"] for name in names}}

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """With local sparsity, hold masked weights where they restarted."""
        return self.perturb(clients, parameters) if self.local_sparsity else parameters

    def wants_gradients(self) -> bool:
        """The released criterion needs the last minibatch's gradient."""
        return self.criterion == "gradient"

    def remember(self, clients: Clients, training: Training) -> Tensors:
        """Note how sensitive the weights were in this round; its mask ends with it."""
        memory = dict(clients.memory)
        for name in weights_of(clients.layers, self.layers):
            if self.criterion == "update":
                memory[f"score/{name}"] = sensitivity(training.start[name], training.trained[name])
            elif self.criterion == "gradient":
                memory[f"score/{name}"] = training.gradients.get(name, memory[f"score/{name}"])
            memory[f"mask/{name}"] = torch.ones_like(memory[f"mask/{name}"])
        if self._ranks_by_training():
            memory["trained"] = torch.ones_like(memory["trained"])
        return memory

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Say that without such layers nothing is masked."""
        if not weights_of(layers, self.layers):
            yield f"The model has no weights in '{self.layers}' layers, so '{self.name}' masks nothing."


@methods.register("lips")
@dataclass(frozen=True)
class Lips(Transient):
    """Local norm layers and transient sparsity on the middle layers: ``fedbn+transient``.

    The parameters are those of ``transient``.
    """

    facts: ClassVar[Facts] = _FACTS

    def parts(self) -> tuple[Part, ...]:
        """Stand for FedBN and transient sparsity."""
        return FedBN(), Transient(**{field.name: getattr(self, field.name) for field in fields(self)})


@methods.register("freeze-middle")
@dataclass(frozen=True)
class FreezeMiddle(Part):
    """From some round on, every client's middle layers stay as they are; first and last layers go on being aggregated.

    This is the experiment of LIPS's Table 1 (w/.fix, with FedBN): accuracy hardly changes, so the middle layers had
    stopped to contribute. Frozen weights do not travel any more.
    """

    facts: ClassVar[Facts] = _FACTS
    claims: ClassVar[tuple[str, ...]] = (CHOOSES_WHAT_TRAVELS, SETS_WEIGHTS)

    after: int = parameter(50, "The last round in which the middle layers move.", low=0)
    layers: str = parameter("middle", "Which layers: a role, 'all', or names with wildcards joined by '|'.")

    def resident(self, layers: LayerMap) -> Iterable[str]:
        """Clients keep their own middle layers."""
        return weights_of(layers, self.layers)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Do not send what is frozen."""
        return message.without(self._frozen(server))

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Hide what is frozen from the optimiser: no step, no decay, no part in the gradient's norm."""
        frozen = set(self._frozen(clients))
        return {name: gradient for name, gradient in gradients.items() if name not in frozen}

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Do not send what is frozen."""
        return message.without(self._frozen(clients))

    def _frozen(self, view: Clients | Server) -> list[str]:
        return weights_of(view.layers, self.layers) if view.round > self.after else []

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Say that without such layers nothing is frozen."""
        if not weights_of(layers, self.layers):
            yield f"The model has no weights in '{self.layers}' layers, so 'freeze-middle' freezes nothing."
