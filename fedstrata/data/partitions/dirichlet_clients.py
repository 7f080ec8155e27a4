"""Dirichlet over clients for each class, with unequal sizes."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import SEED, TEST_SAMPLES, Partitioner, check_clients, partitions
from fedstrata.data.partitions.drawing import class_pools, dealt, dirichlet_log_shares, local_tests, own_tests
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter


@partitions.register("dirichlet-clients")
@dataclass(frozen=True)
class DirichletClients(Partitioner):
    """Each class is divided over the clients by Dir(alpha): unequal sizes, every training sample at one client.

    The partition of FedLWS and FedLAW (Hsu et al., 2019; Lin et al., 2020): for each class, shares p ~ Dir(alpha * 1)
    over the clients, round(p * n) samples each, the last client taking the rest. With ``rounding=down`` it is that of
    PLayer-FL, whose released code cuts p * n down to a whole number (gaiters-aerials/player_fl,
    code/datasets/dataset_processing.py), so that the last client gets up to a sample more of each class for each other
    client. Where chance leaves a client with fewer than ``minimum`` samples, it gets the missing ones from the clients
    that have the most, instead of drawing everything anew until luck helps; PLayer-FL's code has no minimum.

    PLayer-FL divides the first ``most`` x clients training samples only, and a fifth of what a client gets is its test
    set, so that the dataset's own test part is not used: ``dirichlet-clients(alpha=0.5, minimum=1, rounding=down,
    most=2000, test_fraction=0.2)`` for Fashion-MNIST, ``most=3000`` for EMNIST and ``most=10000`` for CIFAR-10.
    """

    alpha: float = parameter(0.5, "The concentration: small values give each class to few clients.", above=0)
    minimum: int = parameter(10, "The training samples that every client has at least.", low=1)
    test_samples: int | None = parameter(None, TEST_SAMPLES, low=1)
    seed: int | None = parameter(None, SEED, low=0)
    rounding: str = parameter(
        "nearest",
        "How p * n becomes a whole number: to the nearest, half to even, or down.",
        choices=("nearest", "down"),
    )
    most: int | None = parameter(
        None,
        "Samples per client, on average and at most: only the first so many times the number of clients are divided; "
        "by default all.",
        low=1,
    )
    test_fraction: float | None = parameter(
        None,
        "The fraction of each client's samples that are its test set, instead of the test part's.",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None and self.most < self.minimum:
            raise FedStrataError(
                f"Every client gets {self.minimum} samples at least, but {self.most} on average at most; "
                f"use minimum={self.most} or less."
            )
        if self.test_samples is not None and self.test_fraction is not None:
            raise FedStrataError(
                "Test samples come from the test part (test_samples) or from each client's own (test_fraction), not "
                "from both; use one of them."
            )

    def split(self, dataset: Dataset, clients: int) -> Split:
        """Divide class after class, then fill up the clients that have too little."""
        check_clients(dataset, clients, self.minimum)
        divided = dataset.train if self.most is None else np.sort(dataset.train)[: clients * self.most]
        pools = class_pools(dataset, divided)
        counts = np.zeros((clients, len(pools)), dtype=np.int64)
        for label, pool in enumerate(pools):
            shares = np.exp(dirichlet_log_shares(self.alpha, clients, self.generator("shares", label)))
            counts[:, label] = client_counts(len(pool), shares, self.rounding)
        counts = filled_up(counts, self.minimum)
        shuffled = [self.generator("train", label).permutation(pool) for label, pool in enumerate(pools)]
        train = dealt(shuffled, counts)
        if self.test_fraction is not None:
            return Split(*own_tests(train, self.test_fraction, self.generator))
        return Split(train, local_tests(dataset, train, self.test_samples, self.generator))


def client_counts(total: int, shares: np.ndarray, rounding: str = "nearest") -> np.ndarray:
    """Divide the samples of a class over clients as FedLWS does, or, rounding down, as PLayer-FL does.

    Each gets total * share, as a whole number and at most what is left; the last client takes the rest.

    >>> client_counts(7, np.array([0.5, 0.3, 0.2])).tolist()
    [4, 2, 1]
    >>> client_counts(7, np.array([0.5, 0.3, 0.2]), "down").tolist()
    [3, 2, 2]
    """
    whole = np.rint if rounding == "nearest" else np.floor
    reached = np.minimum(np.cumsum(whole(total * shares).astype(np.int64)), total)
    reached[-1] = total
    return np.diff(reached, prepend=0)


def filled_up(counts: np.ndarray, minimum: int) -> np.ndarray:
    """Move samples, one at a time, from the largest client's largest class to clients with fewer than ``minimum``.

    ``counts`` is ``[clients, classes]`` and must sum to at least ``minimum`` for each client. At most clients *
    minimum moves.

    >>> filled_up(np.array([[5, 3], [0, 0]]), 2).tolist()
    [[3, 3], [2, 0]]
    """
    counts = counts.copy()
    sizes = counts.sum(axis=1)
    # Who has more than the minimum, the largest first and the first among equals; those that are filled up never give.
    givers = [(-int(sizes[client]), int(client)) for client in np.flatnonzero(sizes > minimum)]
    heapify(givers)
    for client in np.flatnonzero(sizes < minimum):
        for _ in range(minimum - int(sizes[client])):
            negative, giver = givers[0]
            label = int(counts[giver].argmax())
            counts[giver, label] -= 1
            counts[client, label] += 1
            if -negative - 1 > minimum:
                heapreplace(givers, (negative + 1, giver))
            else:
                heappop(givers)
    return counts
