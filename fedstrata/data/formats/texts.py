"""Texts with their classes: CSV as the sets were published, and Parquet as the Hugging Face hub keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from fedstrata.data.formats.bounds import refuse_irregular, refuse_large_table
from fedstrata.data.formats.samples import damaged
from fedstrata.data.labels import read_labels
from fedstrata.errors import FedStrataError, first_line

_BLOCK = 1 << 26
"""No row of a CSV file may be longer."""


@dataclass(frozen=True)
class Texts:
    """Texts with labels ``[n]``, and the owner of each where the files tell it."""

    texts: list[str]
    labels: np.ndarray
    sites: np.ndarray | None = None


def join_texts(parts: Sequence[Texts]) -> Texts:
    """Put the texts of several files one after another."""
    sites = [part.sites for part in parts if part.sites is not None]
    return Texts(
        [text for part in parts for text in part.texts],
        np.concatenate([part.labels for part in parts]),
        np.concatenate(sites) if sites else None,
    )


def read_csv_columns(
    path: Path, columns: Sequence[str], wanted: Sequence[str], encoding: str = "utf-8"
) -> dict[str, pa.ChunkedArray]:
    """Read columns of a CSV file without a line of names, all as texts, none of them missing."""
    refuse_irregular(path)
    try:
        table = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(column_names=list(columns), encoding=encoding, block_size=_BLOCK),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()),
                include_columns=list(wanted),
                strings_can_be_null=False,
            ),
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(path, first_line(error)) from None
    return {name: table.column(name) for name in wanted}


def read_class_numbers(path: Path, marks: pa.ChunkedArray, known: Sequence[str]) -> np.ndarray:
    """Turn the marks of classes into their places among the known ones."""
    found = pc.index_in(marks, value_set=pa.array(known, pa.string()))
    if found.null_count:
        row = int(np.flatnonzero(found.is_null().to_numpy())[0])
        raise damaged(path, f"row {row + 1} has the class '{marks[row]}' instead of one of {', '.join(known)}")
    numbers: np.ndarray = found.to_numpy().astype(np.int64)
    return numbers


def with_title(titles: pa.ChunkedArray, texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Put titles before texts."""
    return pc.binary_join_element_wise(titles, texts, " ")


def read_parquet_texts(
    path: Path,
    classes: int,
    site: str | None = None,
    title: Sequence[str] = (),
    join: Callable[[pa.ChunkedArray, pa.ChunkedArray], pa.ChunkedArray] = with_title,
) -> Texts:
    """Read the columns ``text`` and ``label`` of a Parquet file, and that of the owners if it is named.

    ``title`` names two columns that may stand in the place of ``text``, which ``join`` then makes of them.
    """
    refuse_irregular(path)
    try:
        refuse_large_table(path)
        names = pq.read_schema(path).names
        written = title if title and "text" not in names and set(title) <= set(names) else ["text"]
        wanted = [*written, "label", *([] if site is None else [site])]
        lacking = [name for name in wanted if name not in names]
        if lacking:
            instead = f", or else {' and '.join(title)}," if title and lacking[0] == "text" else ""
            raise FedStrataError(f"'{path}' has the columns {', '.join(names)}; '{lacking[0]}'{instead} is needed too.")
        table = pq.read_table(path, columns=wanted)
        columns = [table.column(name).cast(pa.string()) for name in written]
        texts = join(*columns) if len(columns) > 1 else columns[0]
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, first_line(error)) from None
    if any(table.column(name).null_count for name in wanted):
        raise damaged(path, "some texts or labels are empty")
    labels = read_labels(table.column("label").to_numpy(), f"'{path}'").values
    if labels.dtype.kind != "i" or (len(labels) and not 0 <= labels.min() <= labels.max() < classes):
        raise damaged(path, f"its column 'label' does not hold whole numbers from 0 to {classes - 1}")
    sites = None if site is None else np.array(table.column(site).to_pylist(), dtype=str)
    return Texts(texts.to_pylist(), labels.astype(np.int64), sites)
