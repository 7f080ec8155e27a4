"""The outside of a message: version, round, lengths and checksum around a description and a body.

Layout: the magic and version ``FSM2``; the round; the length of the description; the description; the body; a checksum
of all that. The checksum is CRC-32: it guards against accidents, of which it misses one in four thousand million and
none that touches a single stretch of four bytes, and runs at several times the speed of a cryptographic hash. Against
attackers there is TLS; whatever is read is checked as if an attacker had written it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstrata.errors import FedStrataError

Bytes = bytes | memoryview

_MAGIC = b"FSM2"
_PREFIX = struct.Struct("<4sII")
_CHECKSUM = struct.Struct("<I")
_NO_ROUND = 2**32 - 1
FRAME_BYTES = _PREFIX.size + _CHECKSUM.size


class WireError(FedStrataError):
    """A message that cannot be trusted: nothing of it is used."""


def seal(description: bytes, body: Iterable[Bytes], round: int | None) -> bytes:
    """Put description and body into a frame; each part of the body is read as it comes, and copied once in the end."""
    prefix = _PREFIX.pack(_MAGIC, _NO_ROUND if round is None else round, len(description))
    parts: list[Bytes] = []
    checksum = 0
    for part in chain([prefix, description], body):
        checksum = zlib.crc32(part, checksum)
        parts.append(part)
    return b"".join([*parts, _CHECKSUM.pack(checksum)])


def unseal(data: bytes, round: int | None, longest_description: int) -> tuple[bytes, Reader]:
    """Check the frame, and the round if one is expected; return the description and a reader of the body.

    A description that is too long is refused before anything of it is read.
    """
    if len(data) < FRAME_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise WireError(f"A message of {len(data)} bytes does not begin like one of this version.")
    announced = _PREFIX.unpack_from(data)[2]
    if announced > longest_description:
        raise WireError(f"A message announces a description of {announced} bytes; {longest_description} are the most.")
    content = memoryview(data)[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] != zlib.crc32(content):
        raise WireError("The checksum of a message does not fit its content: it was cut or altered on its way.")
    _, sent_in, length = _PREFIX.unpack_from(data)
    if _PREFIX.size + length > len(content):
        raise WireError(f"A message of {len(data)} bytes announces a description of {length} bytes.")
    if round is not None and sent_in != round:
        given = "no round" if sent_in == _NO_ROUND else f"round {sent_in}"
        raise WireError(f"A message of {given} came where one of round {round} is expected.")
    return bytes(content[_PREFIX.size : _PREFIX.size + length]), Reader(content[_PREFIX.size + length :])


class Reader:
    """Reads a body from beginning to end, never past it."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._position = 0

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        """Read a number of bytes, as a view."""
        if count > len(self._body) - self._position:
            raise WireError("A message ends before what it describes does.")
        self._position += count
        return np.frombuffer(self._body[self._position - count : self._position], dtype=np.uint8)

    def unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        """Read a few numbers."""
        return fields.unpack(self.take(fields.size).data)

    def finish(self) -> None:
        """Refuse a body that goes on."""
        if self._position != len(self._body):
            raise WireError(f"A message has {len(self._body) - self._position} bytes more than it describes.")
