"""The IDX format of MNIST and its relatives, compressed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from fedstrata.data.formats.bounds import LARGEST_CONTENT
from fedstrata.data.formats.samples import damaged

_UNSIGNED_BYTE = 0x08
_MOST_AXES = 4
_CHUNK = 2**20


def read_idx(path: Path) -> np.ndarray:
    """Read an array of unsigned bytes.

    The header is two zero bytes, the type, the number of axes and their lengths (big-endian, 32 bits each). No more is
    unpacked than it promises.
    """
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            return _read(gzip.GzipFile(fileobj=file) if packed else file, path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise damaged(path, f"it does not decompress ({error})") from None


def _read(stream: IO[bytes] | gzip.GzipFile, path: Path) -> np.ndarray:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] != _UNSIGNED_BYTE:
        raise damaged(path, "it does not begin like an IDX file of unsigned bytes")
    axes = start[3]
    if axes > _MOST_AXES:
        raise damaged(path, f"it promises {axes} axes, and there are {_MOST_AXES} at most")
    lengths = stream.read(4 * axes)
    shape = tuple(int.from_bytes(lengths[4 * axis : 4 * axis + 4], "big") for axis in range(axes))
    size = math.prod(shape)
    if size > LARGEST_CONTENT:
        raise damaged(path, f"it promises {size} values, and {LARGEST_CONTENT} are the most that is read")
    content = bytearray()
    while len(content) <= size and (piece := stream.read(min(_CHUNK, size + 1 - len(content)))):
        content += piece
    if len(content) != size:
        held = f"has {len(content)}" if len(content) < size else "has more"
        raise damaged(path, f"it should hold {size} values after its header, but {held}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
