"""Group norm for many clients, with what usually follows it: as batch norm, but each sample of a group by itself.

Images of a client's channels lie one sample after another, so a program reads a few lines of pixels, one from each
channel of its group. The sums for weights and biases are kept for each sample, and added up in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as language
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from fedstrata.kernels.batch_norm import passed
from fedstrata.kernels.launching import exact_type, on_device_of, warps_for

LARGEST = 4096
"""The most numbers that a program holds at once."""
MOST_CHANNELS = 1024
"""The most channels of a group that a program can hold."""


@triton.jit  # type: ignore[untyped-decorator]
def _group_forward(  # type: ignore[no-untyped-def]
    inputs, added, outputs, weight, bias, means, inverses, samples, channels, pixels,
    EPS: constexpr, RECTIFIED: constexpr, TYPE: constexpr,  # noqa: N803
    CHANNELS: constexpr, BLOCK: constexpr, BLOCKS: constexpr,  # noqa: N803
):  # fmt: skip
    row = language.program_id(0).to(language.int64)
    group = row // samples
    lines = language.arange(0, CHANNELS)[:, None]
    columns = language.arange(0, BLOCK)[None, :]
    there = lines < channels
    start = group * channels * samples * pixels + row % samples * pixels
    places = start + lines * (samples * pixels) + columns
    count = channels * pixels
    inside = there & (columns < pixels)
    values = language.load(inputs + places, mask=inside, other=0.0).to(TYPE)
    pivot = language.sum(language.sum(values, 1), 0) / (channels * language.minimum(pixels, BLOCK))
    apart = language.where(inside, values - pivot, 0.0)
    if BLOCKS == 1:
        mean = pivot
        spread = language.sum(language.sum(apart * apart, 1), 0)
    else:
        totals = apart
        squares = apart * apart
        for index in range(1, BLOCKS):
            first = index * BLOCK
            within = there & (first + columns < pixels)
            more = language.load(inputs + places + first, mask=within, other=0.0).to(TYPE)
            apart = language.where(within, more - pivot, 0.0)
            totals += apart
            squares += apart * apart
        total = language.sum(language.sum(totals, 1), 0)
        mean = pivot + total / count
        spread = language.sum(language.sum(squares, 1), 0) - total * total / count
    inverse = language.rsqrt(spread / count + EPS)
    language.store(means + row, mean)
    language.store(inverses + row, inverse)
    scale = language.zeros([CHANNELS, 1], dtype=TYPE) + inverse
    shift = language.zeros([CHANNELS, 1], dtype=TYPE)
    if weight is not None:
        scale = scale * language.load(weight + group * channels + lines, mask=there, other=0.0).to(TYPE)
    if bias is not None:
        shift = language.load(bias + group * channels + lines, mask=there, other=0.0).to(TYPE)
    if BLOCKS == 1:
        result = (values - mean) * scale + shift
        if added is not None:
            result += language.load(added + places, mask=inside, other=0.0).to(TYPE)
        if RECTIFIED:
            result = language.where(result <= 0, 0.0, result)
        language.store(outputs + places, result, mask=inside)
    else:
        for index in range(BLOCKS):
            first = index * BLOCK
            within = there & (first + columns < pixels)
            again = language.load(inputs + places + first, mask=within, other=0.0).to(TYPE)
            result = (again - mean) * scale + shift
            if added is not None:
                result += language.load(added + places + first, mask=within, other=0.0).to(TYPE)
            if RECTIFIED:
                result = language.where(result <= 0, 0.0, result)
            language.store(outputs + places + first, result, mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def _group_backward(  # type: ignore[no-untyped-def]
    gradients, inputs, outputs, weight, bias, means, inverses, for_inputs, for_added, for_weight, for_bias,
    samples, channels, pixels, RECTIFIED: constexpr, TYPE: constexpr,  # noqa: N803
    CHANNELS: constexpr, BLOCK: constexpr, BLOCKS: constexpr,  # noqa: N803
):  # fmt: skip
    row = language.program_id(0).to(language.int64)
    group = row // samples
    sample = row % samples
    lines = language.arange(0, CHANNELS)[:, None]
    columns = language.arange(0, BLOCK)[None, :]
    there = lines < channels
    start = group * channels * samples * pixels + sample * pixels
    places = start + lines * (samples * pixels) + columns
    mean = language.load(means + row)
    inverse = language.load(inverses + row)
    factor = language.zeros([CHANNELS, 1], dtype=TYPE) + 1
    shift = language.zeros([CHANNELS, 1], dtype=TYPE)
    if weight is not None:
        factor = language.load(weight + group * channels + lines, mask=there, other=0.0).to(TYPE)
    if bias is not None:
        shift = language.load(bias + group * channels + lines, mask=there, other=0.0).to(TYPE)
    scale = factor * inverse
    if BLOCKS == 1:
        inside = there & (columns < pixels)
        value = language.load(inputs + places, mask=inside, other=0.0).to(TYPE)
        gradient = language.load(gradients + places, mask=inside, other=0.0).to(TYPE)
        apart = language.where(inside, value - mean, 0.0)
        gradient = passed(gradient, apart, outputs, places, inside, scale, shift, RECTIFIED)
        if for_added is not None:
            language.store(for_added + places, gradient, mask=inside)
        totals = gradient
        products = gradient * apart
    else:
        totals = language.zeros([CHANNELS, BLOCK], dtype=TYPE)
        products = language.zeros([CHANNELS, BLOCK], dtype=TYPE)
        for index in range(BLOCKS):
            first = index * BLOCK
            within = there & (first + columns < pixels)
            value = language.load(inputs + places + first, mask=within, other=0.0).to(TYPE)
            gradient = language.load(gradients + places + first, mask=within, other=0.0).to(TYPE)
            apart = language.where(within, value - mean, 0.0)
            gradient = passed(gradient, apart, outputs, places + first, within, scale, shift, RECTIFIED)
            if for_added is not None:
                language.store(for_added + places + first, gradient, mask=within)
            totals += gradient
            products += gradient * apart
    total = language.sum(totals, 1)[:, None]
    product = language.sum(products, 1)[:, None] * inverse
    own = (group * channels + lines) * samples + sample
    if for_weight is not None:
        language.store(for_weight + own, product, mask=there)
    if for_bias is not None:
        language.store(for_bias + own, total, mask=there)
    if for_inputs is not None:
        count = channels * pixels
        level = language.sum(language.sum(total * factor, 1), 0) / count * inverse
        slope = language.sum(language.sum(product * factor, 1), 0) / count * inverse * inverse
        if BLOCKS == 1:
            language.store(for_inputs + places, gradient * scale - level - apart * slope, mask=inside)
        else:
            for index in range(BLOCKS):
                first = (BLOCKS - 1 - index) * BLOCK
                within = there & (first + columns < pixels)
                apart = language.load(inputs + places + first, mask=within, other=0.0).to(TYPE) - mean
                gradient = language.load(gradients + places + first, mask=within, other=0.0).to(TYPE)
                gradient = passed(gradient, apart, outputs, places + first, within, scale, shift, RECTIFIED)
                language.store(for_inputs + places + first, gradient * scale - level - apart * slope, mask=within)


class _GroupNorm(torch.autograd.Function):
    """Normalise images ``[groups, channels of a group, samples, pixels]``, each sample of a group by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        added: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        rectified: bool,
    ) -> Tensor:
        groups, channels, samples, pixels = inputs.shape
        dtype = inputs.dtype if added is None else torch.promote_types(inputs.dtype, added.dtype)
        outputs = torch.empty_like(inputs, dtype=dtype)
        exact = torch.float64 if inputs.dtype == torch.float64 else torch.float32
        means, inverses = inputs.new_empty(2, groups * samples, dtype=exact).unbind()
        lines, block, warps = _tile(channels, pixels)
        with on_device_of(inputs):
            _group_forward[(groups * samples,)](
                inputs, added, outputs, weight, bias, means, inverses, samples, channels, pixels, eps, rectified,
                exact_type(exact), lines, block, triton.cdiv(pixels, block), num_warps=warps,
            )  # fmt: skip
        needed = outputs if rectified and added is not None else None
        ctx.save_for_backward(inputs, needed, weight, bias, means, inverses)
        ctx.options = rectified, None if added is None else added.dtype
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs, weight, bias, means, inverses = ctx.saved_tensors
        rectified, added = ctx.options
        gradients = gradients.contiguous()
        groups, channels, samples, pixels = inputs.shape
        for_inputs = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        for_added = None
        if added is not None and ctx.needs_input_grad[1]:
            for_added = torch.empty_like(inputs, dtype=added) if rectified else gradients.to(added)
        sums = means.new_empty(2, groups * channels, samples)
        learns = weight is not None and ctx.needs_input_grad[2], bias is not None and ctx.needs_input_grad[3]
        lines, block, warps = _tile(channels, pixels)
        with on_device_of(inputs):
            _group_backward[(groups * samples,)](
                gradients, inputs, outputs, weight, bias, means, inverses, for_inputs,
                for_added if rectified else None, sums[0] if learns[0] else None, sums[1] if learns[1] else None,
                samples, channels, pixels, rectified, exact_type(inputs.dtype), lines, block,
                triton.cdiv(pixels, block), num_warps=warps,
            )  # fmt: skip
        for_weight = for_bias = None
        if any(learns):
            added_up = sums.sum(-1)
            for_weight = added_up[0].to(weight.dtype) if learns[0] else None
            for_bias = added_up[1].to(bias.dtype) if learns[1] else None
        return for_inputs, for_added, for_weight, for_bias, None, None


def _tile(channels: int, pixels: int) -> tuple[int, int, int]:
    """Choose the channels and pixels that a program holds at once, and its warps."""
    lines = triton.next_power_of_2(channels)
    block = min(max(LARGEST // lines, 4), triton.next_power_of_2(pixels))
    return lines, block, warps_for(lines * block)


def group_norm(
    inputs: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    added: Tensor | None = None,
    rectified: bool = False,
) -> Tensor:
    """Normalise ``[K, C, B, pixels]`` over each client's groups of channels, sample by sample; add, rectify if asked.

    ``weight`` and ``bias`` are ``[K * C]``; the outputs are of the type of the inputs, or of a wider one that is added.
    """
    clients, channels, samples, pixels = inputs.shape
    shape = clients * groups, channels // groups, samples, pixels
    added = None if added is None else added.contiguous().view(shape)
    result: Tensor = _GroupNorm.apply(inputs.contiguous().view(shape), added, weight, bias, eps, rectified)
    return result.view(inputs.shape)
