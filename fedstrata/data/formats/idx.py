"""The IDX format of MNIST and its relatives, compressed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedstrata.data.formats.samples import damaged

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> np.ndarray:
    """Read an array of unsigned bytes.

    The header is two zero bytes, the type, the number of axes and their lengths (big-endian, 32 bits each).
    """
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise damaged(path, f"it does not decompress ({error})") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise damaged(path, "it does not begin like an IDX file of unsigned bytes")
    axes = content[3]
    start = 4 + 4 * axes
    shape = tuple(int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes))
    if len(content) - start != math.prod(shape):
        raise damaged(
            path, f"it should hold {math.prod(shape)} values after its header, but has {max(0, len(content) - start)}"
        )
    return np.frombuffer(bytearray(content), dtype=np.uint8, offset=start).reshape(shape)
