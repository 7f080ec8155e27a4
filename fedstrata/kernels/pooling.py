"""Max-pooling that remembers which pixel of its window won, in one byte, and finds its way back without atomics.

The sizes are known when a kernel is compiled, so that places are found by multiplications rather than divisions. On
the way back each pixel asks the windows that hold it whether it won them, in a fixed order: so its gradient is
written once and repeats bit for bit.
"""

from typing import Any

import torch
import triton
import triton.language as language
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from fedstrata.kernels.launching import exact_type, on_device_of

_POOLED = 128
"""As many outputs as threads: neighbours then read neighbours, whatever the stride."""
_BACK = 1024
"""On the way back neighbours read the same anyway, and a thread writes four pixels at once."""

Pair = tuple[int, int]


@triton.jit  # type: ignore[untyped-decorator]
def _pool(  # type: ignore[no-untyped-def]
    images, pooled, winners, count,
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    places = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    inside = places < count
    top = places // ACROSS % ROWS * STRIDE_DOWN - PAD_DOWN
    left = places % ACROSS * STRIDE_ACROSS - PAD_ACROSS
    image = images + places // (ROWS * ACROSS) * (HEIGHT * WIDTH)
    best = language.full([BLOCK], float("-inf"), dtype=pooled.dtype.element_ty)
    winner = language.full([BLOCK], 255, dtype=language.int32)
    for down in language.static_range(KERNEL_HEIGHT):
        for right in language.static_range(KERNEL_WIDTH):
            y = top + down
            x = left + right
            pixel = inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            value = language.load(image + y * WIDTH + x, mask=pixel, other=float("-inf"))
            better = pixel & ((value > best) | (value != value) | (winner == 255))
            best = language.where(better, value, best)
            winner = language.where(better, down * KERNEL_WIDTH + right, winner)
    language.store(pooled + places, best, mask=inside)
    language.store(winners + places, winner.to(language.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _pool_back(  # type: ignore[no-untyped-def]
    gradients, winners, for_images, count,
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    TYPE: constexpr, KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr,  # noqa: N803
    WINDOWS_DOWN: constexpr, WINDOWS_ACROSS: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    places = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    inside = places < count
    y = places // WIDTH % HEIGHT + PAD_DOWN
    x = places % WIDTH + PAD_ACROSS
    plane = places // (HEIGHT * WIDTH) * (ROWS * ACROSS)
    total = language.zeros([BLOCK], dtype=TYPE)
    for up in language.static_range(WINDOWS_DOWN):
        for back in language.static_range(WINDOWS_ACROSS):
            row = y // STRIDE_DOWN - up
            column = x // STRIDE_ACROSS - back
            down = y - row * STRIDE_DOWN
            right = x - column * STRIDE_ACROSS
            held = inside & (row >= 0) & (row < ROWS) & (column >= 0) & (column < ACROSS)
            held = held & (down < KERNEL_HEIGHT) & (right < KERNEL_WIDTH)
            window = plane + row * ACROSS + column
            won = language.load(winners + window, mask=held, other=255).to(language.int32)
            mine = held & (won == down * KERNEL_WIDTH + right)
            total += language.load(gradients + window, mask=mine, other=0.0).to(TYPE)
    language.store(for_images + places, total, mask=inside)


class _MaxPool(torch.autograd.Function):
    """Take the largest pixel of each window of images ``[planes, height, width]``."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        planes, height, width = images.shape
        rows = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
        across = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
        pooled = images.new_empty(planes, rows, across)
        winners = images.new_empty(planes, rows, across, dtype=torch.uint8)
        with on_device_of(images):
            _pool[(triton.cdiv(pooled.numel(), _POOLED),)](
                images, pooled, winners, pooled.numel(), height, width, rows, across, *stride, *padding, *kernel,
                _POOLED,
            )  # fmt: skip
        ctx.save_for_backward(winners)
        ctx.geometry = images.shape, kernel, stride, padding
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (winners,) = ctx.saved_tensors
        shape, kernel, stride, padding = ctx.geometry
        gradients = gradients.contiguous()
        for_images = gradients.new_empty(shape)
        windows = tuple(triton.cdiv(size, step) for size, step in zip(kernel, stride, strict=True))
        with on_device_of(gradients):
            _pool_back[(triton.cdiv(for_images.numel(), _BACK),)](
                gradients, winners, for_images, for_images.numel(), *shape[1:], *winners.shape[1:], *stride, *padding,
                exact_type(gradients.dtype), *kernel, *windows, _BACK,
            )  # fmt: skip
        return for_images, None, None, None


def takes(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> bool:
    """Tell whether the kernel can pool these images: few pixels in a window, and places that fit 32 bits."""
    small = kernel[0] * kernel[1] < 255 and 2 * padding[0] <= kernel[0] and 2 * padding[1] <= kernel[1]
    fits = images.shape[-2] + 2 * padding[0] >= kernel[0] and images.shape[-1] + 2 * padding[1] >= kernel[1]
    return small and fits and min(stride) > 0 and images.is_floating_point() and 0 < images.numel() < 2**31 - _BACK


def max_pool(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Pool images ``[planes, height, width]``; outside of them there is nothing that could win."""
    pooled: Tensor = _MaxPool.apply(images.contiguous(), kernel, stride, padding)
    return pooled
