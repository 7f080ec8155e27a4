"""Messages as bytes, and bytes as messages.

Layout: the magic and version ``FSM1``; the lengths of header and payload; the header, JSON with the name, dtype, shape
and encoding of each tensor; the payload, little-endian values one tensor after the other, truth values as packed bits;
an eight-byte checksum of all that. A tensor with a mask sends the mask as packed bits and then only the values inside
it. A message that is cut, altered or inconsistent is refused as a whole.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.methods.base import Message
from fedstrata.stack import Tensors, per_client

_MAGIC = b"FSM1"
_LENGTHS = struct.Struct("<IQ")
_CHECKSUM_BYTES = 8
# What masks may unpack to: a bit of a mask stands for one value, or for many where it broadcasts.
_BYTES_PER_MASK_BIT = 8
_BROADCAST_BYTES = 2**28
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_Count = TypeVar("_Count", int, Tensor)


class WireError(FedStrataError):
    """A message that cannot be trusted: nothing of it is used."""


def encode(message: Message) -> bytes:
    """Write the message of one client (every leading axis is 1) as bytes."""
    payload = []
    for name, tensor in message.tensors.items():
        mask = message.masks.get(name)
        if mask is None:
            payload.append(_to_bytes(tensor))
        else:
            payload.append(_to_bytes(mask))
            payload.append(_to_bytes(tensor[mask.expand(tensor.shape)]))
    payload.extend(_to_bytes(tensor) for tensor in message.numbers.values())
    header, body = _header(message), b"".join(payload)
    content = _MAGIC + _LENGTHS.pack(len(header), len(body)) + header + body
    return content + _checksum(content)


def decode(data: bytes, device: torch.device | str = "cpu") -> Message:
    """Read a message of one client; whatever does not fit is a :class:`WireError`."""
    start = len(_MAGIC) + _LENGTHS.size
    if len(data) < start + _CHECKSUM_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise WireError(f"A message of {len(data)} bytes does not begin like one of this version.")
    header_length, body_length = _LENGTHS.unpack(data[len(_MAGIC) : start])
    if start + header_length + body_length + _CHECKSUM_BYTES != len(data):
        raise WireError(
            f"A message of {len(data)} bytes announces {header_length + body_length} bytes of content: "
            "it was cut or altered."
        )
    if _checksum(data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
        raise WireError("The checksum of a message does not fit its content: it was altered on its way.")
    try:
        header = json.loads(data[start : start + header_length])
        reader = _Reader(memoryview(data)[start + header_length : -_CHECKSUM_BYTES], device)
        tensors: Tensors = {}
        masks: Tensors = {}
        numbers: Tensors = {}
        for name, dtype, shape, mask_shape in header["tensors"]:
            _check_name(name, tensors)
            if mask_shape is None:
                tensors[name] = reader.values(dtype, shape)
            else:
                masks[name] = reader.values("bool", mask_shape)
                tensors[name] = reader.values_under(masks[name], dtype, shape)
        for name, dtype, shape in header["numbers"]:
            _check_name(name, numbers)
            numbers[name] = reader.values(dtype, shape)
        reader.finish()
    except (KeyError, TypeError, ValueError, RuntimeError, UnicodeDecodeError) as error:
        raise WireError(f"The content of a message does not fit its description ({str(error)[:200]}).") from None
    return Message(tensors, masks, numbers)


def encoded_sizes(message: Message, clients: int) -> list[int]:
    """Tell how many bytes :func:`encode` would write for each client, without writing them."""
    frame = len(_MAGIC) + _LENGTHS.size + len(_header(message)) + _CHECKSUM_BYTES
    sizes = torch.full((clients,), frame, dtype=torch.int64)
    for tensor in (*_unmasked(message), *message.numbers.values()):
        sizes += _byte_count(tensor.dtype, math.prod(tensor.shape[1:]))
    for name, mask in message.masks.items():
        tensor = message.tensors[name]
        held = per_client(mask.expand(max(len(mask), len(tensor)), *tensor.shape[1:])).sum(1).cpu()
        sizes += _byte_count(torch.bool, math.prod(mask.shape[1:])) + _byte_count(tensor.dtype, held)
    return [int(size) for size in sizes]


def _unmasked(message: Message) -> Iterator[Tensor]:
    return (tensor for name, tensor in message.tensors.items() if name not in message.masks)


def _header(message: Message) -> bytes:
    def shape(tensor: Tensor) -> list[int]:
        return [1, *tensor.shape[1:]]

    def dtype(tensor: Tensor) -> str:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise FedStrataError(f"Tensors of type {name} cannot be sent; use one of {', '.join(_DTYPES)}.")
        return name

    masks = message.masks
    tensors = [
        [name, dtype(tensor), shape(tensor), shape(masks[name]) if name in masks else None]
        for name, tensor in message.tensors.items()
    ]
    numbers = [[name, dtype(tensor), shape(tensor)] for name, tensor in message.numbers.items()]
    return json.dumps({"tensors": tensors, "numbers": numbers}, separators=(",", ":")).encode()


def _byte_count(dtype: torch.dtype, values: _Count) -> _Count:
    """Count the bytes of so many values: truth values take a bit each, filled up to whole bytes."""
    return (values + 7) // 8 if dtype == torch.bool else values * dtype.itemsize


def _to_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        return np.packbits(flat.numpy()).tobytes()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


class _Reader:
    """Reads tensors one after the other from a payload, refusing to run past its end."""

    def __init__(self, payload: memoryview, device: torch.device | str) -> None:
        self.payload = payload
        self.device = device
        self.position = 0
        self.allowance = _BYTES_PER_MASK_BIT * 8 * len(payload) + _BROADCAST_BYTES

    def values(self, dtype: str, shape: list[int]) -> Tensor:
        return self._flat(_dtype(dtype), _count(shape)).reshape(shape)

    def values_under(self, mask: Tensor, dtype: str, shape: list[int]) -> Tensor:
        self.allowance -= _count(shape) * _dtype(dtype).itemsize
        if self.allowance < 0:
            raise ValueError("it would unpack to far more than it holds")
        held = mask.expand(shape)
        values = torch.zeros(shape, dtype=_dtype(dtype), device=self.device)
        values[held] = self._flat(values.dtype, int(held.sum()))
        return values

    def finish(self) -> None:
        if self.position != len(self.payload):
            raise ValueError(f"{len(self.payload) - self.position} bytes are left over")

    def _flat(self, dtype: torch.dtype, count: int) -> Tensor:
        raw = self._bytes(_byte_count(dtype, count))
        if not count:
            return torch.empty(0, dtype=dtype, device=self.device)
        if dtype == torch.bool:
            return torch.from_numpy(_unpack(raw, count)).to(self.device)
        return torch.frombuffer(bytearray(raw), dtype=dtype).to(self.device)

    def _bytes(self, count: int) -> memoryview:
        if count > len(self.payload) - self.position:
            raise ValueError("it ends too early")
        self.position += count
        return self.payload[self.position - count : self.position]


def _unpack(packed: memoryview, count: int) -> np.ndarray:
    """Unpack truth values from bits; the last byte must be filled up with zeros, so that they have one encoding."""
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8)).astype(bool)
    if bits[count:].any():
        raise ValueError("bits stand behind the last truth value")
    return bits[:count]


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"unknown number type {name!r}")
    return _DTYPES[name]


def _check_name(name: Any, known: Tensors) -> None:
    if not isinstance(name, str) or name in known:
        raise ValueError(f"{name!r} is no name, or stands there twice")


def _count(shape: Any) -> int:
    if (
        not isinstance(shape, list)
        or not all(type(size) is int and size >= 0 for size in shape)
        or shape[:1] != [1]
        or math.prod(max(size, 1) for size in shape) >= 2**62
    ):
        raise ValueError(f"impossible shape {shape!r}")
    return math.prod(shape)
