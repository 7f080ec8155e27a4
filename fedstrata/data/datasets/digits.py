"""Handwritten digits that come with scikit-learn: real data without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedstrata.data.channels import channel_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets
from fedstrata.data.held_out import hold_out_for_testing


@datasets.register("digits")
@dataclass(frozen=True)
class Digits(DatasetSource):
    """Handwritten digits of scikit-learn: 1,797 grey images of 8 x 8 pixels, no download.

    A quarter of each class, evenly spaced, is the test part; the same always.
    """

    def load(self, root: Path | None = None) -> Dataset:
        """Take the images from scikit-learn; ``root`` is not needed."""
        from sklearn.datasets import load_digits  # a second of its own

        bunch = load_digits()
        inputs = torch.from_numpy((bunch.images / 16).astype(np.float32)[:, None])
        labels = bunch.target.astype(np.int64)
        train, test = hold_out_for_testing(labels, 0.25)
        mean, deviation = channel_statistics(inputs[torch.from_numpy(train)])
        names = tuple(str(digit) for digit in range(10))
        marks = torch.from_numpy(labels)
        return Dataset(str(self), inputs, marks, train, test, names, None, mean, deviation, estimated=True)
