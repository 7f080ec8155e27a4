"""Convolutions of K clients' images with K clients' own weights, as matrix products that never write windows to memory.

Every client has one product. Forward, weights ``[O, C * h * w]`` meet the windows ``[C * h * w, B * H' * W']``, of
which a tile is gathered from the images whenever it is needed. The gradient for the images is such a product again: at
stride one of the gradient with the weights turned around, and at stride ``s`` one for each of the ``s * s`` classes of
pixels that are hit by the same taps, so that nothing has to be added back. The gradient for the weights multiplies by
the windows from the other side and sums over the ``B * H' * W'`` places. Where there are few weights, several programs
share the places; their parts are added up in a fixed order, so that results repeat bit for bit.

Whether a pixel lies inside of the image is told by bits: place ``n`` has a bit for each row and column of the kernel
that stays inside, and one ``and`` with the bits of a tap decides.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

Pair = tuple[int, int]
MOST_TAPS = 15
"""The largest kernel height and width: the bits of its rows and columns share one word."""


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes, and how it does so."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3
    splits: int = 1
    swap: bool = False


@triton.jit  # type: ignore[untyped-decorator]
def _gathered_product(  # type: ignore[no-untyped-def] # Triton reads the annotations: there may be no others
    weights, images, outputs,
    row_count, channels, place_count, height, width,
    weight_client_step, weight_row_step, weight_channel_step, weight_down_step, weight_across_step,
    client_step, channel_step, sample_step, step_down, step_across, origin_down, origin_across,
    output_client_step, output_row_step, output_sample_step, output_down_step, output_across_step,
    GRID_HEIGHT: constexpr, GRID_WIDTH: constexpr, FLAT: constexpr,  # noqa: N803
    TAPS_DOWN: constexpr, TAPS_ACROSS: constexpr, SIGN: constexpr,  # noqa: N803
    IN_ORDER: constexpr, PRECISION: constexpr, SWAP: constexpr,  # noqa: N803
    ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(2).to(language.int64)
    row = language.program_id(1) * ROWS + language.arange(0, ROWS)
    place = language.program_id(0) * COLUMNS + language.arange(0, COLUMNS)
    sample = place // (GRID_HEIGHT * GRID_WIDTH)
    spot = place % (GRID_HEIGHT * GRID_WIDTH)
    down = spot // GRID_WIDTH
    across = spot % GRID_WIDTH
    y = down * step_down + origin_down
    x = across * step_across + origin_across
    valid = place * 0
    for line in language.static_range(TAPS_DOWN):
        valid += language.where((y + SIGN * line).to(language.uint32) < height, 1 << line, 0)
    for line in language.static_range(TAPS_ACROSS):
        valid += language.where((x + SIGN * line).to(language.uint32) < width, 65536 << line, 0)
    valid = language.where(place < place_count, valid, 0)
    pixel = sample * sample_step + y * width + x
    image = images + client * client_step
    weight = weights + client * weight_client_step + row * weight_row_step
    inner_count = channels * (TAPS_DOWN * TAPS_ACROSS)
    if SWAP:
        total = language.full((COLUMNS, ROWS), 0.0, language.float32)
    else:
        total = language.full((ROWS, COLUMNS), 0.0, language.float32)
    for start in range(0, inner_count, INNER):
        inner = start + language.arange(0, INNER)
        channel = inner // (TAPS_DOWN * TAPS_ACROSS)
        tap = inner % (TAPS_DOWN * TAPS_ACROSS)
        i = tap // TAPS_ACROSS
        j = tap % TAPS_ACROSS
        bits = language.where(inner < inner_count, (1 << i) | (65536 << j), 1 << 15)
        offset = channel * channel_step + SIGN * (i * width + j)
        inside = (valid[None, :] & bits[:, None]) == bits[:, None]
        gathered = language.load(image + (offset[:, None] + pixel[None, :]), mask=inside, other=0.0)
        if IN_ORDER:
            which = inner
        else:
            which = channel * weight_channel_step + i * weight_down_step + j * weight_across_step
        known = (row[:, None] < row_count) & (inner[None, :] < inner_count)
        factors = language.load(weight[:, None] + which[None, :], mask=known, other=0.0)
        if SWAP:
            total = language.dot(language.trans(gathered), language.trans(factors), total, input_precision=PRECISION)
        else:
            total = language.dot(factors, gathered, total, input_precision=PRECISION)
    if SWAP:
        total = language.trans(total)
    target = outputs + client * output_client_step
    if FLAT:
        where = place
    else:
        where = sample * output_sample_step + down * output_down_step + across * output_across_step
    known = (row[:, None] < row_count) & (place[None, :] < place_count)
    language.store(
        target + (row[:, None] * output_row_step + where[None, :]), total.to(outputs.dtype.element_ty), mask=known
    )


@triton.jit  # type: ignore[untyped-decorator]
def _product_for_weights(  # type: ignore[no-untyped-def]
    gradient, images, parts,
    row_count, column_count, place_count, places_each, height, width,
    gradient_client_step, gradient_row_step, gradient_sample_step,
    client_step, channel_step, sample_step, step_down, step_across, pad_down, pad_across,
    split_step, client_columns, splits,
    GRID_HEIGHT: constexpr, GRID_WIDTH: constexpr,  # noqa: N803
    TAPS_DOWN: constexpr, TAPS_ACROSS: constexpr, PRECISION: constexpr,  # noqa: N803
    IN_ORDER: constexpr,  # noqa: N803
    ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,  # noqa: N803
):  # fmt: skip
    client = (language.program_id(2) // splits).to(language.int64)
    split = language.program_id(2) % splits
    row = language.program_id(1) * ROWS + language.arange(0, ROWS)
    column = language.program_id(0) * COLUMNS + language.arange(0, COLUMNS)
    channel = column // (TAPS_DOWN * TAPS_ACROSS)
    tap = column % (TAPS_DOWN * TAPS_ACROSS)
    i = tap // TAPS_ACROSS
    j = tap % TAPS_ACROSS
    bits = language.where(column < column_count, (1 << i) | (65536 << j), 1 << 15)
    offset = channel * channel_step + i * width + j
    image = images + client * client_step
    slope = gradient + client * gradient_client_step + row * gradient_row_step
    total = language.full((ROWS, COLUMNS), 0.0, language.float32)
    first = split * places_each
    last = language.minimum(first + places_each, place_count)
    for start in range(first, last, INNER):
        place = start + language.arange(0, INNER)
        sample = place // (GRID_HEIGHT * GRID_WIDTH)
        spot = place % (GRID_HEIGHT * GRID_WIDTH)
        y = spot // GRID_WIDTH * step_down - pad_down
        x = spot % GRID_WIDTH * step_across - pad_across
        valid = place * 0
        for line in language.static_range(TAPS_DOWN):
            valid += language.where((y + line).to(language.uint32) < height, 1 << line, 0)
        for line in language.static_range(TAPS_ACROSS):
            valid += language.where((x + line).to(language.uint32) < width, 65536 << line, 0)
        valid = language.where(place < last, valid, 0)
        pixel = sample * sample_step + y * width + x
        inside = (valid[None, :] & bits[:, None]) == bits[:, None]
        gathered = language.load(image + (offset[:, None] + pixel[None, :]), mask=inside, other=0.0)
        if IN_ORDER:
            which = place
        else:
            which = sample * gradient_sample_step + spot
        known = (row[:, None] < row_count) & (place[None, :] < last)
        slopes = language.load(slope[:, None] + which[None, :], mask=known, other=0.0)
        total = language.dot(slopes, language.trans(gathered), total, input_precision=PRECISION)
    target = parts + split.to(language.int64) * split_step + client * client_columns
    known = (row[:, None] < row_count) & (column[None, :] < column_count)
    language.store(
        target + (row[:, None] * column_count + column[None, :]), total.to(parts.dtype.element_ty), mask=known
    )


def forward(images: Tensor, weights: Tensor, stride: Pair, padding: Pair, tile: Tile, precision: str) -> Tensor:
    """Convolve images ``[K, C, B, H, W]`` with weights ``[K, O, C, h, w]``: ``[K, O, B, H', W']``."""
    images, weights = _in_planes(images), weights.contiguous()
    clients, outputs, channels, tall, wide = weights.shape
    batch, height, width = images.shape[2:]
    rows, across = (height + 2 * padding[0] - tall) // stride[0] + 1, (width + 2 * padding[1] - wide) // stride[1] + 1
    result = images.new_empty(clients, outputs, batch, rows, across)
    places = batch * rows * across
    grid = (triton.cdiv(places, tile.columns), triton.cdiv(outputs, tile.rows), clients)
    with torch.cuda.device_of(images):
        _gathered_product[grid](
            weights, images, result,
            outputs, channels, places, height, width,
            outputs * channels * tall * wide, channels * tall * wide, 0, 0, 0,
            *images.stride()[:3], *stride, -padding[0], -padding[1],
            outputs * places, places, rows * across, across, 1,
            rows, across, True, tall, wide, 1, True, precision, tile.swap,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return result


def for_images(
    gradient: Tensor, weights: Tensor, size: Pair, stride: Pair, padding: Pair, tile: Tile, precision: str, copy: bool = True
) -> Tensor:
    """Carry a gradient ``[K, O, B, H', W']`` back to the images ``[K, C, B, H, W]``, of which ``size`` is the last two."""
    gradient = _in_planes(gradient)
    clients, outputs, channels, tall, wide = weights.shape
    batch, rows, across = gradient.shape[2:]
    height, width = size
    hit_by_all = tall >= stride[0] and wide >= stride[1]
    result = (gradient.new_empty if hit_by_all else gradient.new_zeros)(clients, channels, batch, height, width)
    for down in range(min(stride[0], height)):
        for right in range(min(stride[1], width)):
            first_down, first_right = (down + padding[0]) % stride[0], (right + padding[1]) % stride[1]
            if first_down >= tall or first_right >= wide:
                continue
            taps = weights[:, :, :, first_down :: stride[0], first_right :: stride[1]]
            if copy:
                taps = taps.transpose(1, 2).contiguous().transpose(1, 2)
            grid_height, grid_width = -(-(height - down) // stride[0]), -(-(width - right) // stride[1])
            places = batch * grid_height * grid_width
            steps = taps.stride()
            grid = (triton.cdiv(places, tile.columns), triton.cdiv(channels, tile.rows), clients)
            with torch.cuda.device_of(gradient):
                _gathered_product[grid](
                    taps, gradient, result[..., down:, right:],
                    channels, outputs, places, rows, across,
                    steps[0], steps[2], steps[1], steps[3], steps[4],
                    *gradient.stride()[:3], 1, 1,
                    (down + padding[0]) // stride[0], (right + padding[1]) // stride[1],
                    *result.stride()[:3], stride[0] * width, stride[1],
                    grid_height, grid_width, stride == (1, 1), taps.shape[3], taps.shape[4], -1, copy, precision, tile.swap,
                    tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
                )  # fmt: skip
    return result


def for_weights(
    gradient: Tensor, images: Tensor, kernel: Pair, stride: Pair, padding: Pair, tile: Tile, precision: str
) -> Tensor:
    """Sum a gradient ``[K, O, B, H', W']`` over the windows of the images: ``[K, O, C, h, w]``."""
    gradient, images = _in_planes(gradient), _in_planes(images)
    clients, outputs, batch, rows, across = gradient.shape
    channels, _, height, width = images.shape[1:]
    columns, places = channels * kernel[0] * kernel[1], batch * rows * across
    places_each = triton.cdiv(triton.cdiv(places, tile.splits), tile.inner) * tile.inner
    splits = triton.cdiv(places, places_each)
    parts = torch.empty(
        splits, clients, outputs, columns, dtype=images.dtype if splits == 1 else torch.float32, device=images.device
    )
    grid = (triton.cdiv(columns, tile.columns), triton.cdiv(outputs, tile.rows), clients * splits)
    with torch.cuda.device_of(images):
        _product_for_weights[grid](
            gradient, images, parts,
            outputs, columns, places, places_each, height, width,
            *gradient.stride()[:3], *images.stride()[:3], *stride, *padding,
            clients * outputs * columns, outputs * columns, splits,
            rows, across, *kernel, precision, gradient.stride(2) == rows * across,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    total = parts[0] if splits == 1 else parts.sum(0).to(images.dtype)
    return total.view(clients, outputs, channels, *kernel)


def _in_planes(images: Tensor) -> Tensor:
    """Each channel of a sample lies in one piece, and one client's pixels are told apart by 32 bits."""
    reach = sum((count - 1) * step for count, step in zip(images.shape[1:], images.stride()[1:], strict=True))
    return images if images.stride()[3:] == (images.shape[4], 1) and reach < 2**31 else images.contiguous()
