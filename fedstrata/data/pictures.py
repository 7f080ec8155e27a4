"""Samples on their way into a batch: gathered and changed, on a GPU in one launch where they are images of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from fedstrata.data.dataset import Dataset
from fedstrata.data.transforms import Crop, Flip, Normalise, Own, Rotate, Transform, apply_transforms
from fedstrata.kernels.finding import find_kernels


def make_inputs(
    chosen: Sequence[Transform],
    samples: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    dataset: Dataset,
    keys: Tensor | None = None,
    stream: int | Tensor = 0,
    own: Own | None = None,
) -> Tensor:
    """Gather samples at positions ``[K, B]``, scale bytes to [0, 1] and apply transforms, the random ones with keys."""
    applied = [transform for transform in chosen if keys is not None or not transform.random]
    kernels = _kernels() if samples.is_cuda and _movable(applied, samples, positions, stream) else None
    if kernels is not None:
        table = _table([one for one in applied if isinstance(one, Normalise)], samples, dtype, dataset, own)
        return moved(kernels, applied, samples, positions, table, keys, stream)
    inputs = samples[positions]
    if inputs.dtype == torch.uint8:
        inputs = inputs.to(dtype) / 255
    elif inputs.is_floating_point():
        inputs = inputs.to(dtype)
    return apply_transforms(chosen, inputs, dataset, keys, stream, own)


def moved(
    kernels: ModuleType,
    applied: Sequence[Transform],
    samples: Tensor,
    positions: Tensor,
    table: Tensor,
    keys: Tensor | None,
    stream: int | Tensor,
) -> Tensor:
    """Let a kernel mirror, rotate and crop images, and look their bytes up in a table."""
    flip = next(((one.probability, one.sub_key) for one in applied if isinstance(one, Flip)), None)
    crop = next(((one.padding, one.sub_key) for one in applied if isinstance(one, Crop)), None)
    turning = next((one for one in applied if isinstance(one, Rotate)), None)
    angles = None if turning is None or keys is None else turning.angles(positions, keys, stream)
    order = [_STEPS[type(one)] for one in applied]
    order = order if "scale" in order else [*order, "scale"]
    made: Tensor = kernels.pictures(samples, positions, table, keys, stream, flip, crop, angles, order)
    return made


_STEPS: dict[type[Transform], str] = {Flip: "flip", Crop: "crop", Rotate: "rotate", Normalise: "scale"}
"""What a kernel can do, by its names."""


def _movable(applied: Sequence[Transform], samples: Tensor, positions: Tensor, stream: int | Tensor) -> bool:
    """Tell whether these transforms only move pixels and change each by itself."""
    single = not isinstance(stream, Tensor) or stream.numel() == 1
    images = samples.dtype == torch.uint8 and samples.dim() == 4 and samples.is_contiguous()
    return images and positions.dim() == 2 and single and all(type(one) in _STEPS for one in applied)


def _table(
    normalising: Sequence[Transform], samples: Tensor, dtype: torch.dtype, dataset: Dataset, own: Own | None
) -> Tensor:
    """Tell what the general operations make of every byte in every channel: ``[1 or K, channels, 256]``."""
    bytes_ = _bytes(dtype, samples.device).expand(1 if own is None else len(own[0]), 1, samples.shape[1], 256)
    return apply_transforms(normalising, bytes_, dataset, own=own).squeeze(1)


@lru_cache
def _bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).to(dtype) / 255


def _kernels() -> ModuleType | None:
    def trial(kernels: ModuleType) -> None:
        samples = torch.zeros(1, 1, 2, 2, dtype=torch.uint8, device="cuda")
        positions, keys = (torch.zeros(1, count, dtype=torch.int64, device="cuda") for count in (1, 2))
        table, angles = torch.zeros(1, 1, 256, device="cuda"), torch.zeros(1, 1, dtype=torch.float64, device="cuda")
        kernels.pictures(samples, positions, table, keys, 0, (0.5, (1, 2)), (1, (3, 4)), angles)

    return find_kernels("pictures", "images", trial)
