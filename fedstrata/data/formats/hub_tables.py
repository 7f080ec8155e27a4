"""Datasets of the Hugging Face hub on disk: Parquet shards by part, or what ``datasets.save_to_disk`` writes.

The library ``datasets`` is not needed to read them: a saved dataset is a folder of Arrow streams for each part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedstrata.data.formats.bounds import refuse_irregular, refuse_large_table
from fedstrata.data.formats.parquet import choose_shards, find_shards
from fedstrata.data.formats.samples import damaged
from fedstrata.errors import FedStrataError, first_line

Parts = dict[str, list[Path]]
"""The files of each part, such as ``train``."""
_PART_NAMES = ("train", "test", "validation", "valid", "val", "unsupervised")


def find_parts(folder: Path, configuration: str | None) -> Parts:
    """Find the parts of a dataset in its folder; nothing where none are. Of several configurations one is named."""
    if configuration is not None:
        return parts_in(folder / configuration)
    found = next((parts for one in (folder, folder / "data", folder / "default") if (parts := parts_in(one))), {})
    if found or not folder.is_dir():
        return found
    inner = {path.name: parts for path in sorted(folder.iterdir()) if path.is_dir() and (parts := parts_in(path))}
    if len(inner) > 1:
        raise FedStrataError(
            f"'{folder}' holds the configurations {', '.join(map(repr, inner))}; name one with configuration=...."
        )
    return next(iter(inner.values()), {})


def parts_in(folder: Path) -> Parts:
    """List the files of each part that lie in a folder: Arrow streams, or Parquet shards."""
    if (folder / "state.json").is_file():
        return {"train": _streams(folder)}
    if (folder / "dataset_dict.json").is_file():
        names = _read_json(folder / "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise damaged(folder / "dataset_dict.json", "it does not list the parts of the dataset")
        return {name: _streams(folder / name) for name in names}
    parts: Parts = {}
    for name in _PART_NAMES:
        if shards := find_shards(folder, name):
            parts[name] = choose_shards(shards, None)
        elif (folder / f"{name}.parquet").is_file():
            parts[name] = [folder / f"{name}.parquet"]
        elif shards := sorted((folder / name).glob("*.parquet")):
            parts[name] = choose_shards(shards, None)
    return parts


def column_types(path: Path) -> pa.Schema:
    """Read the names and types of a file's columns, and what the hub tells about them."""
    refuse_irregular(path)
    try:
        if path.suffix == ".parquet":
            return pq.read_schema(path)
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).schema
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, first_line(error)) from None


def read_columns(paths: Sequence[Path], columns: Sequence[str]) -> pa.Table:
    """Read some columns of all files of a part; types that differ from file to file become one that holds both."""
    tables = [_read(path, columns) for path in paths]
    return pa.table({name: _joined(name, tables, paths[0].parent) for name in columns})


def features(schema: pa.Schema) -> Mapping[str, Any]:
    """Take what the hub notes of each column, such as the names of classes, from the schema's metadata."""
    try:
        told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return told if isinstance(told, dict) else {}


def _joined(name: str, tables: Sequence[pa.Table], folder: Path) -> pa.ChunkedArray:
    try:
        return pa.concat_tables([table.select([name]) for table in tables], promote_options="permissive").column(name)
    except pa.ArrowException:
        kinds = dict.fromkeys(str(table.schema.field(name).type) for table in tables)
        raise FedStrataError(
            f"The column '{name}' is {' in one file, '.join(kinds)} in another of '{folder}', which do not go "
            "together; write all files with one type."
        ) from None


def _read(path: Path, columns: Sequence[str]) -> pa.Table:
    names = column_types(path).names
    missing = [column for column in columns if column not in names]
    if missing:
        raise FedStrataError(
            f"'{path}' has no column {', '.join(map(repr, missing))}, as other files of the dataset have; it has "
            f"{', '.join(map(repr, names))}. Fetch it again, or choose other parts with train=... and test=...."
        )
    twice = [column for column in columns if names.count(column) > 1]
    if twice:
        raise damaged(path, f"it has several columns '{twice[0]}'")
    try:
        if path.suffix == ".parquet":
            refuse_large_table(path)
            table = pq.read_table(path, columns=list(columns))
        else:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_stream(source).read_all().select(list(columns))
            table.validate(full=True)  # offsets of a damaged stream would lead elsewhere in memory
        return table.replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, first_line(error)) from None


def _streams(folder: Path) -> list[Path]:
    """List the Arrow files of a part in their order, as its ``state.json`` tells it."""
    listed = _read_json(folder / "state.json").get("_data_files")
    names = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    plain = [name for name in names if isinstance(name, str) and Path(name).name == name]
    if not plain or len(plain) < len(names):
        raise damaged(folder / "state.json", "it does not list the files of the dataset")
    return [folder / name for name in plain]


def _read_json(path: Path) -> dict[str, Any]:
    refuse_irregular(path)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise damaged(path, f"it is no JSON ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise damaged(path, "it holds no JSON object")
    return content
