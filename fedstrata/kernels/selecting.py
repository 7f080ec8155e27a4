"""The lowest numbers of many rows at once, without sorting them.

A sort tells far more than is asked. Here a program has a row to itself: read as whole numbers that are in the same
order, floating-point numbers need 32 questions to find the threshold, each how many are not above the middle of what is
left. A row of some megabytes stays in the cache while it is asked. Then what lies below is marked, and of what equals
the threshold the first.
"""

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import on_device_of

_BLOCK = 8192
_WARPS = 16
_FEWEST_ROWS = 16
"""Fewer programs than this leave most of a GPU idle, and a sort is quicker."""


@triton.jit
def _in_order(numbers):  # type: ignore[no-untyped-def]
    """Turn floating-point numbers into whole ones in the same order; zero has no sign."""
    bits = language.where(numbers == 0, 0.0, numbers).to(language.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _mark_lowest(rows, counts, marks, size, BLOCK: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = language.program_id(0).to(language.int64)
    start = row * size
    places = language.arange(0, BLOCK)
    wanted = language.load(counts + row)
    low = language.full([], -(2**31), dtype=language.int64)
    high = language.full([], 2**31 - 1, dtype=language.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        bound = middle.to(language.int32)
        among = language.zeros([BLOCK], dtype=language.int32)
        for first in range(0, size, BLOCK):
            inside = first + places < size
            number = _in_order(language.load(rows + start + first + places, mask=inside, other=0.0))
            among += (inside & (number <= bound)).to(language.int32)
        enough = language.sum(among, 0) >= wanted
        high = language.where(enough, middle, high)
        low = language.where(enough, low, middle + 1)
    threshold = high.to(language.int32)
    among = language.zeros([BLOCK], dtype=language.int32)
    for first in range(0, size, BLOCK):
        inside = first + places < size
        number = _in_order(language.load(rows + start + first + places, mask=inside, other=0.0))
        among += (inside & (number < threshold)).to(language.int32)
    left = wanted - language.sum(among, 0)  # so many of those that equal the threshold
    for first in range(0, size, BLOCK):
        inside = first + places < size
        number = _in_order(language.load(rows + start + first + places, mask=inside, other=0.0))
        tied = (inside & (number == threshold)).to(language.int32)
        first_ones = (tied > 0) & (language.cumsum(tied, 0) <= left)
        language.store(marks + start + first + places, (number < threshold) | first_ones, mask=inside)
        left -= language.sum(tied, 0)


def takes(rows: Tensor) -> bool:
    """Tell whether the kernel can do it, and is quicker than a sort: for many rows of float32 in one piece."""
    return (
        rows.dtype == torch.float32
        and rows.is_contiguous()
        and len(rows) >= _FEWEST_ROWS
        and 0 < rows.shape[1] < 2**31 - _BLOCK
    )


def lowest(rows: Tensor, counts: Tensor) -> Tensor:
    """Mark the ``counts`` ``[K]`` lowest of each row of ``[K, n]``; among equal ones, the first. None may be NaN."""
    marks = torch.empty_like(rows, dtype=torch.bool)
    with on_device_of(rows):
        _mark_lowest[(len(rows),)](
            rows, counts.to(torch.int32), marks.view(torch.uint8), rows.shape[1], _BLOCK, num_warps=_WARPS
        )
    return marks
