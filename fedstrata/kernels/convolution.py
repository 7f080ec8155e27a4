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
instead, of which three products are taken: that is more exact than tf32.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

Pair = tuple[int, int]
_FEW = 32
"""So many numbers of one line of a window, or fewer, are unfolded into the channels."""

_PLAIN = (
    "channels", "plane", "batch", "height", "width", "across", "out_height", "out_width", "step_down", "step_across",
    "stride_across", "pad_down", "pad_across", "weight_taps", "weight_wide", "row_count", "splits", "split_step",
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


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(values, NARROW: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    if NARROW:
        bits = values.to(language.int32, bitcast=True)
        nearest = ((bits + 0x1000) & -0x2000).to(language.float32, bitcast=True)
        values = language.where(values == values, nearest, values)
    return values


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def _rearrange_images(  # type: ignore[no-untyped-def] # Triton reads the annotations: there may be no others
    images, rearranged, channels, pixel_count, plane, width, stride_across, pad_across,
    client_step, channel_step, sample_step,
    CHANNELS: constexpr, UNFOLDED: constexpr, HEIGHT: constexpr, ACROSS: constexpr, EACH: constexpr,  # noqa: N803
    FLAT: constexpr, NARROW: constexpr,  # noqa: N803
    PARTED: constexpr, SOME: constexpr, PIXELS: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(2).to(language.int64)
    channel = language.program_id(1) * SOME + language.arange(0, SOME)
    pixel = language.program_id(0) * PIXELS + language.arange(0, PIXELS)
    here = (pixel < pixel_count)[None, :]
    if UNFOLDED:
        x = (pixel % ACROSS * stride_across - pad_across)[None, :] + (channel // EACH)[:, None]
        line = pixel // ACROSS
        place = (line // HEIGHT * sample_step + line % HEIGHT * width)[None, :] + x
        place += (channel % EACH * channel_step)[:, None]
        known = here & (channel < EACH * UNFOLDED)[:, None] & (x.to(language.uint32) < width)
    else:
        spot = pixel if FLAT else pixel // plane * sample_step + pixel % plane
        place = (channel * channel_step)[:, None] + spot[None, :]
        known = here & (channel < channels)[:, None]
    values = language.load(images + client * client_step + place, mask=known, other=0.0)
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
    weights, rearranged, count, channels, client_step, row_step, channel_step,
    TALL: constexpr, WIDE: constexpr, CHANNELS: constexpr, UNFOLDED: constexpr, NARROW: constexpr,  # noqa: N803
    BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(1).to(language.int64)
    place = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    channel = place % CHANNELS
    if UNFOLDED:
        tap = place // CHANNELS % TALL * WIDE + channel // channels
        row = place // (CHANNELS * TALL)
        known = (place < count) & (channel < channels * WIDE)
        channel = channel % channels
    else:
        tap = place // CHANNELS % (TALL * WIDE)
        row = place // (CHANNELS * TALL * WIDE)
        known = (place < count) & (channel < channels)
    source = row * row_step + channel * channel_step + tap
    values = language.load(weights + client * client_step + source, mask=known, other=0.0)
    language.store(rearranged + client * count + place, _rounded(values, NARROW), mask=place < count)


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    weights, images, outputs, row_count, batch, height, width, out_height, out_width, step_down, step_across,
    pad_down, pad_across, weight_taps, weight_wide, output_client_step, output_row_step,
    CLASSES_DOWN: constexpr, CLASSES_ACROSS: constexpr, TALL: constexpr, WIDE: constexpr,  # noqa: N803
    CHANNELS: constexpr, BACK: constexpr, PRECISION: constexpr,  # noqa: N803
    ROWS: constexpr, COLUMNS: constexpr, INNER: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(2).to(language.int64)
    row = language.program_id(1) * ROWS + language.arange(0, ROWS)
    kind = language.program_id(0) % (CLASSES_DOWN * CLASSES_ACROSS)
    start_down = kind // CLASSES_ACROSS
    start_across = kind % CLASSES_ACROSS
    grid_height = (out_height - start_down + CLASSES_DOWN - 1) // CLASSES_DOWN
    grid_width = (out_width - start_across + CLASSES_ACROSS - 1) // CLASSES_ACROSS
    place_count = batch * grid_height * grid_width
    first_place = language.program_id(0) // (CLASSES_DOWN * CLASSES_ACROSS) * COLUMNS
    place = first_place + language.arange(0, COLUMNS)
    grid_height = language.maximum(grid_height, 1)
    grid_width = language.maximum(grid_width, 1)
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
    tap = first_column // CHANNELS
    tap_down = tap // WIDE
    tap_across = tap % WIDE
    channel = language.multiple_of(first_column % CHANNELS, COLUMNS) + language.arange(0, COLUMNS)
    pixels = batch.to(language.int64) * height * width * CHANNELS
    image = images + client * pixels + channel[None, :]
    rest = (language.num_programs(2) // splits).to(language.int64) * pixels
    slope = gradient + client * gradient_client_step
    slope += (language.minimum(row, row_count - 1) * gradient_row_step)[:, None]
    total = language.full((ROWS, COLUMNS), 0.0, language.float32)
    first = split * places_each
    last = language.minimum(first + places_each, batch * (GRID_HEIGHT * GRID_WIDTH))
    for start in range(first, last, INNER):
        place = start + language.arange(0, INNER)
        line = place // GRID_WIDTH
        y = line % GRID_HEIGHT * step_down - pad_down + tap_down
        x = place % GRID_WIDTH * step_across - pad_across + tap_across
        sample = line // GRID_HEIGHT
        inside = (place < last) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        source = image + (((sample * height + y) * width + x) * CHANNELS)[:, None]
        gathered = language.load(source, mask=inside[:, None], other=0.0)
        which = place if FLAT else sample * gradient_sample_step + place % (GRID_HEIGHT * GRID_WIDTH)
        slopes = language.load(slope + which[None, :], mask=(place < last)[None, :], other=0.0)
        if PARTED:
            fine = language.load(source + rest, mask=inside[:, None], other=0.0)
            coarse = slopes.to(language.bfloat16)
            total = language.dot((slopes - coarse.to(language.float32)).to(language.bfloat16), gathered, total)
            total = language.dot(coarse, fine, total)
            total = language.dot(coarse, gathered, total)
        else:
            total = language.dot(slopes, gathered, total, input_precision=PRECISION)
    count = row_count * (TALL * WIDE * CHANNELS)
    target = parts + (split.to(language.int64) * (language.num_programs(2) // splits) + client) * count
    target += row[:, None] * (TALL * WIDE * CHANNELS) + (tap * CHANNELS + channel)[None, :]
    language.store(target, total, mask=(row < row_count)[:, None])


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def _collect(  # type: ignore[no-untyped-def]
    parts, weights, count, channels, splits, split_step,
    TALL: constexpr, WIDE: constexpr, CHANNELS: constexpr, UNFOLDED: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(1).to(language.int64)
    place = language.program_id(0) * BLOCK + language.arange(0, BLOCK)
    here = place < count
    tap = place % (TALL * WIDE)
    channel = place // (TALL * WIDE) % channels
    row = place // (TALL * WIDE) // channels
    if UNFOLDED:
        source = (row * TALL + tap // WIDE) * CHANNELS + tap % WIDE * channels + channel
        each = count // (channels * WIDE) * CHANNELS
    else:
        source = (row * (TALL * WIDE) + tap) * CHANNELS + channel
        each = count // channels * CHANNELS
    source += client * each
    total = language.load(parts + source, mask=here, other=0.0)
    for split in range(1, splits):
        total += language.load(parts + source + split * split_step.to(language.int64), mask=here, other=0.0)
    language.store(weights + client * count + place, total.to(weights.dtype.element_ty), mask=here)


def forward(
    images: Tensor, weights: Tensor, stride: Pair, padding: Pair, precision: str, tile: Tile | None = None
) -> Tensor:
    """Convolve images ``[K, C, B, H, W]`` with weights ``[K, O, C, h, w]``: ``[K, O, B, H', W']``."""
    clients, outputs, _, tall, wide = weights.shape
    batch, height, width = images.shape[2:]
    size = (height + 2 * padding[0] - tall) // stride[0] + 1, (width + 2 * padding[1] - wide) // stride[1] + 1
    tile = tile or product_tile(
        clients, outputs, _line(images.shape[1], wide), batch * size[0] * size[1], images.dtype, precision
    )
    result = images.new_empty(clients, outputs, batch, *size)
    laid, unfolded = _rearranged_images(images, tile.inner, wide, stride, padding, size[1], precision)
    factors = _rearranged_weights(weights, laid.shape[4], unfolded, precision)
    across = (1, stride[1], padding[1]) if not unfolded else (1, 1, 0)
    _multiply(
        factors, laid, result, (tall, 1 if unfolded else wide), (stride[0], across[1]), (padding[0], across[2]),
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
    laid, _ = _rearranged_images(gradient, tile.inner, None, stride, padding, 0, precision)
    factors = _rearranged_weights(weights.transpose(1, 2), laid.shape[4], False, precision)
    _multiply(factors, laid, result, (tall, wide), stride, padding, True, tile, precision)
    return result


def for_weights(
    gradient: Tensor,
    images: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    precision: str,
    tile: Tile | None = None,
) -> Tensor:
    """Sum a gradient ``[K, O, B, H', W']`` over the windows of the images: ``[K, O, C, h, w]``."""
    gradient = _in_planes(gradient)
    clients, outputs, batch, rows, across = gradient.shape
    channels = images.shape[1]
    places = batch * rows * across
    tile = tile or weights_tile(clients, outputs, channels, kernel, places, images.dtype)
    parted = precision == "tf32" and images.dtype == torch.float32
    laid, unfolded = _rearranged_images(
        images, tile.columns, kernel[1], stride, padding, across, precision, parted=parted
    )
    if unfolded:
        taps, step_across, pad_across = (kernel[0], 1), 1, 0
    else:
        taps, step_across, pad_across = kernel, stride[1], padding[1]
    places_each = triton.cdiv(triton.cdiv(places, tile.splits), tile.inner) * tile.inner
    splits = triton.cdiv(places, places_each)
    columns = taps[0] * taps[1] * laid.shape[4]
    parts = torch.empty(splits, clients, outputs, columns, dtype=torch.float32, device=images.device)
    weights = images.new_empty(clients, outputs, channels, *kernel)
    count = weights[0].numel()
    with _on(images):
        _product_for_weights[(columns // tile.columns, triton.cdiv(outputs, tile.rows), clients * splits)](
            gradient, laid, parts, outputs, batch, places_each, laid.shape[2], laid.shape[3],
            stride[0], step_across, padding[0], pad_across, *gradient.stride()[:3], splits,
            rows, across, *taps, laid.shape[4], gradient.stride(2) == rows * across, parted, precision,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _collect[(triton.cdiv(count, 4096), clients)](
            parts, weights, count, channels, splits, parts[0].numel(), *kernel, laid.shape[4], unfolded, 4096,
            num_warps=8,
        )  # fmt: skip
    return weights


def product_tile(clients: int, rows: int, line: int, places: int, dtype: torch.dtype, precision: str) -> Tile:
    """Choose the tile of a product of ``[rows, taps * line]`` with ``[taps * line, places]`` for each client.

    The choices were measured on an H200.
    """
    inner = min(32 if dtype == torch.float32 else 64, max(16, triton.next_power_of_2(line)))
    if rows <= 32:
        return Tile(max(16, triton.next_power_of_2(rows)), 128, inner, 4, 3)
    if precision != "tf32" and dtype == torch.float32:
        return Tile(64, 128, inner, 8, 2) if precision == "tf32x3" else Tile(64, 64, 16, 4, 3)
    if rows <= 64:
        return Tile(64, 128, inner, 4, 3)
    if clients * triton.cdiv(rows, 128) * triton.cdiv(places, 128) < 264:
        return Tile(64, 64, inner, 4, 4)
    return Tile(128, 128, inner, 8, 3)


def weights_tile(clients: int, outputs: int, channels: int, kernel: Pair, places: int, dtype: torch.dtype) -> Tile:
    """Choose the tile of a gradient for weights, and how many programs share the places."""
    columns = min(128, max(16, triton.next_power_of_2(_line(channels, kernel[1]))))
    inner = 32 if dtype == torch.float32 else 64
    rows, warps = (128, 8) if columns == 128 and outputs >= 128 else (64, 4)
    programs = clients * triton.cdiv(outputs, rows) * triton.cdiv(channels * kernel[0] * kernel[1], columns)
    splits = max(1, min(264 // programs, places // (8 * inner)))
    return Tile(rows, columns, inner, warps, 3, splits)


def _line(channels: int, wide: int) -> int:
    """Tell how many numbers of a window lie in one piece: those of one line of the kernel where there are few."""
    return channels * wide if channels * wide <= _FEW else channels


def _rearranged_images(
    images: Tensor, inner: int, wide: int | None, stride: Pair, padding: Pair, across: int, precision: str,
    parted: bool = False,
) -> tuple[Tensor, int]:  # fmt: skip
    """Bring ``[K, C, B, H, W]`` into the order ``[K, B, H, W, C]``, the channels filled up with zeros.

    Where one line of the kernel, ``wide``, has few numbers, they all become channels: ``[K, B, H, W', w * C]``; the
    second result is then ``wide``, and else 0.
    """
    images = _in_planes(images)
    clients, channels, batch, height, width = images.shape
    unfolded = wide if wide is not None and wide > 1 and wide * channels <= _FEW else 0
    filled = triton.cdiv(channels * (unfolded or 1), inner) * inner
    kind = torch.bfloat16 if parted else images.dtype
    shape = clients * (1 + parted), batch, height, across if unfolded else width, filled
    laid = torch.empty(shape, dtype=kind, device=images.device)
    some = min(64, triton.next_power_of_2(filled))
    pixels = 4096 // some
    count = batch * height * shape[3]
    narrow = precision == "tf32" and images.dtype == torch.float32 and not parted
    with _on(images):
        _rearrange_images[(triton.cdiv(count, pixels), triton.cdiv(filled, some), clients)](
            images, laid, channels, count, height * width, width, stride[1], padding[1],
            *images.stride()[:3], filled, unfolded, *((height, across, channels) if unfolded else (1, 1, 1)),
            images.stride(2) == height * width, narrow, parted, some, pixels,
        )  # fmt: skip
    return laid, unfolded


def _rearranged_weights(weights: Tensor, filled: int, unfolded: int, precision: str) -> Tensor:
    """Bring ``[K, M, C, h, w]`` into the order ``[K, M, h, w, C]``, the channels filled up with zeros."""
    if weights.stride()[3:] != (weights.shape[4], 1):
        weights = weights.contiguous()
    clients, rows, channels, tall, wide = weights.shape
    taps = tall * (1 if unfolded else wide)
    laid = weights.new_empty(clients, rows, taps, filled)
    count = rows * taps * filled
    with _on(weights):
        _rearrange_weights[(triton.cdiv(count, 4096), clients)](
            weights, laid, count, channels, *weights.stride()[:3], tall, wide, filled, unfolded,
            precision == "tf32" and weights.dtype == torch.float32, 4096, num_warps=8,
        )  # fmt: skip
    return laid


def _multiply(
    factors: Tensor, laid: Tensor, result: Tensor, taps: Pair, stride: Pair, padding: Pair, back: bool,
    tile: Tile, precision: str,
) -> None:  # fmt: skip
    clients, rows, batch, *size = result.shape
    classes = stride if back else (1, 1)
    places = batch * triton.cdiv(size[0], classes[0]) * triton.cdiv(size[1], classes[1])
    grid = (triton.cdiv(places, tile.columns) * classes[0] * classes[1], triton.cdiv(rows, tile.rows), clients)
    with _on(laid):
        _product[grid](
            factors, laid, result, rows, batch, laid.shape[2], laid.shape[3], *size, *stride, *padding,
            factors.shape[2], taps[1], *result.stride()[:2], *classes, *taps, laid.shape[4], back, precision,
            tile.rows, tile.columns, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _on(tensor: Tensor) -> AbstractContextManager[None]:
    """Launch on a tensor's GPU; tensors of the CPU are for Triton's interpreter."""
    device: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return device


def _in_planes(images: Tensor) -> Tensor:
    """Each channel of a sample lies in one piece, and one client's pixels are told apart by 32 bits."""
    reach = sum((count - 1) * step for count, step in zip(images.shape[1:], images.stride()[1:], strict=True))
    return images if images.stride()[3:] == (images.shape[4], 1) and reach < 2**31 else images.contiguous()
