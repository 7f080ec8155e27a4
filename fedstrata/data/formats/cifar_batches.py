"""The two formats in which CIFAR's authors distribute it: pickled batches and the binary version."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.formats.samples import Samples, damaged

_PIXELS = 3 * 32 * 32
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that builds plain values and NumPy arrays and refuses everything else.

    A pickle can name any function to be called while it is read; this one looks only these names up.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return an admitted name."""
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it wants to use '{module}.{name}', and only arrays are admitted")
        return _ADMITTED[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dict, as written by Python 2, with its keys as text."""
    try:
        content = ArrayUnpickler(BytesIO(path.read_bytes()), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise damaged(path, str(error)) from None
    # A truncated or garbled stream can fail in any of these ways.
    except (
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ImportError,
        MemoryError,
        OverflowError,
    ) as error:
        raise damaged(path, f"it cannot be read as a pickle ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise damaged(path, "it does not hold a dict")
    return {_text(key): value for key, value in content.items()}


def read_pickled_batch(path: Path, label_key: str) -> Samples:
    """Read images and labels from a pickled batch of CIFAR."""
    content = read_pickle(path)
    if "data" not in content or label_key not in content:
        raise damaged(path, f"it has the entries {', '.join(content)}, and 'data' and '{label_key}' are needed")
    pixels, labels = np.asarray(content["data"]), np.asarray(content[label_key])
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS) or labels.dtype.kind not in "iu":
        raise damaged(path, f"its images are {pixels.dtype} {pixels.shape} with {len(labels)} labels of {labels.dtype}")
    return Samples(pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64))


def read_pickled_names(path: Path, key: str) -> tuple[str, ...] | None:
    """Read the names of the classes, where the file that tells them is there."""
    names = read_pickle(path).get(key) if path.is_file() else None
    return tuple(map(_text, names)) if names else None


def read_binary_batch(path: Path, label_bytes: int) -> Samples:
    """Read records of one or two label bytes (the last one counts) and the bytes of an image."""
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    record = label_bytes + _PIXELS
    if len(content) == 0 or len(content) % record:
        raise damaged(path, f"its {len(content)} bytes are not a whole number of records of {record} bytes")
    records = content.reshape(-1, record)
    return Samples(
        np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32),
        records[:, label_bytes - 1].astype(np.int64),
    )


def read_text_names(path: Path) -> tuple[str, ...] | None:
    """Read the names of the classes, one a line, where the file that tells them is there."""
    names = path.read_text(encoding="utf-8", errors="replace").split() if path.is_file() else []
    return tuple(names) or None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
