"""Convolutions of K clients' images with K clients' own weights, as matrix products that never write windows to memory.

Every client has one product: its weights ``[O, h * w * C]`` with the windows ``[h * w * C, B * H' * W']``. The images
are first rearranged to ``[K, B, H, W, C]``, with a border of zeros: then one row of a window is ``w * C`` numbers in one
piece, which a program reads in wide loads, in the order in which the tensor cores want them, and never has to ask
whether a pixel lies inside of the image. This costs one pass over the images, where windows cost ``h * w`` of them.

The gradient for the images is such a product again: at stride one of the gradient with the weights turned around, and
at stride ``s`` one for each of the ``s * s`` classes of pixels that are hit by the same taps, so that nothing has to be
added back. The gradient for the weights sums over the places. Where there are few weights, several programs share the
places; their parts are added up in a fixed order, so that results repeat bit for bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

Pair = tuple[int, int]
_BLOCK = 1024


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes, and how it does so."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3
    splits: int = 1


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(values, NARROW: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Round float32 to the nearest number of 10 bits: tensor cores would cut the others off."""
    if NARROW:
        bits = values.to(language.int32, bitcast=True)
        nearest = ((bits + 0x1000) & -0x2000).to(language.float32, bitcast=True)
        values = language.where(values == values, nearest, values)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _rearrange_images(  # type: ignore[no-untyped-def] # Triton reads the annotations: there may be no others
    images, rearranged, channels, height, width, client_step, channel_step, sample_step,
    pixel_count, padded_height, padded_width, pad_down, pad_across,
    CHANNELS: constexpr, NARROW: constexpr, PARTED: constexpr, SOME: constexpr, PIXELS: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(2).to(language.int64)
    channel = language.program_id(1) * SOME + language.arange(0, SOME)
    pixel = language.program_id(0) * PIXELS + language.arange(0, PIXELS)
    x = pixel % padded_width - pad_across
    y = pixel // padded_width % padded_height - pad_down
    sample = pixel // padded_width // padded_height
    inside = (pixel < pixel_count) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    place = sample * sample_step + y * width + x
    source = images + client * client_step + (channel[:, None] * channel_step + place[None, :])
    values = language.load(source, mask=(channel < channels)[:, None] & inside[None, :], other=0.0)
    values = language.trans(_rounded(values, NARROW))
    target = rearranged + client * pixel_count * CHANNELS + (pixel[:, None] * CHANNELS + channel[None, :])
    here = (pixel < pixel_count)[:, None] & (channel < CHANNELS)[None, :]
    if PARTED:
        coarse = values.to(language.bfloat16)
        rest = language.num_programs(2).to(language.int64) * pixel_count * CHANNELS
        language.store(target, coarse, mask=here)
        language.store(target + rest, (values - coarse.to(language.float32)).to(language.bfloat16), mask=here)
    else:
        language.store(target, values, mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _rearrange_weights(  # type: ignore[no-untyped-def]
    weights, rearranged, row_count, channels, client_step, row_step, channel_step, down_step, across_step, first,
    TAPS_DOWN: constexpr, TAPS_ACROSS: constexpr, CHANNELS: constexpr, RUN: constexpr,  # noqa: N803
    NARROW: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(1).to(language.int64)
    place = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    run = place % RUN
    down = place // RUN % TAPS_DOWN
    row = place // RUN // TAPS_DOWN
    across = run // CHANNELS
    channel = run % CHANNELS
    known = (row < row_count) & (across < TAPS_ACROSS) & (channel < channels)
    source = first + row * row_step + channel * channel_step + down * down_step + across * across_step
    values = language.load(weights + client * client_step + source, mask=known, other=0.0)
    count = row_count * TAPS_DOWN * RUN
    language.store(rearranged + client * count + place, _rounded(values, NARROW), mask=place < count)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    weights, images, outputs, row_count, place_count, grid_height, grid_width, client_pixels, padded_height,
    padded_width, step_down, step_across, first_down, first_across,
    output_client_step, output_row_step, output_sample_step, output_down_step, output_across_step,
    TAPS_DOWN: constexpr, TAPS_ACROSS: constexpr, CHANNELS: constexpr, RUN: constexpr,  # noqa: N803
    FLAT: constexpr, WIDE: constexpr, PRECISION: constexpr, ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(2).to(language.int64)
    row = language.program_id(1) * ROWS + language.arange(0, ROWS)
    place = language.program_id(0) * COLUMNS + language.arange(0, COLUMNS)
    known = language.minimum(place, place_count - 1)
    across = known % grid_width
    down = known // grid_width % grid_height
    sample = known // grid_width // grid_height
    y = sample * padded_height + down * step_down + first_down
    pixel = y * padded_width + across * step_across + first_across
    inner = language.arange(0, INNER)
    image = images + client * client_pixels * CHANNELS + (pixel * CHANNELS)[:, None] + inner[None, :]
    factor = weights + client * row_count * (TAPS_DOWN * RUN)
    factor += (language.minimum(row, row_count - 1) * (TAPS_DOWN * RUN))[:, None] + inner[None, :]
    total = language.full((ROWS, COLUMNS), 0.0, language.float32)
    for start in range(0, TAPS_DOWN * RUN, INNER):
        run = start % RUN
        line = language.multiple_of(start // RUN * (padded_width * CHANNELS) + run, WIDE)
        if RUN == TAPS_ACROSS * CHANNELS:
            gathered = language.load(image + line)
        else:
            gathered = language.load(image + line, mask=(run + inner < TAPS_ACROSS * CHANNELS)[None, :], other=0.0)
        factors = language.load(factor + start)
        total = language.dot(factors, language.trans(gathered), total, input_precision=PRECISION)
    if FLAT:
        where = place
    else:
        across = place % grid_width
        down = place // grid_width % grid_height
        sample = place // grid_width // grid_height
        where = sample * output_sample_step + down * output_down_step + across * output_across_step
    target = outputs + client * output_client_step + (row[:, None] * output_row_step + where[None, :])
    here = (row[:, None] < row_count) & (place[None, :] < place_count)
    language.store(target, total.to(outputs.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _product_for_weights(  # type: ignore[no-untyped-def]
    gradient, images, parts, row_count, channels, place_count, places_each, grid_height, grid_width, client_pixels,
    padded_height, padded_width, step_down, step_across,
    gradient_client_step, gradient_row_step, gradient_sample_step, split_step, splits,
    TAPS_DOWN: constexpr, TAPS_ACROSS: constexpr, CHANNELS: constexpr, RUN: constexpr,  # noqa: N803
    GRID_HEIGHT: constexpr, GRID_WIDTH: constexpr,  # noqa: N803
    FLAT: constexpr, SWAP: constexpr, NARROW: constexpr, PARTED: constexpr, PRECISION: constexpr,  # noqa: N803
    ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,  # noqa: N803
):  # fmt: skip
    client = (language.program_id(2) // splits).to(language.int64)
    split = language.program_id(2) % splits
    row = language.program_id(1) * ROWS + language.arange(0, ROWS)
    first_column = language.program_id(0) * COLUMNS
    line = first_column // RUN * (padded_width * CHANNELS)
    run = language.multiple_of(first_column % RUN, COLUMNS) + language.arange(0, COLUMNS)
    image = images + client * client_pixels * CHANNELS + line
    rest = (language.num_programs(2) // splits).to(language.int64) * client_pixels * CHANNELS
    slope = gradient + client * gradient_client_step
    slope += (language.minimum(row, row_count - 1) * gradient_row_step)[:, None]
    if SWAP:
        total = language.full((COLUMNS, ROWS), 0.0, language.float32)
    else:
        total = language.full((ROWS, COLUMNS), 0.0, language.float32)
    first = split * places_each
    last = language.minimum(first + places_each, place_count)
    for start in range(first, last, INNER):
        place = start + language.arange(0, INNER)
        across = place % GRID_WIDTH
        down = place // GRID_WIDTH % GRID_HEIGHT
        sample = place // (GRID_WIDTH * GRID_HEIGHT)
        pixel = (sample * padded_height + down * step_down) * padded_width + across * step_across
        here = (place < last)[:, None]
        if RUN != TAPS_ACROSS * CHANNELS:
            here = here & (run < TAPS_ACROSS * CHANNELS)[None, :]
        source = image + ((pixel * CHANNELS)[:, None] + run[None, :])
        gathered = language.load(source, mask=here, other=0.0)
        if FLAT:
            which = place
        else:
            which = sample * gradient_sample_step + place % (GRID_WIDTH * GRID_HEIGHT)
        slopes = language.load(slope + which[None, :], mask=(place < last)[None, :], other=0.0)
        if PARTED:
            fine = language.load(source + rest, mask=here, other=0.0)
            coarse = slopes.to(language.bfloat16)
            total = language.dot((slopes - coarse.to(language.float32)).to(language.bfloat16), gathered, total)
            total = language.dot(coarse, fine, total)
            total = language.dot(coarse, gathered, total)
        elif SWAP:
            gathered = _rounded(language.trans(gathered), NARROW)
            total = language.dot(gathered, language.trans(slopes), total, input_precision=PRECISION)
        else:
            total = language.dot(slopes, gathered, total, input_precision=PRECISION)
    if SWAP:
        total = language.trans(total)
    down = first_column // RUN
    across = run // CHANNELS
    channel = run % CHANNELS
    column = channel * (TAPS_DOWN * TAPS_ACROSS) + down * TAPS_ACROSS + across
    here = (row < row_count)[:, None] & ((across < TAPS_ACROSS) & (channel < channels))[None, :]
    count = channels * (TAPS_DOWN * TAPS_ACROSS)
    target = parts + split.to(language.int64) * split_step + client * row_count * count
    target += row[:, None] * count + column[None, :]
    language.store(target, total.to(parts.dtype.element_ty), mask=here)


def forward(images: Tensor, weights: Tensor, stride: Pair, padding: Pair, tile: Tile, precision: str) -> Tensor:
    """Convolve images ``[K, C, B, H, W]`` with weights ``[K, O, C, h, w]``: ``[K, O, B, H', W']``."""
    clients, outputs, channels, tall, wide = weights.shape
    batch, height, width = images.shape[2:]
    rows, across = _places(height, tall, stride[0], padding[0]), _places(width, wide, stride[1], padding[1])
    result = images.new_empty(clients, outputs, batch, rows, across)
    laid = _rearranged_images(images, (padding[0], padding[0]), (padding[1], padding[1]), precision)
    factors = _rearranged_weights(weights, tile, precision)
    _multiply(factors, laid, result, (tall, wide), stride, (0, 0), (rows, across), (rows * across, across, 1), tile, precision)
    return result


def for_images(
    gradient: Tensor, weights: Tensor, size: Pair, stride: Pair, padding: Pair, tile: Tile, precision: str
) -> Tensor:
    """Carry a gradient ``[K, O, B, H', W']`` back to the images ``[K, C, B, H, W]``, whose last two axes are ``size``."""
    clients, outputs, channels, tall, wide = weights.shape
    down = [_Class.of(start, size[0], tall, stride[0], padding[0]) for start in range(min(stride[0], size[0]))]
    across = [_Class.of(start, size[1], wide, stride[1], padding[1]) for start in range(min(stride[1], size[1]))]
    whole = all(part.taps for part in (*down, *across))
    result = (gradient.new_empty if whole else gradient.new_zeros)(clients, channels, gradient.shape[2], *size)
    border = _border(down, gradient.shape[3]), _border(across, gradient.shape[4])
    laid = _rearranged_images(gradient, *border, precision)
    steps = (size[0] * size[1], size[1] * stride[0], stride[1])
    for i in down:
        for j in across:
            if i.taps and j.taps:
                taps = weights.transpose(1, 2)[:, :, :, i.tap :: stride[0], j.tap :: stride[1]]
                factors = _rearranged_weights(taps, tile, precision, turned=True)
                first = border[0][0] + i.base - (i.taps - 1), border[1][0] + j.base - (j.taps - 1)
                _multiply(
                    factors, laid, result[..., i.start :, j.start :], (i.taps, j.taps), (1, 1), first,
                    (i.places, j.places), steps, tile, precision,
                )  # fmt: skip
    return result


def for_weights(
    gradient: Tensor, images: Tensor, kernel: Pair, stride: Pair, padding: Pair, tile: Tile, precision: str, swap: bool = False, parted: bool = False
) -> Tensor:
    """Sum a gradient ``[K, O, B, H', W']`` over the windows of the images: ``[K, O, C, h, w]``."""
    gradient = _in_planes(gradient)
    clients, outputs, batch, rows, across = gradient.shape
    channels = images.shape[1]
    laid = _rearranged_images(images, (padding[0], padding[0]), (padding[1], padding[1]), precision, parted)
    run = triton.cdiv(kernel[1] * laid.shape[4], tile.columns) * tile.columns
    places = batch * rows * across
    places_each = triton.cdiv(triton.cdiv(places, tile.splits), tile.inner) * tile.inner
    splits = triton.cdiv(places, places_each)
    kind = images.dtype if splits == 1 else torch.float32
    parts = torch.empty(splits, clients, outputs, channels, *kernel, dtype=kind, device=images.device)
    grid = (kernel[0] * run // tile.columns, triton.cdiv(outputs, tile.rows), clients * splits)
    with torch.cuda.device_of(images):
        _product_for_weights[grid](
            gradient, laid, parts, outputs, channels, places, places_each, rows, across, laid[0, ..., 0].numel(),
            laid.shape[2], laid.shape[3], *stride, *gradient.stride()[:3], parts[0].numel(), splits,
            *kernel, laid.shape[4], run, rows, across, gradient.stride(2) == rows * across, swap,
            precision == "tf32" and images.dtype == torch.float32, parted, precision,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return parts[0] if splits == 1 else parts.sum(0).to(images.dtype)


@dataclass(frozen=True)
class _Class:
    """Rows (or columns) of the images, every s-th from a start, which are hit by the same taps, every s-th from one."""

    start: int
    places: int
    tap: int
    taps: int
    base: int

    @classmethod
    def of(cls, start: int, size: int, kernel: int, stride: int, padding: int) -> "_Class":
        tap = (start + padding) % stride
        taps = max(0, -(-(kernel - tap) // stride))
        return cls(start, -(-(size - start) // stride), tap, taps, (start + padding) // stride)


def _border(classes: list[_Class], size: int) -> Pair:
    """Tell how many zeros are needed before and after a gradient, so that all taps of all classes find a number."""
    hit = [part for part in classes if part.taps]
    before = max((part.taps - 1 - part.base for part in hit), default=0)
    after = max((part.places + part.base - size for part in hit), default=0)
    return max(0, before), max(0, after)


def _places(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def _rearranged_images(images: Tensor, down: Pair, across: Pair, precision: str, parted: bool = False) -> Tensor:
    """Bring ``[K, C, B, H, W]`` into the order ``[K, B, H, W, C]``, with a border of zeros, and of channels as well."""
    images = _in_planes(images)
    clients, channels, batch, height, width = images.shape
    wide = 8 if parted else 16 // images.element_size()
    padded = triton.cdiv(channels, wide) * wide
    shape = clients * (1 + parted), batch, height + sum(down), width + sum(across), padded
    laid = images.new_empty(shape, dtype=torch.bfloat16 if parted else images.dtype)
    some = min(64, triton.next_power_of_2(padded))
    pixels = 4096 // some
    count = laid[0, ..., 0].numel()
    with torch.cuda.device_of(images):
        _rearrange_images[(triton.cdiv(count, pixels), triton.cdiv(padded, some), clients)](
            images, laid, channels, height, width, *images.stride()[:3], count, laid.shape[2], laid.shape[3],
            down[0], across[0], padded,
            precision == "tf32" and images.dtype == torch.float32 and not parted, parted, some, pixels,
        )  # fmt: skip
    return laid


def _rearranged_weights(weights: Tensor, tile: Tile, precision: str, turned: bool = False) -> Tensor:
    """Bring ``[K, M, C, h, w]`` into the order ``[K, M, h, w, C]``, each row of the kernel filled up with zeros.

    ``turned`` kernels begin at their last tap.
    """
    clients, rows, channels, tall, wide = weights.shape
    steps = weights.stride()
    last = steps[3] * (tall - 1) + steps[4] * (wide - 1)
    vector = 16 // weights.element_size()
    padded = triton.cdiv(channels, vector) * vector
    run = triton.cdiv(wide * padded, tile.inner) * tile.inner
    laid = weights.new_empty(clients, rows, tall, run)
    sign = -1 if turned else 1
    with torch.cuda.device_of(weights):
        _rearrange_weights[(triton.cdiv(rows * tall * run, _BLOCK), clients)](
            weights, laid, rows, channels, *steps[:3], sign * steps[3], sign * steps[4], last if turned else 0,
            tall, wide, padded, run, precision == "tf32" and weights.dtype == torch.float32, _BLOCK,
        )  # fmt: skip
    return laid


def _multiply(
    factors: Tensor, laid: Tensor, result: Tensor, kernel: Pair, stride: Pair, first: Pair, grid_size: Pair,
    steps: tuple[int, int, int], tile: Tile, precision: str,
) -> None:  # fmt: skip
    clients, rows = factors.shape[:2]
    places = laid.shape[1] * grid_size[0] * grid_size[1]
    grid = (triton.cdiv(places, tile.columns), triton.cdiv(rows, tile.rows), clients)
    with torch.cuda.device_of(laid):
        _product[grid](
            factors, laid, result, rows, places, *grid_size, laid[0, ..., 0].numel(), laid.shape[2], laid.shape[3],
            *stride, *first, *result.stride()[:2], *steps,
            *kernel, laid.shape[4], factors.shape[3], steps == (grid_size[0] * grid_size[1], grid_size[1], 1), 16 // laid.element_size(), precision,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _in_planes(images: Tensor) -> Tensor:
    """Each channel of a sample lies in one piece, and one client's pixels are told apart by 32 bits."""
    reach = sum((count - 1) * step for count, step in zip(images.shape[1:], images.stride()[1:], strict=True))
    return images if images.stride()[3:] == (images.shape[4], 1) and reach < 2**31 else images.contiguous()
