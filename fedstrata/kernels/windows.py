"""Windows of images as columns.

Unfolding windows is a pure copy, but PyTorch's general copy spends most of its time on computing seven-dimensional
indices. The kernel reads each pixel from the cache and writes whole rows: a fifth off the time of a training round of
ResNet-8 (docs/performance.md).
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
