"""The client's side of a round, for K clients at once.

The loop engine uses it with K = 1, the stacked engine with as many clients as fit the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.probe import DataProbe
from fedstrata.engines.setting import Setting
from fedstrata.engines.training import Trainer
from fedstrata.methods.base import Clients, Message, Training
from fedstrata.methods.composition import Exchange
from fedstrata.stack import Tensors, clone, concatenate, put_, repeat, take


@dataclass(frozen=True)
class ClientState:
    """What clients keep between rounds, as stacks: parts of the model, the method's memory, the optimiser's state."""

    resident: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    optimiser: Tensors = field(default_factory=dict)

    def rows(self, rows: Tensor | None) -> ClientState:
        """Pick some clients."""
        return ClientState(take(self.resident, rows), take(self.memory, rows), take(self.optimiser, rows))

    def put_(self, rows: Tensor | None, other: ClientState) -> None:
        """Write some clients' state back, in place."""
        put_(self.resident, rows, other.resident)
        put_(self.memory, rows, other.memory)
        put_(self.optimiser, rows, other.optimiser)

    @classmethod
    def concatenate(cls, states: Sequence[ClientState]) -> ClientState:
        """Join the clients of several states."""
        kinds = ([getattr(state, kind) for state in states] for kind in ("resident", "memory", "optimiser"))
        return cls(*(concatenate(kind) for kind in kinds))


@dataclass(frozen=True)
class Outcome:
    """What a round leaves at clients: their state, their reply, the trained models, and each client's mean loss."""

    state: ClientState
    reply: Message
    trained: Tensors
    loss: Tensor


@dataclass(frozen=True)
class ClientSide:
    """What clients do; ``ids`` says which clients the slices of all stacks belong to."""

    setting: Setting
    forward: Forward
    data: DeviceData

    def first_state(self, ids: Sequence[int]) -> ClientState:
        """Prepare clients before the first round: everybody starts from the same initial model."""
        model = repeat(self.setting.initial, len(ids))
        resident = clone({name: model[name] for name in sorted(self.setting.resident)})
        memory = clone(self.setting.method.client_memory(self._view(ids, 0, {}), model))
        parameters = {name: model[name] for name in self.setting.layers.parameter_names}
        optimiser = clone(self.setting.optimiser.state(parameters)) if self.setting.optimiser.keep else {}
        return ClientState(resident, memory, optimiser)

    def own_model(self, ids: Sequence[int], state: ClientState, broadcast: Message) -> Tensors:
        """Put together each client's model: what was received, and for the rest what it keeps itself."""
        return {
            name: broadcast.tensors[name].expand(len(ids), *tensor.shape)
            if name in broadcast.tensors
            else state.resident[name]
            for name, tensor in self.setting.initial.items()
        }

    def round(self, ids: Sequence[int], state: ClientState, broadcast: Message, round: int) -> Outcome:
        """Download, begin, perturb, train, remember, upload."""
        method, optimiser = self.setting.method, self.setting.optimiser
        clients = self._view(ids, round, state.memory)
        received = self.own_model(ids, state, broadcast)
        clients = replace(clients, memory=method.begin(clients, received))
        model = start = method.perturb(clients, received)
        learning_rate = optimiser.learning_rate * self.setting.schedule.factor(round, self.setting.rounds)
        losses, gradients, kept = [], Tensors(), state.optimiser
        for number, phase in enumerate(method.phases()):
            trained = self._trainer.train(clients, received, model, phase, learning_rate, f"phase {number}", kept)
            model, gradients = trained.model, gradients | trained.gradients
            kept = trained.optimiser if optimiser.keep else {}
            losses.append(trained.loss)
        training = Training(start, model, gradients)
        clients = replace(clients, memory=method.remember(clients, training))
        shared = Message({name: model[name] for name in self.setting.initial if name not in self.setting.personal})
        reply = method.upload(clients, training, shared)
        resident = {name: model[name] for name in state.resident}
        return Outcome(ClientState(resident, clients.memory, kept), reply, model, torch.stack(losses).mean(0))

    def adapted_model(self, ids: Sequence[int], state: ClientState, broadcast: Message, round: int) -> Tensors:
        """Train clients' own models once more, for themselves, at the initial learning rate."""
        model = self.own_model(ids, state, broadcast)
        phase = self.setting.method.adaptation()
        if phase is None:
            return model
        clients = self._view(ids, round, state.memory)
        rate = self.setting.optimiser.learning_rate
        return self._trainer.train(clients, model, model, phase, rate, "adaptation").model

    def answer_survey(
        self, ids: Sequence[int], state: ClientState, exchange: Exchange, broadcast: Message, round: int
    ) -> Message:
        """Answer a survey before a round, from the current model and the clients' own data."""
        clients = self._view(ids, round, state.memory)
        return exchange.survey(clients, self.own_model(ids, state, broadcast), DataProbe(self._trainer, clients))

    def adopt(
        self, ids: Sequence[int], state: ClientState, exchange: Exchange, announcement: Message, round: int
    ) -> ClientState:
        """Take in what the server concluded from a survey."""
        return replace(state, memory=clone(exchange.adopt(self._view(ids, round, state.memory), announcement)))

    @property
    def _trainer(self) -> Trainer:
        return Trainer(self.setting, self.forward, self.data)

    def _view(self, ids: Sequence[int], round: int, memory: Tensors) -> Clients:
        """Gather what hooks may see of some clients."""
        rows = torch.tensor(list(ids))
        return Clients(
            round=round,
            rounds=self.setting.rounds,
            layers=self.setting.layers,
            ids=tuple(ids),
            seed=self.setting.seed,
            sizes=torch.from_numpy(self.data.split.sizes)[rows].to(self.setting.device),
            label_counts=self.data.label_counts[rows].to(self.setting.device),
            shared=self.setting.shared,
            memory=memory,
        )
