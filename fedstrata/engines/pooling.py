"""Max-pooling for many clients at once on a GPU; on a CPU see ``cpu_pooling.py``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.fused import Pair, pair
from fedstrata.kernels.finding import find_kernels
from fedstrata.private_torch import for_all_clients


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Take the largest number of each window."""
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    if return_indices or input.dim() != 4 or pair(dilation) != (1, 1) or ceil_mode:
        return F.max_pool2d(input, *options, return_indices)  # type: ignore[call-overload]
    return for_all_clients(max_pool_stack, (input,), pair(kernel_size), pair(stride or kernel_size), pair(padding))


def max_pool_stack(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Pool the images ``[K, B, C, H, W]`` of K clients, which lie in memory as ``[K, C, B, H, W]``."""
    stacked = images.transpose(1, 2)
    clients, channels, batch = stacked.shape[:3]
    kernels = find_kernels("pooling", "pooling", _try_pooling) if images.is_cuda else None
    if kernels is not None and kernels.takes(stacked, kernel, stride, padding):
        pooled: Tensor = kernels.max_pool(stacked.flatten(0, 2), kernel, stride, padding)
    else:
        pooled = F.max_pool2d(stacked.reshape(clients * channels, *stacked.shape[2:]), kernel, stride, padding)
    return pooled.view(clients, channels, batch, *pooled.shape[-2:]).transpose(1, 2)


def _try_pooling(kernels: ModuleType) -> None:
    kernels.max_pool(torch.ones(2, 4, 4, device="cuda"), (2, 2), (2, 2), (0, 0))
