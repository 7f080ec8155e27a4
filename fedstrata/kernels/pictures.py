"""Batches of images from a dataset of bytes: gathered, mirrored, rotated, cropped and scaled in one launch.

A byte has 256 values, so whatever happens to single pixels is a table: what the general operations make of the 256
bytes of each channel. The kernel draws where an image moves, and copies through the table: the pixels are those of the
general operations bit for bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import on_device_of
from fedstrata.kernels.random_words import four_words

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _uniform(keys, client, stream, number, FIRST: constexpr, SECOND: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Draw the n-th number in [0, 1) of a client's key, changed by two words."""
    key0 = (language.load(keys + 2 * client) ^ FIRST).to(language.uint32)
    key1 = (language.load(keys + 2 * client + 1) ^ SECOND).to(language.uint32)
    word0, word1, word2, word3 = four_words(key0, key1, (number // 4).to(language.uint32), stream)
    lane = number % 4
    word = language.where(lane < 2, language.where(lane == 0, word0, word1), language.where(lane == 2, word2, word3))
    return (word >> 8).to(language.int32).to(language.float32) * (2.0**-24)


@triton.jit  # type: ignore[untyped-decorator]
def _picture(  # type: ignore[no-untyped-def]
    samples, positions, pictures, table, table_step, keys, streams, turns, batch,
    CHANNELS: constexpr, HEIGHT: constexpr, WIDTH: constexpr,  # noqa: N803
    FLIP: constexpr, FLIP0: constexpr, FLIP1: constexpr,  # noqa: N803
    PADDING: constexpr, CROP0: constexpr, CROP1: constexpr,  # noqa: N803
    ORDER: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    image = language.program_id(0)
    client = (image // batch).to(language.int64)
    number = image % batch
    place = language.program_id(1) * BLOCK + language.arange(0, BLOCK)
    inside = place < CHANNELS * HEIGHT * WIDTH
    channel = place // (HEIGHT * WIDTH)
    row = place // WIDTH % HEIGHT
    column = place % WIDTH
    there, scaled = inside, inside
    for turn in language.static_range(4):  # from the last step to the first: where does a pixel come from?
        if ((ORDER >> 2 * turn) & 3) == 1:
            stream = language.load(streams).to(language.uint32)
            mirrored = _uniform(keys, client, stream, number, FLIP0, FLIP1) < FLIP
            column = language.where(mirrored, WIDTH - 1 - column, column)
        if ((ORDER >> 2 * turn) & 3) == 2:
            stream = language.load(streams).to(language.uint32)
            down = _uniform(keys, client, stream, 2 * number, CROP0, CROP1) * (2 * PADDING + 1)
            right = _uniform(keys, client, stream, 2 * number + 1, CROP0, CROP1) * (2 * PADDING + 1)
            row += down.to(language.int32) - PADDING
            column += right.to(language.int32) - PADDING
            there = there & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
        if ((ORDER >> 2 * turn) & 3) == 3:
            cosine = language.load(turns + 2 * image)
            sine = language.load(turns + 2 * image + 1)
            below = row.to(language.float64) - (HEIGHT - 1) / 2
            beside = column.to(language.float64) - (WIDTH - 1) / 2
            row = language.floor(sine * beside + cosine * below + HEIGHT / 2).to(language.int32)
            column = language.floor(cosine * beside - sine * below + WIDTH / 2).to(language.int32)
            there = there & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
        if turn == (ORDER >> 8):
            scaled = there
    source = samples + language.load(positions + image) * (CHANNELS * HEIGHT * WIDTH)
    value = language.load(source + (channel * HEIGHT + row) * WIDTH + column, mask=there, other=0).to(language.int32)
    result = language.load(table + client * table_step + channel * 256 + value, mask=scaled, other=0.0)
    language.store(pictures + image.to(language.int64) * (CHANNELS * HEIGHT * WIDTH) + place, result, mask=inside)


STEPS = {"flip": 1, "crop": 2, "rotate": 3}
"""The kernel's numbers of what moves pixels; "scale" stands for the table."""


def pictures(
    samples: Tensor,
    positions: Tensor,
    table: Tensor,
    keys: Tensor | None = None,
    stream: int | Tensor = 0,
    flip: tuple[float, tuple[int, int]] | None = None,
    crop: tuple[int, tuple[int, int]] | None = None,
    angles: Tensor | None = None,
    order: Sequence[str] = ("flip", "rotate", "crop", "scale"),
) -> Tensor:
    """Make images ``[K, B, channels, height, width]`` of the bytes ``[n, ...]`` at positions ``[K, B]``.

    ``table`` ``[1 or K, channels, 256]`` says what becomes of each byte; ``flip`` is the probability and the sub-key of
    mirroring, ``crop`` the padding and the sub-key of cropping, ``angles`` ``[K, B]`` by how much images are rotated,
    in radians and float64. They come in an ``order``. What comes from outside an image is zero: the byte, or what is
    there after the table ("scale").
    """
    clients, batch = positions.shape
    shape = samples.shape[1:]
    made = torch.empty(clients, batch, *shape, dtype=table.dtype, device=table.device)
    probability, flip_key = flip or (None, (0, 0))
    padding, crop_key = crop or (None, (0, 0))
    streams = stream if isinstance(stream, Tensor) else positions.new_full((), stream)
    turns = None if angles is None else torch.stack((angles.cos(), angles.sin()), dim=-1).contiguous()
    table = table.contiguous()
    step = table.stride(0) if len(table) > 1 else 0
    grid = clients * batch, triton.cdiv(shape.numel(), _BLOCK)
    with on_device_of(made):
        _picture[grid](
            samples, positions.contiguous(), made, table, step,
            None if keys is None else keys.contiguous(), streams, turns, batch, *shape, probability, *flip_key, padding,
            *crop_key, _in_order(order, flip is not None, crop is not None, angles is not None), _BLOCK, num_warps=4,
        )  # fmt: skip
    return made


def _in_order(order: Sequence[str], flip: bool, crop: bool, rotate: bool) -> int:
    """Write the steps that are done as one number, the last one first, two bits each; above them when to scale."""
    done = {"flip": flip, "crop": crop, "rotate": rotate}
    backwards = [step for step in reversed(order) if done.get(step, step == "scale")]
    scaling = backwards.index("scale") if "scale" in backwards else 0
    return sum(STEPS.get(step, 0) << 2 * place for place, step in enumerate(backwards)) | scaling << 8
