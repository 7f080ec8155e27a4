"""Max-pooling that remembers which pixel of its window won, in one byte, and finds its way back without atomics.

The sizes are known when a kernel is compiled, so that places are found by multiplications rather than divisions. On
the way back each pixel asks the windows that hold it whether it won them, in a fixed order: so its gradient is written
once and repeats bit for bit.
"""

from typing import Any

import torch
import triton
import triton.language as language
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from fedstrata.kernels.launching import exact_type, on_device_of

_BLOCK = 128
"""As many as threads: neighbours then read neighbours, whatever the stride."""

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
    PATCHES_DOWN: constexpr, PATCHES_ACROSS: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    """Answer for patches of as many pixels as a window moves on: all pixels of a patch are in the same windows."""
    places = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    column = places % PATCHES_ACROSS
    row = places // PATCHES_ACROSS % PATCHES_DOWN
    plane = places // (PATCHES_DOWN * PATCHES_ACROSS)
    window = plane * (ROWS * ACROSS) + row * ACROSS + column
    for i in language.static_range(STRIDE_DOWN):
        for j in language.static_range(STRIDE_ACROSS):
            total = language.zeros([BLOCK], dtype=TYPE)
            for down in language.static_range(i, KERNEL_HEIGHT, STRIDE_DOWN):
                for right in language.static_range(j, KERNEL_WIDTH, STRIDE_ACROSS):
                    up = down // STRIDE_DOWN
                    back = right // STRIDE_ACROSS
                    held = (places < count) & (row >= up) & (row < ROWS + up)
                    held = held & (column >= back) & (column < ACROSS + back)
                    asked = window - (up * ACROSS + back)
                    won = language.load(winners + asked, mask=held, other=255).to(language.int32)
                    gradient = language.load(gradients + asked, mask=held, other=0.0).to(TYPE)
                    total += language.where(won == down * KERNEL_WIDTH + right, gradient, 0.0)
            y = row * STRIDE_DOWN + (i - PAD_DOWN)
            x = column * STRIDE_ACROSS + (j - PAD_ACROSS)
            inside = (places < count) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            language.store(for_images + (plane * HEIGHT + y) * WIDTH + x, total, mask=inside)


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
            _pool[(triton.cdiv(pooled.numel(), _BLOCK),)](
                images, pooled, winners, pooled.numel(), height, width, rows, across, *stride, *padding, *kernel,
                _BLOCK,
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
        patches = tuple(triton.cdiv(shape[1 + axis] + padding[axis], stride[axis]) for axis in (0, 1))
        count = shape[0] * patches[0] * patches[1]
        with on_device_of(gradients):
            _pool_back[(triton.cdiv(count, _BLOCK),)](
                gradients, winners, for_images, count, *shape[1:], *winners.shape[1:], *stride, *padding,
                exact_type(gradients.dtype), *kernel, *patches, _BLOCK,
            )  # fmt: skip
        return for_images, None, None, None


def takes(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> bool:
    """Tell whether the kernel can pool these images: few pixels in a window, and places that fit 32 bits."""
    height, width = images.shape[-2:]
    room = (height + 2 * padding[0], width + 2 * padding[1])
    planes = images.numel() // max(height * width, 1)
    return (
        images.is_floating_point()
        and min(stride) > 0
        and kernel[0] * kernel[1] < 255
        and all(2 * padding[axis] <= kernel[axis] <= room[axis] for axis in (0, 1))
        and 0 < planes * room[0] * room[1] < 2**31 - _BLOCK
    )


def max_pool(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Pool images ``[planes, height, width]``; outside of them there is nothing that could win."""
    pooled: Tensor = _MaxPool.apply(images.contiguous(), kernel, stride, padding)
    return pooled
