"""Samples held out from training: to test on, to choose a model on, for each client to judge models on, and for the
server to learn from.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Parts, Split
from fedstrata.errors import FedStrataError
from fedstrata.rng import numpy_generator


def hold_out_for_testing(groups: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide data that comes without a test part into training and test positions, without chance.

    ``groups`` holds one number per sample, such as its label: each group is divided in the same proportion. Of a group
    of ``n`` samples, ``n * fraction``, rounded half up, are held out, evenly spaced in the given order; one sample at
    least stays for training.

    >>> train, test = hold_out_for_testing(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.25)
    >>> test.tolist()
    [2, 6]
    """
    held = np.zeros(len(groups), dtype=bool)
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        count = min(len(members) - 1, math.floor(len(members) * fraction + 0.5))
        if count > 0:
            held[members[((np.arange(count) + 0.5) * len(members) / count).astype(np.int64)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def groups_of(labels: Tensor, sites: np.ndarray | None) -> np.ndarray:
    """Number the combinations of label and site, for :func:`hold_out_for_testing`."""
    if sites is None:
        return labels.numpy()
    _, numbers = np.unique(sites, return_inverse=True)
    groups: np.ndarray = labels.numpy() * (numbers.max() + 1) + numbers.reshape(-1)
    return groups


def checked_fraction(fraction: float) -> float:
    """Let a fraction to hold out pass that leaves something to train on."""
    if not 0 <= fraction < 1:
        raise FedStrataError(f"The test fraction {fraction} is outside what is possible: at least 0 and less than 1.")
    return fraction


def hold_out_for_validation(dataset: Dataset, samples: int, seed: int) -> tuple[Dataset, np.ndarray]:
    """Hold out training samples before the data is divided, of every class in proportion, to choose a model on."""
    if len(dataset.train) <= samples:
        raise FedStrataError(
            f"{samples} samples are to be held out for validation, but '{dataset.name}' has {len(dataset.train)} "
            "training samples; hold out fewer."
        )
    shuffled = numpy_generator(seed, "validation").permutation(dataset.train)
    place, size = _places_in_class(dataset.labels.numpy()[shuffled])
    held_out = np.sort(shuffled[np.argsort((place + 0.5) / size, kind="stable")[:samples]])
    return replace(dataset, train=np.setdiff1d(dataset.train, held_out)), held_out


def _places_in_class(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the samples of each class in their order, and tell how many its class has.

    >>> [numbers.tolist() for numbers in _places_in_class(np.array([3, 1, 3, 3]))]
    [[0, 0, 1, 2], [3, 1, 3, 3]]
    """
    places, sizes = np.zeros(len(labels), dtype=np.int64), np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        places[members], sizes[members] = np.arange(len(members)), len(members)
    return places, sizes


def hold_out_at_clients(
    split: Split, fraction: float, seed: int, who: str = "the method", purpose: str = "held out"
) -> tuple[Split, tuple[np.ndarray, ...]]:
    """Hold out a fraction of every client's training samples, at least one, and leave at least one to train on.

    Some partitions give a client a sample several times; all of these are held out, so that it trains on none of them.
    """
    train, held_out = [], []
    for client, positions in enumerate(split.train):
        if len(positions) < 2:
            raise FedStrataError(
                f"Client {client} has {len(positions)} training sample, but {who} holds some out to judge models "
                "on; give every client at least two."
            )
        shuffled = numpy_generator(seed, client, purpose).permutation(positions)
        count = min(max(1, round(fraction * len(positions))), len(positions) - 1)
        held = np.unique(shuffled[:count])
        left = positions[~np.isin(positions, held)]
        if len(left) == 0:
            raise FedStrataError(
                f"Client {client} has the same training sample {len(positions)} times, but {who} holds some out to "
                "judge models on; give every client at least two different ones."
            )
        held_out.append(held)
        train.append(np.sort(left))
    return replace(split, train=tuple(train)), tuple(held_out)


def hold_out_for_server(dataset: Dataset, split: Split, samples: int, seed: int) -> tuple[Dataset, Split, np.ndarray]:
    """Hold out test samples for the server, balanced over the classes; nobody is tested on them."""
    if len(dataset.test) <= samples:
        raise FedStrataError(
            f"The method's server needs {samples} labelled samples, but '{dataset.name}' has {len(dataset.test)} test "
            "samples to take them from; ask for fewer."
        )
    shuffled = numpy_generator(seed, "proxy").permutation(dataset.test)
    places, _ = _places_in_class(dataset.labels.numpy()[shuffled])
    proxy = np.sort(shuffled[np.argsort(places, kind="stable")[:samples]])
    test = _without(split.test_parts, proxy)
    return replace(dataset, test=np.setdiff1d(dataset.test, proxy)), replace(split, test=test), proxy


def _without(parts: Parts, taken: np.ndarray) -> Parts:
    """Take samples from all clients; what is left is sorted, each sample once at a client."""
    owners, positions = parts.owners(), parts.joined()
    left = ~np.isin(positions, taken)
    both = np.unique(np.stack((owners[left], positions[left])), axis=1)
    return Parts.grouped(both[0], both[1], len(parts))
