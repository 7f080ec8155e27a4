"""What all launches of kernels share."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton.language as language
from torch import Tensor


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch where a tensor lies; Triton's interpreter takes tensors on a CPU, where there is nothing to choose."""
    elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if elsewhere else nullcontext()


def exact_type(dtype: torch.dtype) -> language.dtype:
    """Tell in which type to add up numbers of a type: float64 stays, all others become float32."""
    return language.float64 if dtype == torch.float64 else language.float32


def warps_for(count: int) -> int:
    """Choose the warps of a program that holds ``count`` numbers at once: 16 for each thread."""
    return min(16, max(1, count // 512))
