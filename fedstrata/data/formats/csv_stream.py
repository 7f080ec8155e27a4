"""CSV files that are too large to be held: some columns, block after block, as texts."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from fedstrata.data.formats.bounds import refuse_irregular
from fedstrata.data.formats.samples import damaged
from fedstrata.errors import first_line

_BLOCK = 1 << 26
"""No row may be longer."""
_HEADER = 1 << 16


def stream_columns(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of a CSV file with a line of names, compressed or not; names count in capitals or not."""
    refuse_irregular(path)
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            line = stream.read(_HEADER).split(b"\n")[0].decode("utf-8", errors="replace")
        header = next(csv.reader([line.rstrip("\r")]), [])
        known = {name.upper(): name for name in header}
        missing = [column for column in columns if column not in known]
        if missing:
            raise damaged(path, f"it has no column '{missing[0]}'")
        wanted = [known[column] for column in columns]
        with (
            pa.input_stream(str(path), compression="detect") as stream,
            pyarrow.csv.open_csv(
                stream,
                read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted, strings_can_be_null=False
                ),
            ) as reader,
        ):
            for batch in reader:
                yield batch.rename_columns(list(columns))
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        raise damaged(path, first_line(error)) from None
