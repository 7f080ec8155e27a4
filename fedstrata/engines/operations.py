"""Hand-made operations for many clients at once, used inside ``vmap`` where its generic rule is slow, or wrong.

``vmap`` turns the convolutions of K clients into one grouped convolution, which GPU libraries run far below their
speed. Here images of all clients lie in memory as ``[K, channels, batch, height, width]``: a convolution is then one
batched matrix product over unfolded windows, norms are one call over ``K * channels`` channels (``norms.py``), and
pooling needs no copy. To the model nothing changes: it still sees ``[batch, channels, height, width]``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstrata.engines import cpu_pooling
from fedstrata.engines.norms import batch_norm, group_norm
from fedstrata.errors import FedStrataWarning
from fedstrata.kernels.finding import find_kernels
from fedstrata.private_torch import for_all_clients

Operations = dict[Callable[..., Any], Callable[..., Any]]


def stacked_operations(device: torch.device) -> Operations:
    """Tell which torch functions to replace on a device.

    On a CPU the generic rules for images are the faster ones, but for pooling, and for attention there is none.
    """
    return CORRECTED_OPERATIONS | (GPU_OPERATIONS if device.type == "cuda" else CPU_OPERATIONS)


class StackedConvolution(torch.autograd.Function):
    """Convolve K clients' images ``[K, C, B, H, W]`` with K clients' weights ``[K, O, C, h, w]``."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weights: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        """Multiply the unfolded windows by the weights: ``[K, O, B, H', W']``."""
        clients, outputs = weights.shape[:2]
        columns, batch_height_width = _windows(images, (weights.shape[3], weights.shape[4]), stride, padding)
        ctx.save_for_backward(columns, weights)
        ctx.geometry = images.shape, stride, padding
        return torch.bmm(weights.reshape(clients, outputs, -1), columns).view(clients, outputs, *batch_height_width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients for the images and the weights."""
        columns, weights = ctx.saved_tensors
        shape, stride, padding = ctx.geometry
        clients, outputs = weights.shape[:2]
        flat = gradient.reshape(clients, outputs, -1)
        for_images = for_weights = None
        if ctx.needs_input_grad[1]:
            for_weights = torch.bmm(flat, columns.transpose(1, 2)).view(weights.shape)
        if ctx.needs_input_grad[0]:
            height, width = weights.shape[3:]
            if stride == (1, 1) and padding[0] < height and padding[1] < width:
                for_images = _correlate_back(gradient, weights, padding).view(shape)
            else:
                back = torch.bmm(weights.reshape(clients, outputs, -1).transpose(1, 2), flat)
                for_images = _fold(back, shape, gradient.shape, (height, width), stride, padding)
        return for_images, for_weights, None, None


def _windows(
    images: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Tensor, tuple[int, int, int]]:
    unfold = _kernel() if images.is_cuda else unfolded_windows
    return unfold(images, kernel, stride, padding)


@cache
def _kernel() -> Callable[..., tuple[Tensor, tuple[int, int, int]]]:
    """Find the GPU kernel for windows, or the general operation where it cannot be compiled."""
    if find_spec("triton") is None:
        return unfolded_windows
    try:
        from fedstrata.kernels.windows import windows

        windows(torch.zeros(1, 1, 1, 3, 3, device="cuda"), (3, 3), (1, 1), (1, 1))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1][:120]
        warnings.warn(f"The GPU kernel for convolutions is not used ({reason}).", FedStrataWarning, stacklevel=2)
        return unfolded_windows
    return windows


def unfolded_windows(
    images: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Tensor, tuple[int, int, int]]:
    """Unfold ``[K, C, B, H, W]`` into columns ``[K, C * h * w, B * H' * W']``, and tell ``(B, H', W')``."""
    if padding != (0, 0):
        images = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    windows = images.unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
    clients, channels, batch, height, width = windows.shape[:5]
    columns = windows.permute(0, 1, 5, 6, 2, 3, 4).reshape(clients, channels * kernel[0] * kernel[1], -1)
    return columns, (batch, height, width)


def _correlate_back(gradient: Tensor, weights: Tensor, padding: tuple[int, int]) -> Tensor:
    """At stride one the gradient for the images is itself a convolution: of the gradient with the flipped weights."""
    clients, _, channels, height, width = weights.shape
    opposite = (height - 1 - padding[0], width - 1 - padding[1])
    columns, _ = _windows(gradient, (height, width), (1, 1), opposite)
    flipped = weights.flip(3, 4).transpose(1, 2).reshape(clients, channels, -1)
    return torch.bmm(flipped, columns)


def _fold(
    columns: Tensor,
    shape: torch.Size,
    output: torch.Size,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """Add the columns back to where their windows stood: the adjoint of :func:`_windows`."""
    clients, channels, batch, height, width = shape
    padded = columns.new_zeros(clients, channels, batch, height + 2 * padding[0], width + 2 * padding[1])
    rows, across = output[3:]
    windows = columns.view(clients, channels, *kernel, batch, rows, across)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            target = padded[
                ..., i : i + stride[0] * (rows - 1) + 1 : stride[0], j : j + stride[1] * (across - 1) + 1 : stride[1]
            ]
            target += windows[:, :, i, j]
    return padded[..., padding[0] : padding[0] + height, padding[1] : padding[1] + width]


def _convolve_stack(images: Tensor, weights: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    outputs: Tensor = StackedConvolution.apply(images.transpose(1, 2), weights, stride, padding)
    return outputs.transpose(1, 2)


def _max_pool_stack(images: Tensor, options: tuple[Any, ...]) -> Tensor:
    stacked = images.transpose(1, 2)
    clients, channels, batch = stacked.shape[:3]
    kernel, stride, padding = (_pair(option) for option in (options[0], options[1] or options[0], options[2]))
    suits = images.is_cuda and _pair(options[3]) == (1, 1) and not options[4]
    kernels = find_kernels("pooling", "pooling", _try_pooling) if suits else None
    if kernels is not None and kernels.takes(stacked, kernel, stride, padding):
        outputs: Tensor = kernels.max_pool(stacked.flatten(0, 2), kernel, stride, padding)
        return outputs.view(clients, channels, batch, *outputs.shape[1:]).transpose(1, 2)
    pooled: Tensor = F.max_pool2d(stacked.reshape(clients * channels, *stacked.shape[2:]), *options)
    return pooled.view(clients, channels, batch, *pooled.shape[2:]).transpose(1, 2)


def _try_pooling(kernels: ModuleType) -> None:
    kernels.max_pool(torch.ones(2, 4, 4, device="cuda"), (2, 2), (2, 2), (0, 0))


def _attention_stack(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    mixed = F.scaled_dot_product_attention(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), **options)
    return mixed.view(*query.shape[:2], *mixed.shape[1:])


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if torch.is_autocast_enabled(input.device.type):
        working = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(working), weight.to(working)
    outputs = for_all_clients(_convolve_stack, (input, weight), _pair(stride), _pair(padding))
    return outputs if bias is None else outputs + bias.to(outputs.dtype)[:, None, None]


def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    options = (kernel_size, stride, padding, dilation, ceil_mode)
    if return_indices or input.dim() != 4:
        return F.max_pool2d(input, *options, return_indices)  # type: ignore[call-overload]
    return for_all_clients(_max_pool_stack, (input,), options)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the fused kernel for all clients at once, as one larger batch; dropout is handled elsewhere."""
    if attn_mask is not None or query.dim() < 4:
        return attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return for_all_clients(_attention_stack, (query, key, value), options)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    drop: Callable[[Tensor, float], Tensor] | None = None,
) -> Tensor:
    """Compute scaled dot-product attention by matrix products; ``drop`` is the dropout of its weights."""
    if enable_gqa:
        key, value = (shared.repeat_interleave(query.shape[-3] // shared.shape[-3], -3) for shared in (key, value))
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1)
    return (weights if drop is None else drop(weights, dropout_p)) @ value


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look rows up; the padding row gets no gradient, which the generic rule forgets for all clients but the first."""
    rows = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look the rows of each bag up and join them; the generic rule goes through the clients one by one.

    A bag of nothing but padding is zero, as it is in PyTorch. Bags of unequal length, given by their offsets, are left
    to the generic rule.
    """
    if offsets is not None or input.dim() != 2 or max_norm is not None:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, None, None, norm_type, scale_grad_by_freq, sparse)
    counted = torch.ones_like(input, dtype=torch.bool) if padding_idx is None else input != padding_idx % len(weight)
    counted = counted.unsqueeze(-1)
    if mode == "max":
        best = rows.masked_fill(~counted, -math.inf).max(1).values
        return torch.where(counted.any(1), best, best.new_zeros(()))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    total = torch.where(counted, rows, rows.new_zeros(())).sum(1)
    return total if mode == "sum" else total / counted.sum(1).clamp(min=1)


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """Outside of training a randomised leaky rectifier takes the mean slope; the generic rule does not know it."""
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


GPU_OPERATIONS: Operations = {
    torch.conv2d: _conv2d,
    F.conv2d: _conv2d,
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.max_pool2d: _max_pool2d,
    F.scaled_dot_product_attention: _attention,
}

CPU_OPERATIONS: Operations = {F.max_pool2d: cpu_pooling.max_pool2d, F.scaled_dot_product_attention: attention}

CORRECTED_OPERATIONS: Operations = {F.embedding: _embedding, F.embedding_bag: _embedding_bag, F.rrelu: _rrelu}
