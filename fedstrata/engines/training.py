"""Local training of K clients at once: the only training loop there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedstrata.engines.batches import Batch, DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.setting import Setting
from fedstrata.methods.contract.views import Clients, Phase, Step
from fedstrata.rng import client_keys, fold
from fedstrata.stack import Tensors, add, align, clone, put_, take


@dataclass(frozen=True)
class Trained:
    """What a phase of training leaves.

    ``learned`` is what parts train beside the model. ``loss`` is each client's mean and ``steps`` the number of its
    steps; ``gradients`` are those of its last step and ``mean_gradients`` the mean over all of them, if the method
    wants them.
    """

    model: Tensors
    learned: Tensors
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
        learning_rate: float,
        purpose: str,
        optimiser: Tensors | None = None,
    ) -> Trained:
        """Train K clients for one phase, from ``start``; ``received`` is what hooks see as the weights of the round's
        beginning.

        ``purpose`` separates the draws of different phases. Without an optimiser's state a fresh one is made.
        """
        layers, method = self.setting.layers, self.setting.method
        learned = clone({name: clients.memory[name] for name in method.learns(layers)})
        model = clone(start)
        parameters = {**{name: model[name] for name in layers.parameter_names}, **learned}
        buffers = {name: model[name] for name in layers.buffer_names}
        chosen = set(layers.parameter_names if phase.trains is None else phase.trains(layers))
        moving = [name for name in layers.parameter_names if name in chosen] + list(learned)
        fresh = self.setting.optimiser.state({name: parameters[name] for name in moving})
        state = {**fresh, **clone(optimiser or {})}
        losses, gradients, total = _Mean(len(clients.ids), self.setting.device), Tensors(), Tensors()
        keys = self._keys(clients, f"{purpose}/transforms"), self._keys(clients, f"{purpose}/dropout")
        for batch, repeat in self._batches(clients.ids, clients.round, phase, purpose):
            rows = batch.rows
            some, own_state, own_buffers = clients.rows(rows), take(state, rows), take(buffers, rows)
            current = {name: tensor.detach() for name, tensor in take(parameters, rows).items()}
            for name in moving:
                current[name].requires_grad_()
            place = phase, repeat, learning_rate
            step, loss, after = self._pass(some, take(received, rows), current, own_buffers, batch, keys, place)
            slopes = _slopes(loss, {name: current[name] for name in moving})
            with torch.no_grad():
                if method.wants_gradients():
                    gradients = gradients or {name: torch.zeros_like(parameters[name]) for name in slopes}
                    put_(gradients, rows, slopes)
                if method.wants_mean_gradients():
                    total = total or {name: torch.zeros_like(parameters[name]) for name in slopes}
                    put_(total, rows, add(slopes, take(total, rows)))
                new = {name: tensor.detach() for name, tensor in current.items()}
                self.setting.optimiser.update_(new, method.gradients(some, step, slopes), own_state, learning_rate)
                for name, value in method.project(some, step, new).items():
                    if value is not new[name]:
                        new[name].copy_(value)  # a hook may return what it was given; training owns its tensors
                put_(parameters, rows, new)
                put_(buffers, rows, after)
                put_(state, rows, own_state)
                losses.add(rows, loss.detach())
        model = {name: parameters[name] for name in layers.parameter_names}
        learned = {name: parameters[name] for name in learned}
        mean = {
            name: tensor / align(losses.count.clamp(min=1), tensor).to(tensor.dtype) for name, tensor in total.items()
        }
        return Trained({**model, **buffers}, learned, state, losses.value(), losses.count, gradients, mean)

    def _batches(self, ids: Sequence[int], round: int, phase: Phase, purpose: str) -> Iterator[tuple[Batch, int]]:
        work = replace(self.setting.work, span=phase.span)
        if phase.epochs is not None or phase.steps is not None:
            work = replace(work, epochs=phase.epochs or work.epochs, steps=phase.steps)
        for batch in self.data.batches(ids, work, self.setting.seed, round, purpose):
            yield from ((batch, repeat) for repeat in range(phase.repeats))

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
    ) -> tuple[Step, Tensor, Tensors]:
        """Run the models on a batch: return the step as hooks see it, each client's loss, and the buffers after."""
        method, layers = self.setting.method, self.setting.layers
        for_transforms, for_dropout = keys if batch.rows is None else (key[batch.rows] for key in keys)
        inputs, labels = self.data.make(batch.positions, for_transforms, batch.step)
        draws = fold(for_dropout, batch.step)
        phase, repeat, learning_rate = place

        def run(model: Tensors, own_buffers: Tensors, training: bool) -> tuple[Tensor, Tensor | None, Tensors]:
            features, around = None, method.operations() if training else {}
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.setting.precision == "bf16"):
                if method.wants_features():
                    outputs, features, after = self.forward.features(
                        model, own_buffers, inputs, draws, training=training, around=around
                    )
                else:
                    outputs, after = self.forward(model, own_buffers, inputs, draws, training=training, around=around)
            return outputs.to(self.data.dtype), None if features is None else features.to(self.data.dtype), after

        def forward(chosen: Tensors) -> tuple[Tensor, Tensor | None, Tensors]:
            model = method.effective(clients, chosen, batch.step)
            return run({name: model[name] for name in layers.parameter_names}, buffers, True)

        def predict(model: Tensors) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                weights = method.as_weights(clients, model)
                own = {name: weights[name] for name in layers.parameter_names}
                outputs, features, _ = run(own, {name: weights[name] for name in layers.buffer_names}, False)
            return outputs, outputs if features is None else features

        outputs, features, after = forward(parameters)
        step = Step(
            parameters=parameters,
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
        loss = method.base_loss(clients, step)
        extra = method.loss(clients, step)
        return step, loss if extra is None else loss + extra, after


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
