"""What is done to inputs on their way into a batch: on the device, for all clients at once, from keyed randomness."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata import rng
from fedstrata.data.dataset import Dataset
from fedstrata.errors import FedStrataError
from fedstrata.spec import Registry, Spec, parameter, parse


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

    def uniform(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, count: int) -> Tensor:
        """Draw ``count`` numbers in [0, 1) for each image, ``[K, B, count]``, from a sub-key of this transform."""
        first, second = rng.key(0, "transform", self.name)
        own = torch.stack((keys[..., 0] ^ first, keys[..., 1] ^ second), dim=-1)
        return rng.uniform(own, (inputs.shape[1], count), stream)


transforms: Registry[Transform] = Registry("transform")

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of the channels of ImageNet, as models trained on it expect them."""


@transforms.register("normalise")
@dataclass(frozen=True)
class Normalise(Transform):
    """Subtract the mean and divide by the deviation, per channel: the dataset's, or those of ImageNet.

    ``normalise:imagenet`` is for weights that were trained on ImageNet, such as DINO's. Nothing is done with the
    dataset's own statistics where it has none, and nothing with whole numbers.
    """

    statistics: str = parameter("dataset", "Whose mean and deviation.", choices=("dataset", "imagenet"))

    def check(self, dataset: Dataset) -> None:
        """Refuse a dataset that this transform cannot work on."""
        if self.statistics == "imagenet" and (len(dataset.input_shape) != 3 or dataset.input_shape[0] != 3):
            raise FedStrataError(
                f"The statistics of ImageNet are those of images in colour [3, height, width], but the inputs of the "
                f"dataset '{dataset.name}' have the shape {dataset.input_shape}; use 'normalise' without them."
            )

    def numbers(self, dataset: Dataset) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Return the mean and the deviation of each channel, or none where there is nothing to do."""
        return IMAGENET if self.statistics == "imagenet" else (dataset.mean, dataset.deviation)

    def apply(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, dataset: Dataset) -> Tensor:
        """Change the inputs."""
        mean, deviation = self.numbers(dataset)
        if mean is None or deviation is None or not inputs.is_floating_point():
            return inputs
        shape = (-1, *[1] * (inputs.dim() - 3))
        means = constant(mean, inputs.dtype, inputs.device).reshape(shape)
        return (inputs - means) / constant(deviation, inputs.dtype, inputs.device).reshape(shape)


@lru_cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keep a constant on its device, so that no batch waits for a copy."""
    return torch.tensor(values, dtype=dtype, device=device)


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
        turns = 2 * self.uniform(inputs, keys, stream, 1).double() - 1
        return rotated(inputs, turns.squeeze(-1) * math.radians(self.degrees))


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


def apply_transforms(
    chosen: Sequence[Transform], inputs: Tensor, dataset: Dataset, keys: Tensor | None = None, stream: int | Tensor = 0
) -> Tensor:
    """Apply transforms in order; without keys, as in evaluation, only those that are not random."""
    for transform in chosen:
        if keys is not None:
            inputs = transform.apply(inputs, keys, stream, dataset)
        elif not transform.random:
            inputs = transform.apply(inputs, torch.empty(0, 2, dtype=torch.int64), stream, dataset)
    return inputs
