"""Which samples each client sees at each step, and the batches made of them on the device.

A client's stream of batches depends on its own key and its own data only. Clients are then grouped so that those whose
next batches have the same size are trained together: no padding, so batch norm and optimisers see exactly what they
would see alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstrata.data.channels import Statistics, with_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.pictures import make_inputs
from fedstrata.data.split import Parts, Split
from fedstrata.data.transforms import Own, Transform
from fedstrata.rng import client_keys, permutation, philox_at_once
from fedstrata.stack import Rows
from fedstrata.transfer import numbers_on, to_device

_STEPS_AT_ONCE = 2**20
"""The steps of clients that are planned, and moved to the device, at once: a bound on memory."""


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

    def batches_per_epoch(self, size: npt.ArrayLike) -> np.ndarray:
        """Count the batches that clients of some sizes make of their data."""
        whole, rest = np.divmod(size, self.batch_size)
        counts: np.ndarray = np.maximum(whole + (rest > 0) if self.last_batch == "keep" else whole, 1)
        return counts

    def steps_of(self, size: npt.ArrayLike) -> np.ndarray:
        """Count the steps that such clients make in all."""
        if self.steps is not None:
            return np.full(np.shape(size), self.steps)
        return self.epochs * self.batches_per_epoch(size)

    def stretch_of(self, size: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Tell where such clients' steps of this stretch begin and end."""
        count = self.steps_of(size)
        begin, end = ((edge * count + 0.5).astype(np.int64) for edge in self.span)
        return begin, end

    def samples_of(self, size: npt.ArrayLike) -> np.ndarray:
        """Count the samples of the batches in this stretch, each as often as it comes."""
        each = self.batches_per_epoch(size)
        of_an_epoch = np.minimum(each * self.batch_size, size)

        def before(step: np.ndarray) -> np.ndarray:
            epoch, index = np.divmod(step, each)
            seen: np.ndarray = epoch * of_an_epoch + index * self.batch_size
            return seen

        begin, end = self.stretch_of(size)
        counts: np.ndarray = before(end) - before(begin)
        return counts


@dataclass(frozen=True)
class Batch:
    """The next batches of a group of clients.

    ``rows`` are their rows in the stack, in their order (``None``: all), ``positions`` ``[k, b]`` lie in the pool,
    ``step`` counts. ``numbers`` are the numbers of these clients ``[k]``. All tensors are on the device; ``members``
    are the rows once more, for the host.
    """

    rows: Tensor | None
    positions: Tensor
    step: int
    numbers: Tensor
    members: np.ndarray | None = None

    @property
    def place(self) -> Rows:
        """The rows, without a copy where they are the first ones."""
        first = self.members is not None and int(self.members[-1]) == len(self.members) - 1
        return slice(len(self.positions)) if first else self.rows


@dataclass(frozen=True)
class _Shuffled:
    """Positions in the pool, one client after the other: where each begins, and how far its epochs lie apart."""

    positions: Tensor
    begins: np.ndarray
    strides: np.ndarray

    def read(self, on_host: np.ndarray, starts: Tensor, places: Tensor) -> Tensor:
        """Read ``[k, length]`` positions, a row from each start; no copy where the starts lie evenly apart."""
        apart = np.diff(on_host)
        distance = int(apart[0]) if len(apart) else 0
        if distance >= 0 and (apart == distance).all():
            return self.positions.as_strided((len(on_host), len(places)), (distance, 1), int(on_host[0]))
        return self.positions[starts[:, None] + places]


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
        self.held_out = Parts.of(held_out)
        self.proxy = proxy
        self.validation = np.empty(0, dtype=np.int64) if validation is None else validation
        self.validation_at_clients = Parts.of(validation_at_clients)
        self.transforms = tuple(transforms)
        self.device = device
        self.dtype = dtype
        self.inputs = dataset.inputs.to(device)
        self.labels = dataset.labels.to(device)
        self.label_counts = to_device(split.label_counts(dataset), device)
        self.sizes = to_device(split.sizes, device)
        self._train = to_device(split.train_parts.flat, device)
        self._begins = to_device(split.train_parts.begins, device)
        rows = () if own is None else zip(*own, strict=True)
        self._own = tuple(torch.tensor(values, dtype=dtype, device=device) for values in rows)

    def with_statistics(self, statistics: Statistics) -> DeviceData:
        """Normalise the same samples by other statistics."""
        changed = copy.copy(self)
        changed.dataset = with_statistics(self.dataset, statistics)
        return changed

    def order_of(self, clients: Sequence[int], work: Work) -> np.ndarray | None:
        """Tell in which order clients drop out last to first: the largest first; none where they stand so already.

        In this order those who still have a whole batch are the first ones at each step of an epoch.
        """
        sizes = self.split.sizes[np.array(clients, dtype=np.int64)]
        if work.samples is not None or (np.diff(sizes) <= 0).all():
            return None
        return np.argsort(-sizes, kind="stable")

    def batches(
        self, clients: Sequence[int], work: Work, seed: int, round: int, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Stream the batches of some clients for one round; clients that are done drop out.

        Who trains when is computed here for many steps at a time and moved to the device at once.
        """
        ids = np.array(clients, dtype=np.int64)
        held = self.split.sizes[ids]
        sizes = np.full_like(held, work.samples) if work.samples else held
        per_epoch = work.batches_per_epoch(sizes)
        epochs = -(-work.steps_of(sizes) // per_epoch)
        by_room = _by_room(sizes)
        moved = to_device(np.concatenate((ids, *by_room)), self.device)
        numbers, *groups = torch.split(moved, [len(ids), *map(len, by_room)])
        keys = client_keys(seed, round, clients, purpose, self.device)
        shuffled = self._shuffle(numbers, held, sizes, epochs, keys, zip(by_room, groups, strict=True))
        first, end = work.stretch_of(sizes)
        places = torch.arange(min(work.batch_size, int(sizes.max())), device=self.device)
        at_once = max(1, _STEPS_AT_ONCE // len(ids))
        for low in range(int(first.min()), int(end.max()), at_once):
            begins, ends = np.maximum(first, low), np.minimum(end, low + at_once)
            rows, steps = _every_step(begins, np.maximum(ends, begins))
            epoch, index = np.divmod(steps, per_epoch[rows])
            lengths = np.minimum(work.batch_size, sizes[rows] - index * work.batch_size)
            starts = shuffled.begins[rows] + epoch * shuffled.strides[rows] + index * work.batch_size
            order = np.lexsort((rows, -lengths, steps))
            rows, steps, lengths, starts = rows[order], steps[order], lengths[order], starts[order]
            moved = to_device(np.stack((rows, starts, ids[rows])), self.device)
            for group in _runs(steps, lengths):
                some, begin = rows[group], group.start
                read = shuffled.read(starts[group], moved[1, group], places[: int(lengths[begin])])
                if len(some) == len(ids):
                    yield Batch(None, read, int(steps[begin]), numbers)
                else:
                    yield Batch(moved[0, group], read, int(steps[begin]), moved[2, group], some)

    def _shuffle(
        self,
        numbers: Tensor,
        held: np.ndarray,
        sizes: np.ndarray,
        epochs: np.ndarray,
        keys: Tensor,
        groups: Iterable[tuple[np.ndarray, Tensor]],
    ) -> _Shuffled:
        """Shuffle every client's samples once per epoch, those of a group of clients at once.

        The rows of a group are given for the host and for the device.
        """
        pieces, begins, strides, filled = [], np.empty_like(sizes), np.empty_like(sizes), 0
        for rows, some in groups:
            longest, most, most_held = int(sizes[rows].max()), int(epochs[rows].max()), int(held[rows].max())
            own = numbers[some]
            begin, valid = self._begins[own][:, None, None], self.sizes[own][:, None, None]
            streams = torch.arange(most, device=self.device)[:, None]
            order = permutation(keys[some][:, None, :], most_held, streams, valid, draw=philox_at_once)
            if (sizes[rows] != held[rows]).any():  # an epoch of a fixed size: small clients repeat, large ones stop
                places = torch.arange(longest, device=self.device).remainder(valid).expand(-1, most, -1)
                order = order.gather(2, places)
            # Behind a client's own samples lie those of others, which are not read; behind the last there are none.
            pieces.append(self._train[(begin + order).clamp(max=len(self._train) - 1)].flatten())
            begins[rows] = filled + np.arange(len(rows)) * most * longest
            strides[rows], filled = longest, filled + len(rows) * most * longest
        return _Shuffled(torch.cat(pieces), begins, strides)

    def make(
        self,
        positions: Tensor,
        keys: Tensor | None,
        step: int | Tensor = 0,
        clients: Sequence[int] | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gather samples ``[k, b]`` and prepare them; with keys the random transforms apply too (training).

        ``clients`` are the numbers of the rows' owners, who may have their own ways to normalise.
        """
        own = self._own_of(clients)
        inputs = make_inputs(self.transforms, self.inputs, positions, self.dtype, self.dataset, keys, step, own)
        return inputs, self.labels[positions]

    def _own_of(self, clients: Sequence[int] | Tensor | None) -> Own | None:
        if not self._own:
            return None
        assert clients is not None, "samples of nobody cannot be normalised by their owner's statistics"
        rows = clients if isinstance(clients, Tensor) else numbers_on(clients, self.device)
        means, deviations = (values[rows] for values in self._own)
        return means, deviations


def _every_step(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the steps of each row, from its begin to its end: the rows, and the steps.

    >>> [numbers.tolist() for numbers in _every_step(np.array([0, 2]), np.array([2, 3]))]
    [[0, 0, 1], [0, 1, 2]]
    """
    counts = ends - begins
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - begins, counts)


def _runs(*columns: np.ndarray) -> list[slice]:
    """Find the stretches over which no column changes.

    >>> _runs(np.array([0, 0, 1]), np.array([5, 4, 4]))
    [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None)]
    """
    changes = np.flatnonzero(np.logical_or.reduce([np.diff(column) != 0 for column in columns])) + 1
    edges = [0, *changes.tolist(), len(columns[0])]
    return [slice(begin, end) for begin, end in pairwise(edges) if begin < end]


def _by_room(sizes: np.ndarray) -> list[np.ndarray]:
    """Group rows by the bits of their sizes: clients of similar size need similar room to be shuffled in."""
    bits = np.frexp(sizes.astype(np.float64))[1]
    return [np.flatnonzero(bits == some) for some in np.unique(bits)]
