"""Who holds what: the outcome of a partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import overload

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.errors import FedStrataError

_WANTED = "give each client the places of its samples in the dataset, whole numbers from 0"


class Parts(Sequence[np.ndarray]):
    """The positions of each client, a sequence of arrays that lie one behind the other in one.

    A million clients are three arrays: all positions, where each client's begin, and how many they are. Arrays that are
    the same object, as at a real site where every client is the site itself, are kept once.

    >>> parts = Parts.of([np.array([4, 1]), np.array([7])])
    >>> parts[1].tolist(), parts.sizes.tolist(), parts.joined().tolist(), len(parts)
    ([7], [2, 1], [4, 1, 7], 2)
    """

    def __init__(self, flat: np.ndarray, sizes: np.ndarray, begins: np.ndarray | None = None) -> None:
        self.flat = flat
        self.sizes = sizes
        self._apart = begins is None
        self.begins = np.cumsum(sizes) - sizes if begins is None else begins

    @classmethod
    def of(cls, arrays: Iterable[np.ndarray]) -> Parts:
        """Put the arrays of all clients together."""
        if isinstance(arrays, Parts):
            return arrays
        given = list(arrays)
        kept = {id(positions): positions for positions in given}
        own = [_as_positions(positions) for positions in kept.values()]
        lengths = np.fromiter(map(len, own), dtype=np.int64, count=len(own))
        some = [positions for positions in own if len(positions)]
        flat = np.concatenate(some, dtype=np.int64) if some else np.empty(0, dtype=np.int64)
        if len(kept) == len(given):
            return cls(flat, lengths)
        numbers = {name: number for number, name in enumerate(kept)}
        which = np.fromiter((numbers[id(positions)] for positions in given), dtype=np.int64, count=len(given))
        return cls(flat, lengths[which], (np.cumsum(lengths) - lengths)[which])

    @classmethod
    def grouped(cls, owners: np.ndarray, positions: np.ndarray, clients: int) -> Parts:
        """Give positions to their owners, each owner's sorted.

        >>> [own.tolist() for own in Parts.grouped(np.array([1, 0, 1]), np.array([5, 3, 2]), 2)]
        [[3], [2, 5]]
        """
        order = np.lexsort((positions, owners))
        return cls(positions[order], np.bincount(owners, minlength=clients))

    def __len__(self) -> int:
        """Count the clients."""
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, client: slice) -> tuple[np.ndarray, ...]: ...
    def __getitem__(self, client: int | slice) -> np.ndarray | tuple[np.ndarray, ...]:
        """Look at a client's positions, without a copy."""
        if isinstance(client, slice):
            return tuple(self[one] for one in range(*client.indices(len(self))))
        begin = self.begins[client]
        own: np.ndarray = self.flat[begin : begin + self.sizes[client]]
        return own

    def __iter__(self) -> Iterator[np.ndarray]:
        """Look at the positions of one client after the other."""
        if self._apart:
            ends = np.concatenate(([0], self.begins + self.sizes)).tolist()
            return (self.flat[begin:end] for begin, end in pairwise(ends))
        return (self[client] for client in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Tell whether all clients have the same positions, in the same order."""
        if not isinstance(other, Parts):
            return NotImplemented
        return np.array_equal(self.sizes, other.sizes) and np.array_equal(self.joined(), other.joined())

    def __hash__(self) -> int:
        """Hash the content."""
        return hash((self.sizes.tobytes(), self.joined().tobytes()))

    def __repr__(self) -> str:
        """Tell the parts in a line."""
        return f"Parts({len(self)} clients, {int(self.sizes.sum())} positions)"

    @property
    def shared(self) -> bool:
        """Whether some clients have the same array."""
        return not self._apart

    def joined(self) -> np.ndarray:
        """Return the positions of all clients in one array, in their order."""
        return self.flat if self._apart else self.take(np.arange(len(self)))

    def owners(self) -> np.ndarray:
        """Name the client of each of these positions."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def take(self, clients: np.ndarray) -> np.ndarray:
        """Return the positions of some clients in one array, in their order."""
        sizes = self.sizes[clients]
        places = np.arange(sizes.sum()) + np.repeat(self.begins[clients] - (np.cumsum(sizes) - sizes), sizes)
        taken: np.ndarray = self.flat[places]
        return taken

    def repeats(self) -> int:
        """Count the positions that stand before at the same client.

        >>> Parts.of([np.array([4, 1, 4, 4]), np.array([4])]).repeats()
        2
        """
        owners, positions = self.owners(), self.joined()
        order = np.lexsort((positions, owners))
        owners, positions = owners[order], positions[order]
        return int(np.count_nonzero((owners[1:] == owners[:-1]) & (positions[1:] == positions[:-1])))

    def label_counts(self, dataset: Dataset) -> np.ndarray:
        """Count the labels of each client's samples: an array ``[clients, classes]``."""
        places = self.owners() * dataset.classes + dataset.labels.numpy()[self.joined()]
        return np.bincount(places, minlength=len(self) * dataset.classes).reshape(len(self), dataset.classes)


def _as_positions(given: object) -> np.ndarray:
    """Take what one client is given as whole numbers; refuse all else, also masks, which would count as 0 and 1."""
    try:
        positions = np.asarray(given)
    except ValueError:
        raise FedStrataError(f"The positions of a client are lists of unequal lengths; {_WANTED}.") from None
    if positions.ndim == 1 and (not len(positions) or positions.dtype.kind in "iu"):
        return positions.astype(np.int64, copy=False)
    hint = "; np.flatnonzero(mask) has those of a mask" if positions.dtype.kind == "b" else ""
    raise FedStrataError(
        f"The positions of a client are an array of shape {list(positions.shape)} and type {positions.dtype}; "
        f"{_WANTED}{hint}."
    )


@dataclass(frozen=True)
class Split:
    """For each client, the positions in the dataset's pool that it trains and tests on.

    Whatever sequences of arrays are given, they are kept as :class:`Parts`.
    """

    train: Sequence[np.ndarray]
    test: Sequence[np.ndarray]

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            object.__setattr__(self, name, Parts.of(getattr(self, name)))
        if len(self.train) != len(self.test):
            raise FedStrataError(f"A split has {len(self.train)} training parts but {len(self.test)} test parts.")
        empty = np.flatnonzero(self.train_parts.sizes == 0)
        if len(empty):
            raise FedStrataError(
                f"Client {empty[0]} of {len(self.train)} holds no training samples; "
                "use fewer clients, more data or a milder skew."
            )
        lowest = min(int(parts.flat.min(initial=0)) for parts in (self.train_parts, self.test_parts))
        if lowest < 0:
            raise FedStrataError(f"A split has the position {lowest}; positions in a dataset count from 0.")

    def check(self, dataset: Dataset) -> None:
        """Refuse a dataset that lacks some of these positions."""
        highest = max(int(parts.flat.max(initial=0)) for parts in (self.train_parts, self.test_parts))
        if highest >= len(dataset.inputs):
            raise FedStrataError(
                f"The split has the position {highest}, but the dataset '{dataset.name}' has {len(dataset.inputs)} "
                f"samples, at 0 to {len(dataset.inputs) - 1}; divide this dataset."
            )

    def trained_and_tested(self, dataset: Dataset) -> int:
        """Count the test samples on which somebody trains."""
        held = [np.zeros(len(dataset.inputs), dtype=np.bool_) for _ in range(2)]
        for mask, parts in zip(held, (self.train_parts, self.test_parts), strict=True):
            mask[parts.flat] = True
        return int(np.count_nonzero(held[0] & held[1]))

    def __repr__(self) -> str:
        """Tell the split in a line."""
        return (
            f"Split({self.clients} clients, {self.sizes.sum()} samples for training and "
            f"{self.test_parts.sizes.sum()} for testing, hash {self.hash})"
        )

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train)

    @property
    def train_parts(self) -> Parts:
        """The training positions of all clients, in one array."""
        return Parts.of(self.train)

    @property
    def test_parts(self) -> Parts:
        """The test positions of all clients, in one array."""
        return Parts.of(self.test)

    @property
    def sizes(self) -> np.ndarray:
        """The number of training samples of each client."""
        return self.train_parts.sizes

    @property
    def test_sizes(self) -> np.ndarray:
        """The number of test samples of each client."""
        return self.test_parts.sizes

    @property
    def hash(self) -> str:
        """A fingerprint: equal for equal splits, on every machine."""
        digest = sha256()
        for parts in (self.train_parts, self.test_parts):
            lengths = np.cumsum(parts.sizes) - parts.sizes
            digest.update(np.insert(parts.joined(), lengths, parts.sizes).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def client_names(self, dataset: Dataset) -> tuple[str, ...]:
        """Name each client after the site whose training samples it has; nobody where a client is not one whole site.

        Clients that mix sites, or that share one, have no names, nor have those of data without sites.
        """
        if dataset.sites is None:
            return ()
        parts = self.train_parts
        own = dataset.sites[parts.flat[parts.begins]]
        if len(np.unique(own)) < len(own) or (dataset.sites[parts.joined()] != own[parts.owners()]).any():
            return ()
        return tuple(map(str, own.tolist()))

    def samples(self, dataset: Dataset) -> int:
        """Count the samples of all, also those that nobody holds."""
        return len(dataset.inputs)

    def label_counts(self, dataset: Dataset) -> np.ndarray:
        """Count the training labels: an array ``[clients, classes]``."""
        return self.train_parts.label_counts(dataset)
