"""What is done to inputs on their way into a batch: on the device, for all clients at once, from keyed randomness."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata import rng
from fedstrata.data.dataset import Dataset
from fedstrata.errors import FedStrataError
from fedstrata.spec import Registry, Spec, parameter, parse
from fedstrata.stack import constant


@dataclass(frozen=True)
class Transform(Spec, ABC):
    """A change of inputs ``[K, B, channels, height, width]`` of K clients, scaled to [0, 1].

    A ``random`` transform draws afresh for each image and applies in training only. What a client's image becomes
    depends on the client's key and the stream (the step), never on the other clients of the stack.
    """

    random: ClassVar[bool] = False
    images_only: ClassVar[bool] = False
    scaled_only: ClassVar[bool] = False
    """Whether it must stand before ``normalise``."""

    @abstractmethod
    def apply(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, dataset: Dataset) -> Tensor:
        """Change the inputs; ``keys`` is ``[K, 2]``, one key per client."""

    def check(self, dataset: Dataset) -> None:
        """Refuse a dataset that this transform cannot work on."""
        if self.images_only and len(dataset.input_shape) != 3:
            raise FedStrataError(
                f"The transform '{self.name}' works on images [channels, height, width], but the inputs of the dataset "
                f"'{dataset.name}' have the shape {dataset.input_shape}; leave it out."
            )

    @property
    def sub_key(self) -> tuple[int, int]:
        """What turns clients' keys into those of this transform, by exclusive or."""
        return rng.key(0, "transform", self.name)

    def uniform(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, count: int) -> Tensor:
        """Draw ``count`` numbers in [0, 1) for each image, ``[K, B, count]``, from a sub-key of this transform."""
        first, second = self.sub_key
        own = torch.stack((keys[..., 0] ^ first, keys[..., 1] ^ second), dim=-1)
        return rng.uniform(own, (inputs.shape[1], count), stream)


transforms: Registry[Transform] = Registry("transform")

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of the channels of ImageNet, as models trained on it expect them."""
OTHER_WAYS = (
    "'normalise:site' takes each site's own statistics, 'normalise:imagenet' and normalise(mean='...', "
    "deviation='...') numbers that everybody knows"
)
"""What stands open where the mean and deviation of all samples may not be known."""


@transforms.register("normalise")
@dataclass(frozen=True)
class Normalise(Transform):
    """Subtract the mean and divide by the deviation, per channel.

    They are those of the training samples of all clients together, unless the dataset has published constants: real
    sites find them by adding up their sums before the first round. ``normalise:site`` takes those of each client's own
    training samples, which never leave it. ``normalise:imagenet`` is for weights that were trained on ImageNet, such as
    DINO's. ``normalise(mean=0.5, deviation=0.25)`` takes numbers that are known beforehand, for all channels or, in
    quotes with spaces between them, for each. Nothing is done to data without channels (sequences, whole numbers).
    """

    statistics: str = parameter("dataset", "Whose mean and deviation.", choices=("dataset", "site", "imagenet"))
    mean: str | float | None = parameter(
        None, "Known means, instead: one number, or one for each channel in quotes, with spaces between them."
    )
    deviation: str | float | None = parameter(None, "Known deviations, with the means, in the same way.")

    def __post_init__(self) -> None:
        """Keep a number as its text, so that both have one written form."""
        super().__post_init__()
        for field in ("mean", "deviation"):
            if isinstance(value := getattr(self, field), float):
                object.__setattr__(self, field, str(value))
        if (self.mean is None) != (self.deviation is None):
            raise FedStrataError("'normalise' takes both a mean and a deviation, or neither.")
        if self.mean is not None and self.statistics != "dataset":
            raise FedStrataError(
                f"'normalise' takes a mean and a deviation, or the statistics of '{self.statistics}', not both."
            )
        if any(deviation <= 0 for deviation in _numbers(self.deviation or "1")):
            raise FedStrataError(f"The deviation '{self.deviation}' of 'normalise' must be above 0.")
        _numbers(self.mean or "0")

    @property
    def of_everybody(self) -> bool:
        """Whether the statistics are those of all clients' samples, where the dataset has no published ones."""
        return self.statistics == "dataset" and self.mean is None

    @property
    def of_each(self) -> bool:
        """Whether each client has statistics of its own."""
        return self.statistics == "site"

    def check(self, dataset: Dataset) -> None:
        """Refuse a dataset that this transform cannot work on."""
        if self.statistics == "imagenet" and (len(dataset.input_shape) != 3 or dataset.input_shape[0] != 3):
            raise FedStrataError(
                f"The statistics of ImageNet are those of images in colour [3, height, width], but the inputs of the "
                f"dataset '{dataset.name}' have the shape {dataset.input_shape}; use 'normalise' without them."
            )
        for given in (self.mean, self.deviation):
            if given is not None and len(_numbers(given)) not in (1, dataset.input_shape[0]):
                raise FedStrataError(
                    f"'normalise' has the {len(_numbers(given))} numbers '{given}', but the samples of the dataset "
                    f"'{dataset.name}' have {dataset.input_shape[0]} channels; give one number, or one for each."
                )

    def numbers(self, dataset: Dataset) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Return the mean and the deviation of each channel, or none where there is nothing to do."""
        if self.mean is not None and self.deviation is not None:
            channels = dataset.input_shape[0]
            mean, deviation = (_numbers(given) for given in (self.mean, self.deviation))
            return _for_each(mean, channels), _for_each(deviation, channels)
        return IMAGENET if self.statistics == "imagenet" else (dataset.mean, dataset.deviation)

    def apply(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, dataset: Dataset) -> Tensor:
        """Change the inputs."""
        mean, deviation = self.numbers(dataset)
        if mean is None or deviation is None or not inputs.is_floating_point():
            return inputs
        shape = (-1, *[1] * (inputs.dim() - 3))
        means = constant(mean, inputs.dtype, inputs.device).reshape(shape)
        return (inputs - means) / constant(deviation, inputs.dtype, inputs.device).reshape(shape)

    def apply_own(self, inputs: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
        """Change the inputs ``[K, B, channels, ...]`` of K clients by statistics of their own, ``[K, channels]``."""
        shape = (len(inputs), 1, -1, *[1] * (inputs.dim() - 3))
        return (inputs - means.reshape(shape)) / deviations.reshape(shape)


def _numbers(given: str | float) -> tuple[float, ...]:
    try:
        numbers = tuple(float(word) for word in str(given).split())
    except ValueError:
        numbers = ()
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise FedStrataError(f"'{given}' does not fit 'normalise': give one number, or one for each channel in quotes.")
    return numbers


def _for_each(numbers: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return numbers * channels if len(numbers) == 1 else numbers


@transforms.register("flip")
@dataclass(frozen=True)
class Flip(Transform):
    """Mirror an image from left to right, with a probability."""

    probability: float = parameter(0.5, "The probability that an image is mirrored.", low=0, high=1)

    random = True
    images_only = True

    def apply(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, dataset: Dataset) -> Tensor:
        """Change the inputs."""
        self.check(dataset)
        mirrored = self.uniform(inputs, keys, stream, 1) < self.probability
        return torch.where(mirrored[..., None, None], inputs.flip(-1), inputs)


@transforms.register("crop")
@dataclass(frozen=True)
class Crop(Transform):
    """Pad an image with zeros on all sides and cut a part of the original size out at random."""

    padding: int = parameter(4, "The pixels added on each side.", low=1)

    random = True
    images_only = True

    def apply(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, dataset: Dataset) -> Tensor:
        """Change the inputs."""
        self.check(dataset)
        offsets = (self.uniform(inputs, keys, stream, 2) * (2 * self.padding + 1)).long() - self.padding
        height, width = inputs.shape[-2:]
        rows = torch.arange(height, device=inputs.device)[:, None] + offsets[..., 0, None, None]
        columns = torch.arange(width, device=inputs.device) + offsets[..., 1, None, None]
        return take_pixels(inputs, rows, columns)


@transforms.register("rotate")
@dataclass(frozen=True)
class Rotate(Transform):
    """Rotate an image about its centre by a random angle.

    The nearest pixel is taken, and zero from outside the image: torchvision's defaults.
    """

    degrees: float = parameter(15.0, "The largest angle in degrees, either way.", above=0, high=180)

    random = True
    images_only = True

    def apply(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, dataset: Dataset) -> Tensor:
        """Change the inputs."""
        self.check(dataset)
        return rotated(inputs, self.angles(inputs, keys, stream))

    def angles(self, inputs: Tensor, keys: Tensor, stream: int | Tensor) -> Tensor:
        """Draw by how much each of the inputs ``[K, B, ...]`` is rotated, in radians ``[K, B]``."""
        turns = 2 * self.uniform(inputs, keys, stream, 1).double() - 1
        return turns.squeeze(-1) * math.radians(self.degrees)


def rotated(inputs: Tensor, angles: Tensor) -> Tensor:
    """Rotate images ``[..., channels, height, width]`` counter-clockwise by angles ``[...]`` in radians.

    The nearest pixel is taken. Source positions are computed in float64 whatever the inputs are, so that every
    precision takes the same pixels.
    """
    height, width = inputs.shape[-2:]
    cosine, sine = (values[..., None, None] for values in (angles.double().cos(), angles.double().sin()))
    down = torch.arange(height, device=inputs.device, dtype=torch.float64)[:, None] - (height - 1) / 2
    right = torch.arange(width, device=inputs.device, dtype=torch.float64) - (width - 1) / 2
    rows = (sine * right + cosine * down + (height - 1) / 2).round().long()
    columns = (cosine * right - sine * down + (width - 1) / 2).round().long()
    return take_pixels(inputs, rows, columns)


def take_pixels(inputs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Build images ``[..., channels, height, width]`` from the pixels at given places, zero where a place lies outside.

    ``rows`` and ``columns`` are ``[..., height, width]``, or broadcast to it: the source of each pixel.
    """
    height, width = inputs.shape[-2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    index = places.flatten(-2)[..., None, :].expand(*inputs.shape[:-2], height * width)
    taken = inputs.flatten(-2).gather(-1, index).reshape(inputs.shape)
    return taken.masked_fill(~inside[..., None, :, :], 0)


def parse_transforms(text: str) -> tuple[Transform, ...]:
    """Read transforms joined by ``+``, in the order in which they apply; ``none`` for nothing.

    >>> [str(transform) for transform in parse_transforms("flip+crop:2+normalise")]
    ['flip', 'crop(padding=2)', 'normalise']
    """
    if text.strip().lower() in ("none", ""):
        return ()
    chosen = tuple(transforms.build(call) for call in parse(text, "transform"))
    names = [transform.name for transform in chosen]
    for name in names:
        if names.count(name) > 1:
            raise FedStrataError(f"The transform '{name}' is given twice in '{text}'; give each once.")
    for place, transform in enumerate(chosen):
        if transform.scaled_only and Normalise.name in names[:place]:
            raise FedStrataError(
                f"The transform '{transform.name}' works on pixels in [0, 1], but in '{text}' it comes after "
                f"'{Normalise.name}'; put it before."
            )
    return chosen


def normalisation_in(chosen: Sequence[Transform]) -> Normalise | None:
    """Find the transform that normalises."""
    return next((transform for transform in chosen if isinstance(transform, Normalise)), None)


Own = tuple[Tensor, Tensor]
"""Means and deviations ``[K, channels]`` of K clients."""


def apply_transforms(
    chosen: Sequence[Transform],
    inputs: Tensor,
    dataset: Dataset,
    keys: Tensor | None = None,
    stream: int | Tensor = 0,
    own: Own | None = None,
) -> Tensor:
    """Apply transforms in order; without keys, as in evaluation, only those that are not random.

    With statistics of their ``own``, the inputs of K clients are normalised by these.
    """
    for transform in chosen:
        if isinstance(transform, Normalise) and own is not None:
            inputs = transform.apply_own(inputs, *own)
        elif keys is not None:
            inputs = transform.apply(inputs, keys, stream, dataset)
        elif not transform.random:
            inputs = transform.apply(inputs, torch.empty(0, 2, dtype=torch.int64), stream, dataset)
    return inputs
