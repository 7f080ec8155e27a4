"""Samples set aside: by each client from its training data, and for the server from the test set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError
from fedstrata.rng import numpy_generator


def set_aside(split: Split, fraction: float, seed: int) -> tuple[Split, tuple[np.ndarray, ...]]:
    """Take a fraction of every client's training samples aside, at least one, and leave at least one to train on."""
    train, aside = [], []
    for client, positions in enumerate(split.train):
        if len(positions) < 2:
            raise FedStrataError(
                f"Client {client} has {len(positions)} training sample, but the method holds some out to judge models "
                "on; give every client at least two."
            )
        shuffled = numpy_generator(seed, client, "held out").permutation(positions)
        count = min(max(1, round(fraction * len(positions))), len(positions) - 1)
        aside.append(np.sort(shuffled[:count]))
        train.append(np.sort(shuffled[count:]))
    return replace(split, train=tuple(train)), tuple(aside)


def take_proxy(dataset: Dataset, split: Split, samples: int, seed: int) -> tuple[Dataset, Split, np.ndarray]:
    """Take samples for the server out of the test set, balanced over the classes; nobody is tested on them."""
    if len(dataset.test) <= samples:
        raise FedStrataError(
            f"The method's server needs {samples} labelled samples, but '{dataset.name}' has {len(dataset.test)} test "
            "samples to take them from; ask for fewer."
        )
    shuffled = numpy_generator(seed, "proxy").permutation(dataset.test)
    labels = dataset.labels.numpy()[shuffled]
    place_in_class = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        place_in_class[members] = np.arange(len(members))
    proxy = np.sort(shuffled[np.argsort(place_in_class, kind="stable")[:samples]])
    test = tuple(np.setdiff1d(positions, proxy) for positions in split.test)
    return replace(dataset, test=np.setdiff1d(dataset.test, proxy)), replace(split, test=test), proxy
