"""Dirichlet over classes for each client, with exact sizes and overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import SEED, TEST_SAMPLES, Partitioner, check_clients, partitions
from fedstrata.data.partitions.drawing import (
    class_pools,
    dirichlet_log_shares,
    draw_by_class,
    local_test,
    present_counts,
    present_shares,
)
from fedstrata.data.split import Split
from fedstrata.spec import parameter


@partitions.register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Class shares of each client from Dir(alpha), the same number of samples for all; clients may share samples.

    The partition of LIPS and FedCAC (Wu et al., ICCV 2023): client i draws q_i ~ Dir(alpha * 1) and takes, without
    replacement, int(n * q_ij + 0.5) samples of class j, the last class taking the rest. Training and test set follow
    the same q_i. Each client draws from the whole training part, independently of the others; a sample is repeated
    inside a client only where a class has too few. Where ``samples`` or ``test_samples`` are given and more than a
    tenth of them are such repeats, that is told.
    """

    alpha: float = parameter(
        0.1, "The concentration: small values give each client few classes, large ones all classes.", above=0
    )
    samples: int | None = parameter(
        None, "Training samples per client; by default the training part divided by the number of clients.", low=1
    )
    test_samples: int | None = parameter(None, TEST_SAMPLES, low=1)
    seed: int | None = parameter(None, SEED, low=0)

    def split(self, dataset: Dataset, clients: int) -> Split:
        """Draw each client's shares, then its training and test samples."""
        check_clients(dataset, clients, each=1 if self.samples is None else 0)
        samples = self.samples or len(dataset.train) // clients
        pools, test_pools = class_pools(dataset, dataset.train), class_pools(dataset, dataset.test)
        train, test = [], []
        for client in range(clients):
            log_shares = dirichlet_log_shares(self.alpha, dataset.classes, self.generator(client, "shares"))
            counts = present_counts(samples, present_shares(log_shares, pools), pools, rounded_counts)
            train.append(draw_by_class(pools, counts, self.generator(client, "train")))
            shares, generator = present_shares(log_shares, test_pools), self.generator(client, "test")
            test.append(local_test(test_pools, shares, self.test_samples, samples, generator, rounded_counts))
        return Split(tuple(train), tuple(test))


def rounded_counts(total: int, shares: np.ndarray) -> np.ndarray:
    """Divide ``total`` over classes as LIPS does: int(total * share + 0.5), at most what is left, the rest to the last.

    >>> rounded_counts(10, np.array([0.55, 0.30, 0.15])).tolist()
    [6, 3, 1]
    """
    reached = np.minimum(np.cumsum(np.floor(total * shares + 0.5).astype(np.int64)), total)
    reached[-1] = total
    return np.diff(reached, prepend=0)
