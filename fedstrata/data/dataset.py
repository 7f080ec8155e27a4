"""What every dataset becomes: one pool of samples, some for training, some for testing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedstrata.errors import FedStrataError


@dataclass(frozen=True)
class Dataset:
    """All samples of a classification task in one pool, which splits and batches index into.

    ``inputs`` is ``[n, ...]``: images as uint8 ``[n, channels, height, width]`` in 0..255 (scaled to [0, 1] when a
    batch is made) or any floating-point features; ``labels`` is int64 ``[n]``. ``train`` and ``test`` are positions in
    the pool. ``sites`` names the natural owner of each sample (a hospital, a writer), where there is one. ``mean`` and
    ``deviation`` are per channel, for the ``normalise`` transform; ``estimated`` tells that they were computed from the
    training samples of this pool, so that they are not published constants, which are the same for everybody.
    """

    name: str
    inputs: Tensor
    labels: Tensor
    train: np.ndarray
    test: np.ndarray
    class_names: tuple[str, ...]
    sites: np.ndarray | None = None
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None
    estimated: bool = False
    notes: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.inputs.shape[1:])

    def check(self) -> None:
        """Refuse data that training would only turn into nonsense."""
        if len(self.inputs) == 0:
            raise FedStrataError(f"The dataset '{self.name}' holds no samples.")
        if len(self.inputs) != len(self.labels):
            raise FedStrataError(
                f"The dataset '{self.name}' has {len(self.inputs)} inputs but {len(self.labels)} labels; "
                "give one label per input."
            )
        if self.inputs.is_floating_point() and not bool(torch.isfinite(self.inputs).all()):
            bad = int((~torch.isfinite(self.inputs)).flatten(1).any(1).nonzero()[0])
            raise FedStrataError(
                f"Sample {bad} of the dataset '{self.name}' holds a NaN or an infinity; "
                "clean or drop such samples first."
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.classes:
            raise FedStrataError(
                f"The labels of the dataset '{self.name}' range from {low} to {high}, "
                f"but its {self.classes} classes are 0 to {self.classes - 1}."
            )
