"""Max pooling on a CPU, bit for bit as PyTorch does it, in less time.

PyTorch pools images channel by channel, one number after another, unless the channels of a pixel lie side by side: then
it takes many at a time. So where gradients are wanted, the channels of all clients are brought side by side first,
which costs less than it saves. Where only the largest numbers are, windows are compared all at once, place by place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.fused import Windows, pair
from fedstrata.private_torch import differs_between_clients, for_all_clients, has_memory


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Pool batches of images, of one client or inside ``vmap`` of all; what is rarely asked for is left to PyTorch."""
    apart = kernel_size if stride is None or stride == () else stride
    windows = Windows(pair(kernel_size), pair(apart), pair(padding))
    plain = pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    if plain and input.dim() == 4 and _are_usual(windows, input.shape):
        if differs_between_clients(input):
            return for_all_clients(_pool, (input,), windows)
        if has_memory(input):
            return _pool(input.unsqueeze(0), windows).squeeze(0)
    return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)  # type: ignore[call-overload]


def _are_usual(windows: Windows, images: torch.Size) -> bool:
    """Tell whether PyTorch would take them, and whether there are any."""
    narrow = all(2 * padding <= size for padding, size in zip(windows.padding, windows.kernel, strict=True))
    return narrow and min(windows.stride) > 0 and min(windows.count(images)) > 0 and images.numel() > 0


def _pool(images: Tensor, windows: Windows) -> Tensor:
    pooled: Tensor = MaxPooling.apply(images, windows)  # type: ignore[no-untyped-call]
    return pooled


class MaxPooling(torch.autograd.Function):
    """Pools images ``[K, n, channels, height, width]``."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, windows: Windows) -> Tensor:
        """Find the largest number of each window, and its place if a gradient is going to be sent there."""
        if not ctx.needs_input_grad[0]:
            return largest(images, windows)
        clients, batch, channels, height, width = images.shape
        pixels = images.permute(1, 3, 4, 0, 2).contiguous()
        beside = pixels.view(batch, height, width, clients * channels).permute(0, 3, 1, 2)

        def apart(results: Tensor) -> Tensor:
            return results.reshape(batch, clients, channels, *results.shape[2:]).transpose(0, 1).contiguous()

        pooled, places = F.max_pool2d_with_indices(beside, windows.kernel, windows.stride, windows.padding)
        ctx.save_for_backward(apart(places))
        ctx.shape, ctx.overlap = images.shape, windows.overlap
        return apart(pooled)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        """Give each gradient to the place that was the largest of its window, the first of several."""
        (places,) = ctx.saved_tensors
        zeros = gradients.new_zeros(*ctx.shape[:3], ctx.shape[3] * ctx.shape[4])
        give = zeros.scatter_add if ctx.overlap else zeros.scatter
        return give(3, places.flatten(3), gradients.flatten(3)).view(ctx.shape), None


def largest(images: Tensor, windows: Windows) -> Tensor:
    """Find the largest number of each window: first in its columns, then among these."""
    heights, widths = (
        [slice(first, first + stride * (count - 1) + 1, stride) for first in range(size)]
        for size, stride, count in zip(windows.kernel, windows.stride, windows.count(images.shape), strict=True)
    )
    above, beside = windows.padding
    if above or beside:
        images = F.pad(images, (beside, beside, above, above), value=-torch.inf)
    columns = images[..., heights[0], :]
    for place in heights[1:]:
        columns = torch.maximum(columns, images[..., place, :])
    found = columns[..., widths[0]]
    for place in widths[1:]:
        found = torch.maximum(found, columns[..., place])
    return found.contiguous()
