"""What every dataset becomes: one pool of samples, some for training, some for testing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedstrata.errors import FedStrataError

if TYPE_CHECKING:
    from fedstrata.data.tables import Table
    from fedstrata.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Dataset:
    """All samples of a classification task in one pool, which splits and batches index into.

    ``inputs`` is ``[n, ...]``: images as uint8 ``[n, channels, height, width]`` in 0..255 (scaled to [0, 1] when a
    batch is made), any floating-point features, or whole numbers of any other type, such as the numbers of tokens,
    which reach the model as they are; ``labels`` is int64 ``[n]``. ``train`` and ``test`` are positions in
    the pool. ``sites`` names the natural owner of each sample (a hospital, a writer), where there is one. ``mean`` and
    ``deviation`` are per channel, for the ``normalise`` transform; ``estimated`` tells that they were computed from the
    training samples of this pool, so that they are not published constants, which are the same for everybody.
    ``table`` tells how rows became inputs, where the samples come from a table, and ``vocabulary`` how texts became
    whole numbers.
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
    table: Table | None = field(default=None, compare=False)
    vocabulary: Vocabulary | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.check()

    def __repr__(self) -> str:
        """Tell the data in a line."""
        shape, kind = list(self.inputs.shape[1:]), str(self.inputs.dtype).removeprefix("torch.")
        sites = "" if self.sites is None else f", {len(np.unique(self.sites))} sites"
        return (
            f"Dataset({self.name}: {len(self.train)} samples for training and {len(self.test)} for testing, "
            f"{shape} {kind}, {self.classes} classes{sites})"
        )

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.inputs.shape[1:])

    @property
    def whole_numbers(self) -> bool:
        """Whether inputs are whole numbers, such as those of tokens, rather than images or features."""
        return not self.inputs.is_floating_point() and self.inputs.dtype != torch.uint8

    @property
    def trial(self) -> Tensor | None:
        """Two samples to try a model on where inputs are whole numbers; none where zeros will do.

        One is a training sample, the other has the largest number of all, for which a model must have an embedding.
        """
        if not self.whole_numbers:
            return None
        axes = tuple(range(1, self.inputs.dim()))
        highest = self.inputs.amax(axes) if axes else self.inputs
        return self.inputs[torch.tensor([int(np.resize(self.train, 1)[0]), int(highest.long().argmax())])]

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
        if self.labels.dtype != torch.int64:
            kind = str(self.labels.dtype).removeprefix("torch.")
            raise FedStrataError(
                f"The labels of the dataset '{self.name}' are of the type {kind}; give class numbers, int64, or let "
                "fedstrata.from_arrays number them."
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.classes:
            raise FedStrataError(
                f"The labels of the dataset '{self.name}' range from {low} to {high}, "
                f"but its {self.classes} classes are 0 to {self.classes - 1}."
            )
