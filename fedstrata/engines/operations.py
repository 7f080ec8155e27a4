"""Hand-made operations for many clients at once, used inside ``vmap`` where its generic rule is slow, or wrong.

``vmap`` turns the convolutions of K clients into one grouped convolution, which GPU libraries run far below their
speed. Here images of all clients lie in memory as ``[K, channels, batch, height, width]``: a convolution is then one
batched matrix product (``convolution.py``), norms are one call over ``K * channels`` channels (``norms.py``), and
pooling needs no copy (``pooling.py``). To the model nothing changes: it still sees images ``[batch, channels, height,
width]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.engines import cpu_pooling
from fedstrata.engines.convolution import StackedConvolution
from fedstrata.engines.norms import batch_norm, group_norm
from fedstrata.engines.pooling import max_pool2d
from fedstrata.fused import pair
from fedstrata.private_torch import for_all_clients

Operations = dict[Callable[..., Any], Callable[..., Any]]


def stacked_operations(device: torch.device) -> Operations:
    """Tell which torch functions to replace on a device.

    On a CPU the generic rules for images are the faster ones, but for pooling, and for attention there is none.
    """
    return CORRECTED_OPERATIONS | (GPU_OPERATIONS if device.type == "cuda" else CPU_OPERATIONS)


def loop_operations(device: torch.device) -> Operations:
    """Tell which torch functions to replace on a device where clients are called one by one."""
    return {F.max_pool2d: cpu_pooling.max_pool2d} if device.type == "cpu" else {}


def _convolve_stack(images: Tensor, weights: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    outputs: Tensor = StackedConvolution.apply(images.transpose(1, 2), weights, stride, padding)
    return outputs.transpose(1, 2)


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
    if groups != 1 or pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    outputs = for_all_clients(_convolve_stack, (input, weight), pair(stride), pair(padding))
    return outputs if bias is None else outputs + bias.to(outputs.dtype)[:, None, None]


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


GPU_OPERATIONS: Operations = {
    torch.conv2d: _conv2d,
    F.conv2d: _conv2d,
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.max_pool2d: max_pool2d,
    F.scaled_dot_product_attention: _attention,
}

CPU_OPERATIONS: Operations = {F.max_pool2d: cpu_pooling.max_pool2d, F.scaled_dot_product_attention: attention}

CORRECTED_OPERATIONS: Operations = {F.embedding: _embedding, F.embedding_bag: _embedding_bag, F.rrelu: _rrelu}
