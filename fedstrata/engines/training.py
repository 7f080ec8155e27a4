"""Local training of K clients at once: the only training loop there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedstrata.engines.batches import Batch, DeviceData, Work
from fedstrata.engines.forward import Forward
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Clients, LocalStep, Phase
from fedstrata.rng import client_keys, fold
from fedstrata.stack import Stack, Tensors, add, align, clone, put_, take
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


@dataclass(frozen=True)
class Trainer:
    """Trains clients on their own data."""

    setting: Setting
    forward: Forward
    data: DeviceData

    def train(
        self,
        clients: Clients,
        received: Tensors,
        start: Tensors,
        phase: Phase,
        factor: float,
        purpose: str,
        kept: Tensors | None = None,
    ) -> Trained:
        """Train K clients for one phase, from ``start``; ``received`` is what hooks see as the weights of the round's
        beginning.

        ``factor`` is the schedule's, for the learning rate. ``purpose`` separates the draws of different phases.
        Without a ``kept`` state of the optimiser a fresh one is made.
        """
        optimiser = phase.optimiser or self.setting.optimiser
        step_size = optimiser.learning_rate * factor * phase.rate
        learning_rate = self.setting.optimiser.learning_rate * factor * phase.rate
        layers, method = self.setting.layers, self.setting.method
        learned = clone({name: clients.memory[name] for name in method.learned(clients.memory)})
        changed = Stack()
        model = clone(start)
        parameters = {**{name: model[name] for name in layers.parameter_names}, **learned}
        buffers = {name: model[name] for name in layers.buffer_names}
        chosen = set(layers.parameter_names if phase.trains is None else phase.trains(layers))
        moving = [name for name in layers.parameter_names if name in chosen] + list(learned)
        fresh = optimiser.state({name: parameters[name] for name in moving})
        state = {**fresh, **clone(kept or {})}
        losses, gradients, total = _Mean(len(clients.ids), self.setting.device), Tensors(), Tensors()
        keys = self._keys(clients, f"{purpose}/transforms"), self._keys(clients, f"{purpose}/dropout")
        for batch, repeat in self._batches(clients.ids, clients.round, phase, purpose):
            rows = batch.rows
            some, own_state, own_buffers = clients.rows(rows), take(state, rows), take(buffers, rows)
            current = {name: tensor.detach() for name, tensor in take(parameters, rows).items()}
            for name in moving:
                current[name].requires_grad_()
            some = _remembering(some, changed, rows, {name: current[name] for name in learned})
            place = phase, repeat, learning_rate
            step, loss, after = self._pass(some, take(received, rows), current, own_buffers, batch, keys, place)
            slopes = _slopes(loss, {name: current[name] for name in moving})
            with torch.no_grad():
                if method.needs.last_gradients:
                    gradients = gradients or {name: torch.zeros_like(parameters[name]) for name in slopes}
                    put_(gradients, rows, slopes)
                if method.needs.mean_gradients:
                    total = total or {name: torch.zeros_like(parameters[name]) for name in slopes}
                    put_(total, rows, add(slopes, take(total, rows)))
                new = {name: tensor.detach() for name, tensor in current.items()}
                optimiser.update_(new, method.gradients(some, step, slopes), own_state, step_size)
                own = {name: new[name] for name in layers.parameter_names}
                some = _remembering(some, Stack(), None, {name: new[name] for name in learned})
                projected, memory = method.project(some, step, own)
                for name, value in projected.items():
                    if value is not new[name]:
                        new[name].copy_(value)  # a hook may return what it was given; training owns its tensors
                _change_(changed, clients.memory, rows, memory)
                put_(parameters, rows, new)
                put_(buffers, rows, after)
                put_(state, rows, own_state)
                losses.add(rows, loss.detach())
        trained = {name: parameters[name] for name in layers.parameter_names}
        memory = clients.memory | changed | {name: parameters[name] for name in learned}
        mean = {
            name: tensor / align(losses.count.clamp(min=1), tensor).to(tensor.dtype) for name, tensor in total.items()
        }
        return Trained({**trained, **buffers}, memory, state, losses.value(), losses.count, gradients, mean)

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

    def _keys(self, clients: Clients, purpose: str) -> Tensor:
        return client_keys(self.setting.seed, clients.round, clients.ids, purpose, self.setting.device)

    def _pass(
        self,
        clients: Clients,
        received: Tensors,
        parameters: Tensors,
        buffers: Tensors,
        batch: Batch,
        keys: tuple[Tensor, Tensor],
        place: tuple[Phase, int, float],
    ) -> tuple[LocalStep, Tensor, Tensors]:
        """Run the models on a batch: return the step as hooks see it, each client's loss, and the buffers after."""
        method, layers = self.setting.method, self.setting.layers
        for_transforms, for_dropout = keys if batch.rows is None else (key[batch.rows] for key in keys)
        inputs, labels = self.data.make(batch.positions, for_transforms, batch.step, clients.ids)
        draws = fold(for_dropout, batch.step)
        phase, repeat, learning_rate = place

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
            model = method.effective(clients, chosen, batch.step)
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
            learning_rate=learning_rate,
            forward=lambda chosen: forward(chosen)[0],
            predict=predict,
            features=features,
            phase=phase,
            number=batch.step,
            repeat=repeat,
        )
        return step, method.loss(clients, step, self.setting.loss(outputs, labels, clients.label_counts)), after


def _remembering(clients: Clients, changed: Stack, rows: Tensor | None, learned: Tensors) -> Clients:
    """Let hooks see in the memory what changed in steps before, and what is just being learned."""
    if not changed and not learned:
        return clients
    return replace(clients, memory=clients.memory | take(changed, rows) | learned)


def _change_(changed: Stack, memory: Stack, rows: Tensor | None, new: Stack) -> None:
    """Note what hooks changed in the memory of some clients; the memory itself stays as it was."""
    refuse_unprepared(new, memory)
    for name, tensor in new.items():
        if rows is None:
            changed[name] = tensor.clone()  # what a hook remembers may be what training goes on to change
            continue
        if name not in changed:
            changed[name] = memory[name].clone()
        changed[name].index_copy_(0, rows, tensor)


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

    def add(self, rows: Tensor | None, values: Tensor) -> None:
        if rows is None:
            rows = torch.arange(len(values), device=values.device)
        self.total.index_add_(0, rows, values.to(torch.float64))
        self.count.index_add_(0, rows, torch.ones_like(values, dtype=torch.float64))

    def value(self) -> Tensor:
        return self.total / self.count
