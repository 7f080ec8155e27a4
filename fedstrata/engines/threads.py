"""Several clients of the loop engine at a time, each in a thread of its own.

Large convolutions gain little from more threads inside of an operation; a client for each core uses all of them.
PyTorch computes without Python's lock, and whoever trains has a model and a side of its own, so that threads share
nothing that they write to. Each client computes what it computes alone, bit for bit.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch

from fedstrata._platform import CORES
from fedstrata.engines.client import ClientSide
from fedstrata.engines.forward import LoopForward

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class SideBySide:
    """Lends ``count`` client sides to as many threads: the given one, or, where they are several, copies of it.

    The given one has the model that whoever takes the answers may use meanwhile, to test what is trained already.
    """

    def __init__(self, side: ClientSide, count: int) -> None:
        self.count = count
        self.sides = (side,) if count == 1 else tuple(_copy(side) for _ in range(count))
        self._free: SimpleQueue[ClientSide] = SimpleQueue()
        for one in self.sides:
            self._free.put(one)

    def map(self, work: Callable[[ClientSide, Item], Answer], items: Sequence[Item]) -> Iterator[Answer]:
        """Work on all items, ``count`` at a time, each with a side that nobody else has; answers come in order."""
        if self.count == 1 or len(items) < 2:
            yield from map(self._lending(work), items)
            return
        threads = torch.get_num_threads()  # each thread of Python has a number of its own
        pool = ThreadPoolExecutor(self.count, initializer=_begin, initargs=(threads,))
        try:
            if len(items) <= self.count:  # in every round each has the side that knows its steps
                yield from pool.map(work, self.sides, items)
            else:
                yield from pool.map(self._lending(work), items)
        finally:  # where one has failed or the run is stopped, nobody begins with another
            pool.shutdown(cancel_futures=True)

    def _lending(self, work: Callable[[ClientSide, Item], Answer]) -> Callable[[Item], Answer]:
        def lend(item: Item) -> Answer:
            side = self._free.get()
            try:
                return work(side, item)
            finally:
                self._free.put(side)

        return lend


def _copy(side: ClientSide) -> ClientSide:
    return ClientSide(side.setting, LoopForward(copy.deepcopy(side.forward.model), side.forward.head), side.data)


def _begin(threads: int) -> None:
    """Begin a thread: with so many threads of PyTorch, on any core, also where the one that starts it is bound."""
    torch.set_num_threads(threads)
    if CORES:
        os.sched_setaffinity(0, CORES)
