"""What partitions and engines rely on in a dataset."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.data import Dataset, datasets
from fedstrata.errors import FedStrataError
from fedstrata.testing.requiring import require


def check_dataset(dataset: str | Dataset) -> None:
    """Check a dataset: labels in range, training and test samples apart, finite inputs, the same when loaded again.

    Give a dataset, or the name of one that is registered.

    >>> check_dataset("digits")
    """
    try:
        data = datasets.make(dataset).load(None) if isinstance(dataset, str) else dataset
    except FedStrataError as error:
        raise AssertionError(f"the dataset cannot be loaded: {error}") from error
    count = len(data.labels)
    require(data.name, "the dataset has no name")
    require(len(data.inputs) == count, f"there are {len(data.inputs)} inputs for {count} labels")
    require(data.labels.dtype == torch.int64, f"labels are {data.labels.dtype}, not int64")
    low, high = int(data.labels.min()), int(data.labels.max())
    require(low >= 0 and high < data.classes, f"labels go from {low} to {high}, with {data.classes} class names")
    require(len(set(data.class_names)) == data.classes, "two classes have the same name")
    for part in ("train", "test"):
        positions = getattr(data, part)
        require(len(np.unique(positions)) == len(positions), f"a {part} sample stands twice")
        require(
            len(positions) == 0 or (positions.min() >= 0 and positions.max() < count),
            f"a {part} position lies outside of the {count} samples",
        )
    require(len(data.train), "there is nothing to train on")
    require(not np.intersect1d(data.train, data.test).size, "a sample is for training and for testing")
    if data.inputs.is_floating_point():
        require(bool(torch.isfinite(data.inputs).all()), "an input is not a finite number")
    if isinstance(dataset, str):
        again = datasets.make(dataset).load(None)
        require(
            torch.equal(data.inputs, again.inputs) and torch.equal(data.labels, again.labels),
            "the dataset is another one when it is loaded again",
        )
