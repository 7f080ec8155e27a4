"""Batches as they were first written, client by client and step by step: what the vectorised ones are held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedstrata.data import Split
from fedstrata.engines.batches import Work
from fedstrata.rng import client_keys, permutation


def batches_per_epoch(work: Work, size: int) -> int:
    whole, rest = divmod(size, work.batch_size)
    return max(whole + (1 if rest and work.last_batch == "keep" else 0), 1)


def steps_of(work: Work, size: int) -> int:
    return work.steps if work.steps is not None else work.epochs * batches_per_epoch(work, size)


def stretch_of(work: Work, size: int) -> tuple[int, int]:
    count = steps_of(work, size)
    begin, end = (int(edge * count + 0.5) for edge in work.span)
    return begin, end


def samples_of(work: Work, size: int) -> int:
    each = batches_per_epoch(work, size)
    steps = range(*stretch_of(work, size))
    return sum(min(work.batch_size, size - step % each * work.batch_size) for step in steps)


def plain_batches(
    split: Split, clients: Sequence[int], work: Work, seed: int, round: int
) -> Iterator[tuple[list[int] | None, list[list[int]], int]]:
    """Yield rows (none: all), positions and step of each batch."""
    sizes = [work.samples or len(split.train[client]) for client in clients]
    keys = client_keys(seed, round, clients, "batches")
    orders = [
        _epochs(split.train[client], size, -(-steps_of(work, size) // batches_per_epoch(work, size)), own)
        for client, size, own in zip(clients, sizes, keys, strict=True)
    ]
    for step in range(max(stretch_of(work, size)[1] for size in sizes)):
        groups: dict[int, tuple[list[int], list[list[int]]]] = {}
        for row, size in enumerate(sizes):
            first, end = stretch_of(work, size)
            if first <= step < end:
                epoch, index = divmod(step, batches_per_epoch(work, size))
                begin = index * work.batch_size
                length = min(work.batch_size, size - begin)
                rows, positions = groups.setdefault(length, ([], []))
                rows.append(row)
                positions.append(orders[row][epoch][begin : begin + length])
        for length in sorted(groups, reverse=True):
            rows, positions = groups[length]
            yield None if len(rows) == len(clients) else rows, positions, step


def _epochs(own: np.ndarray, size: int, epochs: int, key: Tensor) -> list[list[int]]:
    drawn = [permutation(key[None], len(own), torch.tensor([[epoch]]))[0].tolist() for epoch in range(epochs)]
    return [[int(own[order[place % len(own)]]) for place in range(size)] for order in drawn]
