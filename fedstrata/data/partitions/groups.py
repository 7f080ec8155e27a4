"""Groups of clients, each with classes that are named: known shifts between the first clients and the last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import SEED, TEST_SAMPLES, Partitioner, check_clients, partitions
from fedstrata.data.partitions.classes import divided_classes
from fedstrata.data.partitions.drawing import even_sizes, local_tests
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter


@partitions.register("groups")
@dataclass(frozen=True)
class Groups(Partitioner):
    """Clients in groups, one after another, and each group with classes of its own; no two clients share a sample.

    ``groups(classes='0-7|8-9', clients='80|20')`` gives the first 80 clients the classes 0 to 7 and the last 20 the
    classes 8 and 9, as where clients with new classes join late (SSFL, Fig. 5). Groups may have classes in common
    (``0-4|5-9|0-9``: FedLWS, Fig. 5). The samples of a class are divided equally over all clients whose groups have it.
    """

    classes: str = parameter("0-4|5-9", "The classes of each group, by number: '0-7|8-9', or '0,3|1-2'.")
    clients: str | None = parameter(None, "The clients in each group: '80|20'; by default about as many in each.")
    test_samples: int | None = parameter(None, TEST_SAMPLES, low=1)
    seed: int | None = parameter(None, SEED, low=0)

    def __post_init__(self) -> None:
        """Refuse what is no list of numbers before any data is read."""
        super().__post_init__()
        groups = len(self._named())
        if self.clients is not None and len(_sizes(self.clients)) != groups:
            raise FedStrataError(
                f"The partition 'groups' has classes for {groups} groups ('{self.classes}') and clients for "
                f"{len(_sizes(self.clients))} ('{self.clients}'); give as many of one as of the other."
            )

    def _named(self) -> list[list[int]]:
        """The classes of each group."""
        return [_numbers(text, self.classes) for text in self.classes.split("|")]

    def clients_for(self, dataset: Dataset) -> int | None:
        """As many as the groups have together, where that is said."""
        return None if self.clients is None else sum(_sizes(self.clients))

    def split(self, dataset: Dataset, clients: int) -> Split:
        """Give each group its classes, then divide each class over its clients."""
        check_clients(dataset, clients)
        named = self._named()
        unknown = sorted({label for labels in named for label in labels if label >= dataset.classes})
        if unknown:
            raise FedStrataError(
                f"The partition 'groups' names the class {unknown[0]}, but the dataset '{dataset.name}' has classes "
                f"0 to {dataset.classes - 1}; give classes='...' with these."
            )
        if clients < len(named):
            raise FedStrataError(
                f"{clients} clients cannot make the {len(named)} groups of '{self}'; use at least {len(named)} clients."
            )
        sizes = even_sizes(clients, len(named)).tolist() if self.clients is None else _sizes(self.clients)
        if sum(sizes) != clients:
            raise FedStrataError(
                f"The groups of '{self}' have {sum(sizes)} clients together, and the federation has {clients}; "
                "give the same number to both."
            )
        holds = np.zeros((clients, dataset.classes), dtype=np.bool_)
        for labels, members in zip(named, np.split(np.arange(clients), np.cumsum(sizes)[:-1]), strict=True):
            holds[members[:, None], labels] = True
        train = divided_classes(dataset, holds, self.generator)
        return Split(train, local_tests(dataset, train, self.test_samples, self.generator))


def _numbers(text: str, whole: str) -> list[int]:
    """Read numbers and ranges, such as ``0-2,5``: 0, 1, 2 and 5."""
    found: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise FedStrataError(
                f"The classes '{whole}' of the partition 'groups' are no numbers; write them like '0-7|8-9', with | "
                "between groups."
            )
        found += range(int(first), int(last or first) + 1)
    if not found:
        raise FedStrataError(f"The range '{text}' in the classes '{whole}' of the partition 'groups' is empty.")
    return found


def _sizes(text: str) -> list[int]:
    parts = text.split("|")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise FedStrataError(
            f"The clients '{text}' of the partition 'groups' are no numbers of clients; write them like '80|20'."
        )
    return [int(part) for part in parts]
