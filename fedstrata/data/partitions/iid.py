"""The same distribution everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import SEED, TEST_SAMPLES, Partitioner, check_clients, partitions
from fedstrata.data.partitions.drawing import cut_evenly, local_tests
from fedstrata.data.split import Split
from fedstrata.spec import parameter


@partitions.register("iid")
@dataclass(frozen=True)
class Iid(Partitioner):
    """Shuffled and dealt out: every client's data has the same distribution.

    Each training sample goes to one client; sizes differ by one at most.
    """

    test_samples: int | None = parameter(None, TEST_SAMPLES, low=1)
    seed: int | None = parameter(None, SEED, low=0)

    def split(self, dataset: Dataset, clients: int) -> Split:
        """Shuffle, and cut into equal parts."""
        check_clients(dataset, clients)
        shuffled = self.generator("train").permutation(dataset.train)
        train = cut_evenly(shuffled, clients)
        return Split(train, local_tests(dataset, train, self.test_samples, self.generator))
