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
from fedstrata.methods.contract.composition import Exchange
from fedstrata.methods.contract.views import Clients, Message, Training
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
    """What a round leaves at clients: their state, their reply with the masks in it that the server holds too, the
    trained models, and each client's mean loss.
    """

    state: ClientState
    reply: Message
    known: Tensors
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
        optimiser = self._first_optimiser(model, memory) if self.setting.optimiser.keep else {}
        return ClientState(resident, memory, optimiser)

    def _first_optimiser(self, model: Tensors, memory: Tensors) -> Tensors:
        """Prepare the optimiser's state for the model, for what is learned beside it, and for second models."""
        method, layers, optimiser = self.setting.method, self.setting.layers, self.setting.optimiser
        parameters = {name: model[name] for name in layers.parameter_names}
        learned = {name: memory[name] for name in method.learns(layers)}
        first = optimiser.state({**parameters, **learned})
        for second in method.second_models():
            first |= _under(second, optimiser.state({**parameters, **learned}))
        return clone(first)

    def own_model(
        self, ids: Sequence[int], state: ClientState, broadcast: Message, round: int
    ) -> tuple[Tensors, Clients]:
        """Put together each client's model: what was received, and for the rest what it keeps itself.

        Return it with the view of the clients, whose memory may have changed with it.
        """
        model = {
            name: _combined(broadcast, name, initial.expand(len(ids), *initial.shape), state.resident.get(name))
            for name, initial in self.setting.initial.items()
        }
        clients = self._view(ids, round, state.memory)
        model, memory = self.setting.method.receive(clients, broadcast, model, DataProbe(self._trainer, clients))
        return model, replace(clients, memory=memory)

    def deployed_model(self, ids: Sequence[int], state: ClientState, broadcast: Message, round: int) -> Tensors:
        """Put together the model that each client uses, and that is tested."""
        model, clients = self.own_model(ids, state, broadcast, round)
        return self.setting.method.deployed(clients, model)

    def round(
        self,
        ids: Sequence[int],
        state: ClientState,
        broadcast: Message,
        round: int,
        losses_so_far: Sequence[float] = (),
    ) -> Outcome:
        """Download, begin, perturb, train, settle, remember, upload.

        ``losses_so_far`` are the mean training losses of the rounds before, which some schedules look at.
        """
        method, keep = self.setting.method, self.setting.optimiser.keep
        received, clients = self.own_model(ids, state, broadcast, round)
        clients = replace(clients, memory=method.begin(clients, received, broadcast))
        known = method.masks_known(clients, upload=True)
        model = start = method.perturb(clients, received)
        factor = self.setting.schedule.factor(round, self.setting.rounds, losses_so_far)
        learning_rate = self.setting.optimiser.learning_rate * factor
        losses, models, steps = [], [], torch.zeros_like(clients.sizes)
        gradients, mean_gradients = Tensors(), Tensors()
        kept, last = dict(state.optimiser), Tensors()
        phases, first = method.phases(clients), 0
        for number, phase in enumerate(phases):
            first = number if phase.span[0] == 0 else first  # the spans of one piece of work share its draws
            second = method.second_model(phase)
            begin = model if second is None else _of(second, clients.memory)
            own = _outside(method.second_models(), kept) if second is None else _of(second, kept)
            optimiser = last if phase.continues else own
            rate = learning_rate * phase.rate
            trained = self._trainer.train(clients, received, begin, phase, rate, f"phase {first}", optimiser)
            memory, last = {**clients.memory, **trained.learned}, trained.optimiser
            if second is None:
                model, steps = trained.model, steps + trained.steps
                gradients, mean_gradients = gradients | trained.gradients, mean_gradients | trained.mean_gradients
            else:
                memory |= _under(second, trained.model)
            if keep:
                kept |= trained.optimiser if second is None else _under(second, trained.optimiser)
            clients = replace(clients, memory=memory)
            losses.append(trained.loss)
            models.append(trained.model)
            if number + 1 < len(phases):
                probe = DataProbe(self._trainer, clients)
                model, memory = method.between_phases(clients, number, model, probe)
                clients = replace(clients, memory=memory)
        model = method.settle(clients, start, model)
        training = Training(
            received=received,
            start=start,
            trained=model,
            gradients=gradients,
            mean_gradients=mean_gradients,
            after_phase=tuple(models),
            steps=steps,
            effective_steps=self.setting.optimiser.effective_steps(steps),
            learning_rate=learning_rate,
            probe=DataProbe(self._trainer, clients),
        )
        clients = replace(clients, memory=method.remember(clients, training))
        shared = Message({name: model[name] for name in self.setting.initial if name not in self.setting.personal})
        reply = method.upload(clients, training, shared)
        resident = {name: model[name] for name in state.resident}
        used = method.deployed(clients, model)
        after = ClientState(resident, clients.memory, kept)
        return Outcome(after, reply, known, used, torch.stack(losses).nanmean(0))

    def masks_known(self, ids: Sequence[int], state: ClientState, round: int) -> Tensors:
        """Return the masks under which the next broadcast may come without sending them."""
        return self.setting.method.masks_known(self._view(ids, round, state.memory), upload=False)

    def adapted_model(self, ids: Sequence[int], state: ClientState, broadcast: Message, round: int) -> Tensors:
        """Train clients' own models once more, for themselves, at the initial learning rate times that of the phase."""
        model, clients = self.own_model(ids, state, broadcast, round)
        phase = self.setting.method.adaptation()
        if phase is not None:
            rate = self.setting.optimiser.learning_rate * phase.rate
            model = self._trainer.train(clients, model, model, phase, rate, "adaptation").model
        return self.setting.method.deployed(clients, model)

    def answer_survey(
        self, ids: Sequence[int], state: ClientState, exchange: Exchange, broadcast: Message, round: int
    ) -> Message:
        """Answer a survey before a round, from the current model and the clients' own data."""
        model, clients = self.own_model(ids, state, broadcast, round)
        return exchange.survey(clients, model, DataProbe(self._trainer, clients))

    def adopt(
        self, ids: Sequence[int], state: ClientState, exchange: Exchange, announcement: Message, round: int
    ) -> ClientState:
        """Take in what the server concluded from a survey."""
        return replace(state, memory=clone(exchange.adopt(self._view(ids, round, state.memory), announcement)))

    def probe(self, ids: Sequence[int], round: int) -> DataProbe:
        """Offer the data of some clients to measurements outside of a run."""
        return DataProbe(self._trainer, self._view(ids, round, {}))

    @property
    def _trainer(self) -> Trainer:
        return Trainer(self.setting, self.forward, self.data)

    def _view(self, ids: Sequence[int], round: int, memory: Tensors) -> Clients:
        """Gather what hooks may see of some clients."""
        rows = torch.tensor(list(ids))
        return Clients(
            round=round,
            rounds=self.setting.rounds,
            epochs=self.setting.work.epochs,
            layers=self.setting.layers,
            ids=tuple(ids),
            seed=self.setting.seed,
            sizes=torch.from_numpy(self.data.split.sizes)[rows].to(self.setting.device),
            label_counts=self.data.label_counts[rows].to(self.setting.device),
            shared=self.setting.shared,
            memory=memory,
            initial=self.setting.initial,
            secret=self.setting.secret,
        )


def _combined(broadcast: Message, name: str, initial: Tensor, kept: Tensor | None) -> Tensor:
    """Take a tensor from the broadcast, where the client keeps its own value for entries that were not sent.

    What neither travels nor is kept is what it was at the beginning.
    """
    if name not in broadcast.tensors:
        return initial if kept is None else kept
    received = broadcast.tensors[name].expand_as(initial)
    if kept is None or name not in broadcast.masks:
        return received
    return received.where(broadcast.masks[name], kept)


def _of(prefix: str, tensors: Tensors) -> Tensors:
    """Take what is named under a prefix, without it."""
    return {
        name.removeprefix(f"{prefix}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}/")
    }


def _outside(prefixes: Sequence[str], tensors: Tensors) -> Tensors:
    """Take what is named under none of some prefixes."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not any(name.startswith(f"{prefix}/") for prefix in prefixes)
    }


def _under(prefix: str, tensors: Tensors) -> Tensors:
    """Put names under a prefix."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}
