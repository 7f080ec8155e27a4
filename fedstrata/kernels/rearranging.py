"""Images and weights in the order in which implicit products read them: the channels of a pixel in one piece.

Where one line of the kernel has few numbers, as that of a first layer with its three colours, they all become channels.
"""

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import on_device_of

Pair = tuple[int, int]
_FEW = 32
"""So many numbers of one line of a window, or fewer, are unfolded into the channels."""
_BLOCK = 4096
_SIDE = 64
"""Rows and columns of a tile of weights that is turned around."""
_PLAIN = ("channels", "plane", "width", "stride_across", "pad_across", "splits", "split_step")


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


@triton.jit(do_not_specialize=("rows", "columns"))  # type: ignore[untyped-decorator]
def _transpose_weights(  # type: ignore[no-untyped-def]
    weights, transposed, rows, columns, FILLED: constexpr, NARROW: constexpr, SIDE: constexpr,  # noqa: N803
):  # fmt: skip
    client = language.program_id(2).to(language.int64)
    row = language.program_id(1) * SIDE + language.arange(0, SIDE)
    column = language.program_id(0) * SIDE + language.arange(0, SIDE)
    source = weights + client * rows * columns + (row[:, None] * columns + column[None, :])
    values = language.load(source, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
    values = language.trans(_rounded(values, NARROW))
    target = transposed + client * columns * FILLED + (column[:, None] * FILLED + row[None, :])
    language.store(target, values, mask=(column < columns)[:, None] & (row < FILLED)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _part(values, parts, count, BLOCK: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    place = language.program_id(0).to(language.int64) * BLOCK + language.arange(0, BLOCK)
    value = language.load(values + place, mask=place < count, other=0.0)
    coarse = value.to(language.bfloat16)
    language.store(parts + place, coarse, mask=place < count)
    fine = (value - coarse.to(language.float32)).to(language.bfloat16)
    language.store(parts + count + place, fine, mask=place < count)


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


def rearranged_images(
    images: Tensor, inner: int, wide: int | None, stride: Pair, padding: Pair, across: int, precision: str,
    parted: bool = False,
) -> tuple[Tensor, int]:  # fmt: skip
    """Bring ``[K, C, B, H, W]`` into the order ``[K, B, H, W, C]``, the channels filled up with zeros.

    Where one line of the kernel, ``wide``, has few numbers, they all become channels: ``[K, B, H, W', w * C]``; the
    second result is then ``wide``, and else 0.
    """
    images = in_planes(images)
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
    with on_device_of(images):
        _rearrange_images[(triton.cdiv(count, pixels), triton.cdiv(filled, some), clients)](
            images, laid, channels, count, height * width, width, stride[1], padding[1],
            *images.stride()[:3], filled, unfolded, *((height, across, channels) if unfolded else (1, 1, 1)),
            images.stride(2) == height * width, narrow, parted, some, pixels,
        )  # fmt: skip
    return laid, unfolded


def rearranged_weights(weights: Tensor, filled: int, unfolded: int, precision: str, dtype: torch.dtype) -> Tensor:
    """Bring ``[K, O, C, h, w]`` into the order ``[K, O, h, w, C]``, the channels filled up with zeros."""
    if weights.stride()[3:] != (weights.shape[4], 1):
        weights = weights.contiguous()
    clients, rows, channels, tall, wide = weights.shape
    taps = tall * (1 if unfolded else wide)
    laid = weights.new_empty(clients, rows, taps, filled, dtype=dtype)
    count = rows * taps * filled
    with on_device_of(weights):
        _rearrange_weights[(triton.cdiv(count, _BLOCK), clients)](
            weights, laid, count, channels, *weights.stride()[:3], tall, wide, filled, unfolded,
            precision == "tf32" and dtype == torch.float32, _BLOCK, num_warps=8,
        )  # fmt: skip
    return laid


def transposed_weights(weights: Tensor, filled: int, precision: str, dtype: torch.dtype) -> Tensor:
    """Bring ``[K, O, C, h, w]`` into the order ``[K, C, h, w, O]``, the outputs filled up with zeros.

    For each client this is one matrix, turned around: tiles of it are read and written in whole rows.
    """
    weights = weights.contiguous()
    clients, outputs, channels, tall, wide = weights.shape
    laid = weights.new_empty(clients, channels, tall * wide, filled, dtype=dtype)
    columns = channels * tall * wide
    with on_device_of(weights):
        _transpose_weights[(triton.cdiv(columns, _SIDE), triton.cdiv(filled, _SIDE), clients)](
            weights, laid, outputs, columns, filled, precision == "tf32" and dtype == torch.float32, _SIDE
        )
    return laid


def collected(parts: Tensor, channels: int, kernel: Pair, filled: int, unfolded: int, dtype: torch.dtype) -> Tensor:
    """Add up parts ``[S, K, O, h * w * C]``, one after another, and bring them into the order ``[K, O, C, h, w]``."""
    splits, clients, outputs = parts.shape[:3]
    weights = torch.empty(clients, outputs, channels, *kernel, dtype=dtype, device=parts.device)
    count = weights[0].numel()
    with on_device_of(parts):
        _collect[(triton.cdiv(count, _BLOCK), clients)](
            parts, weights, count, channels, splits, parts[0].numel(), *kernel, filled, unfolded, _BLOCK, num_warps=8
        )
    return weights


def in_two_parts(values: Tensor) -> Tensor:
    """Part float32 numbers ``[K, ...]`` into two bfloat16 numbers each, ``[2 * K, ...]``: what is left comes second."""
    values = values.contiguous()
    parts = torch.empty(2 * len(values), *values.shape[1:], dtype=torch.bfloat16, device=values.device)
    with on_device_of(values):
        _part[(triton.cdiv(values.numel(), _BLOCK),)](values, parts, values.numel(), _BLOCK, num_warps=8)
    return parts


def line_of(channels: int, wide: int) -> int:
    """Tell how many numbers of a window lie in one piece: those of one line of the kernel where there are few."""
    return channels * wide if channels * wide <= _FEW else channels


def filling(channels: int, wide: int, most: int) -> int:
    """Tell to a multiple of which number channels are filled up."""
    return int(min(most, max(16, triton.next_power_of_2(line_of(channels, wide)))))


def in_planes(images: Tensor) -> Tensor:
    """Each channel of a sample lies in one piece, and one client's pixels are told apart by 32 bits."""
    reach = sum((count - 1) * step for count, step in zip(images.shape[1:], images.stride()[1:], strict=True))
    return images if images.stride()[3:] == (images.shape[4], 1) and reach < 2**31 else images.contiguous()
