"""The client's side of a round, for K clients at once.

The loop engine and a real site call it with K = 1, the stacked engine with as many clients as fit the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.engines.batches import DeviceData, Work
from fedstrata.engines.forward import Forward
from fedstrata.layers import LayerMap
from fedstrata.methods.base import Clients, Message, Phase, Step, Training
from fedstrata.methods.composition import Method
from fedstrata.optimisers import Optimiser
from fedstrata.rng import client_keys, fold
from fedstrata.schedules import Schedule
from fedstrata.stack import Tensors, clone, concatenate, put_, repeat, take


@dataclass(frozen=True)
class Setting:
    """All that stays the same over a run, and that every client and the server know."""

    method: Method
    layers: LayerMap
    initial: Tensors
    personal: frozenset[str]
    resident: frozenset[str]
    optimiser: Optimiser
    schedule: Schedule
    work: Work
    rounds: int
    seed: int
    clients: int
    precision: str
    device: torch.device

    @property
    def shared(self) -> frozenset[str]:
        """The names that travel."""
        return frozenset(self.initial) - self.personal


@dataclass(frozen=True)
class ClientState:
    """What clients keep between rounds, as stacks: resident tensors of the model, the method's memory, the
    optimiser's."""

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
    """What a round leaves at the clients: their state, their reply, the trained models and the mean loss of each
    client."""

    state: ClientState
    reply: Message
    trained: Tensors
    loss: Tensor


def view(setting: Setting, data: DeviceData, ids: Sequence[int], round: int, memory: Tensors) -> Clients:
    """Gather what hooks may see of some clients."""
    rows = torch.tensor(list(ids))
    return Clients(
        round=round,
        rounds=setting.rounds,
        layers=setting.layers,
        ids=tuple(ids),
        seed=setting.seed,
        sizes=torch.from_numpy(data.split.sizes)[rows].to(setting.device),
        label_counts=data.label_counts[rows].to(setting.device),
        shared=setting.shared,
        memory=memory,
    )


def first_state(setting: Setting, data: DeviceData, ids: Sequence[int]) -> ClientState:
    """Prepare clients before the first round: everybody starts from the same initial model."""
    model = repeat(setting.initial, len(ids))
    resident = clone({name: model[name] for name in sorted(setting.resident)})
    memory = clone(setting.method.client_memory(view(setting, data, ids, 0, {}), model))
    parameters = {name: model[name] for name in setting.layers.parameter_names}
    optimiser = clone(setting.optimiser.state(parameters)) if setting.optimiser.keep else {}
    return ClientState(resident, memory, optimiser)


def own_model(setting: Setting, state: ClientState, broadcast: Message, clients: int) -> Tensors:
    """Put together each client's model: what was received, and for the rest what it keeps itself."""
    return {
        name: broadcast.tensors[name].expand(clients, *tensor.shape)
        if name in broadcast.tensors
        else state.resident[name]
        for name, tensor in setting.initial.items()
    }


def client_round(
    setting: Setting,
    forward: Forward,
    data: DeviceData,
    ids: Sequence[int],
    state: ClientState,
    broadcast: Message,
    round: int,
) -> Outcome:
    """Download, begin, perturb, train, remember, upload."""
    method = setting.method
    clients = view(setting, data, ids, round, state.memory)
    received = own_model(setting, state, broadcast, len(ids))
    clients = replace(clients, memory=method.begin(clients, received))
    start = method.perturb(clients, received)
    model = clone(start)
    learning_rate = setting.optimiser.learning_rate * setting.schedule.factor(round, setting.rounds)
    kept = clone(state.optimiser)
    losses, gradients = [], Tensors()
    for number, phase in enumerate(method.phases()):
        purpose = f"phase {number}"
        model, kept, loss, last = train(
            setting, forward, data, clients, received, model, kept, phase, learning_rate, purpose
        )
        losses.append(loss)
        gradients |= last
    training = Training(start, model, gradients)
    clients = replace(clients, memory=method.remember(clients, training))
    resident = {name: model[name] for name in state.resident}
    message = Message({name: model[name] for name in setting.initial if name not in setting.personal})
    reply = method.upload(clients, training, message)
    return Outcome(ClientState(resident, clients.memory, kept), reply, model, torch.stack(losses).mean(0))


def adapt(
    setting: Setting,
    forward: Forward,
    data: DeviceData,
    ids: Sequence[int],
    state: ClientState,
    model: Tensors,
    round: int,
) -> Tensors:
    """Train clients' own models once more, for themselves, at the initial learning rate."""
    phase = setting.method.adaptation()
    if phase is None:
        return model
    clients = view(setting, data, ids, round, state.memory)
    learning_rate = setting.optimiser.learning_rate
    return train(setting, forward, data, clients, model, clone(model), {}, phase, learning_rate, "adaptation")[0]


def train(
    setting: Setting,
    forward: Forward,
    data: DeviceData,
    clients: Clients,
    received: Tensors,
    model: Tensors,
    optimiser: Tensors,
    phase: Phase,
    learning_rate: float,
    purpose: str,
) -> tuple[Tensors, Tensors, Tensor, Tensors]:
    """Train K clients for one phase.

    Return their models, the optimiser's state if it is kept, the mean loss of each client, and the gradients of each
    client's last step if the method wants them. ``model`` and ``optimiser`` belong to this function and are changed in
    place. ``purpose`` separates the draws of different phases.
    """
    moving = _moving(setting.layers, phase)
    parameters = {name: model[name] for name in setting.layers.parameter_names}
    buffers = {name: model[name] for name in setting.layers.buffer_names}
    if not optimiser:
        optimiser = setting.optimiser.state({name: parameters[name] for name in moving})
    work = setting.work if phase.epochs is None else replace(setting.work, epochs=phase.epochs, steps=None)
    keys = client_keys(setting.seed, clients.round, clients.ids, f"{purpose}/transforms", setting.device)
    dropout = client_keys(setting.seed, clients.round, clients.ids, f"{purpose}/dropout", setting.device)
    total = torch.zeros(len(clients.ids), dtype=torch.float64, device=setting.device)
    steps = torch.zeros_like(total)
    last: Tensors = {}
    for batch in data.batches(clients.ids, work, setting.seed, clients.round, purpose):
        rows = batch.rows
        some = clients.rows(rows)
        own_keys, own_dropout = (keys, dropout) if rows is None else (keys[rows], dropout[rows])
        inputs, labels = data.make(batch.positions, own_keys, batch.step)
        current = {name: tensor.detach() for name, tensor in take(parameters, rows).items()}
        own_buffers, own_optimiser = take(buffers, rows), take(optimiser, rows)
        for name in moving:
            current[name].requires_grad_()
        step, loss, after = _evaluate_step(
            setting,
            forward,
            some,
            take(received, rows),
            current,
            own_buffers,
            inputs,
            labels,
            fold(own_dropout, batch.step),
            learning_rate,
        )
        gradients = dict(zip(moving, torch.autograd.grad(loss.sum(), [current[name] for name in moving]), strict=True))
        with torch.no_grad():
            if setting.method.wants_gradients():
                last = last or {name: torch.zeros_like(parameters[name]) for name in moving}
                put_(last, rows, gradients)
            gradients = setting.method.gradients(some, step, gradients)
            new = {name: tensor.detach() for name, tensor in current.items()}
            setting.optimiser.update_(new, gradients, own_optimiser, learning_rate)
            for name, value in setting.method.project(some, step, new).items():
                if value is not new[name]:
                    new[name].copy_(value)  # a hook may return what it was given; training goes on in its own tensors
            put_(parameters, rows, new)
            put_(buffers, rows, after)
            put_(optimiser, rows, own_optimiser)
            detached = loss.detach().to(torch.float64)
            if rows is None:
                total, steps = total + detached, steps + 1
            else:
                total.index_add_(0, rows, detached)
                steps.index_add_(0, rows, torch.ones_like(detached))
    return {**parameters, **buffers}, optimiser if setting.optimiser.keep else {}, total / steps, last


def _moving(layers: LayerMap, phase: Phase) -> list[str]:
    chosen = set(layers.parameter_names if phase.trains is None else phase.trains(layers))
    return [name for name in layers.parameter_names if name in chosen]


def _evaluate_step(
    setting: Setting,
    forward: Forward,
    clients: Clients,
    received: Tensors,
    parameters: Tensors,
    buffers: Tensors,
    inputs: Tensor,
    labels: Tensor,
    keys: Tensor,
    learning_rate: float,
) -> tuple[Step, Tensor, Tensors]:
    """Run the models on a batch: the step as hooks see it, each client's loss ``[k]``, and the buffers after the
    pass."""

    def run(chosen: Tensors) -> tuple[Tensor, Tensors]:
        with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=setting.precision == "bf16"):
            return forward(chosen, buffers, inputs, keys, training=True)

    outputs, after = run(parameters)
    if outputs.dtype == torch.bfloat16:
        outputs = outputs.float()
    step = Step(parameters, received, inputs, labels, outputs, learning_rate, lambda chosen: run(chosen)[0])
    loss = cross_entropy(outputs, labels).mean(1)
    extra = setting.method.loss(clients, step)
    return step, loss if extra is None else loss + extra, after


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of every sample ``[K, B]``."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
