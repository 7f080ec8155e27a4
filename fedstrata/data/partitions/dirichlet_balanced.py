"""Dirichlet over classes for each client, with equal sizes and without overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import SEED, TEST_SAMPLES, Partitioner, check_clients, partitions
from fedstrata.data.partitions.drawing import (
    class_pools,
    dealt,
    dirichlet_log_shares,
    even_sizes,
    local_tests,
    normalised_logarithms,
)
from fedstrata.data.split import Split
from fedstrata.spec import parameter


@partitions.register("dirichlet-balanced")
@dataclass(frozen=True)
class DirichletBalanced(Partitioner):
    """Class shares of each client from Dir(alpha), equal sizes, every training sample at exactly one client.

    The partition of SSFL and DisPFL (Dai et al., ICML 2022). Clients ask for samples by their shares; a class that is
    asked for more than it has is dealt out at random among those who asked, and what they lack they ask of the
    classes that are left. One class at least is exhausted in each such turn, so it ends; late draws must deviate from
    the shares, as in the original.
    """

    alpha: float = parameter(
        0.3, "The concentration: small values give each client few classes, large ones all classes.", above=0
    )
    test_samples: int | None = parameter(None, TEST_SAMPLES, low=1)
    seed: int | None = parameter(None, SEED, low=0)

    def split(self, dataset: Dataset, clients: int) -> Split:
        """Fix how many samples of each class every client gets, then deal the shuffled classes out."""
        check_clients(dataset, clients)
        pools = class_pools(dataset, dataset.train)
        shares = [
            dirichlet_log_shares(self.alpha, dataset.classes, self.generator(client, "shares"))
            for client in range(clients)
        ]
        sizes = even_sizes(len(dataset.train), clients)
        available = np.array([len(pool) for pool in pools])
        counts = balanced_counts(np.stack(shares), sizes, available, self.generator("counts"))
        shuffled = [self.generator("train", label).permutation(pool) for label, pool in enumerate(pools)]
        train = dealt(shuffled, counts)
        return Split(train, local_tests(dataset, train, self.test_samples, self.generator))


def balanced_counts(
    log_shares: np.ndarray, sizes: np.ndarray, available: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Draw counts ``[clients, classes]`` by shares: rows sum to ``sizes``, columns to ``available`` at most.

    ``sizes`` must not sum to more than ``available``. Takes as many turns as there are classes at most.
    """
    counts = np.zeros_like(log_shares, dtype=np.int64)
    while (missing := sizes - counts.sum(axis=1)).any():
        left = available - counts.sum(axis=0)
        open_classes = np.flatnonzero(left)
        for_sale = np.stack([np.exp(normalised_logarithms(row)) for row in log_shares[:, open_classes]])
        asked = np.stack([generator.multinomial(count, row) for count, row in zip(missing, for_sale, strict=True)])
        for column, label in enumerate(open_classes):
            wanted = asked[:, column]
            over = wanted.sum() > left[label]
            counts[:, label] += generator.multivariate_hypergeometric(wanted, left[label]) if over else wanted
    return counts
