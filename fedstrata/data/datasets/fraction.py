"""A part of another dataset, for runs that are to be shorter than the real ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets
from fedstrata.spec import parameter


@datasets.register("fraction")
@dataclass(frozen=True)
class Fraction(DatasetSource):
    """A part of the samples of another dataset, with its classes and its sites in proportion; always the same part."""

    of: str = parameter("digits", "The other dataset.", local=True)
    keep: float = parameter(0.1, "The part of its training samples and of its test samples.", above=0, high=1)

    def find(self, root: Path | None = None) -> object:
        """Find the files of the other dataset."""
        return datasets.make(self.of).find(root)

    def load(self, root: Path | None = None) -> Dataset:
        """Load the other dataset, and keep a part of its samples."""
        whole = datasets.make(self.of).load(root)
        train, test = (evenly(whole, positions, self.keep) for positions in (whole.train, whole.test))
        return dataclasses.replace(whole, name=str(self), train=train, test=test)


def evenly(dataset: Dataset, positions: np.ndarray, keep: float) -> np.ndarray:
    """Choose a part of some positions, in steps of the same length through sites and classes; at least one."""
    labels = dataset.labels.numpy()[positions]
    sites = (
        np.zeros(len(labels)) if dataset.sites is None else np.unique(dataset.sites[positions], return_inverse=True)[1]
    )
    order = positions[np.lexsort((positions, labels, sites))]
    count = min(len(order), max(1, round(keep * len(order))))
    return np.sort(order[(np.arange(count) * len(order)) // count])
