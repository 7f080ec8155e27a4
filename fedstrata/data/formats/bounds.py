"""What is looked at before a file is read: that it is one, and how much would come out of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fedstrata.errors import FedStrataError

LARGEST_CONTENT = 2**31
"""So many bytes may be unpacked from one compressed file: four times the largest file of EMNIST."""
LARGEST_IMAGE = 2**26
"""So many pixels may an image have, 8192 x 8192; decoded in colour that is 200 MB."""
_CELL_BYTES = 8
_CHUNK = 2**20


def refuse_irregular(path: Path) -> None:
    """Refuse what is no regular file: reading a pipe or a device may never end."""
    if not path.is_file():
        what = "leads nowhere" if not path.exists() else "is no regular file, but a folder, a pipe or a device"
        raise FedStrataError(f"'{path}' {what}; remove it, or put the file there that its name promises.")


def refuse_large_image(size: tuple[int, int], name: str) -> None:
    """Refuse an image by the size that its header declares, before it is decoded."""
    width, height = size
    if width * height > LARGEST_IMAGE:
        raise FedStrataError(
            f"{name} has {width} x {height} pixels, more than the {LARGEST_IMAGE:,} that are read; scale it down first."
        )


def refuse_large_table(path: Path) -> None:
    """Refuse a Parquet file by what its footer declares: rows and columns, and the size of the pages unpacked."""
    metadata = pq.read_metadata(path)
    pages = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    size = max(pages, metadata.num_rows * metadata.num_columns * _CELL_BYTES)
    if size > LARGEST_CONTENT:
        raise FedStrataError(
            f"'{path}' would take {size / 2**30:.1f} GiB ({metadata.num_rows:,} rows of {metadata.num_columns} columns)"
            f", more than the {LARGEST_CONTENT / 2**30:g} that are read; divide it, or leave rows or columns out."
        )


def refuse_large_text(path: Path) -> None:
    """Refuse a compressed text that unpacks to too much; it is unpacked once for that, and nothing of it is kept."""
    size = 0
    with pa.input_stream(str(path), compression="detect") as stream:
        while piece := stream.read(_CHUNK):
            size += len(piece)
            if size > LARGEST_CONTENT:
                raise FedStrataError(
                    f"'{path}' unpacks to more than the {LARGEST_CONTENT / 2**30:g} GiB that are read from a "
                    "compressed file; unpack it first if that is right, or divide it."
                )
