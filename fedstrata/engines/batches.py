"""Which samples each client sees at each step, and the batches made of them on the device.

A client's stream of batches depends on its own key and its own data only. Clients are then grouped so that those whose
next batches have the same size are trained together: no padding, so batch norm and optimisers see exactly what they
would see alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedstrata.data.channels import Statistics, with_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.data.transforms import Own, Transform, apply_transforms
from fedstrata.rng import client_keys, permutation, philox_at_once


@dataclass(frozen=True)
class Work:
    """How much local training: epochs (or steps instead), the size of batches, what becomes of a small last one.

    ``samples`` fixes the samples of an epoch, if given: large clients take a part of theirs, small ones repeat some.
    ``span`` is the stretch of it that is done, from 0 to 1.
    """

    epochs: int
    steps: int | None
    batch_size: int
    last_batch: str
    samples: int | None = None
    span: tuple[float, float] = (0.0, 1.0)

    def batches_per_epoch(self, size: int) -> int:
        """Count the batches that a client of some size makes of its data."""
        whole, rest = divmod(size, self.batch_size)
        return max(whole + (1 if rest and self.last_batch == "keep" else 0), 1)

    def steps_of(self, size: int) -> int:
        """Count the steps that such a client makes in all."""
        return self.steps if self.steps is not None else self.epochs * self.batches_per_epoch(size)

    def stretch_of(self, size: int) -> tuple[int, int]:
        """Tell where such a client's steps of this stretch begin and end."""
        count = self.steps_of(size)
        begin, end = (int(edge * count + 0.5) for edge in self.span)
        return begin, end

    def samples_of(self, size: int) -> int:
        """Count the samples of the batches in this stretch, each as often as it comes."""
        each = self.batches_per_epoch(size)
        return sum(min(self.batch_size, size - step % each * self.batch_size) for step in range(*self.stretch_of(size)))


@dataclass(frozen=True)
class Batch:
    """The next batches of a group of clients.

    ``rows`` are their rows in the stack (``None``: all), ``positions`` ``[k, b]`` lie in the pool, ``step`` counts.
    """

    rows: Tensor | None
    positions: Tensor
    step: int


@dataclass(frozen=True)
class _Shuffled:
    """Positions in the pool, one client after the other: where each begins, and how far its epochs lie apart."""

    positions: Tensor
    begins: list[int]
    strides: list[int]

    def start(self, row: int, epoch: int) -> int:
        """Tell where a client's epoch begins."""
        return self.begins[row] + epoch * self.strides[row]

    def read(self, starts: list[int], length: int) -> Tensor:
        """Read ``[k, length]`` positions, a row from each start; no copy where the starts lie evenly apart."""
        distance = starts[-1] - starts[-2] if len(starts) > 1 else 0
        if distance >= 0 and all(after - before == distance for before, after in pairwise(starts)):
            return self.positions.as_strided((len(starts), length), (distance, 1), starts[0])
        device = self.positions.device
        return self.positions[torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)]


class DeviceData:
    """A dataset and its split, on the device where training happens.

    ``own`` are the statistics of each client, where each normalises by its own.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        transforms: Sequence[Transform],
        device: torch.device,
        dtype: torch.dtype,
        held_out: Sequence[np.ndarray] = (),
        proxy: np.ndarray | None = None,
        validation: np.ndarray | None = None,
        validation_at_clients: Sequence[np.ndarray] = (),
        own: Sequence[Statistics] | None = None,
    ) -> None:
        self.own = own
        self.dataset = dataset
        self.split = split
        self.held_out = tuple(held_out)
        self.proxy = proxy
        self.validation = np.empty(0, dtype=np.int64) if validation is None else validation
        self.validation_at_clients = tuple(validation_at_clients)
        self.transforms = tuple(transforms)
        self.device = device
        self.dtype = dtype
        self.inputs = dataset.inputs.to(device)
        self.labels = dataset.labels.to(device)
        self.label_counts = torch.from_numpy(split.label_counts(dataset))
        longest = max(map(len, split.train))
        padded = np.stack([np.pad(positions, (0, longest - len(positions))) for positions in split.train])
        self._train = torch.from_numpy(padded).to(device)
        self._sizes = torch.from_numpy(split.sizes).to(device)
        rows = () if own is None else zip(*own, strict=True)
        self._own = tuple(torch.tensor(values, dtype=dtype, device=device) for values in rows)

    def with_statistics(self, statistics: Statistics) -> DeviceData:
        """Normalise the same samples by other statistics."""
        changed = copy.copy(self)
        changed.dataset = with_statistics(self.dataset, statistics)
        return changed

    def batches(
        self, clients: Sequence[int], work: Work, seed: int, round: int, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Stream the batches of some clients for one round; clients that are done drop out."""
        sizes = [work.samples or int(self.split.sizes[client]) for client in clients]
        per_epoch = [work.batches_per_epoch(size) for size in sizes]
        steps = [work.steps_of(size) for size in sizes]
        epochs = [-(-count // each) for count, each in zip(steps, per_epoch, strict=True)]
        shuffled = self._shuffle(clients, sizes, epochs, client_keys(seed, round, clients, purpose, self.device))
        stretches = [work.stretch_of(size) for size in sizes]
        for step in range(max(end for _, end in stretches)):
            groups: dict[int, tuple[list[int], list[int]]] = {}
            for row, (size, each, (first, end)) in enumerate(zip(sizes, per_epoch, stretches, strict=True)):
                if first <= step < end:
                    epoch, index = divmod(step, each)
                    begin = index * work.batch_size
                    rows, starts = groups.setdefault(min(work.batch_size, size - begin), ([], []))
                    rows.append(row)
                    starts.append(shuffled.start(row, epoch) + begin)
            for length in sorted(groups, reverse=True):
                rows, starts = groups[length]
                chosen = None if len(rows) == len(clients) else torch.tensor(rows, device=self.device)
                yield Batch(chosen, shuffled.read(starts, length), step)

    def _shuffle(self, clients: Sequence[int], sizes: list[int], epochs: list[int], keys: Tensor) -> _Shuffled:
        """Shuffle every client's samples once per epoch; clients of similar size, which need similar room, at once."""
        similar: dict[int, list[int]] = {}
        for row, size in enumerate(sizes):
            similar.setdefault(size.bit_length(), []).append(row)
        pieces, begins, strides, filled = [], [0] * len(clients), [0] * len(clients), 0
        for rows in similar.values():
            longest, most = max(sizes[row] for row in rows), max(epochs[row] for row in rows)
            streams = torch.arange(most, device=self.device)[:, None]
            numbers = torch.tensor([clients[row] for row in rows], device=self.device)
            held = self._sizes[numbers][:, None, None]
            most_held = int(held.max())
            own_keys = keys[torch.tensor(rows, device=self.device)][:, None, :]
            order = permutation(own_keys, most_held, streams, held, draw=philox_at_once)
            if longest != most_held:
                places = torch.arange(longest, device=self.device).remainder(held).expand(-1, most, -1)
                order = order.gather(2, places)
            own = self._train[numbers, :most_held]
            pieces.append(own[:, None, :].expand(-1, most, -1).gather(2, order).flatten())
            for row in rows:
                begins[row], strides[row], filled = filled, longest, filled + most * longest
        return _Shuffled(torch.cat(pieces), begins, strides)

    def make(
        self, positions: Tensor, keys: Tensor | None, step: int = 0, clients: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gather samples ``[k, b]`` and prepare them; with keys the random transforms apply too (training).

        ``clients`` are the owners of the rows, who may have their own ways to normalise.
        """
        inputs = self.inputs[positions]
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(self.dtype) / 255
        elif inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        changed = apply_transforms(self.transforms, inputs, self.dataset, keys, step, self._own_of(clients))
        return changed, self.labels[positions]

    def _own_of(self, clients: Sequence[int] | None) -> Own | None:
        if not self._own:
            return None
        assert clients is not None, "samples of nobody cannot be normalised by their owner's statistics"
        rows = torch.tensor(clients, device=self.device)
        means, deviations = (values[rows] for values in self._own)
        return means, deviations
