"""The client's side of a round, for K clients at once.

The loop engine uses it with K = 1, the stacked engine with as many clients as fit the memory.

All that a client keeps between rounds is one :class:`~fedstrata.stack.Stack`, in groups: ``own`` tensors of the model,
the ``memory`` of each part of the method, the state of the ``optimiser`` where it is kept, and where a part asks for it
the ``previous`` model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.observing import Observer
from fedstrata.engines.probe import DataProbe
from fedstrata.engines.setting import Setting
from fedstrata.engines.training import Assignment, Trainer, refuse_unprepared
from fedstrata.flops import Cost
from fedstrata.methods.contract.composition import PartExchange
from fedstrata.methods.contract.views import Clients, Declared, Message, Phase, Stretch, Training
from fedstrata.stack import Stack, Tensors, clone, repeat, under
from fedstrata.transfer import numbers_on

_HAS_TRAINED = "previous:trained"
_TAKEN = "taken"
"""How many steps an optimiser's state has seen."""


@dataclass(frozen=True)
class Outcome:
    """What a round leaves at clients: their state, their reply with the masks in it that the server holds too, the
    trained models, each client's mean loss, and what training cost.
    """

    state: Stack
    reply: Message
    known: Tensors
    trained: Tensors
    loss: Tensor
    cost: Cost


@dataclass(frozen=True)
class ClientSide:
    """What clients do; ``ids`` says which clients the slices of all stacks belong to."""

    setting: Setting
    forward: Forward
    data: DeviceData

    def first_state(self, ids: Sequence[int]) -> Stack:
        """Prepare clients before the first round: everybody starts from the same initial model."""
        setting = self.setting
        model, clients = repeat(setting.initial, len(ids)), self._view(ids, 0, Stack())
        memory = setting.method.client_memory(clients, model)
        state = under("own", {name: model[name] for name in sorted(setting.resident)}) | under("memory", memory)
        if setting.method.needs.previous:
            never = torch.zeros_like(clients.sizes, dtype=torch.bool)
            state |= under("previous", model) | {_HAS_TRAINED: never}
        return clone(state | under("optimiser", self._first_optimisers(replace(clients, memory=memory), model)))

    def _first_optimisers(self, clients: Clients, model: Tensors) -> Stack:
        """Prepare the states that optimisers keep: for the model and what is learned beside it, and second models."""
        method, first = self.setting.method, Stack()
        parameters = {name: model[name] for name in self.setting.layers.parameter_names}
        learned = {name: clients.memory[name] for name in method.learned(clients.memory)}
        for phase in (Phase(), *method.phases(clients)):
            optimiser = phase.optimiser or self.setting.optimiser
            if optimiser.keep:
                none = {_TAKEN: torch.zeros_like(clients.sizes, dtype=torch.float64)}
                first |= under(self._place(phase), {**optimiser.state({**parameters, **learned}), **none})
        return first

    def _place(self, phase: Phase) -> str:
        """Name where a phase's optimiser keeps its state: one place for each model and each optimiser of a part."""
        own = "" if phase.optimiser is None else f" of {phase.name or 'phase'}"
        return (self.setting.method.second_model(phase) or "model") + own

    def own_model(self, ids: Sequence[int], state: Stack, broadcast: Message, round: int) -> tuple[Tensors, Clients]:
        """Put together each client's model: what was received, and for the rest what it keeps itself.

        Return it with the view of the clients, whose memory may have changed with it.
        """
        own = state.group("own")
        model = {
            name: _combined(broadcast, name, initial.expand(len(ids), *initial.shape), own.get(name))
            for name, initial in self.setting.initial.items()
        }
        clients = self._view(ids, round, state)
        model, memory = self.setting.method.receive(clients, broadcast, model)
        return model, replace(clients, memory=memory)

    def deployed_model(self, ids: Sequence[int], state: Stack, broadcast: Message, round: int) -> Tensors:
        """Put together the model that each client uses, and that is tested."""
        model, clients = self.own_model(ids, state, broadcast, round)
        return self.setting.method.deployed(clients, model)

    def round(
        self,
        ids: Sequence[int],
        state: Stack,
        broadcast: Message,
        round: int,
        losses_so_far: Sequence[float] = (),
        observer: Observer | None = None,
    ) -> Outcome:
        """Receive, start, train, finish, upload.

        ``losses_so_far`` are the mean training losses of the rounds before, which some schedules look at. An
        ``observer`` is shown the models.
        """
        method = self.setting.method
        received, clients = self.own_model(ids, state, broadcast, round)
        start, memory = method.start(clients, broadcast, received)
        clients = replace(clients, memory=memory)
        known = method.masks_known(clients, upload=True)
        kept = state.group("optimiser")
        clients, training, loss, cost, optimiser = self._train(clients, received, start, losses_so_far, kept)
        model, memory = method.finish(clients, training)
        refuse_unprepared(memory, state.group("memory"))
        clients, training = replace(clients, memory=memory), replace(training, trained=model)
        if observer is not None:
            observer.note_models(ids, received, start, model, memory)
        shared = Message({name: model[name] for name in self.setting.initial if name not in self.setting.personal})
        reply = method.upload(clients, training, shared)
        after = under("own", {name: model[name] for name in state.group("own")}) | under("memory", memory)
        if method.needs.previous:
            after |= under("previous", model) | {_HAS_TRAINED: torch.ones_like(state[_HAS_TRAINED])}
            clients = replace(clients, previous=Stack(model), trained=after[_HAS_TRAINED])
        after |= under("optimiser", optimiser)
        return Outcome(after, reply, known, method.deployed(clients, model), loss, cost)

    def _train(
        self, clients: Clients, received: Tensors, start: Tensors, losses_so_far: Sequence[float], kept: Stack
    ) -> tuple[Clients, Training, Tensor, Cost, Stack]:
        """Train all phases, at learning rates times the schedule's factor in their stages.

        Return the clients, what training did, each client's mean loss, what it cost, and the states that optimisers
        keep.
        """
        method, trainer = self.setting.method, self.trainer
        model = start
        losses, costs, models, stretches, steps = [], [], [], [], torch.zeros_like(clients.sizes)
        gradients, mean_gradients = Tensors(), Tensors()
        last, first, factor = Tensors(), 0, 1.0
        for number, phase in enumerate(method.phases(clients)):
            first = number if phase.span[0] == 0 else first  # the spans of one piece of work share its draws
            model, memory = method.before_phase(clients, phase, model)
            clients = replace(clients, memory=memory)
            second = method.second_model(phase)
            begin = model if second is None else memory.group(second)
            stage = phase.stage or (1, clients.rounds)
            factor = self.setting.schedule.factor_in_stage(clients.round, stage, losses_so_far)
            state = last if phase.continues else kept.group(self._place(phase))
            task = Assignment(clients, received, begin, phase, f"phase {first}", factor, state)
            trained = trainer.train(task)
            optimiser, taken = phase.optimiser or self.setting.optimiser, state.get(_TAKEN, torch.zeros_like(steps))
            memory, last = trained.memory, {**trained.optimiser, _TAKEN: taken + trained.steps}
            if second is None:
                if phase.trains is None or self.setting.shared.intersection(phase.trains(self.setting.layers)):
                    rate = optimiser.learning_rate * factor * phase.rate
                    stretches.append(Stretch(trained.steps, taken, optimiser, rate))
                model, steps = trained.model, steps + trained.steps
                gradients, mean_gradients = gradients | trained.gradients, mean_gradients | trained.mean_gradients
            else:
                memory |= under(second, trained.model)
            if optimiser.keep:
                kept |= under(self._place(phase), last)
            clients = replace(clients, memory=memory)
            losses.append(trained.loss)
            costs.append(self.setting.flops.training(trainer.samples(clients.ids, phase), begin, trained.model))
            models.append(trained.model)
        training = Training(
            received=received,
            start=start,
            trained=model,
            gradients=gradients,
            mean_gradients=mean_gradients,
            after_phase=tuple(models),
            steps=steps,
            stretches=tuple(stretches),
            learning_rate=self.setting.optimiser.learning_rate * factor,
        )
        return clients, training, torch.stack(losses).nanmean(0), Cost.total(costs), kept

    def samples(self, ids: Sequence[int], round: int) -> Tensor:
        """Count the samples that clients would be trained on in a round, each as often as it comes ``[K]``.

        Nothing is trained; phases are taken as they are before anything was.
        """
        first = self._view(ids[:1], round, self.first_state(ids[:1]))
        return torch.stack([self.trainer.samples(ids, phase) for phase in self.setting.method.phases(first)]).sum(0)

    def masks_known(self, ids: Sequence[int], state: Stack, round: int) -> Tensors:
        """Return the masks under which the next broadcast may come without sending them."""
        return self.setting.method.masks_known(self._view(ids, round, state), upload=False)

    def adapted_model(self, ids: Sequence[int], state: Stack, broadcast: Message, round: int) -> Tensors:
        """Train clients' own models once more, for themselves, at the initial learning rate times that of the phase."""
        model, clients = self.own_model(ids, state, broadcast, round)
        phase = self.setting.method.adaptation
        if phase is not None:
            model = self.trainer.train(Assignment(clients, model, model, phase, "adaptation")).model
        return self.setting.method.deployed(clients, model)

    def answer_survey(
        self, ids: Sequence[int], state: Stack, exchange: PartExchange, broadcast: Message, round: int
    ) -> Message:
        """Answer a survey before a round, from the current model and the clients' own data."""
        model, clients = self.own_model(ids, state, broadcast, round)
        return exchange.survey(clients, model)

    def adopt(
        self, ids: Sequence[int], state: Stack, exchange: PartExchange, announcement: Message, round: int
    ) -> Stack:
        """Take in what the server concluded from a survey."""
        memory = clone(exchange.adopt(self._view(ids, round, state), announcement))
        return state.without("memory") | under("memory", memory)

    def weights(self, ids: Sequence[int]) -> Tensor:
        """Tell what the clients' replies count, from what they themselves know ``[K]``."""
        clients = self._view(ids, 0, Stack())
        return self.setting.method.weigh(Declared(clients.sizes, clients.label_counts))

    def probe(
        self, ids: Sequence[int], round: int, state: Stack | None = None, at_once: int | None = None
    ) -> DataProbe:
        """Offer the data of some clients to measurements outside of training, beside what these clients keep.

        ``at_once`` bounds how many models run together, where the probe is asked for more.
        """
        return DataProbe(self.trainer, self._view(ids, round, state or Stack()), at_once)

    @cached_property
    def trainer(self) -> Trainer:
        """What trains the clients, and keeps records of their steps."""
        return Trainer(self.setting, self.forward, self.data)

    def _view(self, ids: Sequence[int], round: int, state: Stack) -> Clients:
        """Gather what hooks may see of some clients."""
        numbers = numbers_on(ids, self.setting.device)
        return Clients(
            round=round,
            rounds=self.setting.rounds,
            epochs=self.setting.work.epochs,
            layers=self.setting.layers,
            ids=ids if isinstance(ids, range) else tuple(ids),
            numbers=numbers,
            seed=self.setting.seed,
            sizes=self.data.sizes[numbers],
            label_counts=self.data.label_counts[numbers],
            shared=self.setting.shared,
            memory=state.group("memory"),
            initial=self.setting.initial,
            previous=state.group("previous"),
            trained=state.get(_HAS_TRAINED, torch.empty(0)),
            secret=self.setting.secret,
            probing=lambda clients: DataProbe(self.trainer, clients),
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
