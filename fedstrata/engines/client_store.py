"""What all clients keep between rounds: in memory while it fits, else in files, of which a round reads and writes the
rows of its participants.

Where a method keeps nothing at its clients, nothing is kept here, however many clients there are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedstrata.data.cache import cache_directory
from fedstrata.stack import Stack, apart, put_, take
from fedstrata.transfer import numbers_on

FirstState = Callable[[Sequence[int]], Stack]
"""Makes the state of some clients before their first round, the same however many are asked for at once."""
_PART_OF_MEMORY = 0.25


class ClientStore(Protocol):
    """Holds the state of all clients; clients are given by their numbers, in ascending order if they are all."""

    def take(self, clients: Sequence[int]) -> Stack:
        """Return the state of some clients, on the device."""
        ...

    def put(self, clients: Sequence[int], state: Mapping[str, Tensor]) -> None:
        """Keep the new state of some clients."""
        ...

    def pieces(self) -> Iterator[range]:
        """Divide all clients into as many at a time as fit the memory."""
        ...

    def everything(self) -> Stack:
        """Return the state of all clients, in their order."""
        ...


def client_store(
    first: FirstState, clients: int, device: torch.device, state: Stack | None = None, bound: int | None = None
) -> ClientStore:
    """Choose where clients' state is kept: in memory up to a bound in bytes, by default a part of what is free.

    ``state`` is that of all clients, where a run goes on; else they begin.
    """
    one = first(range(1)) if state is None else take(state, torch.zeros(1, dtype=torch.int64, device=device))
    each = sum(tensor.nbytes for tensor in one.values())
    bound = _memory_for_state(device) if bound is None else bound
    if each * clients <= bound:
        whole = first(range(clients)) if one and state is None else state
        return InMemory(Stack() if whole is None else whole, clients, device)
    store = OnDisk(first, one, clients, device, max(1, bound // each))
    if state is not None:
        for some in store.pieces():
            store.put(some, {name: tensor[some.start : some.stop] for name, tensor in state.items()})
    return store


def _memory_for_state(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_PART_OF_MEMORY * torch.cuda.mem_get_info(device)[0])
    known = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {})
    return int(_PART_OF_MEMORY * (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if known else 2**33))


class InMemory:
    """The state of all clients as one stack on the device."""

    def __init__(self, state: Stack, clients: int, device: torch.device) -> None:
        self._state = state
        self._clients = clients
        self._device = device

    def take(self, clients: Sequence[int]) -> Stack:
        """Pick some clients; of all of them there is no copy."""
        return take(self._state, self._rows(clients)) if self._state else Stack()

    def put(self, clients: Sequence[int], state: Mapping[str, Tensor]) -> None:
        """Write some clients' rows, in place; or take the tensors of all."""
        if state:
            rows = self._rows(clients)
            put_(self._state, rows, apart(state) if rows is None else state)

    def pieces(self) -> Iterator[range]:
        """All clients at once."""
        yield range(self._clients)

    def everything(self) -> Stack:
        """Return the stack itself."""
        return self._state

    def _rows(self, clients: Sequence[int]) -> Tensor | None:
        return None if len(clients) == self._clients else numbers_on(clients, self._device)


class OnDisk:
    """The state of all clients in files that are mapped into memory, one for each tensor.

    They lie in a folder of the cache, which goes with the store. A client that was never written to is as at the
    beginning, and takes no room.
    """

    def __init__(self, first: FirstState, one: Stack, clients: int, device: torch.device, at_once: int) -> None:
        self._first = first
        self._clients = clients
        self._device = device
        self._at_once = at_once
        self._written = np.zeros(clients, dtype=np.bool_)
        cache = cache_directory()
        cache.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="clients-", dir=cache))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._tensors = Stack({name: self._mapped(number, tensor) for number, (name, tensor) in enumerate(one.items())})

    def _mapped(self, number: int, one: Tensor) -> Tensor:
        shape = self._clients, *one.shape[1:]
        if not one[0].numel():
            return torch.empty(shape, dtype=one.dtype)
        path = str(self._folder / str(number))
        return torch.from_file(path, shared=True, size=self._clients * one[0].numel(), dtype=one.dtype).reshape(shape)

    def take(self, clients: Sequence[int]) -> Stack:
        """Read some clients' rows, in the order in which they lie on the disk."""
        ids = np.array(clients, dtype=np.int64)
        known = self._written[ids]
        if not known.any():
            return self._first(clients)
        order = np.argsort(ids, kind="stable")
        rows, back = torch.from_numpy(ids[order]), torch.from_numpy(np.argsort(order, kind="stable"))
        state = Stack({name: tensor[rows][back].to(self._device) for name, tensor in self._tensors.items()})
        fresh = np.flatnonzero(~known)
        if len(fresh):
            put_(state, numbers_on(fresh.tolist(), self._device), self._first(ids[fresh].tolist()))
        return state

    def put(self, clients: Sequence[int], state: Mapping[str, Tensor]) -> None:
        """Write some clients' rows, in the order in which they lie on the disk."""
        ids = np.array(clients, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        rows, sort = torch.from_numpy(ids[order]), torch.from_numpy(order)
        for name, value in state.items():
            if name not in self._tensors:
                self._tensors[name] = self._mapped(len(self._tensors), value)
            self._tensors[name][rows] = value.detach().cpu()[sort]
        self._written[ids] = True

    def pieces(self) -> Iterator[range]:
        """As many clients at once as the bound allows."""
        for begin in range(0, self._clients, self._at_once):
            yield range(begin, min(begin + self._at_once, self._clients))

    def everything(self) -> Stack:
        """Return the mapped files, after those were written to that never took part."""
        for some in self.pieces():
            fresh = some.start + np.flatnonzero(~self._written[some.start : some.stop])
            if len(fresh):
                self.put(fresh.tolist(), self._first(fresh.tolist()))
        return self._tensors
