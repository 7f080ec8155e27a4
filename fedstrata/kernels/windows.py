"""Unfolding windows and adding them back are pure copies, but PyTorch's general ones mostly compute indices.

The kernels are made for a size of images, so that places are found without divisions. Unfolding reads each pixel from
the cache and writes whole rows. On the way back each pixel adds up what the windows that hold it have for it, in a
fixed order: so it is written once, and repeats bit for bit (docs/performance.md).
"""

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import exact_type, on_device_of
from fedstrata.kernels.pooling import held_by_window, pixels_of_patch, window_inside

Pair = tuple[int, int]


@triton.jit(do_not_specialize=("batch",))  # type: ignore[untyped-decorator]
def _unfold(  # type: ignore[no-untyped-def] # Triton reads the annotations: there may be no others
    images, columns, channels, batch, client_step, channel_step, sample_step,
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    plane = language.program_id(0).to(language.int64)
    count = batch * (ROWS * ACROSS)
    place = language.program_id(1) * BLOCK + language.arange(0, BLOCK)
    inside = place < count
    top = place // ACROSS % ROWS * STRIDE_DOWN - PAD_DOWN
    left = place % ACROSS * STRIDE_ACROSS - PAD_ACROSS
    image = images + plane // channels * client_step + plane % channels * channel_step
    image += (place // (ROWS * ACROSS)).to(language.int64) * sample_step + (top * WIDTH + left)
    column = columns + plane * (KERNEL_HEIGHT * KERNEL_WIDTH) * count + place
    for down in language.static_range(KERNEL_HEIGHT):
        for right in language.static_range(KERNEL_WIDTH):
            pixel = window_inside(
                top, left, inside, down, right, HEIGHT, WIDTH, ROWS, ACROSS, STRIDE_DOWN, STRIDE_ACROSS, PAD_DOWN,
                PAD_ACROSS,
            )  # fmt: skip
            value = language.load(image + (down * WIDTH + right), mask=pixel, other=0.0)
            language.store(column + (down * KERNEL_WIDTH + right) * count, value, mask=inside)


@triton.jit(do_not_specialize=("batch",))  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    columns, images, batch,
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr,  # noqa: N803
    PATCHES_DOWN: constexpr, PATCHES_ACROSS: constexpr, TYPE: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    """Answer for patches of as many pixels as a window moves on, each with the windows around it."""
    plane = language.program_id(0).to(language.int64)
    patch = language.program_id(1) * BLOCK + language.arange(0, BLOCK)
    row = patch // PATCHES_ACROSS % PATCHES_DOWN
    across = patch % PATCHES_ACROSS
    sample = patch // (PATCHES_DOWN * PATCHES_ACROSS)
    count = batch * (ROWS * ACROSS)
    known = sample < batch
    column = columns + plane * (KERNEL_HEIGHT * KERNEL_WIDTH) * count + (sample * ROWS + row) * ACROSS + across
    corner = images + plane * batch * (HEIGHT * WIDTH)
    corner += (sample * HEIGHT + row * STRIDE_DOWN) * WIDTH + across * STRIDE_ACROSS
    PAIR: constexpr = 2 - STRIDE_ACROSS % 2  # neighbours are written together  # noqa: N806
    for i in language.static_range(STRIDE_DOWN):
        for j in language.static_range(0, STRIDE_ACROSS, PAIR):
            total = _sum_for_pixel(
                column, count, row, across, known, i, j, TYPE, ROWS, ACROSS, STRIDE_DOWN, STRIDE_ACROSS, PAD_DOWN,
                PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH, PATCHES_DOWN, PATCHES_ACROSS, BLOCK,
            )  # fmt: skip
            if PAIR == 2:
                other = _sum_for_pixel(
                    column, count, row, across, known, i, j + 1, TYPE, ROWS, ACROSS, STRIDE_DOWN, STRIDE_ACROSS,
                    PAD_DOWN, PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH, PATCHES_DOWN, PATCHES_ACROSS, BLOCK,
                )  # fmt: skip
                total = language.join(total, other)
            place, inside = pixels_of_patch(row, across, known, i, j, HEIGHT, WIDTH, STRIDE_DOWN, STRIDE_ACROSS, PAIR)
            if PAIR == 2:
                language.store(corner[:, None] + place, total, mask=inside)
            else:
                language.store(corner + place, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_for_pixel(  # type: ignore[no-untyped-def]
    column, count, row, across, known, I: constexpr, J: constexpr, TYPE: constexpr,  # noqa: E741, N803
    ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr,  # noqa: N803
    PATCHES_DOWN: constexpr, PATCHES_ACROSS: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    """Add up what windows have for pixel (I, J) of each patch."""
    total = language.zeros([BLOCK], dtype=TYPE)
    for down in language.static_range((I + PAD_DOWN) % STRIDE_DOWN, KERNEL_HEIGHT, STRIDE_DOWN):
        for right in language.static_range((J + PAD_ACROSS) % STRIDE_ACROSS, KERNEL_WIDTH, STRIDE_ACROSS):
            below = (I + PAD_DOWN - down) // STRIDE_DOWN
            beside = (J + PAD_ACROSS - right) // STRIDE_ACROSS
            held = held_by_window(row, below, known, ROWS, PATCHES_DOWN)
            held = held_by_window(across, beside, held, ACROSS, PATCHES_ACROSS)
            source = column + (down * KERNEL_WIDTH + right) * count + (below * ACROSS + beside)
            total += language.load(source, mask=held, other=0.0).to(TYPE)
    return total


def windows(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, tuple[int, int, int]]:
    """Unfold ``[K, C, B, H, W]`` into columns ``[K, C * h * w, B * H' * W']``, and tell ``(B, H', W')``.

    Clients, channels and samples may lie in memory in any order; each channel of a sample lies in one piece.
    """
    clients, channels, batch, height, width = images.shape
    if images.stride()[3:] != (width, 1):
        images = images.contiguous()
    rows = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
    across = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
    count = batch * rows * across
    columns = torch.empty(clients, channels * kernel[0] * kernel[1], count, device=images.device, dtype=images.dtype)
    block = _block(count)
    with on_device_of(images):
        _unfold[(clients * channels, triton.cdiv(count, block))](
            images, columns, channels, batch, *images.stride()[:3], height, width, rows, across, *stride, *padding,
            *kernel, block,
        )  # fmt: skip
    return columns, (batch, rows, across)


def fold(columns: Tensor, shape: torch.Size, places: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Add columns ``[K, C * h * w, B * H' * W']`` back to images ``[K, C, B, H, W]``; ``places`` are ``(H', W')``."""
    clients, channels, batch, height, width = shape
    images = columns.new_empty(shape)
    patches = triton.cdiv(height, stride[0]), triton.cdiv(width, stride[1])
    count = batch * patches[0] * patches[1]
    block = _block(count)
    with on_device_of(columns):
        _fold[(clients * channels, triton.cdiv(count, block))](
            columns.contiguous(), images, batch, height, width, *places, *stride, *padding, *kernel, *patches,
            exact_type(columns.dtype), block,
        )  # fmt: skip
    return images


def _block(count: int) -> int:
    """Choose how many of ``count`` places a program takes, so that few of its threads have nothing to do."""
    return int(min(512, max(128, triton.next_power_of_2(count))))
