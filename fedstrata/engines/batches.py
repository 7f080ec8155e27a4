"""Which samples each client sees at each step, and the batches made of them on the device.

A client's stream of batches depends on its own key and its own data only. Clients are then grouped so that those whose
next batches have the same size are trained together: no padding, so batch norm and optimisers see exactly what they
would see alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.data.transforms import Transform, apply_transforms
from fedstrata.rng import client_keys, permutation


@dataclass(frozen=True)
class Work:
    """How much local training: epochs, or a number of steps instead; the size of batches; what becomes of a small last
    one."""

    epochs: int
    steps: int | None
    batch_size: int
    last_batch: str

    def batches_per_epoch(self, size: int) -> int:
        """Count the batches that a client of some size makes of its data."""
        whole, rest = divmod(size, self.batch_size)
        return max(whole + (1 if rest and self.last_batch == "keep" else 0), 1)

    def steps_of(self, size: int) -> int:
        """Count the steps that such a client makes in all."""
        return self.steps if self.steps is not None else self.epochs * self.batches_per_epoch(size)


@dataclass(frozen=True)
class Batch:
    """The next batches of a group of clients: their rows in the stack (``None``: all), positions ``[k, b]`` in the
    pool, step counter."""

    rows: Tensor | None
    positions: Tensor
    step: int


class DeviceData:
    """A dataset and its split, on the device where training happens."""

    def __init__(
        self, dataset: Dataset, split: Split, transforms: Sequence[Transform], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.transforms = tuple(transforms)
        self.device = device
        self.dtype = dtype
        self.inputs = dataset.inputs.to(device)
        self.labels = dataset.labels.to(device)
        self.label_counts = torch.from_numpy(split.label_counts(dataset))
        longest = int(split.sizes.max())
        padded = np.stack([np.pad(positions, (0, longest - len(positions))) for positions in split.train])
        self._train = torch.from_numpy(padded).to(device)

    def batches(
        self, clients: Sequence[int], work: Work, seed: int, round: int, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Stream the batches of some clients for one round; clients that are done drop out."""
        sizes = [int(self.split.sizes[client]) for client in clients]
        per_epoch = [work.batches_per_epoch(size) for size in sizes]
        steps = [work.steps_of(size) for size in sizes]
        shuffled = self._shuffled(
            clients,
            sizes,
            seed,
            round,
            purpose,
            max(-(-count // each) for count, each in zip(steps, per_epoch, strict=True)),
        )
        for step in range(max(steps)):
            groups: dict[int, list[tuple[int, int, int]]] = {}
            for row, (size, each, count) in enumerate(zip(sizes, per_epoch, steps, strict=True)):
                if step < count:
                    epoch, index = divmod(step, each)
                    begin = index * work.batch_size
                    groups.setdefault(min(work.batch_size, size - begin), []).append((row, epoch, begin))
            for length in sorted(groups, reverse=True):
                yield self._batch(shuffled, groups[length], length, step)

    def _shuffled(
        self, clients: Sequence[int], sizes: Sequence[int], seed: int, round: int, purpose: str, epochs: int
    ) -> Tensor:
        """Shuffle every client's samples once per epoch: positions in the pool ``[K, epochs, longest]``."""
        keys = client_keys(seed, round, clients, purpose, self.device)
        longest = max(sizes)
        streams = torch.arange(epochs, device=self.device)[:, None]
        valid = torch.tensor(sizes, device=self.device)[:, None, None]
        order = permutation(keys[:, None, :], longest, streams, valid)
        own = self._train[torch.tensor(list(clients), device=self.device), :longest]
        return own[:, None, :].expand(-1, epochs, -1).gather(2, order)

    def _batch(self, shuffled: Tensor, group: list[tuple[int, int, int]], length: int, step: int) -> Batch:
        everybody = len(group) == len(shuffled)
        if everybody and len({(epoch, begin) for _, epoch, begin in group}) == 1:
            _, epoch, begin = group[0]
            return Batch(None, shuffled[:, epoch, begin : begin + length], step)
        rows, epochs, begins = (torch.tensor(column, device=self.device) for column in zip(*group, strict=True))
        offsets = begins[:, None] + torch.arange(length, device=self.device)
        return Batch(None if everybody else rows, shuffled[rows[:, None], epochs[:, None], offsets], step)

    def make(self, positions: Tensor, keys: Tensor | None, step: int = 0) -> tuple[Tensor, Tensor]:
        """Gather samples ``[k, b]`` and prepare them; with keys the random transforms apply too (training)."""
        inputs = self.inputs[positions]
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(self.dtype) / 255
        elif inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        return apply_transforms(self.transforms, inputs, self.dataset, keys, step), self.labels[positions]
