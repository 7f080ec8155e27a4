"""The supports of masks: where their true entries lie, worked out once and kept for the next message.

A mask that both sides hold comes with every message of a run, and to find its true entries takes as long as to send the
values. So the supports that were used last are kept, up to some number of bytes. They are found again by the bits of
the mask and not by the tensor that holds them: a mask that was changed in place is another one.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from torch import Tensor

Truth = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

HASH_BYTES = 8
_STRETCH = 2**16
"""Positions inside this many entries fit into two bytes, and the entries into the processor's cache."""
_BYTES_OF_AN_EMPTY_ONE = 2**10


class Support:
    """The true entries of a mask; ``bits`` are all its entries, packed with the first in the highest bit.

    ``positions`` of the true entries may be given where they are known.
    """

    def __init__(self, mask: Truth, bits: Bits, positions: Positions | None = None) -> None:
        self.shape = mask.shape
        self.bits = bits
        starts = range(0, mask.size, _STRETCH)
        if positions is None:
            entries = np.ascontiguousarray(mask).reshape(-1)
            stretches = [entries[start : start + _STRETCH] for start in starts]
            self._ends = np.cumsum([0, *map(np.count_nonzero, stretches)]).tolist()
            self._inside = np.empty(self._ends[-1], np.uint16)
            for stretch, begin, end in zip(stretches, self._ends, self._ends[1:], strict=False):
                self._inside[begin:end] = true_positions(stretch)
        else:
            self._ends = [*np.searchsorted(positions, starts).tolist(), len(positions)]
            self._inside = positions.astype(np.uint16)  # what is above two bytes is the number of the stretch

    @property
    def count(self) -> int:
        """How many entries are true."""
        return len(self._inside)

    @property
    def nbytes(self) -> int:
        """The memory that it takes, roughly."""
        return self.bits.nbytes + self._inside.nbytes + _BYTES_OF_AN_EMPTY_ONE

    @cached_property
    def hash(self) -> bytes:
        """The mask's name: eight bytes of BLAKE2b over its shape, without the client axis, and its bits."""
        digest = blake2b(repr(self.shape[1:]).encode(), digest_size=HASH_BYTES)
        digest.update(self.bits.data)
        return digest.digest()

    def is_of(self, mask: Tensor) -> bool:
        """Tell whether it is the support of a mask."""
        return self.shape == mask.shape and np.array_equal(self.bits, np.packbits(_entries(mask)))

    def mask(self) -> Truth:
        """Unpack the mask."""
        return np.unpackbits(self.bits, count=math.prod(self.shape)).view(np.bool_).reshape(self.shape)

    def expanded(self, shape: Sequence[int]) -> Support:
        """Return the support of the mask broadcast to a shape."""
        return self if self.shape == tuple(shape) else SUPPORTS.find(np.broadcast_to(self.mask(), tuple(shape)))

    def stretches(self) -> Iterator[tuple[slice, slice, Positions]]:
        """Walk over the mask: a stretch of its entries, its place among the true ones, the positions inside it."""
        for number in range(len(self._ends) - 1):
            place = slice(*self._ends[number : number + 2])
            yield slice(number * _STRETCH, (number + 1) * _STRETCH), place, self._inside[place].astype(np.int64)

    def positions(self) -> Positions:
        """Return the positions of all true entries."""
        found = self._inside.astype(np.int64)
        for stretch, place, _ in self.stretches():
            found[place] += stretch.start
        return found


class Supports:
    """The supports that were asked for last, as many as fit into a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: OrderedDict[tuple[tuple[int, ...], int], Support] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, mask: Truth, positions: Positions | None = None) -> Support:
        """Return the support of a mask; the ``positions`` of its true entries may be given where they are known."""
        bits = np.packbits(mask)
        key = mask.shape, zlib.crc32(bits.data)
        with self._lock:
            support = self._kept.pop(key, None)
            self.nbytes -= 0 if support is None else support.nbytes
            if support is None or not np.array_equal(support.bits, bits):
                support = Support(mask, bits, positions)
            self._kept[key] = support
            self.nbytes += support.nbytes
            while self.nbytes > self.most_bytes:
                self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return support

    def clear(self) -> None:
        """Keep none of them."""
        with self._lock:
            self._kept.clear()
            self.nbytes = 0


SUPPORTS = Supports(2**28)
"""Those of this process."""


def support_of(mask: Tensor) -> Support:
    """Find the support of a mask."""
    return SUPPORTS.find(_entries(mask))


def _entries(mask: Tensor) -> Truth:
    return mask.detach().cpu().numpy()


def true_positions(entries: Truth) -> Positions:
    """Find the true entries ``[n]``.

    Where one in ten or fewer is true, NumPy takes three times as long as elsewhere; it is faster to find the words of
    eight entries that are not empty, and then to look into these.
    """
    if 10 * np.count_nonzero(entries) > len(entries):
        return np.flatnonzero(entries)
    whole = len(entries) // 8 * 8
    words = entries[:whole].view(np.uint64)
    filled = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[filled].view(np.bool_))
    rest = np.flatnonzero(entries[whole:])
    return np.concatenate([(filled[inside >> 3] << 3) + (inside & 7), rest + whole])
