"""Batch norm for many clients, with what usually follows it: an addition, a rectifier, perhaps a max-pooling.

A norm is bound by memory: as separate operations, statistics, normalising, addition and rectifier each read and write
all activations. Here one program reads a row of numbers that share their statistics, finds the statistics, and writes
the final outputs; what it reads a second time is still in registers or in the cache. On the way back the rectifier's
mask is computed again rather than kept: from the inputs or, where something was added, from the outputs, which the next
layer keeps anyway. Of images that are pooled only the pooled ones are kept, and which pixel of each window won; the
gradient of a pixel is gathered from the windows that hold it (:mod:`fedstrata.kernels.pooling`), and never written. In
16 bits the program that normalises also pools; in 32 it would read rows from memory a second time, and a second launch
is quicker.

Sums run in a fixed order within one program, so results repeat bit for bit. Squares are taken of distances from the
mean of the row's first block, which loses at most a few times the rounding of a second pass: a block that holds a
fraction f of a row has a mean within sqrt((1 - f) / f) deviations of the row's.
"""

import math
from typing import Any

import torch
import triton
import triton.language as language
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

from fedstrata.kernels.launching import exact_type, on_device_of, warps_for
from fedstrata.kernels.pooling import Pooling, best_of_window, gradient_of_pixel, pixels_of_patch, pool, pooling_of

__all__ = ["LARGEST", "POOLED_APART", "batch_norm", "passed", "pooling_of"]

LARGEST = 8192
"""The most numbers that a program holds at once."""

POOLED_APART = 4
"""From how many bytes a number on a launch of its own pools what was normalised."""


@triton.jit  # type: ignore[untyped-decorator]
def _batch_forward(  # type: ignore[no-untyped-def]
    inputs, added, outputs, winners, weight, bias, running_mean, running_variance, means, inverses, count, place_count,
    MOMENTUM: constexpr, EPS: constexpr, TRAINING: constexpr,  # noqa: N803
    RECTIFIED: constexpr, TYPE: constexpr, BLOCK: constexpr, BLOCKS: constexpr,  # noqa: N803
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr, WINDOWS: constexpr, PASSES: constexpr,  # noqa: N803
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
    if winners is not None:
        sign = language.where(scale < 0, -1.0, 1.0).to(TYPE)
        for index in range(PASSES):
            window = (PASSES - 1 - index) * WINDOWS + language.arange(0, WINDOWS)  # what was read last is nearest
            best, winner = best_of_window(
                inputs + start, window, window < place_count, sign, TYPE, HEIGHT, WIDTH, ROWS, ACROSS, STRIDE_DOWN,
                STRIDE_ACROSS, PAD_DOWN, PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH, WINDOWS,
            )  # fmt: skip
            result = (best * sign - mean) * scale + shift
            if RECTIFIED:
                result = language.where(result <= 0, 0.0, result)
            language.store(outputs + row * place_count + window, result, mask=window < place_count)
            language.store(winners + row * place_count + window, winner.to(language.uint8), mask=window < place_count)
    elif BLOCKS == 1:
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
    gradients, inputs, outputs, winners, weight, bias, means, inverses, for_inputs, for_added, for_weight, for_bias,
    count, place_count, TRAINING: constexpr, RECTIFIED: constexpr, TYPE: constexpr,  # noqa: N803
    BLOCK: constexpr, BLOCKS: constexpr,  # noqa: N803
    HEIGHT: constexpr, WIDTH: constexpr, ROWS: constexpr, ACROSS: constexpr,  # noqa: N803
    STRIDE_DOWN: constexpr, STRIDE_ACROSS: constexpr, PAD_DOWN: constexpr, PAD_ACROSS: constexpr,  # noqa: N803
    KERNEL_HEIGHT: constexpr, KERNEL_WIDTH: constexpr,  # noqa: N803
    PATCHES_DOWN: constexpr, PATCHES_ACROSS: constexpr, WINDOWS: constexpr, PASSES: constexpr,  # noqa: N803
    PATCH_PASSES: constexpr,  # noqa: N803
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
    if winners is not None:
        totals = language.zeros([WINDOWS], dtype=TYPE)
        products = language.zeros([WINDOWS], dtype=TYPE)
        for index in range(PASSES):
            window = index * WINDOWS + language.arange(0, WINDOWS)
            known = window < place_count
            winner = language.load(winners + row * place_count + window, mask=known, other=0).to(language.int32)
            y = window // ACROSS % ROWS * STRIDE_DOWN - PAD_DOWN + winner // KERNEL_WIDTH
            x = window % ACROSS * STRIDE_ACROSS - PAD_ACROSS + winner % KERNEL_WIDTH
            pixel = start + (window // (ROWS * ACROSS) * HEIGHT + y) * WIDTH + x
            value = language.load(inputs + pixel, mask=known, other=0.0, eviction_policy="evict_last").to(TYPE)
            gradient = language.load(gradients + row * place_count + window, mask=known, other=0.0).to(TYPE)
            apart = language.where(known, value - mean, 0.0)
            gradient = passed(gradient, apart, None, window, known, scale, shift, RECTIFIED)
            totals += gradient
            products += gradient * apart
    elif BLOCKS == 1:
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
        if winners is not None:
            patch_count = count // (HEIGHT * WIDTH) * (PATCHES_DOWN * PATCHES_ACROSS)
            PAIR: constexpr = 2 - STRIDE_ACROSS % 2  # neighbours are read and written together  # noqa: N806
            for index in range(PATCH_PASSES):
                patch = (PATCH_PASSES - 1 - index) * WINDOWS + language.arange(0, WINDOWS)
                known = patch < patch_count
                across = patch % PATCHES_ACROSS
                down = patch // PATCHES_ACROSS % PATCHES_DOWN
                sample = patch // (PATCHES_DOWN * PATCHES_ACROSS)
                window = row * place_count + (sample * ROWS + down) * ACROSS + across
                corner = start + (sample * HEIGHT + down * STRIDE_DOWN) * WIDTH + across * STRIDE_ACROSS
                for i in language.static_range(STRIDE_DOWN):
                    for j in language.static_range(0, STRIDE_ACROSS, PAIR):
                        gradient = gradient_of_pixel(
                            gradients, winners, window, down, across, known, i, j, TYPE, ROWS, ACROSS, STRIDE_DOWN,
                            STRIDE_ACROSS, PAD_DOWN, PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH, PATCHES_DOWN,
                            PATCHES_ACROSS, WINDOWS,
                        )  # fmt: skip
                        here, within = pixels_of_patch(
                            down, across, known, i, j, HEIGHT, WIDTH, STRIDE_DOWN, STRIDE_ACROSS, PAIR
                        )  # fmt: skip
                        if PAIR == 2:
                            other = gradient_of_pixel(
                                gradients, winners, window, down, across, known, i, j + 1, TYPE, ROWS, ACROSS,
                                STRIDE_DOWN, STRIDE_ACROSS, PAD_DOWN, PAD_ACROSS, KERNEL_HEIGHT, KERNEL_WIDTH,
                                PATCHES_DOWN, PATCHES_ACROSS, WINDOWS,
                            )  # fmt: skip
                            gradient = language.join(gradient, other)
                            here = corner[:, None] + here
                        else:
                            here = corner + here
                        value = language.load(inputs + here, mask=within, other=0.0).to(TYPE)
                        apart = value - mean
                        gradient = passed(gradient, apart, None, here, within, scale, shift, RECTIFIED)
                        language.store(for_inputs + here, (gradient - level - apart * slope) * scale, mask=within)
        elif BLOCKS == 1:
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
        pooling: Pooling | None,
    ) -> Tensor:
        rows, count = inputs.shape
        inside, apart = (None, pooling) if inputs.element_size() >= POOLED_APART else (pooling, None)
        places = _places(count, inside)
        outputs = inputs.new_empty(rows, places, dtype=dtype)
        winners = None if inside is None else torch.empty_like(outputs, dtype=torch.uint8)
        exact = torch.float64 if inputs.dtype == torch.float64 else torch.float32
        means, inverses = inputs.new_empty(2, rows, dtype=exact).unbind()
        block = _block(count, inputs)
        windows = _windows(block)
        geometry, passes = _NO_GEOMETRY, 0
        if inside is not None:
            geometry, passes = inside.geometry, triton.cdiv(places, windows)
        with on_device_of(inputs):
            _batch_forward[(rows,)](
                inputs, added, outputs, winners, weight, bias, *running, means, inverses, count, places, momentum, eps,
                training, rectified, exact_type(exact), block, triton.cdiv(count, block), *geometry, windows,
                passes, num_warps=warps_for(block),
            )  # fmt: skip
        if apart is not None:
            outputs, winners = (found.view(rows, -1) for found in pool(outputs.view(-1, *apart.size), apart))
        needed = outputs if rectified and added is not None else None
        ctx.save_for_backward(inputs, needed, winners, weight, bias, means, inverses)
        ctx.options = training, rectified, None if added is None else added.dtype, pooling
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs, winners, weight, bias, means, inverses = ctx.saved_tensors
        training, rectified, added, pooling = ctx.options
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
        places, windows = _places(count, pooling), _windows(block)
        geometry, passes = (*_NO_GEOMETRY, 0, 0), (0, 0)
        if pooling is not None:
            patches = count // math.prod(pooling.size) * math.prod(pooling.patches)
            geometry = (*pooling.geometry, *pooling.patches)
            passes = triton.cdiv(places, windows), triton.cdiv(patches, windows)
        with on_device_of(inputs):
            _batch_backward[(rows,)](
                gradients, inputs, outputs, winners, weight, bias, means, inverses, for_inputs,
                for_added if rectified else None, for_weight, for_bias, count, places, training, rectified,
                exact_type(inputs.dtype), block, triton.cdiv(count, block), *geometry, windows,
                *passes, num_warps=warps_for(block),
            )  # fmt: skip
        return for_inputs, for_added, for_weight, for_bias, None, None, None, None, None, None, None


_NO_GEOMETRY: tuple[int, ...] = (0,) * 10


def _places(count: int, pooling: Pooling | None) -> int:
    """Tell how many numbers of a row are written: all, or one for each window."""
    if pooling is None:
        return count
    return count // math.prod(pooling.size) * math.prod(pooling.windows)


def _block(count: int, inputs: Tensor) -> int:
    """Choose how many numbers of a row a program holds at once: all, or as many as were fastest on an H200."""
    whole = max(64, triton.next_power_of_2(count))
    return whole if whole <= LARGEST else LARGEST if inputs.element_size() == 4 else LARGEST // 2


def _windows(block: int) -> int:
    """Choose how many windows a program pools at once: four for each thread."""
    return max(32, block // 4)


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
    pooling: Pooling | None = None,
) -> Tensor:
    """Normalise each row of ``[rows, count]``, add what is ``added``, rectify, pool if asked.

    Running statistics ``[rows]`` are updated in place while training, and taken where not. Rows that are pooled are
    images of the size that ``pooling`` names, one after another, to which nothing is added.
    """
    assert pooling is None or added is None
    dtype = inputs.dtype if added is None else torch.promote_types(inputs.dtype, added.dtype)
    running = running_mean, running_variance
    added = None if added is None else added.contiguous()
    result: Tensor = _BatchNorm.apply(
        inputs.contiguous(), added, weight, bias, running, training, momentum, eps, rectified, dtype, pooling
    )
    return result
