"""What one must know to use a model besides its weights, as plain JSON that every language can read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedstrata._version import __version__
from fedstrata.data.dataset import Dataset
from fedstrata.data.transforms import Normalise, Transform
from fedstrata.errors import FedStrataError

FORMAT = 1
Step = Mapping[str, Any]
"""One step of preprocessing. ``scale`` divides by a number, ``normalise`` subtracts a mean and divides by a deviation
per channel, ``transform`` is a registered transform of somebody's own, by its text.
"""


@dataclass(frozen=True)
class Card:
    """What stands beside the weights of a model.

    ``architecture`` is the text from which FedStrata builds the network, or ``python:Name`` for a module of the user's
    own. ``preprocessing`` is done to inputs of ``input_shape`` and ``input_type`` in its order; ``table`` tells before
    it how the rows of a table become such inputs (:class:`fedstrata.data.Table`), and ``vocabulary`` how texts do
    (:class:`fedstrata.data.Vocabulary`). ``metrics`` are what the model reached on test samples, ``origin`` tells where
    it comes from (method, data, client, round), and ``hash`` is the SHA-256 of the file with the weights.
    """

    architecture: str
    input_shape: tuple[int, ...]
    input_type: str
    preprocessing: tuple[Step, ...]
    class_names: tuple[str, ...]
    table: Mapping[str, Any] | None = None
    vocabulary: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    hash: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Write the card as plain data."""
        return {"format": FORMAT, "fedstrata": __version__, **dataclasses.asdict(self)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: Path) -> Card:
        """Read a card; ``source`` is named where something is wrong with it."""
        if values.get("format") != FORMAT:
            raise FedStrataError(
                f"'{source}' is a model card of the format {values.get('format')!r}, but this version of FedStrata "
                f"({__version__}) reads {FORMAT}; use the version that wrote it ({values.get('fedstrata', 'unknown')})."
            )
        names = [one.name for one in dataclasses.fields(cls)]
        values = {"vocabulary": None, **values}  # earlier versions knew no texts
        missing = [name for name in names if name not in values]
        if missing:
            raise FedStrataError(f"The model card '{source}' lacks '{missing[0]}'; export the model again.")
        card = {name: values[name] for name in names}
        for name in ("input_shape", "preprocessing", "class_names"):
            card[name] = tuple(card[name])
        return cls(**card)

    def with_changes(self, **changes: Any) -> Card:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def preprocessing_of(dataset: Dataset, transforms: Sequence[Transform]) -> tuple[Step, ...]:
    """List what is done to inputs before the model sees them, outside of training, with all its numbers.

    >>> from fedstrata.data import from_arrays, parse_transforms
    >>> data = from_arrays(torch.tensor([[0.0], [2.0], [4.0]]), [0, 1, 0], test_fraction=0)
    >>> [dict(step) for step in preprocessing_of(data, parse_transforms("normalise"))]
    [{'step': 'normalise', 'mean': [2.0], 'deviation': [1.632993161855452]}]
    """
    steps: list[Step] = []
    if dataset.inputs.dtype == torch.uint8:
        steps.append({"step": "scale", "divide_by": 255})
    for transform in transforms:
        if transform.random:
            continue
        if not isinstance(transform, Normalise):
            steps.append({"step": "transform", "name": str(transform)})
            continue
        mean, deviation = transform.numbers(dataset)
        if mean is not None and deviation is not None:
            steps.append({"step": "normalise", "mean": list(mean), "deviation": list(deviation)})
    return tuple(steps)
