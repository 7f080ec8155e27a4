"""The server's own small labelled set, for methods that learn from one (see :class:`fedstrata.methods.Proxy`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.setting import Setting
from fedstrata.rng import fold, key
from fedstrata.stack import Tensors, repeat


@dataclass(frozen=True)
class DataProxy:
    """Answers with samples of the test set, which no score is computed on."""

    setting: Setting
    forward: Forward
    data: DeviceData
    samples: np.ndarray

    @property
    def size(self) -> int:
        """How many samples there are."""
        return len(self.samples)

    def loss(self, parameters: Tensors, buffers: Tensors, step: int, rows: Tensor) -> tuple[Tensor, Tensors]:
        """Return the mean loss ``[K]`` of K models on some samples, in training mode, and their buffers after it."""
        clients = len(next(iter(parameters.values())))
        positions = torch.from_numpy(self.samples).to(self.setting.device)[rows].expand(clients, -1)
        inputs, labels = self.data.make(positions, None)
        initial = repeat({name: self.setting.initial[name] for name in self.setting.layers.buffer_names}, clients)
        keys = torch.tensor([key(self.setting.seed, "proxy")] * clients, device=self.setting.device)
        outputs, after = self.forward(parameters, {**initial, **buffers}, inputs, fold(keys, step), training=True)
        return self.setting.loss(outputs, labels, self._counts.expand(clients, -1)), after

    @cached_property
    def _counts(self) -> Tensor:
        """How many samples of each class there are."""
        labels = self.data.labels[torch.from_numpy(self.samples).to(self.setting.device)]
        return torch.bincount(labels, minlength=self.data.dataset.classes)


def server_proxy(setting: Setting, forward: Forward, data: DeviceData) -> DataProxy | None:
    """Make the server's proxy where there are samples for it."""
    return None if data.proxy is None else DataProxy(setting, forward, data, data.proxy)
