"""A method's own exchange before a round: the server surveys all clients, concludes, and announces.

SSFL finds its mask this way, and PLayer-FL the layers to share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedstrata.engines.batches import Batch, DeviceData
from fedstrata.engines.client import ClientState, Setting, cross_entropy, own_model, train, view
from fedstrata.engines.forward import Forward
from fedstrata.methods.base import Clients, Message, Phase
from fedstrata.methods.composition import Exchange
from fedstrata.rng import fold, numpy_generator
from fedstrata.stack import Tensors, clone, take


def answer_survey(
    setting: Setting,
    forward: Forward,
    data: DeviceData,
    ids: Sequence[int],
    state: ClientState,
    exchange: Exchange,
    broadcast: Message,
    round: int,
) -> Message:
    """Answer a survey before a round, from the current model and the clients' own data."""
    clients = view(setting, data, ids, round, state.memory)
    model = own_model(setting, state, broadcast, len(ids))
    return exchange.survey(clients, model, DataProbe(setting, forward, data, clients))


def adopt_announcement(
    setting: Setting,
    data: DeviceData,
    ids: Sequence[int],
    state: ClientState,
    exchange: Exchange,
    announcement: Message,
    round: int,
) -> ClientState:
    """Take in what the server concluded from a survey."""
    clients = view(setting, data, ids, round, state.memory)
    return replace(state, memory=clone(exchange.adopt(clients, announcement)))


@dataclass(frozen=True)
class DataProbe:
    """Gives hooks the answers of a client's own data (see :class:`fedstrata.methods.Probe`)."""

    setting: Setting
    forward: Forward
    data: DeviceData
    clients: Clients

    def gradients(self, model: Tensors, batch_size: int, batches: int = 1, balanced: bool = False) -> Tensors:
        """Return the gradients of the mean loss on some minibatches, in training mode; nothing is kept."""
        names = self.setting.layers.parameter_names
        buffers = {name: model[name] for name in self.setting.layers.buffer_names}
        total = {name: torch.zeros_like(model[name], memory_format=torch.contiguous_format) for name in names}
        dropout = self.clients.keys("probe/dropout")
        for batch in self._balanced(batch_size, batches) if balanced else self._plain(batch_size, batches):
            rows = batch.rows
            keys = fold(dropout if rows is None else dropout[rows], batch.step)
            inputs, labels = self.data.make(batch.positions, None)
            own = {
                name: tensor.detach().requires_grad_() for name, tensor in take(model, rows).items() if name in total
            }
            outputs, _ = self.forward(own, take(buffers, rows), inputs, keys, training=True)
            loss = cross_entropy(outputs, labels).mean(1).sum()
            for name, gradient in zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True):
                if rows is None:
                    total[name] += gradient / batches
                else:
                    total[name].index_add_(0, rows, gradient / batches)
        return total

    def train(self, model: Tensors, epochs: int) -> Tensors:
        """Return the model after some epochs of local training at the initial learning rate."""
        rate, phase = self.setting.optimiser.learning_rate, Phase(epochs=epochs)
        trained, *_ = train(
            self.setting, self.forward, self.data, self.clients, model, clone(model), {}, phase, rate, "survey"
        )
        return trained

    def _plain(self, batch_size: int, batches: int) -> Iterator[Batch]:
        work = replace(self.setting.work, batch_size=batch_size, steps=batches)
        return self.data.batches(self.clients.ids, work, self.setting.seed, self.clients.round, "probe")

    def _balanced(self, batch_size: int, batches: int) -> Iterator[Batch]:
        """Yield each client's batches with its classes in turn, one client at a time; small clients repeat samples."""
        for row, client in enumerate(self.clients.ids):
            chance = numpy_generator(self.setting.seed, self.clients.round, client, "probe/balanced")
            positions = chance.permutation(self.data.split.train[client])
            order = np.argsort(_occurrence(self.data.dataset.labels.numpy()[positions]), kind="stable")
            needed = np.resize(positions[order], batch_size * batches).reshape(batches, batch_size)
            rows = torch.tensor([row], device=self.setting.device)
            for step, batch in enumerate(needed):
                yield Batch(rows, torch.from_numpy(batch)[None].to(self.setting.device), step)


def _occurrence(labels: np.ndarray) -> np.ndarray:
    """Number the occurrences of each label: 0 for its first, 1 for its second, ...

    >>> _occurrence(np.array([3, 3, 1, 3, 1])).tolist()
    [0, 1, 0, 2, 1]
    """
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    first = np.searchsorted(grouped, grouped)
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(labels)) - first
    return numbers
