"""RandAugment: a few operations on each image, drawn at random, all of one strength."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.data.dataset import Dataset
from fedstrata.data.transforms import Transform, rotated, take_pixels, transforms
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter
from fedstrata.stack import constant

_STEPS = 30
_LEVELS = 255
_LUMINANCE = (0.299, 0.587, 0.114)


@transforms.register("randaugment")
@dataclass(frozen=True)
class RandAugment(Transform):
    """Change an image by operations drawn uniformly from fourteen: geometry, colour, contrast, or nothing.

    "RandAugment: Practical automated data augmentation with a reduced search space" (Cubuk et al., CVPR workshops
    2020). Operations, their ranges and the defaults are torchvision's: shears up to 0.3, shifts up to 150/331 of the
    side, rotations up to 30 degrees, brightness, colour, contrast and sharpness by up to 0.9, posterising down to 4
    bits, solarising, automatic contrast, equalising. The nearest pixel is taken, and zero from outside the image.
    Pixels are rounded to 256 levels only where an operation is about levels (posterise, equalise).

    It works on images in [0, 1], grey or in colour, so it stands before ``normalise``.
    """

    operations: int = parameter(2, "How many operations are applied to an image, one after another.", low=1)
    magnitude: int = parameter(9, "How strong they are.", low=0, high=_STEPS)

    random = True
    images_only = True
    scaled_only = True

    def check(self, dataset: Dataset) -> None:
        """Refuse a dataset that this transform cannot work on."""
        super().check(dataset)
        if dataset.input_shape[0] not in (1, 3):
            raise FedStrataError(
                f"The transform '{self.name}' works on images of 1 or 3 channels, but those of the dataset "
                f"'{dataset.name}' have {dataset.input_shape[0]}; leave it out."
            )

    def apply(self, inputs: Tensor, keys: Tensor, stream: int | Tensor, dataset: Dataset) -> Tensor:
        """Change the inputs."""
        self.check(dataset)
        draws = self.uniform(inputs, keys, stream, 2 * self.operations).flatten(0, 1)
        images = inputs.flatten(0, 1)
        change = change_all if images.is_cuda else change_in_groups
        for chance, side in zip(draws[:, 0::2].unbind(1), draws[:, 1::2].unbind(1), strict=True):
            chosen = (chance * len(OPERATIONS)).long()
            strength = torch.where(side < 0.5, -1.0, 1.0).double() * (self.magnitude / _STEPS)
            images = change(images, chosen, strength)
        return images.reshape(inputs.shape)


def change_in_groups(images: Tensor, chosen: Tensor, strength: Tensor) -> Tensor:
    """Apply to each image the operation that was chosen for it, to those with the same one at once."""
    counts = torch.bincount(chosen, minlength=len(OPERATIONS)).tolist()
    groups = torch.split(chosen.argsort(stable=True), counts)
    changed = images.clone()
    for operation, group in zip(OPERATIONS.values(), groups, strict=True):
        changed[group] = operation(images[group], strength[group])
    return changed


def change_all(images: Tensor, chosen: Tensor, strength: Tensor) -> Tensor:
    """Do the same by applying every operation to all images, and taking what was chosen.

    How many images are in a group is then of no interest: a GPU is not waited for, and steps can be replayed.
    """
    changed = images
    for number, operation in enumerate(OPERATIONS.values()):
        changed = torch.where((chosen == number)[:, None, None, None], operation(images, strength), changed)
    return changed


# The operations: of images [..., channels, height, width] at strengths [...] in [-1, 1]; some take only its size ------


def _identity(images: Tensor, strength: Tensor) -> Tensor:
    return images


def _shear_x(images: Tensor, strength: Tensor) -> Tensor:
    down, right = _centres(images)
    return _nearest(images, down.expand_as(down + right), right + 0.3 * _per_pixel(strength) * down)


def _shear_y(images: Tensor, strength: Tensor) -> Tensor:
    down, right = _centres(images)
    return _nearest(images, down + 0.3 * _per_pixel(strength) * right, right.expand_as(down + right))


def _translate_x(images: Tensor, strength: Tensor) -> Tensor:
    down, right = _centres(images)
    shift = (150 / 331 * images.shape[-1] * _per_pixel(strength)).trunc()
    return _nearest(images, down.expand_as(down + right), right - shift)


def _translate_y(images: Tensor, strength: Tensor) -> Tensor:
    down, right = _centres(images)
    shift = (150 / 331 * images.shape[-2] * _per_pixel(strength)).trunc()
    return _nearest(images, down - shift, right.expand_as(down + right))


def _rotate(images: Tensor, strength: Tensor) -> Tensor:
    return rotated(images, math.radians(30) * strength)


def _brightness(images: Tensor, strength: Tensor) -> Tensor:
    return _away_from(torch.zeros_like(images), images, strength)


def _colour(images: Tensor, strength: Tensor) -> Tensor:
    return _away_from(_grey(images), images, strength)


def _contrast(images: Tensor, strength: Tensor) -> Tensor:
    mean = _grey(images).double().mean((-3, -2, -1), keepdim=True).to(images.dtype)
    return _away_from(mean, images, strength)


def _sharpness(images: Tensor, strength: Tensor) -> Tensor:
    """Go away from the image smoothed by a window of 3 x 3 with five times the weight in the middle."""
    height, width = images.shape[-2:]
    smooth = images.clone()
    if height > 2 and width > 2:
        windows = [images[..., y : height - 2 + y, x : width - 2 + x] for y in range(3) for x in range(3)]
        smooth[..., 1:-1, 1:-1] = (sum(windows[1:], windows[0]) + 4 * windows[4]) / 13
    return _away_from(smooth, images, strength)


def _posterise(images: Tensor, strength: Tensor) -> Tensor:
    """Keep the highest 8 to 4 bits of each level."""
    step = 2 ** (4 * strength.abs()).round()[..., None, None, None]
    return (_levels(images).double() // step * step / _LEVELS).to(images.dtype)


def _solarise(images: Tensor, strength: Tensor) -> Tensor:
    """Invert what is brighter than a threshold."""
    threshold = (1 - strength.abs())[..., None, None, None].to(images.dtype)
    return torch.where(images >= threshold, 1 - images, images)


def _auto_contrast(images: Tensor, strength: Tensor) -> Tensor:
    """Stretch every channel to [0, 1]; one of a single level stays as it is."""
    lowest, highest = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    flat = highest == lowest
    return torch.where(flat, images, (images - lowest) / torch.where(flat, 1, highest - lowest))


def _equalise(images: Tensor, strength: Tensor) -> Tensor:
    """Spread the levels of every channel evenly, as Pillow does; too few pixels for that stay as they are."""
    levels = _levels(images).flatten(-2)
    below = torch.searchsorted(levels.sort(-1).values, levels)  # how many pixels are darker
    step = below.amax(-1, keepdim=True) // _LEVELS
    spread = ((below + step // 2) // step.clamp(min=1)).clamp(max=_LEVELS)
    return torch.where(step[..., None] > 0, spread.reshape(images.shape).to(images.dtype) / _LEVELS, images)


OPERATIONS = {
    "identity": _identity,
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
    "rotate": _rotate,
    "brightness": _brightness,
    "colour": _colour,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterise": _posterise,
    "solarise": _solarise,
    "auto-contrast": _auto_contrast,
    "equalise": _equalise,
}
"""What can be done to an image."""


def _centres(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the middles of pixels lie, down and to the right; in float64, so that precisions agree."""
    height, width = images.shape[-2:]
    down = torch.arange(height, device=images.device, dtype=torch.float64)[:, None] + 0.5
    return down, torch.arange(width, device=images.device, dtype=torch.float64) + 0.5


def _nearest(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Take the pixels in which places lie."""
    return take_pixels(images, down.floor().long(), right.floor().long())


def _per_pixel(strength: Tensor) -> Tensor:
    return strength[..., None, None]


def _away_from(base: Tensor, images: Tensor, strength: Tensor) -> Tensor:
    """Go from a degenerate image to the given one, and beyond it by up to 0.9 of the way, or stop as much before."""
    factor = (1 + 0.9 * strength)[..., None, None, None].to(images.dtype)
    return (base + factor * (images - base)).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    """Return the luminance ``[..., 1, height, width]``."""
    if images.shape[-3] == 1:
        return images
    weights = constant(_LUMINANCE, images.dtype, images.device)[:, None, None]
    return (images * weights).sum(-3, keepdim=True)


def _levels(images: Tensor) -> Tensor:
    """Round to whole levels from 0 to 255."""
    return (images * _LEVELS).round().clamp(0, _LEVELS).long()
