"""Convolutions of K clients' images with K clients' own weights, as matrix products that never write windows to memory.

Every client has one product: its weights ``[O, h * w * C]`` with the windows ``[h * w * C, B * H' * W']``. Images are
first rearranged to ``[K, B, H, W, C]``: then the channels of a pixel lie in one piece, in the order in which the tensor
cores want them, and a program reads them in wide loads, tap after tap. This costs one pass over the images, where
windows cost ``h * w`` of them. Of images with few channels one line of the kernel is unfolded into the channels.

The gradient for the images is such a product again: at stride one of the gradient with the weights turned around, and
at stride ``s`` one for each of the ``s * s`` classes of pixels that are hit by the same taps, so that nothing has to be
added back. The gradient for the weights sums over the places. Where there are few weights, several programs share the
places; their parts are added up in a fixed order, so that results repeat bit for bit.

Tensor cores multiply float32 with 10 bits of each factor (``tf32``), and cut the others off. Here they are rounded
before. For the weights, where the order in memory does not suit them, each factor is parted into two bfloat16 numbers
instead, of which three products are taken: that is more exact than tf32. Both factors are parted in memory before: a
factor that was parted in registers was overwritten on an H200 (Triton 3.6) while the tensor cores still read it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import on_device_of
from fedstrata.kernels.rearranging import (
    collected,
    filling,
    in_planes,
    in_two_parts,
    line_of,
    rearranged_images,
    rearranged_weights,
    transposed_weights,
)

Pair = tuple[int, int]

_PLAIN = (
    "row_count", "batch", "height", "width", "out_height", "out_width", "step_down", "step_across", "pad_down",
    "pad_across", "weight_taps", "weight_wide", "splits",
)  # fmt: skip
"""Sizes for which there is no kernel of their own, since each takes a second to compile."""


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes, and how it does so."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3
    splits: int = 1


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    weights, images, outputs, row_count, batch, height, width, out_height, out_width, step_down, step_across,
    pad_down, pad_across, weight_taps, weight_wide, output_client_step, output_row_step,
    CLASSES_DOWN: constexpr, CLASSES_ACROSS: constexpr, EVEN_HEIGHT: constexpr, EVEN_WIDTH: constexpr,  # noqa: N803
    TALL: constexpr, WIDE: constexpr,  # noqa: N803
    CHANNELS: constexpr, BACK: constexpr, PRECISION: constexpr,  # noqa: N803
    ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(2).to(language.int64)
    row = language.program_id(1) * ROWS + language.arange(0, ROWS)
    kind = language.program_id(0) % (CLASSES_DOWN * CLASSES_ACROSS)
    start_down = kind // CLASSES_ACROSS
    start_across = kind % CLASSES_ACROSS
    if EVEN_HEIGHT:
        grid_height = EVEN_HEIGHT
        grid_width = EVEN_WIDTH
        place_count = batch * (EVEN_HEIGHT * EVEN_WIDTH)
    else:
        grid_height = (out_height - start_down + CLASSES_DOWN - 1) // CLASSES_DOWN
        grid_width = (out_width - start_across + CLASSES_ACROSS - 1) // CLASSES_ACROSS
        place_count = batch * grid_height * grid_width
        grid_height = language.maximum(grid_height, 1)
        grid_width = language.maximum(grid_width, 1)
    first_place = language.program_id(0) // (CLASSES_DOWN * CLASSES_ACROSS) * COLUMNS
    place = first_place + language.arange(0, COLUMNS)
    across = place % grid_width
    line = place // grid_width
    down = line % grid_height
    sample = line // grid_height
    if BACK:
        tap_down = (start_down + pad_down) % CLASSES_DOWN
        tap_across = (start_across + pad_across) % CLASSES_ACROSS
        taps_down = (TALL - tap_down + CLASSES_DOWN - 1) // CLASSES_DOWN
        taps_across = (WIDE - tap_across + CLASSES_ACROSS - 1) // CLASSES_ACROSS
        y = down + (start_down + pad_down) // CLASSES_DOWN
        x = across + (start_across + pad_across) // CLASSES_ACROSS
    else:
        tap_down = 0
        tap_across = 0
        taps_down = TALL
        taps_across = WIDE
        y = down * step_down - pad_down
        x = across * step_across - pad_across
    valid = place * 0
    for tap in language.static_range(TALL):
        if BACK:
            valid += language.where((y - tap >= 0) & (y - tap < height), 1 << tap, 0)
        else:
            valid += language.where((y + tap >= 0) & (y + tap < height), 1 << tap, 0)
    for tap in language.static_range(WIDE):
        if BACK:
            valid += language.where((x - tap >= 0) & (x - tap < width), 65536 << tap, 0)
        else:
            valid += language.where((x + tap >= 0) & (x + tap < width), 65536 << tap, 0)
    valid = language.where(place < place_count, valid, 0)
    pixel = (sample * height + y) * width + x
    inner = language.arange(0, INNER)
    image = images + client * batch * height * width * CHANNELS + (pixel * CHANNELS)[:, None] + inner[None, :]
    factor = weights + client * row_count * (weight_taps * CHANNELS)
    factor += (language.minimum(row, row_count - 1) * (weight_taps * CHANNELS))[:, None] + inner[None, :]
    if ROWS < 64:
        total = language.full((COLUMNS, ROWS), 0.0, language.float32)
    else:
        total = language.full((ROWS, COLUMNS), 0.0, language.float32)
    for step in range(0, taps_down * taps_across * CHANNELS, INNER):
        channel = language.multiple_of(step % CHANNELS, INNER)
        i = step // CHANNELS // taps_across
        j = step // CHANNELS % taps_across
        which = (tap_down + i * CLASSES_DOWN) * weight_wide + tap_across + j * CLASSES_ACROSS
        shift = i * width + j
        if BACK:
            shift = -shift
        bits = (1 << i) | (65536 << j)
        inside = (valid & bits) == bits
        offset = language.multiple_of(shift * CHANNELS + channel, 8)
        gathered = language.load(image + offset, mask=inside[:, None], other=0.0)
        factors = language.load(factor + language.multiple_of(which * CHANNELS + channel, 8))
        if ROWS < 64:
            total = language.dot(gathered, language.trans(factors), total, input_precision=PRECISION)
        else:
            total = language.dot(factors, language.trans(gathered), total, input_precision=PRECISION)
    if ROWS < 64:
        total = language.trans(total)
    place = first_place + language.arange(0, COLUMNS)
    if CLASSES_DOWN * CLASSES_ACROSS == 1:
        where = place
    else:
        line = place // grid_width
        down = line % grid_height * CLASSES_DOWN + start_down
        where = (line // grid_height * out_height + down) * out_width
        where += place % grid_width * CLASSES_ACROSS + start_across
    target = outputs + client * output_client_step + (row[:, None] * output_row_step + where[None, :])
    here = (row[:, None] < row_count) & (place[None, :] < place_count)
    language.store(target, total.to(outputs.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def _product_for_weights(  # type: ignore[no-untyped-def]
    gradient, images, parts, row_count, batch, places_each, height, width, step_down, step_across, pad_down, pad_across,
    gradient_client_step, gradient_row_step, gradient_sample_step, splits,
    GRID_HEIGHT: constexpr, GRID_WIDTH: constexpr, TALL: constexpr, WIDE: constexpr, CHANNELS: constexpr,  # noqa: N803
    FLAT: constexpr, PARTED: constexpr, PRECISION: constexpr,  # noqa: N803
    ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,  # noqa: N803
):  # fmt: skip
    client = (language.program_id(2) // splits).to(language.int64)
    split = language.program_id(2) % splits
    row = language.program_id(1) * ROWS + language.arange(0, ROWS)
    first_column = language.program_id(0) * COLUMNS
    column = first_column + language.arange(0, COLUMNS)
    if CHANNELS % COLUMNS == 0:
        tap_down = first_column // CHANNELS // WIDE
        tap_across = first_column // CHANNELS % WIDE
        channel = language.multiple_of(first_column % CHANNELS, COLUMNS) + language.arange(0, COLUMNS)
        offset = ((tap_down * width + tap_across) * CHANNELS + channel)[None, :]
    else:
        tap_down = (column // CHANNELS // WIDE)[None, :]
        tap_across = (column // CHANNELS % WIDE)[None, :]
        offset = (tap_down * width + tap_across) * CHANNELS + (column % CHANNELS)[None, :]
        offset = language.max_contiguous(language.multiple_of(offset, (1, 8)), (1, 8))
    pixels = batch.to(language.int64) * height * width * CHANNELS
    image = images + client * pixels
    rest = (language.num_programs(2) // splits).to(language.int64) * pixels
    slope = gradient + client * gradient_client_step
    other_slopes = (language.num_programs(2) // splits).to(language.int64) * gradient_client_step
    slope += (language.minimum(row, row_count - 1) * gradient_row_step)[:, None]
    if ROWS < 64:
        total = language.full((COLUMNS, ROWS), 0.0, language.float32)
    else:
        total = language.full((ROWS, COLUMNS), 0.0, language.float32)
    first = split * places_each
    last = language.minimum(first + places_each, batch * (GRID_HEIGHT * GRID_WIDTH))
    for start in range(first, last, INNER):
        place = start + language.arange(0, INNER)
        line = place // GRID_WIDTH
        y = (line % GRID_HEIGHT * step_down - pad_down)[:, None] + tap_down
        x = (place % GRID_WIDTH * step_across - pad_across)[:, None] + tap_across
        inside = (place < last)[:, None] & (y.to(language.uint32) < height) & (x.to(language.uint32) < width)
        if CHANNELS % COLUMNS != 0:
            inside = inside & (column < TALL * WIDE * CHANNELS)[None, :]
        sample = line // GRID_HEIGHT
        corner = (sample * height + line % GRID_HEIGHT * step_down - pad_down) * width
        corner += place % GRID_WIDTH * step_across - pad_across
        source = image + ((corner * CHANNELS)[:, None] + offset)
        gathered = language.load(source, mask=inside, other=0.0)
        which = place if FLAT else sample * gradient_sample_step + place % (GRID_HEIGHT * GRID_WIDTH)
        slopes = language.load(slope + which[None, :], mask=(place < last)[None, :], other=0.0)
        if PARTED:
            remainder = language.load(source + rest, mask=inside, other=0.0)
            fine = language.load(slope + other_slopes + which[None, :], mask=(place < last)[None, :], other=0.0)
            if ROWS < 64:
                total = language.dot(language.trans(gathered), language.trans(fine), total)
                total = language.dot(language.trans(remainder), language.trans(slopes), total)
                total = language.dot(language.trans(gathered), language.trans(slopes), total)
            else:
                total = language.dot(fine, gathered, total)
                total = language.dot(slopes, remainder, total)
                total = language.dot(slopes, gathered, total)
        elif ROWS < 64:
            total = language.dot(language.trans(gathered), language.trans(slopes), total, input_precision=PRECISION)
        else:
            total = language.dot(slopes, gathered, total, input_precision=PRECISION)
    if ROWS < 64:
        total = language.trans(total)
    count = row_count * (TALL * WIDE * CHANNELS)
    target = parts + (split.to(language.int64) * (language.num_programs(2) // splits) + client) * count
    target += row[:, None] * (TALL * WIDE * CHANNELS) + column[None, :]
    language.store(target, total, mask=(row < row_count)[:, None] & (column < TALL * WIDE * CHANNELS)[None, :])


def forward(
    images: Tensor, weights: Tensor, stride: Pair, padding: Pair, precision: str, tile: Tile | None = None
) -> Tensor:
    """Convolve images ``[K, C, B, H, W]`` with weights ``[K, O, C, h, w]``: ``[K, O, B, H', W']``."""
    clients, outputs, _, tall, wide = weights.shape
    batch, height, width = images.shape[2:]
    size = (height + 2 * padding[0] - tall) // stride[0] + 1, (width + 2 * padding[1] - wide) // stride[1] + 1
    tile = tile or product_tile(
        clients, outputs, line_of(images.shape[1], wide), batch * size[0] * size[1], images.dtype, precision
    )
    result = images.new_empty(clients, outputs, batch, *size)
    laid, unfolded = rearranged_images(images, tile.inner, wide, stride, padding, size[1], precision)
    factors = rearranged_weights(weights, laid.shape[4], unfolded, precision, images.dtype)
    _multiply(
        factors, laid, result, (tall, 1 if unfolded else wide),
        (stride[0], 1 if unfolded else stride[1]), (padding[0], 0 if unfolded else padding[1]),
        False, tile, precision,
    )  # fmt: skip
    return result


def for_images(
    gradient: Tensor,
    weights: Tensor,
    size: Pair,
    stride: Pair,
    padding: Pair,
    precision: str,
    tile: Tile | None = None,
) -> Tensor:
    """Carry a gradient ``[K, O, B, H', W']`` back to images ``[K, C, B, H, W]``, whose last two axes are ``size``."""
    clients, _, channels, tall, wide = weights.shape
    batch = gradient.shape[2]
    places = batch * -(-size[0] // stride[0]) * -(-size[1] // stride[1])
    tile = tile or product_tile(
        clients * stride[0] * stride[1], channels, gradient.shape[1], places, gradient.dtype, precision
    )
    result = gradient.new_empty(clients, channels, batch, *size)
    laid, _ = rearranged_images(gradient, tile.inner, None, stride, padding, 0, precision)
    factors = transposed_weights(weights, laid.shape[4], precision, gradient.dtype)
    _multiply(factors, laid, result, (tall, wide), stride, padding, True, tile, precision)
    return result


def for_weights(
    gradient: Tensor,
    images: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    precision: str,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """Sum a gradient ``[K, O, B, H', W']`` over the windows of the images: ``[K, O, C, h, w]``, of some type."""
    gradient = in_planes(gradient)
    clients, outputs, batch, rows, across = gradient.shape
    channels = images.shape[1]
    places = batch * rows * across
    tile = tile or weights_tile(clients, outputs, channels, kernel, places, images.dtype, precision)
    parted = precision == "tf32" and images.dtype == torch.float32
    if precision == "tf32x3":
        precision = "ieee"  # the order in memory suits plain multiplications better
    laid, unfolded = rearranged_images(
        images, filling(channels, kernel[1], tile.columns), kernel[1], stride, padding, across, precision, parted
    )
    if parted:
        gradient = in_two_parts(gradient)
    if unfolded:
        taps, step_across, pad_across = (kernel[0], 1), 1, 0
    else:
        taps, step_across, pad_across = kernel, stride[1], padding[1]
    places_each = triton.cdiv(triton.cdiv(places, tile.splits), tile.inner) * tile.inner
    splits = triton.cdiv(places, places_each)
    columns = taps[0] * taps[1] * laid.shape[4]
    parts = torch.empty(splits, clients, outputs, columns, dtype=torch.float32, device=images.device)
    with on_device_of(images):
        _product_for_weights[(triton.cdiv(columns, tile.columns), triton.cdiv(outputs, tile.rows), clients * splits)](
            gradient, laid, parts, outputs, batch, places_each, laid.shape[2], laid.shape[3],
            stride[0], step_across, padding[0], pad_across, *gradient.stride()[:3], splits,
            rows, across, *taps, laid.shape[4], gradient.stride(2) == rows * across, parted, precision,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return collected(parts, channels, kernel, laid.shape[4], unfolded, dtype)


def product_tile(clients: int, rows: int, line: int, places: int, dtype: torch.dtype, precision: str) -> Tile:
    """Choose the tile of a product of ``[rows, taps * line]`` with ``[taps * line, places]`` for each client.

    The choices were measured on an H200.
    """
    inner = min(32 if dtype == torch.float32 else 64, max(16, triton.next_power_of_2(line)))
    if rows <= 32:
        return Tile(max(16, triton.next_power_of_2(rows)), 128, inner, 4, 3)
    if dtype == torch.float32 and precision != "tf32":
        return Tile(64, 64, inner, 4, 2)
    if rows <= 64:
        return Tile(64, 128, inner, 4, 4)
    if clients * triton.cdiv(rows, 128) * triton.cdiv(places, 128) < 264:
        return Tile(64, 64, inner, 4, 4)
    return Tile(128, 128, inner, 8, 3)


def weights_tile(
    clients: int, outputs: int, channels: int, kernel: Pair, places: int, dtype: torch.dtype, precision: str
) -> Tile:
    """Choose the tile of a gradient for weights, and how many programs share the places: measured on an H200."""
    line = max(16, triton.next_power_of_2(line_of(channels, kernel[1])))
    columns, warps = 64 if line == 64 else 128, 4
    rows = 64 if outputs > 32 else max(16, triton.next_power_of_2(outputs))
    inner = 32 if dtype == torch.float32 else 64
    if dtype == torch.float32 and precision != "tf32":
        columns, inner = 64, 16
    elif dtype != torch.float32 and columns == 128 and outputs >= 128:
        rows, warps = 128, 8
    programs = clients * triton.cdiv(outputs, rows) * triton.cdiv(kernel[0] * kernel[1] * channels, columns)
    splits = max(1, min(400 // programs, places // (8 * inner)))
    return Tile(rows, columns, inner, warps, 3, splits)


def _multiply(
    factors: Tensor, laid: Tensor, result: Tensor, taps: Pair, stride: Pair, padding: Pair, back: bool,
    tile: Tile, precision: str,
) -> None:  # fmt: skip
    clients, rows, batch, *size = result.shape
    classes = stride if back else (1, 1)
    places = batch * triton.cdiv(size[0], classes[0]) * triton.cdiv(size[1], classes[1])
    even = (0, 0)  # where all classes have the same size, the kernel is made for it: it computes many places from it
    if classes != (1, 1) and size[0] % classes[0] == size[1] % classes[1] == 0:
        even = (size[0] // classes[0], size[1] // classes[1])
    grid = (triton.cdiv(places, tile.columns) * classes[0] * classes[1], triton.cdiv(rows, tile.rows), clients)
    with on_device_of(laid):
        _product[grid](
            factors, laid, result, rows, batch, laid.shape[2], laid.shape[3], *size, *stride, *padding,
            factors.shape[2], taps[1], *result.stride()[:2], *classes, *even, *taps, laid.shape[4], back, precision,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
