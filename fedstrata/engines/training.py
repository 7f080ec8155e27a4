"""Local training of K clients at once: the only training loop there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.engines.batches import Batch, DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.setting import Setting
from fedstrata.methods.base import Clients, Phase, Step
from fedstrata.rng import client_keys, fold
from fedstrata.stack import Tensors, clone, put_, take


@dataclass(frozen=True)
class Trained:
    """What a phase of training leaves.

    ``loss`` is each client's mean; ``gradients`` are those of its last step, if the method wants them.
    """

    model: Tensors
    optimiser: Tensors
    loss: Tensor
    gradients: Tensors


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
        model = clone(start)
        parameters = {name: model[name] for name in layers.parameter_names}
        buffers = {name: model[name] for name in layers.buffer_names}
        chosen = set(layers.parameter_names if phase.trains is None else phase.trains(layers))
        moving = [name for name in layers.parameter_names if name in chosen]
        state = (
            clone(optimiser) if optimiser else self.setting.optimiser.state({name: parameters[name] for name in moving})
        )
        losses, gradients = _Mean(len(clients.ids), self.setting.device), Tensors()
        keys = self._keys(clients, f"{purpose}/transforms"), self._keys(clients, f"{purpose}/dropout")
        for batch in self._batches(clients.ids, clients.round, phase, purpose):
            rows = batch.rows
            some, own_state, own_buffers = clients.rows(rows), take(state, rows), take(buffers, rows)
            current = {name: tensor.detach() for name, tensor in take(parameters, rows).items()}
            for name in moving:
                current[name].requires_grad_()
            step, loss, after = self._pass(some, take(received, rows), current, own_buffers, batch, keys, learning_rate)
            slopes = dict(zip(moving, torch.autograd.grad(loss.sum(), [current[name] for name in moving]), strict=True))
            with torch.no_grad():
                if method.wants_gradients():
                    gradients = gradients or {name: torch.zeros_like(parameters[name]) for name in moving}
                    put_(gradients, rows, slopes)
                new = {name: tensor.detach() for name, tensor in current.items()}
                self.setting.optimiser.update_(new, method.gradients(some, step, slopes), own_state, learning_rate)
                for name, value in method.project(some, step, new).items():
                    if value is not new[name]:
                        new[name].copy_(value)  # a hook may return what it was given; training owns its tensors
                put_(parameters, rows, new)
                put_(buffers, rows, after)
                put_(state, rows, own_state)
                losses.add(rows, loss.detach())
        return Trained({**parameters, **buffers}, state, losses.value(), gradients)

    def _batches(self, ids: Sequence[int], round: int, phase: Phase, purpose: str) -> Iterator[Batch]:
        work = (
            self.setting.work if phase.epochs is None else replace(self.setting.work, epochs=phase.epochs, steps=None)
        )
        return self.data.batches(ids, work, self.setting.seed, round, purpose)

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
        learning_rate: float,
    ) -> tuple[Step, Tensor, Tensors]:
        """Run the models on a batch: return the step as hooks see it, each client's loss, and the buffers after."""
        for_transforms, for_dropout = keys if batch.rows is None else (key[batch.rows] for key in keys)
        inputs, labels = self.data.make(batch.positions, for_transforms, batch.step)

        def run(chosen: Tensors) -> tuple[Tensor, Tensors]:
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self.setting.precision == "bf16"):
                outputs, after = self.forward(chosen, buffers, inputs, fold(for_dropout, batch.step), training=True)
            return outputs.to(self.data.dtype), after

        outputs, after = run(parameters)
        step = Step(parameters, received, inputs, labels, outputs, learning_rate, lambda chosen: run(chosen)[0])
        loss = cross_entropy(outputs, labels).mean(1)
        extra = self.setting.method.loss(clients, step)
        return step, loss if extra is None else loss + extra, after


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


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of every sample ``[K, B]``."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
