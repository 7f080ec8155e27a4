"""The mean and standard deviation of each channel, for the ``normalise`` transform."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 4096


def channel_statistics(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]:
    """Compute mean and deviation per channel of images ``[n, channels, height, width]``, or per feature of tables.

    Images of bytes count as scaled to [0, 1]. A channel that never changes gets the deviation 1. Other inputs (tokens,
    sequences) have no channels: both results are none.
    """
    has_channels = inputs.dim() in (2, 4) and (inputs.dtype == torch.uint8 or inputs.is_floating_point())
    if not has_channels or len(inputs) == 0:
        return None, None
    scale = 255.0 if inputs.dtype == torch.uint8 else 1.0
    others = [axis for axis in range(inputs.dim()) if axis != 1]
    count = inputs[:, 0].numel()
    parts = [inputs[start : start + _CHUNK] for start in range(0, len(inputs), _CHUNK)]
    mean = torch.stack([part.double().sum(others) for part in parts]).sum(0) / count
    centre = mean.reshape(-1, *[1] * (inputs.dim() - 2))
    squares = torch.stack([(part.double() - centre).square().sum(others) for part in parts]).sum(0)
    deviation = (squares / count).sqrt() / scale
    deviation[deviation == 0] = 1.0
    return tuple((mean / scale).tolist()), tuple(deviation.tolist())
