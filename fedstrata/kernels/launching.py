"""What all launches of kernels share."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as language
from torch import Tensor


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch where a tensor lies; Triton's interpreter takes tensors on a CPU, where there is nothing to choose."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def exact_type(dtype: torch.dtype) -> language.dtype:
    """Tell in which type to add up numbers of a type: float64 stays, all others become float32."""
    return language.float64 if dtype == torch.float64 else language.float32


def block_and_warps(count: int, largest: int, each: int = 16) -> tuple[int, int]:
    """Choose how many of ``count`` numbers a program takes at once, and the warps in which each thread has ``each``."""
    block = min(largest, max(64, triton.next_power_of_2(count)))
    return block, min(32, max(1, block // (32 * each)))
