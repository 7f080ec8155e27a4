"""Local training of K clients at once: the only training loop there is.

A step changes what stands in the places of a :class:`Workspace`, and nothing else, so that it can be recorded once and
replayed (:mod:`fedstrata.engines.replaying`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.engines.batches import Batch, DeviceData, Work
from fedstrata.engines.forward import Forward
from fedstrata.engines.replaying import KeyRing, Replayer, fill_, hold, shape_of
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Clients, LocalStep, Phase, altered
from fedstrata.optimisers import Optimiser
from fedstrata.rng import client_keys, fold
from fedstrata.stack import Rows, Stack, Tensors, add, align, clone, copy_, take, under
from fedstrata.transfer import to_device


@dataclass(frozen=True)
class Trained:
    """What a phase of training leaves.

    ``memory`` is that of the clients, with what parts trained or changed in it. ``loss`` is each client's mean and
    ``steps`` the number of its steps; ``gradients`` are those of its last step and ``mean_gradients`` the mean over all
    of them, if the method needs them.
    """

    model: Tensors
    memory: Stack
    optimiser: Tensors
    loss: Tensor
    steps: Tensor
    gradients: Tensors
    mean_gradients: Tensors

    def copied(self, given: Stack) -> Trained:
        """Take everything out of places that will be used again; memory that is still as it was ``given`` stays."""
        memory = {name: own if given.get(name) is own else own.clone() for name, own in self.memory.items()}
        return Trained(
            clone(self.model), Stack(memory), clone(self.optimiser), self.loss, self.steps.clone(),
            clone(self.gradients), self.mean_gradients,
        )  # fmt: skip

    def ordered(self, rows: Tensor, given: Stack, taken: Stack) -> Trained:
        """Bring clients into another order, as copies; memory that is still as it was ``taken`` is as it was given."""
        memory = {
            name: given[name] if taken.get(name) is own else own.index_select(0, rows)
            for name, own in self.memory.items()
        }
        return Trained(
            take(self.model, rows), Stack(memory), take(self.optimiser, rows), self.loss[rows], self.steps[rows],
            take(self.gradients, rows), take(self.mean_gradients, rows),
        )  # fmt: skip


@dataclass(frozen=True)
class Assignment:
    """What K clients are asked to do: to train for one phase, from ``start``.

    ``received`` is what hooks see as the weights of the round's beginning, ``factor`` the schedule's, for the learning
    rate. ``purpose`` separates the draws of different phases. Without a ``kept`` state of the optimiser a fresh one is
    made.
    """

    clients: Clients
    received: Tensors
    start: Tensors
    phase: Phase
    purpose: str
    factor: float = 1.0
    kept: Tensors = field(default_factory=dict)

    def in_order(self, rows: Tensor, order: np.ndarray) -> Assignment:
        """Bring the clients into another order, which ``rows`` has on the device."""
        received, start, kept = (take(stack, rows) for stack in (self.received, self.start, self.kept))
        return replace(self, clients=self.clients.rows(rows, order), received=received, start=start, kept=kept)


@dataclass
class Workspace:
    """The places of all that steps of K clients read and write.

    ``given`` is what a phase begins with: what clients ``received``, their ``memory`` and facts about them, which steps
    only read, and their ``parameters`` (with what is learned beside the model), ``buffers`` and the ``optimiser``'s
    state, which they change. ``keys`` are those of the random transforms and of dropout. ``changed`` is the memory that
    hooks have changed, ``gradients`` those of the last step and ``summed`` the sum over all, where they are needed.
    """

    view: Clients
    given: Stack
    ring: KeyRing
    keys: Tensors
    moving: list[str]
    learned: list[str]
    number: Tensor
    step_size: Tensor
    learning_rate: Tensor
    losses: _Mean
    changed: Stack = field(default_factory=Stack)
    gradients: Tensors = field(default_factory=dict)
    summed: Tensors = field(default_factory=dict)
    batches: dict[Any, Batch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters, self.buffers, self.optimiser = (
            self.given.group(name) for name in ("parameters", "buffers", "optimiser")
        )
        self.received = self.given.group("received")
        self.clients = _seen(self.view, self.given, self.ring)

    def in_places(self, for_ever: bool) -> Workspace:
        """Copy what steps change into places of its own, for each client; for ever, also what they read."""
        read = self.given.without(*_CHANGING)
        changed = {name: tensor for name, tensor in self.given.items() if name not in read}
        return replace(self, given=(hold(read) if for_ever else read) | clone(changed))

    def refill_(self, begun: Workspace) -> None:
        """Begin again, in the same places, with what another one begins with."""
        fill_(self.given, begun.given)
        fill_(self.keys, begun.keys)
        self.step_size.copy_(begun.step_size)
        self.learning_rate.copy_(begun.learning_rate)
        for place in (self.losses.total, self.losses.count, *self.gradients.values(), *self.summed.values()):
            place.zero_()
        memory = self.given.group("memory")
        fill_(self.changed, {name: memory[name] for name in self.changed})
        self.view = begun.view
        self.ring.turn_(begun.view)
        self.clients = _seen(self.view, self.given, self.ring)

    def batch_in_places(self, batch: Batch) -> tuple[Any, Batch]:
        """Put a batch where others of its kind, for as many clients with as many samples, have been; tell the kind."""
        kind = type(batch.place), batch.positions.shape
        if kind not in self.batches:
            self.batches[kind] = replace(batch, **{name: own.clone() for name, own in _tensors_of(batch).items()})
        places = _tensors_of(self.batches[kind])
        for name, own in _tensors_of(batch).items():
            places[name].copy_(own)
        return kind, replace(batch, **places)

    def outcome(self, parameter_names: Sequence[str]) -> Trained:
        """Tell what training has left in the places."""
        model = {**{name: self.parameters[name] for name in parameter_names}, **self.buffers}
        memory = self.view.memory | self.changed | {name: self.parameters[name] for name in self.learned}
        mean = {
            name: tensor / align(self.losses.count.clamp(min=1), tensor).to(tensor.dtype)
            for name, tensor in self.summed.items()
        }
        return Trained(
            model, memory, dict(self.optimiser), self.losses.value(), self.losses.count, dict(self.gradients), mean
        )


def _tensors_of(batch: Batch) -> dict[str, Any]:
    named = {"rows": batch.place, "positions": batch.positions, "numbers": batch.numbers}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def _seen(view: Clients, given: Stack, ring: KeyRing) -> Clients:
    """Let hooks see clients with their tensors where they are held."""
    facts = {name: given[name] for name in _FACTS if name in given}
    return altered(view, memory=given.group("memory"), previous=given.group("previous"), drawing=ring, **facts)


_FACTS = ("sizes", "label_counts", "numbers", "trained")
_CHANGING = ("parameters", "buffers", "optimiser")
_KEPT_WORKSPACES = 6
"""For how many kinds of training, such as phases and sizes of chunks, places are kept from round to round."""


@dataclass(frozen=True)
class Trainer:
    """Trains clients on their own data; places and records of steps are kept from round to round."""

    setting: Setting
    forward: Forward
    data: DeviceData
    kept: OrderedDict[Any, tuple[Workspace, Replayer]] = field(default_factory=OrderedDict, repr=False, compare=False)

    def train(self, task: Assignment) -> Trained:
        """Train K clients for one phase: those of unequal size in the order of it, so that who goes on comes first."""
        order = self.data.order_of(task.clients.ids, self._work(task.phase))
        if order is None:
            trained = self._train(task)
            return trained.copied(task.clients.memory) if self.setting.replay else trained
        rows, back = to_device(np.stack((order, np.argsort(order))), self.setting.device)
        in_order = task.in_order(rows, order)
        return self._train(in_order).ordered(back, task.clients.memory, in_order.clients.memory)

    def _train(self, task: Assignment) -> Trained:
        """Train clients in the order in which they are given; what it leaves may lie in places that are used again."""
        clients, phase = task.clients, task.phase
        work = self._begin(task)
        work, replayer = self._in_kept_places(work, phase) if self.setting.replay else (work.in_places(False), None)

        for batch, repeat in self._batches(clients.ids, clients.round, phase, task.purpose):
            work.number.fill_(batch.step)
            if replayer is None:
                self._step(work, work.clients, batch, phase, repeat)
                continue
            kind, held = work.batch_in_places(batch)
            step = partial(self._step, work, batch=held, phase=phase, repeat=repeat)
            replayer.run((repeat, *kind), work.clients, batch.members, step, work.ring)
        trained = work.outcome(self.setting.layers.parameter_names)
        work.view = work.clients  # not to hold what the clients of this round keep
        return trained

    def _begin(self, task: Assignment) -> Workspace:
        """Gather what a phase begins with, as it is."""
        clients, phase, start = task.clients, task.phase, task.start
        layers, method, device = self.setting.layers, self.setting.method, self.setting.device
        optimiser = phase.optimiser or self.setting.optimiser
        learned = {name: clients.memory[name] for name in method.learned(clients.memory)}
        parameters = {**{name: start[name] for name in layers.parameter_names}, **learned}
        chosen = set(layers.parameter_names if phase.trains is None else phase.trains(layers))
        moving = [name for name in layers.parameter_names if name in chosen] + list(learned)
        fresh = optimiser.state({name: parameters[name] for name in moving})
        given = (
            under("received", task.received)
            | under("memory", clients.memory)
            | under("previous", clients.previous)
            | {name: getattr(clients, name) for name in _FACTS}
            | under("parameters", parameters)
            | under("buffers", {name: start[name] for name in layers.buffer_names})
            | under("optimiser", {**fresh, **task.kept})
        )

        def rate(of: Optimiser) -> Tensor:
            return torch.full((), of.learning_rate * task.factor * phase.rate, dtype=torch.float64, device=device)

        return Workspace(
            view=clients,
            given=given,
            ring=KeyRing(clients),
            keys={
                use: client_keys(self.setting.seed, clients.round, clients.ids, f"{task.purpose}/{use}", device)
                for use in ("transforms", "dropout")
            },
            moving=moving,
            learned=list(learned),
            number=torch.zeros((), dtype=torch.int64, device=device),
            step_size=rate(optimiser),
            learning_rate=rate(self.setting.optimiser),
            losses=_Mean(len(clients.ids), device),
        )

    def _in_kept_places(self, begun: Workspace, phase: Phase) -> tuple[Workspace, Replayer]:
        """Put what a phase begins with where an earlier one of the same kind had it, with the records of its steps."""
        optimiser = phase.optimiser or self.setting.optimiser
        read = begun.given.without(*_CHANGING)
        kind = (
            shape_of(read), tuple(begun.given), tuple(begun.moving), tuple(begun.learned), optimiser, phase.model,
            phase.name, phase.epochs, phase.steps, phase.repeats, phase.continues, phase.rate, phase.span,
            phase.stage,
        )  # fmt: skip
        if kind in self.kept:
            self.kept.move_to_end(kind)
            work, replayer = self.kept[kind]
            work.refill_(begun)
            return work, replayer
        work = begun.in_places(True)
        self.kept[kind] = work, Replayer(self.setting.device)
        if len(self.kept) > _KEPT_WORKSPACES:
            self.kept.popitem(last=False)
        return self.kept[kind]

    def _step(self, work: Workspace, clients: Clients, batch: Batch, phase: Phase, repeat: int) -> None:
        """Make one step of a group of the clients, in place."""
        method, layers, rows = self.setting.method, self.setting.layers, batch.place
        optimiser = phase.optimiser or self.setting.optimiser
        some, own_state = clients.rows(rows, batch.members), take(work.optimiser, rows)
        current = {name: tensor.detach() for name, tensor in take(work.parameters, rows).items()}
        for name in work.moving:
            current[name].requires_grad_()
        some = _remembering(some, work.changed, rows, {name: current[name] for name in work.learned})
        step, loss, after = self._pass(work, some, current, batch, phase, repeat)
        slopes = _slopes(loss, {name: current[name] for name in work.moving})
        with torch.no_grad():
            if method.needs.last_gradients:
                _write_(work.gradients, rows, slopes, work.parameters)
            if method.needs.mean_gradients:
                _add_(work.summed, rows, slopes, work.parameters)
            new = {name: tensor.detach() for name, tensor in current.items()}
            optimiser.update_(new, method.gradients(some, step, slopes), own_state, work.step_size)
            own = {name: new[name] for name in layers.parameter_names}
            some = _remembering(some, Stack(), None, {name: new[name] for name in work.learned})
            projected, memory = method.project(some, step, own)
            # A hook may return what it was given; training owns its tensors.
            copy_(new, {name: value for name, value in projected.items() if value is not new[name]})
            refuse_unprepared(memory, work.view.memory)
            _write_(work.changed, rows, memory, work.clients.memory)
            if isinstance(rows, Tensor):  # otherwise they were changed where they are
                _write_(work.parameters, rows, new)
                _write_(work.optimiser, rows, own_state)
            _write_(work.buffers, rows, after)
            work.losses.add_(rows, loss.detach())

    @property
    def replayed(self) -> int:
        """How many steps were not run in Python, but replayed from records."""
        return sum(replayer.replayed for _, replayer in self.kept.values())

    @property
    def learning(self) -> bool:
        """Whether some of its steps still run in Python, and others like them will be replayed."""
        return any(replayer.learning for _, replayer in self.kept.values())

    @property
    def obstacles(self) -> list[str]:
        """What stood against records, in words."""
        return [replayer.obstacle for _, replayer in self.kept.values() if replayer.obstacle is not None]

    def samples(self, ids: Sequence[int], phase: Phase) -> Tensor:
        """Count the samples that a phase trains K clients on, each as often as it comes ``[K]``."""
        work = self._work(phase)
        held = self.data.split.sizes[np.array(ids, dtype=np.int64)]
        counts = work.samples_of(held if work.samples is None else np.full_like(held, work.samples))
        return to_device((phase.repeats * counts).astype(np.float64), self.setting.device)

    def _batches(self, ids: Sequence[int], round: int, phase: Phase, purpose: str) -> Iterator[tuple[Batch, int]]:
        for batch in self.data.batches(ids, self._work(phase), self.setting.seed, round, purpose):
            yield from ((batch, repeat) for repeat in range(phase.repeats))

    def _work(self, phase: Phase) -> Work:
        work = replace(self.setting.work, span=phase.span)
        if phase.epochs is None and phase.steps is None:
            return work
        return replace(work, epochs=phase.epochs or work.epochs, steps=phase.steps)

    def _pass(
        self, work: Workspace, clients: Clients, parameters: Tensors, batch: Batch, phase: Phase, repeat: int
    ) -> tuple[LocalStep, Tensor, Tensors]:
        """Run the models on a batch: return the step as hooks see it, each client's loss, and the buffers after."""
        method, layers, rows = self.setting.method, self.setting.layers, batch.place
        received, buffers, keys = (take(stack, rows) for stack in (work.received, work.buffers, work.keys))
        inputs, labels = self.data.make(batch.positions, keys["transforms"], work.number, clients.numbers)
        draws = fold(keys["dropout"], work.number)

        def run(model: Tensors, own_buffers: Tensors, training: bool) -> tuple[Tensor, Tensor, Tensors]:
            features, around = torch.empty(0), dict(method.needs.operations) if training else {}
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.setting.precision == "bf16"):
                if method.needs.features:
                    outputs, features, after = self.forward.features(
                        model, own_buffers, inputs, draws, training=training, around=around
                    )
                else:
                    outputs, after = self.forward(model, own_buffers, inputs, draws, training=training, around=around)
            return outputs.to(self.data.dtype), features.to(self.data.dtype), after

        def forward(chosen: Tensors) -> tuple[Tensor, Tensor, Tensors]:
            model = method.effective(clients, chosen, work.number)
            return run({name: model[name] for name in layers.parameter_names}, buffers, True)

        def predict(model: Tensors) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                weights = method.effective(clients, model, None)
                own = {name: weights[name] for name in layers.parameter_names}
                outputs, features, _ = run(own, {name: weights[name] for name in layers.buffer_names}, False)
            return outputs, features

        outputs, features, after = forward(parameters)
        step = LocalStep(
            parameters={name: parameters[name] for name in layers.parameter_names},
            received=received,
            inputs=inputs,
            labels=labels,
            outputs=outputs,
            learning_rate=work.learning_rate,
            forward=lambda chosen: forward(chosen)[0],
            predict=predict,
            features=features,
            phase=phase,
            number=work.number,
            repeat=repeat,
        )
        return step, method.loss(clients, step, self.setting.loss(outputs, labels, clients.label_counts)), after


def _remembering(clients: Clients, changed: Stack, rows: Rows, learned: Tensors) -> Clients:
    """Let hooks see in the memory what changed in steps before, and what is just being learned."""
    if not changed and not learned:
        return clients
    return altered(clients, memory=clients.memory | take(changed, rows) | learned)


def _write_(places: Tensors, rows: Rows, values: Mapping[str, Tensor], like: Tensors | None = None) -> None:
    """Write what some of K clients have into its places; where there is none yet, one is made ``like`` another."""
    for name in values:
        if name not in places:
            assert like is not None
            places[name] = like[name].detach().clone(memory_format=torch.contiguous_format)
    if not isinstance(rows, Tensor):
        copy_(take(places, rows), values)
        return
    for name, value in values.items():
        places[name].index_copy_(0, rows, value)


def _add_(places: Tensors, rows: Rows, values: Mapping[str, Tensor], like: Tensors) -> None:
    """Add what some of K clients have to what stands in its places, at first zero."""
    for name in values:
        if name not in places:
            places[name] = torch.zeros_like(like[name])
    _write_(places, rows, add(values, take({name: places[name] for name in values}, rows)))


def refuse_unprepared(new: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    """Refuse memory that was not there before the first round: for clients that sit out there would be none."""
    for name in new:
        if name not in known:
            raise FedStrataError(
                f"A part remembers '{name}' at its clients, which its client_memory did not prepare; prepare it there."
            )


def _slopes(loss: Tensor, moving: Tensors) -> Tensors:
    """Take the gradients of every client's own loss; what the loss does not depend on has none."""
    slopes = torch.autograd.grad(loss.sum(), list(moving.values()), allow_unused=True)
    return {name: slope for name, slope in zip(moving, slopes, strict=True) if slope is not None}


class _Mean:
    """The mean of what some of K clients add at each step."""

    def __init__(self, clients: int, device: torch.device) -> None:
        self.total = torch.zeros(clients, dtype=torch.float64, device=device)
        self.count = torch.zeros_like(self.total)

    def add_(self, rows: Rows, values: Tensor) -> None:
        if not isinstance(rows, Tensor):
            some = slice(None) if rows is None else rows
            self.total[some].add_(values)
            self.count[some].add_(1)
            return
        self.total.index_add_(0, rows, values.to(torch.float64))
        self.count.index_add_(0, rows, torch.ones_like(values, dtype=torch.float64))

    def value(self) -> Tensor:
        return self.total / self.count
