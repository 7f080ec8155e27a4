"""A fixed number of classes per client: the pathological partition, or clients drawn apart from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import SEED, TEST_SAMPLES, Partitioner, check_clients, partitions
from fedstrata.data.partitions.drawing import class_pools, dealt, even_sizes, local_tests
from fedstrata.data.split import Parts, Split
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter


@partitions.register("classes")
@dataclass(frozen=True)
class Classes(Partitioner):
    """Each client holds a fixed number of classes; no two clients share a sample, unless they are drawn apart.

    The pathological partition (McMahan et al., AISTATS 2017), built exactly: K clients with N classes each are K * N
    slots, every class fills the same number of them (one more or less where it does not come out even), and its
    samples are divided equally over its slots. With 100 clients and the 450 samples of each of 100 classes, every
    client has N classes and 450 samples. Where there are fewer slots than classes, some classes are held by nobody.

    With ``apart`` each client draws its classes, and as many samples of each, as if it were alone, so that some classes
    are held by more clients than others, and samples by several, as in the released code of "Federated Learning Under
    the Lens of Task Arithmetic" (emanueleR3/AML-Project-2, ``partition_non_iid``).
    """

    per_client: int = parameter(2, "The number of classes of each client.", low=1)
    test_samples: int | None = parameter(None, TEST_SAMPLES, low=1)
    seed: int | None = parameter(None, SEED, low=0)
    apart: bool = parameter(False, "Whether clients draw classes and samples apart, and may hold the same ones.")

    def split(self, dataset: Dataset, clients: int) -> Split:
        """Choose every client's classes, then divide each class over its clients."""
        check_clients(dataset, clients)
        present = np.unique(dataset.labels.numpy()[dataset.train])
        if self.per_client > len(present):
            raise FedStrataError(
                f"{self.per_client} classes per client are asked for, but the dataset '{dataset.name}' "
                f"has {len(present)}; use at most {len(present)}."
            )
        if self.apart:
            pools = class_pools(dataset, dataset.train)
            train = Parts.of(
                self._drawn_apart([pools[label] for label in present], client, clients) for client in range(clients)
            )
            return Split(train, local_tests(dataset, train, self.test_samples, self.generator))
        held = present[balanced_slots(clients, self.per_client, len(present), self.generator("slots"))]
        holds = np.zeros((clients, dataset.classes), dtype=np.bool_)
        np.put_along_axis(holds, held, True, axis=1)
        train = divided_classes(dataset, holds, self.generator)
        return Split(train, local_tests(dataset, train, self.test_samples, self.generator))

    def _drawn_apart(self, pools: Sequence[np.ndarray], client: int, clients: int) -> np.ndarray:
        """Draw one client's classes and its part of each, whatever others hold."""
        generator = self.generator("apart", client)
        chosen = [pools[place] for place in generator.choice(len(pools), self.per_client, replace=False)]
        counts = [min(len(pool), max(1, len(pool) * len(pools) // (clients * self.per_client))) for pool in chosen]
        drawn = [generator.choice(pool, count, replace=False) for pool, count in zip(chosen, counts, strict=True)]
        return np.sort(np.concatenate(drawn))


def divided_classes(dataset: Dataset, holds: np.ndarray, generator: Callable[..., np.random.Generator]) -> Parts:
    """Divide the samples of each class equally over the clients that hold it, by ``holds`` ``[clients, classes]``."""
    pools = class_pools(dataset, dataset.train)
    counts, shuffled = np.zeros(holds.shape, dtype=np.int64), list(pools)
    for label, pool in enumerate(pools):
        holders = np.flatnonzero(holds[:, label])
        if len(holders) > len(pool):
            raise FedStrataError(
                f"The class '{dataset.class_names[label]}' has {len(pool)} training samples "
                f"for {len(holders)} clients; use fewer clients or fewer classes per client."
            )
        if len(holders):
            shuffled[label] = generator("train", label).permutation(pool)
            counts[holders, label] = even_sizes(len(pool), len(holders))
    return dealt(shuffled, counts)


def balanced_slots(clients: int, per_client: int, classes: int, generator: np.random.Generator) -> np.ndarray:
    """Choose distinct classes for every client, ``[clients, per_client]``, each class as often as any other.

    Uses of a class differ by one at most. Each client in turn takes the classes with the most uses left, in random
    order among equals; this never runs into a dead end.
    """
    left = np.full(classes, clients * per_client // classes)
    left[generator.permutation(classes)[: clients * per_client % classes]] += 1
    held = np.empty((clients, per_client), dtype=np.int64)
    for client in range(clients):
        chosen = np.lexsort((generator.random(classes), -left))[:per_client]
        left[chosen] -= 1
        held[client] = np.sort(chosen)
    return held
