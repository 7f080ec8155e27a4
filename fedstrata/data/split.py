"""Who holds what: the outcome of a partition."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.errors import FedStrataError


@dataclass(frozen=True)
class Split:
    """For each client, the positions in the dataset's pool that it trains and tests on."""

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        if len(self.train) != len(self.test):
            raise FedStrataError(f"A split has {len(self.train)} training parts but {len(self.test)} test parts.")
        for client, positions in enumerate(self.train):
            if len(positions) == 0:
                raise FedStrataError(
                    f"Client {client} of {len(self.train)} holds no training samples; "
                    "use fewer clients, more data or a milder skew."
                )

    def __repr__(self) -> str:
        """Tell the split in a line."""
        return (
            f"Split({self.clients} clients, {sum(self.sizes)} samples for training and {sum(map(len, self.test))} for "
            f"testing, hash {self.hash})"
        )

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train)

    @property
    def sizes(self) -> np.ndarray:
        """The number of training samples of each client."""
        return np.array([len(positions) for positions in self.train], dtype=np.int64)

    @property
    def test_sizes(self) -> np.ndarray:
        """The number of test samples of each client."""
        return np.array([len(positions) for positions in self.test], dtype=np.int64)

    @property
    def hash(self) -> str:
        """A fingerprint: equal for equal splits, on every machine."""
        digest = sha256()
        for part in (self.train, self.test):
            for positions in part:
                digest.update(len(positions).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(positions, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]

    def samples(self, dataset: Dataset) -> int:
        """Count the samples of all, also those that nobody holds."""
        return len(dataset.inputs)

    def label_counts(self, dataset: Dataset) -> np.ndarray:
        """Count the training labels: an array ``[clients, classes]``."""
        labels = dataset.labels.numpy()
        return np.stack([np.bincount(labels[positions], minlength=dataset.classes) for positions in self.train])
