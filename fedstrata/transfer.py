"""From the host to the device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device | str) -> Tensor:
    """Put an array on a device; a GPU copies it from pinned memory while the host goes on."""
    tensor, device = torch.from_numpy(values), torch.device(device)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def numbers_on(numbers: Sequence[int], device: torch.device | str) -> Tensor:
    """Put whole numbers, such as those of clients, on a device; a range is made there.

    >>> numbers_on((4, 2), "cpu"), numbers_on(range(3), "cpu")
    (tensor([4, 2]), tensor([0, 1, 2]))
    """
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
    return to_device(np.array(numbers, dtype=np.int64), device)
