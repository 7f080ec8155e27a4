"""What a partition is."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np

from fedstrata import rng
from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError
from fedstrata.spec import Registry, Spec

SEED = "The seed of the draws; by default that of the experiment."
TEST_SAMPLES = (
    "Test samples per client, drawn in the proportions of its training labels; "
    "by default as many as it trains on, or fewer where a sample would have to be repeated."
)


class Partitioner(Spec, ABC):
    """A way to divide a dataset among clients: its parameters, the seed included, decide every client's samples.

    Each partition declares ``seed`` as its last parameter, so that what matters most comes first in ``dirichlet:0.1``.
    """

    seed: int | None

    @abstractmethod
    def split(self, dataset: Dataset, clients: int) -> Split:
        """Give each client its training and test samples."""

    def with_seed(self, seed: int) -> Self:
        """Return this partition with a seed, if it has none of its own."""
        changes: dict[str, Any] = {"seed": seed}
        return dataclasses.replace(self, **changes) if self.seed is None else self

    def clients_for(self, dataset: Dataset) -> int | None:
        """Tell the number of clients that the dataset dictates, or none where any number will do."""
        return None

    def generator(self, *place: int | str) -> np.random.Generator:
        """Return the source of the draws of one place, such as a client; without a seed, as with the seed 0."""
        return rng.numpy_generator(self.seed or 0, "partition", self.name, *place)


partitions: Registry[Partitioner] = Registry("partition")


def check_clients(dataset: Dataset, clients: int, each: int = 1) -> None:
    """Refuse a number of clients that cannot all get ``each`` training samples of their own."""
    samples = len(dataset.train)
    if clients < 1:
        raise FedStrataError(f"{clients} clients cannot hold data; use at least 1.")
    if clients * each > samples:
        share = "one training sample" if each == 1 else f"{each} training samples"
        raise FedStrataError(
            f"{clients} clients cannot have {share} each of the {samples} of the dataset '{dataset.name}'; "
            f"use at most {samples // each} clients."
        )
