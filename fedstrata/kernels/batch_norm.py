"""Batch norm for many clients, with what usually follows it: an addition and a rectifier.

A norm is bound by memory: as separate operations, statistics, normalising, addition and rectifier each read and write
all activations. Here one program reads a row of numbers that share their statistics, finds the statistics, and writes
the final outputs; what it reads a second time is still in registers or in the cache. On the way back the rectifier's
mask is computed again rather than kept: from the inputs or, where something was added, from the outputs, which the next
layer keeps anyway.

Sums run in a fixed order within one program, so results repeat bit for bit. Squares are taken of distances from the
mean of the row's first block, which loses at most a few times the rounding of a second pass: a block that holds a
fraction f of a row has a mean within sqrt((1 - f) / f) deviations of the row's.
"""

from typing import Any

import torch
import triton
import triton.language as language
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from fedstrata.kernels.launching import exact_type, on_device_of, warps_for

LARGEST = 8192
"""The most numbers that a program holds at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _batch_forward(  # type: ignore[no-untyped-def]
    inputs, added, outputs, weight, bias, running_mean, running_variance, means, inverses, count,
    MOMENTUM: constexpr, EPS: constexpr, TRAINING: constexpr,  # noqa: N803
    RECTIFIED: constexpr, TYPE: constexpr, BLOCK: constexpr, BLOCKS: constexpr,  # noqa: N803
):  # fmt: skip
    row = language.program_id(0).to(language.int64)
    start = row * count
    places = language.arange(0, BLOCK)
    if TRAINING or BLOCKS == 1:
        inside = places < count
        values = language.load(inputs + start + places, mask=inside, other=0.0).to(TYPE)
    if TRAINING:
        pivot = language.sum(values, 0) / language.minimum(count, BLOCK)
        apart = language.where(inside, values - pivot, 0.0)
        if BLOCKS == 1:
            mean = pivot
            spread = language.sum(apart * apart, 0)
        else:
            totals = apart
            squares = apart * apart
            for index in range(1, BLOCKS):
                first = index * BLOCK
                within = first + places < count
                more = language.load(inputs + start + first + places, mask=within, other=0.0).to(TYPE)
                apart = language.where(within, more - pivot, 0.0)
                totals += apart
                squares += apart * apart
            total = language.sum(totals, 0)
            mean = pivot + total / count
            spread = language.sum(squares, 0) - total * total / count
        inverse = language.rsqrt(spread / count + EPS)
        if running_mean is not None:
            kept = language.load(running_mean + row).to(TYPE) * (1 - MOMENTUM) + mean * MOMENTUM
            language.store(running_mean + row, kept)
            unbiased = spread / (count - 1)
            kept = language.load(running_variance + row).to(TYPE) * (1 - MOMENTUM) + unbiased * MOMENTUM
            language.store(running_variance + row, kept)
    else:
        mean = language.load(running_mean + row).to(TYPE)
        inverse = language.rsqrt(language.load(running_variance + row).to(TYPE) + EPS)
    language.store(means + row, mean)
    language.store(inverses + row, inverse)
    scale = inverse
    shift = 0.0
    if weight is not None:
        scale = inverse * language.load(weight + row).to(TYPE)
    if bias is not None:
        shift = language.load(bias + row).to(TYPE)
    if BLOCKS == 1:
        result = (values - mean) * scale + shift
        if added is not None:
            result += language.load(added + start + places, mask=inside, other=0.0).to(TYPE)
        if RECTIFIED:
            result = language.where(result <= 0, 0.0, result)
        language.store(outputs + start + places, result, mask=inside)
    else:
        for index in range(BLOCKS):
            first = (BLOCKS - 1 - index) * BLOCK  # what was read last is nearest
            within = first + places < count
            again = language.load(inputs + start + first + places, mask=within, other=0.0).to(TYPE)
            result = (again - mean) * scale + shift
            if added is not None:
                result += language.load(added + start + first + places, mask=within, other=0.0).to(TYPE)
            if RECTIFIED:
                result = language.where(result <= 0, 0.0, result)
            language.store(outputs + start + first + places, result, mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def passed(gradient, normal, outputs, places, inside, factor, shift, RECTIFIED: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Let the gradient through where the rectifier did."""
    if RECTIFIED:
        if outputs is not None:
            positive = language.load(outputs + places, mask=inside, other=0.0) > 0
        else:
            positive = normal * factor + shift > 0
        gradient = language.where(positive, gradient, 0.0)
    return gradient


@triton.jit  # type: ignore[untyped-decorator]
def _batch_backward(  # type: ignore[no-untyped-def]
    gradients, inputs, outputs, weight, bias, means, inverses, for_inputs, for_added, for_weight, for_bias, count,
    TRAINING: constexpr, RECTIFIED: constexpr, TYPE: constexpr,  # noqa: N803
    BLOCK: constexpr, BLOCKS: constexpr,  # noqa: N803
):  # fmt: skip
    row = language.program_id(0).to(language.int64)
    start = row * count
    places = language.arange(0, BLOCK)
    mean = language.load(means + row)
    inverse = language.load(inverses + row)
    scale = inverse
    shift = 0.0
    if weight is not None:
        scale = inverse * language.load(weight + row).to(TYPE)
    if bias is not None:
        shift = language.load(bias + row).to(TYPE)
    if BLOCKS == 1:
        inside = places < count
        value = language.load(inputs + start + places, mask=inside, other=0.0).to(TYPE)
        gradient = language.load(gradients + start + places, mask=inside, other=0.0).to(TYPE)
        apart = language.where(inside, value - mean, 0.0)
        gradient = passed(gradient, apart, outputs, start + places, inside, scale, shift, RECTIFIED)
        if for_added is not None:
            language.store(for_added + start + places, gradient, mask=inside)
        totals = gradient
        products = gradient * apart
    else:
        totals = language.zeros([BLOCK], dtype=TYPE)
        products = language.zeros([BLOCK], dtype=TYPE)
        for index in range(BLOCKS):
            first = index * BLOCK
            here = start + first + places
            within = first + places < count
            value = language.load(inputs + here, mask=within, other=0.0, eviction_policy="evict_last").to(TYPE)
            gradient = language.load(gradients + here, mask=within, other=0.0).to(TYPE)
            apart = language.where(within, value - mean, 0.0)
            gradient = passed(gradient, apart, outputs, here, within, scale, shift, RECTIFIED)
            if for_added is not None:
                language.store(for_added + here, gradient, mask=within)
            totals += gradient
            products += gradient * apart
    total = language.sum(totals, 0)
    product = language.sum(products, 0) * inverse
    if for_weight is not None:
        language.store(for_weight + row, product)
    if for_bias is not None:
        language.store(for_bias + row, total)
    if TRAINING:
        level = total / count
        slope = product * inverse / count
    else:
        level = total * 0
        slope = total * 0
    if for_inputs is not None:
        if BLOCKS == 1:
            language.store(for_inputs + start + places, (gradient - level - apart * slope) * scale, mask=inside)
        else:
            for index in range(BLOCKS):
                first = (BLOCKS - 1 - index) * BLOCK
                here = start + first + places
                within = first + places < count
                value = language.load(inputs + here, mask=within, other=0.0, eviction_policy="evict_first").to(TYPE)
                gradient = language.load(gradients + here, mask=within, other=0.0).to(TYPE)
                apart = value - mean
                gradient = passed(gradient, apart, outputs, here, within, scale, shift, RECTIFIED)
                result = (gradient - level - apart * slope) * scale
                language.store(for_inputs + here, result, mask=within, eviction_policy="evict_first")


class _BatchNorm(torch.autograd.Function):
    """Normalise rows ``[rows, count]``, each with statistics, weight and bias of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        added: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        training: bool,
        momentum: float,
        eps: float,
        rectified: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        rows, count = inputs.shape
        outputs = torch.empty_like(inputs, dtype=dtype)
        exact = torch.float64 if inputs.dtype == torch.float64 else torch.float32
        means, inverses = inputs.new_empty(2, rows, dtype=exact).unbind()
        block = _block(count, inputs)
        with on_device_of(inputs):
            _batch_forward[(rows,)](
                inputs, added, outputs, weight, bias, *running, means, inverses, count, momentum, eps, training,
                rectified, exact_type(exact), block, triton.cdiv(count, block), num_warps=warps_for(block),
            )  # fmt: skip
        needed = outputs if rectified and added is not None else None
        ctx.save_for_backward(inputs, needed, weight, bias, means, inverses)
        ctx.options = training, rectified, None if added is None else added.dtype
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs, weight, bias, means, inverses = ctx.saved_tensors
        training, rectified, added = ctx.options
        gradients = gradients.contiguous()
        rows, count = inputs.shape
        for_inputs = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        for_added = for_weight = for_bias = None
        if added is not None and ctx.needs_input_grad[1]:
            for_added = torch.empty_like(inputs, dtype=added) if rectified else gradients.to(added)
        if weight is not None and ctx.needs_input_grad[2]:
            for_weight = torch.empty_like(weight)
        if bias is not None and ctx.needs_input_grad[3]:
            for_bias = torch.empty_like(bias)
        block = _block(count, inputs)
        with on_device_of(inputs):
            _batch_backward[(rows,)](
                gradients, inputs, outputs, weight, bias, means, inverses, for_inputs,
                for_added if rectified else None, for_weight, for_bias, count, training, rectified,
                exact_type(inputs.dtype), block, triton.cdiv(count, block), num_warps=warps_for(block),
            )  # fmt: skip
        return for_inputs, for_added, for_weight, for_bias, None, None, None, None, None, None


def _block(count: int, inputs: Tensor) -> int:
    """Choose how many numbers of a row a program holds at once: all, or as many as were fastest on an H200."""
    whole = max(64, triton.next_power_of_2(count))
    return whole if whole <= LARGEST else LARGEST if inputs.element_size() == 4 else LARGEST // 2


def batch_norm(
    inputs: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    added: Tensor | None = None,
    rectified: bool = False,
) -> Tensor:
    """Normalise each row of ``[rows, count]``, add what is ``added``, rectify if asked: one launch either way.

    Running statistics ``[rows]`` are updated in place while training, and taken where not.
    """
    dtype = inputs.dtype if added is None else torch.promote_types(inputs.dtype, added.dtype)
    running = running_mean, running_variance
    added = None if added is None else added.contiguous()
    result: Tensor = _BatchNorm.apply(
        inputs.contiguous(), added, weight, bias, running, training, momentum, eps, rectified,
        dtype,
    )  # fmt: skip
    return result
