"""What masks keep of a stack, in one pass: PyTorch's ``where`` with a single zero does not use the memory's full speed.

Numbers that are not kept become zero whatever they were, also where they are not finite.
"""

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import on_device_of

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    values, masks, kept, count,
    BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    places = language.program_id(0).to(language.int64) * BLOCK + language.arange(0, BLOCK)
    inside = places < count
    value = language.load(values + places, mask=inside, other=0.0)
    chosen = language.load(masks + places, mask=inside, other=0)
    language.store(kept + places, language.where(chosen != 0, value, 0.0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _keep_in_place(  # type: ignore[no-untyped-def]
    values, masks, count,
    BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    places = language.program_id(0).to(language.int64) * BLOCK + language.arange(0, BLOCK)
    inside = places < count
    value = language.load(values + places, mask=inside, other=0.0)
    chosen = language.load(masks + places, mask=inside, other=1)
    language.store(values + places, 0.0, mask=inside & (chosen == 0) & (value != 0.0))


def takes(tensor: Tensor, mask: Tensor) -> bool:
    """Tell whether a kernel can do it: one mask for each number, both in one piece."""
    return (
        tensor.dtype in (torch.float32, torch.float64)
        and mask.dtype == torch.bool
        and tensor.shape == mask.shape
        and tensor.is_contiguous()
        and mask.is_contiguous()
        and tensor.numel() > 0
    )


def keep(tensor: Tensor, mask: Tensor) -> Tensor:
    """Put what a mask does not keep to zero, in a copy."""
    kept, count = torch.empty_like(tensor), tensor.numel()
    with on_device_of(tensor):
        _keep[(triton.cdiv(count, _BLOCK),)](tensor, mask.view(torch.uint8), kept, count, _BLOCK)
    return kept


def keep_(tensor: Tensor, mask: Tensor) -> None:
    """Put what a mask does not keep to zero, in place; where it is zero already, nothing is written."""
    count = tensor.numel()
    with on_device_of(tensor):
        _keep_in_place[(triton.cdiv(count, _BLOCK),)](tensor, mask.view(torch.uint8), count, _BLOCK)
