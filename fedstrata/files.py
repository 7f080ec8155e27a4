"""Files that appear whole or not at all, a lock that dies with its process, and disk trouble told in one sentence."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedstrata.errors import FedStrataError, FedStrataWarning

LOCK_FILE = ".lock"
_PARTIAL_NAME = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
_LOCKED = (errno.EAGAIN, errno.EACCES)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_SUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def explained(path: Path, action: str = "written") -> Iterator[None]:
    """Turn what the system says of a file or folder into one sentence for the user."""
    try:
        yield
    except OSError as error:
        raise FedStrataError(f"'{path}' cannot be {action}: {_reason(error)}.") from error


class Pieces:
    """The content of a file that comes piece by piece, and is never in memory as a whole.

    Once it is written, it knows its size and its checksum, which is computed while the pieces are written.

    >>> content = Pieces([b"ab", b"c"])
    >>> b"".join(content), content.size, content.sha256 == sha256(b"abc").hexdigest()
    (b'abc', 3, True)
    """

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._sum = sha256()
        self.size = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        with ThreadPoolExecutor(1) as beside:
            for piece in self._pieces:
                summed = beside.submit(self._sum.update, piece)
                self.size += len(piece)
                yield piece
                summed.result()

    @property
    def sha256(self) -> str:
        """The checksum of what has been written."""
        return self._sum.hexdigest()


Content = bytes | str | Pieces
"""What can be written into a file."""


def write_atomically(path: Path, content: Content, private: bool = False) -> None:
    """Put a file in place in one step: at any moment there is the old file or the new one, never a part.

    What is ``private``, only its owner can read, from its first moment on.
    """
    partial = _partial_beside(path)
    with explained(path), _removed_on_failure(partial):
        _write_through(partial, content, private)
        partial.replace(path)
        _flush(path.parent)


def write_folder_atomically(
    path: Path, files: Mapping[str, Content | Callable[[], str]], private: bool = False
) -> None:
    """Put a folder with its files in place in one step; a folder of that name must not exist, or be empty.

    The name of a file may have a folder before it, as in ``imports/my_methods.py``. What is ``private``, only its owner
    can read. A function is called when all files before its own are written.
    """
    partial = _partial_beside(path)
    with explained(path), _removed_on_failure(partial):
        partial.mkdir(_folder_mode(private))
        for name, content in files.items():
            (partial / name).parent.mkdir(_folder_mode(private), exist_ok=True)
            _write_through(partial / name, content() if callable(content) else content, private)
        for folder in {(partial / name).parent for name in files} | {partial}:
            _flush(folder)
        partial.rename(path)
        _flush(path.parent)


def open_to_append(path: Path) -> int:
    """Open a file to which is only ever added; one that is not there is made, for its owner alone."""
    new = not path.exists()
    make_folder(path.parent, private=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    if new:
        _flush(path.parent)
    return descriptor


def make_folder(path: Path, private: bool = False) -> None:
    """Make a folder and its parents, where they are missing; a new one that is ``private``, only its owner enters."""
    with explained(path):
        path.mkdir(_folder_mode(private), parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Take a folder away in one step: it is renamed first, so that a part of it is never mistaken for the whole."""
    partial = _partial_beside(path)
    with explained(path):
        path.rename(partial)
        shutil.rmtree(partial)


def remove_partials(folder: Path, name: str | None = None) -> None:
    """Clear away what interrupted writes (of all files and folders, or of one ``name``) have left in a folder."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        written = partial_of(entry.name)
        if written is not None and name in (None, written):
            _remove(entry)


def partial_of(name: str) -> str | None:
    """Tell of which file or folder this is an unfinished write, if it is one."""
    matched = _PARTIAL_NAME.fullmatch(name)
    return matched.group(1) if matched else None


def read_bytes(path: Path) -> bytes:
    """Read a file; why it cannot be read is told in one sentence."""
    with explained(path, "read"):
        return path.read_bytes()


def to_json(content: Any) -> str:
    """Write plain data as JSON for every reader: arrays as lists; NaN and infinities, which JSON lacks, as null.

    >>> to_json({"loss": float("nan")})
    '{\\n  "loss": null\\n}\\n'
    """
    large: dict[str, np.ndarray] = {}
    text = json.dumps(_plain(content, large), indent=2, allow_nan=False) + "\n"
    for place, numbers in large.items():
        before, behind = text.split(f'"{place}"')
        line = before[before.rfind("\n") + 1 :]
        text = before + _indented(numbers, len(line) - len(line.lstrip())) + behind
    return text


def from_json(content: bytes, source: Path) -> dict[str, Any]:
    """Read a JSON object; ``source`` is named when the content is damaged."""
    try:
        values = json.loads(content)
    except ValueError as error:
        raise _damaged(source, "JSON", error) from error
    if not isinstance(values, dict):
        raise FedStrataError(f"'{source}' is damaged: it holds no JSON object.")
    return values


def column_of(numbers: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Make a column of whole or floating-point numbers from their memory.

    ``pa.array`` imports pandas, wherever it is installed, to ask whether what it was given belongs to it; in some
    versions ``to_pandas_dtype`` does, too, which takes a second.
    """
    letter = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    own = np.ascontiguousarray(numbers, dtype=f"{letter}{kind.bit_width // 8}")
    return pa.Array.from_buffers(kind, len(own), [None, pa.py_buffer(own)])


def texts_of(words: np.ndarray, texts: Sequence[str]) -> pa.Array:
    """Make a column of texts, each given by its place in a list of distinct ones; without ``pa.array``, as above."""
    encoded = [text.encode("utf-8") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    distinct = pa.Array.from_buffers(pa.string(), len(encoded), buffers)
    return distinct.take(column_of(words, pa.int32()))


def to_parquet(table: pa.Table) -> bytes:
    """Write a table as Parquet, the same bytes for the same content."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def from_parquet(content: bytes, schema: pa.Schema, source: Path) -> pa.Table:
    """Read a table and insist on its columns; ``source`` is named when the content is damaged.

    By one thread: one of Arrow's own could still hold the content when Python ends, and that would end in an abort.
    """
    try:
        table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(source, "Parquet", error) from error
    if not table.schema.equals(schema):
        raise FedStrataError(
            f"'{source}' has the columns {table.column_names} of other names or types than {schema.names}."
        )
    return table


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Write named tensors in the safetensors format; tensors that share memory are written as independent copies."""
    return b"".join(_safetensors(tensors, {}))


def safetensors_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Pieces:
    """Write the same piece by piece, perhaps with texts beside the tensors."""
    return Pieces(_safetensors(tensors, metadata or {}))


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Write the same bytes as the library of that name.

    The library holds all of it in memory several times over, which takes longer than to write it to the disk.
    """
    ranks = {kind: rank for rank, kind in enumerate(_SAFE_TYPES.values())}
    kinds = {name: _safe_type(tensor) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-ranks[kinds[name]], name))
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        described[name] = {"dtype": kinds[name], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for name in order:
        flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        for piece in (flat,) if flat.device.type == "cpu" else torch.split(flat, _PIECE):
            yield piece.cpu().numpy().data


_PIECE = 2**24
"""How many bytes are brought from a GPU at once."""
_SAFE_TYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.complex64: "C64", torch.float64: "F64",
    torch.int64: "I64",
}  # fmt: skip
"""The names of types in the safetensors format; tensors are written in the opposite order of these."""


def _safe_type(tensor: Tensor) -> str:
    try:
        return _SAFE_TYPES[tensor.dtype]
    except KeyError:
        raise FedStrataError(f"Tensors of type {str(tensor.dtype).removeprefix('torch.')} cannot be saved.") from None


def from_safetensors(content: bytes, source: Path) -> dict[str, Tensor]:
    """Read named tensors onto the CPU; ``source`` is named when the content is damaged."""
    try:
        return safetensors.torch.load(content)
    except SafetensorError as error:
        raise _damaged(source, "safetensors", error) from error


class WriteLock:
    """The right to write a folder, held by one process at a time; the system takes it back when that process ends.

    A forked child does not hold it, so that workers which outlive a killed parent do not keep the folder locked.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        with explained(path):
            file = path.open("ab")
        try:
            _take_lock(file)
        except OSError as error:
            if error.errno in _LOCKED:
                file.close()
                raise FedStrataError(
                    f"'{folder}' is being written by another process; wait until that ends, or choose another folder."
                ) from None
            warnings.warn(
                f"'{folder}' cannot be locked ({_reason(error)}), so see to it that no other process writes there.",
                FedStrataWarning,
                stacklevel=2,
            )
        self._file: IO[bytes] | None = file
        _held.add(self)

    def release(self) -> None:
        """Let others write."""
        if self._file is not None:
            self._file.close()
            self._file = None


def is_being_written(folder: Path) -> bool | None:
    """Tell whether a process holds the right to write a folder; none where the file system cannot tell."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return True if error.errno in _LOCKED else None
    return False


def _take_lock(file: IO[bytes]) -> None:
    """Lock a file at once, or after a moment: who only asks whether it is locked holds it for an instant, too."""
    for _ in range(_MOMENTS):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_MOMENT)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_MOMENTS, _MOMENT = 3, 0.01
_held: WeakSet[WriteLock] = WeakSet()


def _leave_locks_to_parent() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def _partial_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _folder_mode(private: bool) -> int:
    return 0o700 if private else 0o777


def _write_through(path: Path, content: Content, private: bool = False) -> None:
    """Write a new file down to the disk itself, not only into the system's memory."""
    mode = 0o600 if private else 0o666
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        waiting = 0
        for piece in content if isinstance(content, Pieces) else (content,):
            waiting += file.write(piece.encode("utf-8") if isinstance(piece, str) else piece)
            if waiting >= _STRETCH:
                file.flush()
                _let_go(file.fileno())
                waiting = 0
        file.flush()
        os.fsync(file.fileno())


_STRETCH = 2**25
"""After so many bytes what was written is brought down to the disk, and leaves the system's memory."""


def _let_go(descriptor: int) -> None:
    """Bring what was written so far down to the disk, and let the system's memory of it serve for what comes.

    It must come down in the end. Until then a large file would take as much memory as it is long, which costs a
    virtual machine more time than writing it, and push out what others have read.
    """
    os.fdatasync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _flush(folder: Path) -> None:
    """Bring the names in a folder down to the disk, on file systems that can do so on demand."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _remove(path)
        raise


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _reason(error: OSError) -> str:
    if error.errno in _NO_SPACE:
        return "the disk is full; free some space, or choose a folder on another disk"
    if error.errno in _NO_PERMISSION:
        return "permission is missing; change the permissions, or choose another folder"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "a file stands where a folder is needed; choose another folder"
    return (error.strerror or str(error)).lower()


def _damaged(source: Path, format_name: str, error: Exception) -> FedStrataError:
    return FedStrataError(f"'{source}' is damaged: it is not {format_name} ({str(error).splitlines()[0]}).")


_FEW = 1000


def _plain(value: Any, large: dict[str, np.ndarray]) -> Any:
    """Turn a value into what JSON knows; arrays of many whole numbers are put aside, and only their place is held."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim in (1, 2) and value.size > _FEW:
        place = secrets.token_hex()
        large[place] = value
        return place
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), large)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, large) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, large) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _indented(numbers: np.ndarray, indent: int) -> str:
    """Write whole numbers ``[n]`` or ``[n, m]`` as ``json.dumps`` with an indent does, which is far slower for many."""
    outer, inner, innermost = ("\n" + " " * (indent + more) for more in (0, 2, 4))
    text = json.dumps(numbers.tolist(), separators=(",", ":"))
    if numbers.ndim == 1:
        return f"[{inner}{text[1:-1].replace(',', ',' + inner)}{outer}]"
    rows = text[2:-2].replace("],[", ";").replace(",", "," + innermost).replace(";", f"{inner}],{inner}[{innermost}")
    return f"[{inner}[{innermost}{rows}{inner}]{outer}]"
