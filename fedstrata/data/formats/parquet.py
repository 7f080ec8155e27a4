"""Images in Parquet shards, as the Hugging Face hub keeps them.

A shard is named ``train-00000-of-00005.parquet``; its image column is a struct of encoded ``bytes`` and a ``path``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedstrata.data.formats.bounds import refuse_irregular, refuse_large_table
from fedstrata.data.formats.images import decode_images
from fedstrata.data.formats.samples import Samples, damaged, join
from fedstrata.data.labels import read_labels
from fedstrata.errors import FedStrataError, first_line

IMAGE_COLUMNS = ("img", "image")


def find_shards(folder: Path, part: str) -> list[Path]:
    """List the shards of one part (``train`` or ``test``) of a dataset, in order."""
    return sorted(folder.glob(f"{part}-*.parquet"))


def choose_shards(shards: Sequence[Path], count: int | None) -> list[Path]:
    """Take the first ``count`` shards, or all, after checking that those are there."""
    numbered = [re.search(r"-(\d+)-of-(\d+)", shard.name) for shard in shards]
    promised = max((int(found.group(2)) for found in numbered if found), default=len(shards))
    wanted = promised if count is None else count
    if wanted > promised:
        raise FedStrataError(
            f"{wanted} training shards are asked for, but there are {promised} in '{shards[0].parent}'; use fewer."
        )
    present = {int(found.group(1)) for found in numbered if found}
    missing = [number for number in range(wanted) if present and number not in present]
    if missing:
        raise FedStrataError(f"Shard {missing[0]} of {promised} is missing beside '{shards[0]}'; fetch it again.")
    return list(shards[:wanted])


def read_shards(shards: Sequence[Path], label_column: str, mode: str, side: int) -> Samples:
    """Decode the labels of shards, and the images, all of which have as many pixels on each ``side``."""
    return join([_read_shard(shard, label_column, mode, side) for shard in shards])


def _read_shard(path: Path, label_column: str, mode: str, side: int) -> Samples:
    refuse_irregular(path)
    try:
        refuse_large_table(path)
        schema = pq.read_schema(path)
        image_column = next((column for column in IMAGE_COLUMNS if column in schema.names), None)
        if image_column is None or label_column not in schema.names:
            raise FedStrataError(
                f"'{path}' has the columns {', '.join(schema.names)}; "
                f"an image column ('img' or 'image') and '{label_column}' are needed."
            )
        table = pq.read_table(path, columns=[image_column, label_column])
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, first_line(error)) from None
    images = table.column(image_column)
    if not pa.types.is_struct(images.type) or images.type.get_field_index("bytes") < 0:
        raise FedStrataError(
            f"The column '{image_column}' of '{path}' must be a struct with the encoded 'bytes', not {images.type}."
        )
    encoded = [blob for chunk in images.chunks for blob in chunk.field("bytes").to_pylist()]
    labels = table.column(label_column)
    if None in encoded or labels.null_count:
        raise damaged(path, "some images or labels are empty")
    marks = read_labels(labels.to_numpy(), f"'{path}'").values
    if marks.dtype.kind != "i":
        raise damaged(path, f"its column '{label_column}' does not hold whole numbers")
    pixels = decode_images(
        encoded,
        mode,
        None,
        str(path),
        side,
        called=lambda row: f"The image in row {row} of the column '{image_column}' of '{path}'",
    )
    return Samples(pixels, marks.astype(np.int64), class_names(schema.metadata, label_column))


def class_names(metadata: Mapping[bytes, bytes] | None, label_column: str) -> tuple[str, ...] | None:
    """Find the names of the classes in a schema's metadata: under ``class_names``, or in the hub's own description."""
    entries = metadata or {}
    try:
        if b"class_names" in entries:
            return tuple(map(str, json.loads(entries[b"class_names"])))
        described: Any = json.loads(entries.get(b"huggingface", b"{}"))
        return tuple(map(str, described["info"]["features"][label_column]["names"]))
    except (ValueError, KeyError, TypeError):
        return None
