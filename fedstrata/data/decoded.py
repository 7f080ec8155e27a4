"""Images that were decoded once lie in the cache, and are mapped into memory from then on instead of decoded again.

An entry is one safetensors file, written whole or not at all and for its owner alone, with the pool of a dataset and
what it was made from: a hash of every byte of its source files, and the versions of the programs that decoded them.
Sources are read and hashed each time, as sizes and times of files can lie; that takes a hundredth of decoding them.
The entry itself is checked by the fingerprint of its samples (:mod:`fedstrata.data.contents`), which every run notes
anyway. There is one entry for a dataset in a folder, so that changed sources replace what they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import safetensors
import torch
from safetensors import SafetensorError

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.caching import kept_directory
from fedstrata.data.contents import fingerprint, remember
from fedstrata.data.dataset import Dataset
from fedstrata.errors import FedStrataError, FedStrataWarning

SMALLEST = 2**20
"""Sources of fewer bytes are decoded as quickly as an entry is found."""
_SPARED = 4
"""An entry may take one part in so many of the free disk."""
_FORMAT = 1
_KEY = "dataset"

_keeping: ContextVar[bool] = ContextVar("keeping", default=True)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Neither keep what is decoded meanwhile nor look for it, as with samples that are not to be copied."""
    token = _keeping.set(False)
    try:
        yield
    finally:
        _keeping.reset(token)


def kept(
    name: str, place: Path, sources: Sequence[Path], decode: Callable[[], Dataset], classes: Sequence[str] = ()
) -> Dataset:
    """Take a dataset from the cache if it was made from the same ``sources``; else ``decode`` and keep it.

    ``name`` is the text by which it was asked for, parameters included, and ``place`` the folder of its files.
    ``classes`` are the names of its classes where these do not stand in its files.
    """
    folder = kept_directory("decoded") if _keeping.get() else None
    made_from = None if folder is None else _made_from(name, place, sources, classes)
    if folder is None or made_from is None:
        return decode()
    path = folder / f"{_hash([name, str(place.resolve())])}.safetensors"
    found = _read(path, made_from)
    if found is None:
        found = decode()
        _write(path, found, made_from)
    return found


def _made_from(name: str, place: Path, sources: Sequence[Path], classes: Sequence[str]) -> list[Any] | None:
    """Describe what a dataset is made from; none where it is not worth it, or decoding has to say what is wrong."""
    try:
        if not all(path.is_file() for path in sources) or sum(path.stat().st_size for path in sources) < SMALLEST:
            return None
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            hashes = list(pool.map(_hash_file, sources))
    except OSError:
        return None
    names = [os.path.relpath(path, place) for path in sources]
    hashed = [list(pair) for pair in zip(names, hashes, strict=True)]
    return [_FORMAT, __version__, PIL.__version__, name, list(classes), hashed]


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(path: Path, made_from: list[Any]) -> Dataset | None:
    """Map an entry into memory, if it is there, whole, and made from the same."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = json.loads(file.metadata()[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if header["made_from"] != made_from:
            return None
        described = header["described"]
        dataset = Dataset(
            inputs=tensors["inputs"],
            labels=tensors["labels"],
            train=tensors["train"].numpy(),
            test=tensors["test"].numpy(),
            sites=np.array(described["sites"])[tensors["sites"].numpy()] if "sites" in tensors else None,
            **{key: _tuples(described[key]) for key in ("name", "class_names", "mean", "deviation", "estimated")},
        )
        contents = fingerprint(dataset)
        whole = _hash([made_from, described, contents]) == header["checksum"]
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, IndexError, FedStrataError):
        whole = False
    if not whole:
        warnings.warn(
            f"The decoded images in '{path}' are damaged; they are decoded again.", FedStrataWarning, stacklevel=2
        )
        return None
    remember(dataset, contents)
    return dataset


def _write(path: Path, dataset: Dataset, made_from: list[Any]) -> None:
    """Keep a dataset where there is room for it and it may be written; else nothing happens."""
    tensors = {
        "inputs": dataset.inputs,
        "labels": dataset.labels,
        "train": torch.from_numpy(dataset.train),
        "test": torch.from_numpy(dataset.test),
    }
    described: dict[str, Any] = {
        key: getattr(dataset, key) for key in ("name", "class_names", "mean", "deviation", "estimated")
    }
    if dataset.sites is not None:
        sites, numbers = np.unique(dataset.sites, return_inverse=True)
        tensors["sites"], described["sites"] = torch.from_numpy(numbers), sites.tolist()
    described = json.loads(json.dumps(described))  # as it will be read
    contents = fingerprint(dataset)
    header = {
        "made_from": made_from,
        "described": described,
        "checksum": _hash([made_from, described, contents]),
    }
    try:
        files.make_folder(path.parent, private=True)
        if sum(tensor.nbytes for tensor in tensors.values()) * _SPARED > shutil.disk_usage(path.parent).free:
            return
        files.write_atomically(path, files.safetensors_pieces(tensors, {_KEY: json.dumps(header)}), private=True)
    except (FedStrataError, OSError):
        return
    remember(dataset, contents)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
