"""Max-pooling that remembers which pixel of its window won, in one byte, and finds its way back without atomics.

The sizes are known when a kernel is compiled, so that places are found by multiplications rather than divisions. On
the way back each pixel asks the windows that hold it whether it won them, in a fixed order: so its gradient is written
once and repeats bit for bit. Batch norm pools in the same way what it has just normalised
(:mod:`fedstrata.kernels.batch_norm`).
"""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Pooling:
    """Images of some size, and the windows that are moved over them."""

    size: Pair
    kernel: Pair
    stride: Pair
    padding: Pair

    @property
    def windows(self) -> Pair:
        """How many windows there are, down and across."""
        down, across = (
            (self.size[axis] + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1 for axis in (0, 1)
        )
        return down, across

    @property
    def patches(self) -> Pair:
        """How many patches there are of as many pixels as a window moves on, down and across."""
        return triton.cdiv(self.size[0], self.stride[0]), triton.cdiv(self.size[1], self.stride[1])

    @property
    def geometry(self) -> tuple[int, ...]:
        """All sizes in the order in which kernels take them."""
        return *self.size, *self.windows, *self.stride, *self.padding, *self.kernel


@triton.jit  # type: ignore[untyped-decorator]
def window_inside(  # type: ignore[no-untyped-def]
    top, left, known, DOWN: constexpr, RIGHT: constexpr,  # noqa: N803
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
):  # fmt: skip
    """Tell whether pixel (DOWN, RIGHT) of each window is one of the image; what cannot fail is not asked."""
    if DOWN < PAD_DOWN:
        known = known & (top + DOWN >= 0)
    if (ROWS - 1) * STRIDE_DOWN + DOWN >= HEIGHT + PAD_DOWN:
        known = known & (top + DOWN < HEIGHT)
    if RIGHT < PAD_ACROSS:
        known = known & (left + RIGHT >= 0)
    if (ACROSS - 1) * STRIDE_ACROSS + RIGHT >= WIDTH + PAD_ACROSS:
        known = known & (left + RIGHT < WIDTH)
    return known


@triton.jit  # type: ignore[untyped-decorator]
def best_of_window(  # type: ignore[no-untyped-def]
    images, windows, known, sign, TYPE: constexpr,  # noqa: N803
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    """Find the largest pixel of windows, and which it is; with a ``sign``, of the pixels times this number."""
    top = windows // ACROSS % ROWS * STRIDE_DOWN - PAD_DOWN
    left = windows % ACROSS * STRIDE_ACROSS - PAD_ACROSS
    image = images + (windows // (ROWS * ACROSS) * HEIGHT + top) * WIDTH + left
    best = language.full([BLOCK], float("-inf"), dtype=TYPE)
    winner = language.full([BLOCK], 255, dtype=language.int32)
    for down in language.static_range(KERNEL_HEIGHT):
        for right in language.static_range(KERNEL_WIDTH):
            pixel = window_inside(
                top, left, known, down, right, HEIGHT, WIDTH, ROWS, ACROSS, STRIDE_DOWN, STRIDE_ACROSS, PAD_DOWN,
                PAD_ACROSS,
            )  # fmt: skip
            value = language.load(image + (down * WIDTH + right), mask=pixel, other=0.0).to(TYPE)
            if sign is not None:
                value = value * sign
            better = pixel & ((value > best) | (value != value))
            best = language.where(better, value, best)
            winner = language.where(better, down * KERNEL_WIDTH + right, winner)
    first = language.maximum(-top, 0) * KERNEL_WIDTH + language.maximum(-left, 0)
    return best, language.where(winner == 255, first, winner)  # nothing is larger than minus infinity


@triton.jit  # type: ignore[untyped-decorator]
def gradient_of_pixel(  # type: ignore[no-untyped-def]
    gradients, winners, window, row, across, known, I: constexpr, J: constexpr, TYPE: constexpr,  # noqa: E741, N803
    ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr,  # noqa: N803
    PATCHES_DOWN: constexpr, PATCHES_ACROSS: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    """Add up the gradients of the windows that pixel (I, J) of each patch won; patch and ``window`` begin together."""
    total = language.zeros([BLOCK], dtype=TYPE)
    for down in language.static_range((I + PAD_DOWN) % STRIDE_DOWN, KERNEL_HEIGHT, STRIDE_DOWN):
        for right in language.static_range((J + PAD_ACROSS) % STRIDE_ACROSS, KERNEL_WIDTH, STRIDE_ACROSS):
            below = (I + PAD_DOWN - down) // STRIDE_DOWN
            beside = (J + PAD_ACROSS - right) // STRIDE_ACROSS
            held = held_by_window(row, below, known, ROWS, PATCHES_DOWN)
            held = held_by_window(across, beside, held, ACROSS, PATCHES_ACROSS)
            asked = window + (below * ACROSS + beside)
            won = language.load(winners + asked, mask=held, other=255).to(language.int32)
            gradient = language.load(gradients + asked, mask=held, other=0.0).to(TYPE)
            total += language.where(won == down * KERNEL_WIDTH + right, gradient, 0.0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def held_by_window(place, apart, known, WINDOWS: constexpr, PATCHES: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Tell whether there is a window so far ``apart`` from that of a patch; what cannot fail is not asked."""
    if apart < 0:
        known = known & (place + apart >= 0)
    if PATCHES + apart > WINDOWS:
        known = known & (place + apart < WINDOWS)
    return known


@triton.jit  # type: ignore[untyped-decorator]
def _pool(  # type: ignore[no-untyped-def]
    images, pooled, winners, count,
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr, TYPE: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    window = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    best, winner = best_of_window(
        images, window, window < count, None, TYPE, HEIGHT, WIDTH, ROWS, ACROSS, STRIDE_DOWN, STRIDE_ACROSS, PAD_DOWN,
        PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH, BLOCK,
    )  # fmt: skip
    language.store(pooled + window, best, mask=window < count)
    language.store(winners + window, winner.to(language.uint8), mask=window < count)


@triton.jit  # type: ignore[untyped-decorator]
def _pool_back(  # type: ignore[no-untyped-def]
    gradients, winners, for_images, count,
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr,  # noqa: N803
    PATCHES_DOWN: constexpr, PATCHES_ACROSS: constexpr, TYPE: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    patch = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    known = patch < count
    across = patch % PATCHES_ACROSS
    row = patch // PATCHES_ACROSS % PATCHES_DOWN
    plane = patch // (PATCHES_DOWN * PATCHES_ACROSS)
    window = (plane * ROWS + row) * ACROSS + across
    corner = for_images + (plane * HEIGHT + row * STRIDE_DOWN) * WIDTH + across * STRIDE_ACROSS
    PAIR: constexpr = 2 - STRIDE_ACROSS % 2  # neighbours are written together  # noqa: N806
    for i in language.static_range(STRIDE_DOWN):
        for j in language.static_range(0, STRIDE_ACROSS, PAIR):
            total = gradient_of_pixel(
                gradients, winners, window, row, across, known, i, j, TYPE, ROWS, ACROSS, STRIDE_DOWN, STRIDE_ACROSS,
                PAD_DOWN, PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH, PATCHES_DOWN, PATCHES_ACROSS, BLOCK,
            )  # fmt: skip
            if PAIR == 2:
                other = gradient_of_pixel(
                    gradients, winners, window, row, across, known, i, j + 1, TYPE, ROWS, ACROSS, STRIDE_DOWN,
                    STRIDE_ACROSS, PAD_DOWN, PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH, PATCHES_DOWN, PATCHES_ACROSS,
                    BLOCK,
                )  # fmt: skip
                total = language.join(total, other)
            place, inside = pixels_of_patch(
                row, across, known, i, j, HEIGHT, WIDTH, STRIDE_DOWN, STRIDE_ACROSS, PAIR
            )  # fmt: skip
            if PAIR == 2:
                language.store(corner[:, None] + place, total, mask=inside)
            else:
                language.store(corner + place, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def pixels_of_patch(  # type: ignore[no-untyped-def]
    row, across, known, I: constexpr, J: constexpr, HEIGHT: constexpr, WIDTH: constexpr,  # noqa: E741, N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAIR: constexpr,  # noqa: N803
):  # fmt: skip
    """Tell where pixel (I, J) of a patch lies from its corner, perhaps with its neighbour, and if in the image."""
    if HEIGHT % STRIDE_DOWN:
        known = known & (row * STRIDE_DOWN + I < HEIGHT)
    place = I * WIDTH + J
    if PAIR == 2:
        beside = language.arange(0, 2)[None, :]
        place = place + beside
        known = known[:, None] & (beside >= 0)
        if WIDTH % STRIDE_ACROSS:
            known = known & ((across * STRIDE_ACROSS)[:, None] + (J + beside) < WIDTH)
    elif WIDTH % STRIDE_ACROSS:
        known = known & (across * STRIDE_ACROSS + J < WIDTH)
    return place, known


class _MaxPool(torch.autograd.Function):
    """Take the largest pixel of each window of images ``[planes, height, width]``."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, pooling: Pooling) -> Tensor:
        pooled, winners = pool(images, pooling)
        ctx.save_for_backward(winners)
        ctx.pooling = pooling
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        (winners,) = ctx.saved_tensors
        pooling: Pooling = ctx.pooling
        gradients = gradients.contiguous()
        for_images = gradients.new_empty(len(gradients), *pooling.size)
        count = len(gradients) * pooling.patches[0] * pooling.patches[1]
        with on_device_of(gradients):
            _pool_back[(triton.cdiv(count, _BLOCK),)](
                gradients, winners, for_images, count, *pooling.geometry, *pooling.patches,
                exact_type(gradients.dtype), _BLOCK,
            )  # fmt: skip
        return for_images, None


def pool(images: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
    """Find the largest pixel of each window of images ``[planes, height, width]``, and which it is."""
    pooled = images.new_empty(len(images), *pooling.windows)
    winners = torch.empty_like(pooled, dtype=torch.uint8)
    with on_device_of(images):
        _pool[(triton.cdiv(pooled.numel(), _BLOCK),)](
            images, pooled, winners, pooled.numel(), *pooling.geometry, exact_type(images.dtype), _BLOCK
        )
    return pooled, winners


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


def pooling_of(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Pooling | None:
    """Describe windows over images ``[..., height, width]``, if the kernels can pool them."""
    size = images.shape[-2], images.shape[-1]
    return Pooling(size, kernel, stride, padding) if takes(images, kernel, stride, padding) else None


def max_pool(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Pool images ``[planes, height, width]``; outside of them there is nothing that could win."""
    pooled: Tensor = _MaxPool.apply(
        images.contiguous(), Pooling((images.shape[1], images.shape[2]), kernel, stride, padding)
    )
    return pooled
