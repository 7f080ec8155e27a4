"""GPU kernels in Triton, which CUDA builds of PyTorch bring along; imported only where there is a GPU.

Unfolding windows is a pure copy, but PyTorch's general copy spends most of its time on computing seven-dimensional
indices. The kernel reads each pixel from the cache and writes whole rows: a fifth off the time of a training round of
ResNet-8 (docs/performance.md). Random words take ten rounds of a few operations each: more than a hundred small
launches in PyTorch, and one here.
"""

import torch
import triton
import triton.language as language
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _unfold(  # type: ignore[no-untyped-def] # Triton reads the annotations: there may be no others
    images, columns, channels, batch, height, width, client_step, channel_step, sample_step,
    rows, across, stride_down, stride_across, pad_down, pad_across,
    KERNEL_HEIGHT: language.constexpr, KERNEL_WIDTH: language.constexpr, BLOCK: language.constexpr,  # noqa: N803
):  # fmt: skip
    plane = language.program_id(0).to(language.int64)
    count = batch * rows * across
    place = language.program_id(1) * BLOCK + language.arange(0, BLOCK)
    inside = place < count
    column = place % across
    row = place // across % rows
    sample = (place // across // rows).to(language.int64)
    image = images + plane // channels * client_step + plane % channels * channel_step + sample * sample_step
    for down in language.static_range(KERNEL_HEIGHT):
        for right in language.static_range(KERNEL_WIDTH):
            y = row * stride_down - pad_down + down
            x = column * stride_across - pad_across + right
            pixel = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            value = language.load(image + y * width + x, mask=pixel, other=0.0)
            line = plane * KERNEL_HEIGHT * KERNEL_WIDTH + down * KERNEL_WIDTH + right
            language.store(columns + line * count + place, value, mask=inside)


def windows(
    images: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Tensor, tuple[int, int, int]]:
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
    grid = (clients * channels, triton.cdiv(count, _BLOCK))
    with torch.cuda.device(images.device):
        _unfold[grid](
            images, columns, channels, batch, height, width, *images.stride()[:3],
            rows, across, *stride, *padding, *kernel, _BLOCK,
        )  # fmt: skip
    return columns, (batch, rows, across)


@triton.jit  # type: ignore[untyped-decorator]
def _philox(keys, streams, words, blocks, BLOCK: language.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = language.program_id(0).to(language.int64)
    place = language.program_id(1) * BLOCK + language.arange(0, BLOCK)
    inside = place < blocks
    nothing = place.to(language.uint32) * 0
    key0 = language.load(keys + 2 * row).to(language.uint32) + nothing
    key1 = language.load(keys + 2 * row + 1).to(language.uint32) + nothing
    word0, word1 = place.to(language.uint32), nothing
    word2, word3 = language.load(streams + row).to(language.uint32) + nothing, nothing
    first = nothing + 0xD2511F53
    second = nothing + 0xCD9E8D57
    for _ in language.static_range(10):
        high0, low0 = language.umulhi(word0, first), word0 * first
        high1, low1 = language.umulhi(word2, second), word2 * second
        word0, word1 = high1 ^ word1 ^ key0, low1
        word2, word3 = high0 ^ word3 ^ key1, low0
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    target = words + (row * blocks + place) * 4
    language.store(target, word0.to(language.int64), mask=inside)
    language.store(target + 1, word1.to(language.int64), mask=inside)
    language.store(target + 2, word2.to(language.int64), mask=inside)
    language.store(target + 3, word3.to(language.int64), mask=inside)


def philox_words(keys: Tensor, streams: Tensor, blocks: int) -> Tensor:
    """Draw ``[n, 4 * blocks]`` words of 32 bits, as int64, for keys ``[n, 2]`` and streams ``[n]``."""
    words = torch.empty(len(keys), 4 * blocks, dtype=torch.int64, device=keys.device)
    block = min(_BLOCK, triton.next_power_of_2(blocks))
    with torch.cuda.device(keys.device):
        _philox[(len(keys), triton.cdiv(blocks, block))](keys.contiguous(), streams.contiguous(), words, blocks, block)
    return words
