"""The mean and standard deviation of each channel, for the ``normalise`` transform.

They are made of sums that can be added up over clients or sites without any rounding: so one pool of samples, a
simulation of its clients and real sites that add their sums up get the same numbers, in whatever order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError

_CHUNK = 4096
_NUMBERS_AT_ONCE = 2**22
POINT = 160
"""Sums are whole multiples of 2 to the power of minus this."""
_SMALLEST_VARIANCE = 1e-14
"""A variance that is a smaller part of the squared mean is that of rounding: single precision could not see it."""


class Statistics(NamedTuple):
    """Mean and deviation of each channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class ChannelSums:
    """How many numbers each channel has, their sums and the sums of their squares, in whole multiples of 2⁻¹⁶⁰."""

    count: int
    sums: tuple[int, ...]
    squares: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Tensor) -> ChannelSums | None:
        """Add up images ``[n, channels, height, width]`` or tables ``[n, features]``; images of bytes as in [0, 1].

        Other inputs (tokens, sequences) have no channels, and so no sums.
        """
        has_channels = inputs.dim() in (2, 4) and (inputs.dtype == torch.uint8 or inputs.is_floating_point())
        if not has_channels or len(inputs) == 0:
            return None
        scale = 255.0 if inputs.dtype == torch.uint8 else 1.0
        others = tuple(axis for axis in range(inputs.dim()) if axis != 1)
        sums, squares = (np.zeros(inputs.shape[1]) for _ in range(2))
        for start in range(0, len(inputs), _CHUNK):  # in NumPy, whose sums do not depend on the number of threads
            part = inputs[start : start + _CHUNK].double().numpy()
            sums += part.sum(others)
            squares += np.square(part).sum(others)
        count = inputs[:, 0].numel()
        return cls.from_numbers(count, (sums / scale).tolist(), (squares / scale**2).tolist())

    @classmethod
    def from_numbers(cls, count: int, sums: Sequence[float], squares: Sequence[float]) -> ChannelSums:
        """Take sums as ordinary numbers."""
        return cls(count, tuple(map(_whole, sums)), tuple(map(_whole, squares)))

    @classmethod
    def total(cls, parts: Iterable[ChannelSums]) -> ChannelSums:
        """Add up the sums of several clients, exactly."""
        counts, sums, squares = zip(*((part.count, part.sums, part.squares) for part in parts), strict=True)
        return cls(sum(counts), *(tuple(map(sum, zip(*all_of_them, strict=True))) for all_of_them in (sums, squares)))

    def keeping(self, changed: Sequence[bool]) -> ChannelSums:
        """Leave channels as they are that are not to be changed: their mean will be 0 and their deviation 1."""
        one = self.count * 2**POINT
        return ChannelSums(
            self.count,
            tuple(value if change else 0 for value, change in zip(self.sums, changed, strict=True)),
            tuple(value if change else one for value, change in zip(self.squares, changed, strict=True)),
        )

    def numbers(self) -> tuple[list[float], list[float]]:
        """Give the sums as ordinary numbers."""
        sums, squares = ([float(Fraction(one, 2**POINT)) for one in part] for part in (self.sums, self.squares))
        return sums, squares

    def statistics(self) -> Statistics:
        """Tell mean and deviation; a channel that never changes gets the deviation 1."""
        whole = self.count * 2**POINT
        means = [Fraction(one, whole) for one in self.sums]
        variances = [float(Fraction(one, whole) - mean**2) for one, mean in zip(self.squares, means, strict=True)]
        return Statistics(
            tuple(float(mean) for mean in means),
            tuple(
                math.sqrt(variance) if variance > _SMALLEST_VARIANCE * float(mean) ** 2 else 1.0
                for variance, mean in zip(variances, means, strict=True)
            ),
        )


def _whole(number: float) -> int:
    if not math.isfinite(number):
        raise FedStrataError("A channel's values are so large that their squares have no sum; scale them down first.")
    numerator, denominator = number.as_integer_ratio()
    whole = (abs(numerator) << POINT) // denominator
    return whole if numerator >= 0 else -whole


def channel_statistics(inputs: Tensor) -> Statistics | tuple[None, None]:
    """Compute mean and deviation per channel of images ``[n, channels, height, width]``, or per feature of tables.

    Images of bytes count as scaled to [0, 1]. A channel that never changes gets the deviation 1. Other inputs (tokens,
    sequences) have no channels: both results are none.
    """
    try:
        sums = ChannelSums.of(inputs)
    except FedStrataError:
        if bool(torch.isfinite(inputs).all()):
            raise
        return None, None  # the dataset that is made of such samples names the first of them
    return (None, None) if sums is None else sums.statistics()


def _sums_of_clients(dataset: Dataset, split: Split) -> list[ChannelSums]:
    """Add up the channels of each client's training samples; at a real site every client is the site itself."""
    parts = split.train_parts
    places = list(zip(parts.begins.tolist(), parts.sizes.tolist(), strict=True))
    holders = {place: client for client, place in enumerate(places)}
    sums = {place: client_sums(dataset, split, client) for place, client in holders.items()}
    return [sums[place] for place in places]


def client_sums(dataset: Dataset, split: Split, client: int) -> ChannelSums:
    """Add up the channels of one client's training samples; of a table, only the columns that are quantities."""
    sums = ChannelSums.of(dataset.inputs[torch.from_numpy(split.train[client])])
    assert sums is not None, "only data with channels has statistics"
    return sums if dataset.table is None else sums.keeping(dataset.table.quantities)


def _sums_of_all(dataset: Dataset, split: Split) -> ChannelSums:
    """Add up what :func:`client_sums` gives of each client; those of the same size at once where that changes no bit.

    Whole numbers have exact sums in any order, and rows of a table are added one after the other.
    """
    inputs, parts = dataset.inputs, split.train_parts
    in_bulk = inputs.dtype == torch.uint8 or (inputs.dim() == 2 and inputs.shape[1] > 1)
    if not in_bulk or parts.shared or parts.sizes.max() > _CHUNK:
        return ChannelSums.total(_sums_of_clients(dataset, split))
    scale, channels = 255.0 if inputs.dtype == torch.uint8 else 1.0, inputs.shape[1]
    sums, squares = [0] * channels, [0] * channels
    for size in np.unique(parts.sizes):
        at_once = max(1, _NUMBERS_AT_ONCE // (int(size) * inputs[0].numel()))
        begins = parts.begins[parts.sizes == size]
        for some in np.split(begins, range(at_once, len(begins), at_once)):
            places = parts.flat[some[:, None] + np.arange(size)]
            values = inputs[torch.from_numpy(places.ravel())].double().numpy().reshape(*places.shape, channels, -1)
            for total, each in (
                (sums, values.sum((1, 3)) / scale),
                (squares, np.square(values).sum((1, 3)) / scale**2),
            ):
                for channel in range(channels):
                    total[channel] += _whole_total(each[:, channel])
    count = int(parts.sizes.sum()) * inputs[0, 0].numel()
    whole = ChannelSums(count, tuple(sums), tuple(squares))
    return whole if dataset.table is None else whole.keeping(dataset.table.quantities)


def _whole_total(numbers: np.ndarray) -> int:
    """Add up :func:`_whole` of many numbers, without a rounding.

    >>> _whole_total(np.array([0.5, -3.0, 1e300])) == _whole(0.5) + _whole(-3.0) + _whole(1e300)
    True
    """
    if not np.isfinite(numbers).all():
        return _whole(math.inf)
    mantissas, exponents = np.frexp(numbers)
    digits, total = (mantissas * 2.0**53).astype(np.int64), 0
    for exponent in np.unique(exponents):
        some, shift = digits[exponents == exponent], int(exponent) - 53 + POINT
        if shift < 0:
            total += sum(map(_whole, numbers[exponents == exponent].tolist()))
        else:  # in two halves, whose sums stay whole numbers of 64 bits
            total += (int((some >> 26).sum()) << 26) + int((some & (2**26 - 1)).sum()) << shift
    return total


def with_statistics_of_all(dataset: Dataset, split: Split) -> Dataset:
    """Give a dataset the mean and deviation of the training samples of all clients together.

    Data without channels, or with published constants, stays as it is.
    """
    if not dataset.estimated or dataset.mean is None:
        return dataset
    return with_statistics(dataset, _sums_of_all(dataset, split).statistics())


def with_statistics(dataset: Dataset, statistics: Statistics) -> Dataset:
    """Give a dataset some mean and deviation."""
    return replace(dataset, mean=statistics.mean, deviation=statistics.deviation)


def statistics_of_clients(dataset: Dataset, split: Split) -> list[Statistics] | None:
    """Tell the mean and deviation of each client's own training samples; none for data without channels."""
    if ChannelSums.of(dataset.inputs[:1]) is None:
        return None
    return [sums.statistics() for sums in _sums_of_clients(dataset, split)]
