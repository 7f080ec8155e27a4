"""Messages, and frames around anything, for the tests of the wire."""

from __future__ import annotations

import json
import struct
import zlib

import torch

from fedstrata.methods.contract.views import Message

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
PREFIX = struct.Struct("<4sII")
NO_ROUND = 2**32 - 1


def numbers(dtype, *shape):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) * 37 % 251
    return (values % 2 == 0) if dtype == torch.bool else (values - 100 if dtype.is_signed else values).to(dtype)


def assert_equal(left, right):
    for kind in ("tensors", "masks", "numbers"):
        ours, theirs = getattr(left, kind), getattr(right, kind)
        assert list(ours) == list(theirs)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype, name
            assert ours[name].shape == theirs[name].shape, name
            assert torch.equal(ours[name], theirs[name]), name


def sealed(content):
    """Put the checksum that fits behind any bytes."""
    return bytes(content) + struct.pack("<I", zlib.crc32(content))


def framed(description, body=b"", round=NO_ROUND):
    """Frame any description and body, with a checksum that fits."""
    raw = description if isinstance(description, bytes) else json.dumps(description).encode()
    return sealed(PREFIX.pack(b"FSM2", round, len(raw)) + raw + body)


def unframed(data):
    """Take a message apart: its description and its body."""
    begin = PREFIX.size + PREFIX.unpack_from(data)[2]
    return json.loads(data[PREFIX.size : begin]), data[begin:-4]


def random_mask(density, *shape, seed=0):
    return torch.rand(1, *shape, generator=torch.Generator().manual_seed(seed)) < density


def small_message():
    mask = torch.tensor([[True, False, True], [False, False, True]])[None]
    return Message(
        {"layer.weight": torch.tensor([[1.5, 0.0, -2.0], [0.0, 0.0, 3.25]])[None] * mask, "count": torch.tensor([7])},
        {"layer.weight": mask},
        {"samples": torch.tensor([12.0])},
    )
