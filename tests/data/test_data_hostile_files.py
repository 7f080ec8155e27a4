"""Files that are not what their names promise, or hold far more than they weigh, are refused before they are read."""

from __future__ import annotations

import gzip
import os
import resource
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedstrata.data import Dataset, datasets, from_arrays, from_table
from fedstrata.data.formats import bounds
from fedstrata.data.formats.idx import read_idx
from fedstrata.errors import FedStrataError

MEGABYTE = 2**20


def peak_growth(action: Callable[[], object]) -> float:
    """Tell by how many megabytes the memory of this process has grown at its peak."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    action()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def packed_zeros(megabytes: int) -> bytes:
    """Compress zeros without ever having them: the same block again and again."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(MEGABYTE)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * megabytes + zlib.compressobj(wbits=-15).flush()


def vast_png(side: int) -> bytes:
    """Write the PNG of a black image without ever having its pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", b"\x78\x01" + packed_zeros(side * (1 + 3 * side) // MEGABYTE + 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def shard(path: Path, content: bytes, label: pa.Array) -> None:
    column = pa.array([{"bytes": content, "path": None}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"img": column, "label": label}), path)


def small_png(side: int = 32) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.attack(
    "An image of 13,000 x 13,000 pixels lies inside a Parquet shard of CIFAR-10, or in a folder of images.",
    "It is refused by the size in its header, before a pixel is decoded.",
)
def test_a_vast_image_is_refused_before_it_is_decoded(tmp_path, record_property):
    vast = vast_png(13_000)
    for part in ("train", "test"):
        shard(tmp_path / f"{part}-00000-of-00001.parquet", vast, pa.array([0]))
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "vast.png").write_bytes(vast)

    def load() -> None:
        with pytest.raises(FedStrataError, match="13000 x 13000 pixels, more than the 67,108,864 that are read"):
            datasets.make("cifar10").load(tmp_path)
        with pytest.raises(FedStrataError, match=r"vast.png' has 13000 x 13000 pixels"):
            datasets.make("image_folder(size=8)").load(tmp_path / "images")

    grown = peak_growth(load)
    assert grown < 100
    record_property("measured", f"memory grew by {grown:.0f} MB")


@pytest.mark.attack(
    "A pipe or a device is called image.png, in a folder of images, or table.csv.",
    "It is refused by name; nothing waits for what never comes.",
)
def test_what_is_no_regular_file_is_not_opened(tmp_path):
    (tmp_path / "images" / "cat").mkdir(parents=True)
    os.mkfifo(tmp_path / "images" / "cat" / "image.png")
    with pytest.raises(FedStrataError, match=r"image.png' is no regular file"):
        datasets.make("image_folder").load(tmp_path / "images")
    os.mkfifo(tmp_path / "table.csv")
    with pytest.raises(FedStrataError, match=r"table.csv' is no regular file"):
        from_table(tmp_path / "table.csv", label="ill")
    (tmp_path / "images" / "cat" / "image.png").unlink()
    (tmp_path / "images" / "cat" / "image.png").symlink_to(tmp_path / "nothing")
    with pytest.raises(FedStrataError, match=r"image.png' leads nowhere"):
        datasets.make("image_folder").load(tmp_path / "images")


def test_a_loop_of_links_ends(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    for name in ("cat", "dog"):
        for place in range(4):
            (tmp_path / name / f"{place}.png").write_bytes(small_png())
    (tmp_path / "cat" / "loop").symlink_to(tmp_path)
    (tmp_path / "cat" / "folder.png").mkdir()
    assert len(datasets.make("image_folder").load(tmp_path).inputs) == 8


def idx(shape: tuple[int, ...], values: int) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(values)


@pytest.mark.attack(
    "A gzip file of 0.3 MB in the IDX format unpacks to 300 MB, or promises more than there is memory.",
    "No more is unpacked than its header promises, and no more is promised than 2 GiB.",
)
def test_no_more_is_unpacked_than_an_idx_file_promises(tmp_path, record_property):
    path = tmp_path / "bomb.gz"
    packer = zlib.compressobj(9, wbits=31)
    content = packer.compress(idx((10, 28, 28), 0)) + packer.flush(zlib.Z_FULL_FLUSH) + packed_zeros(300)
    path.write_bytes(content)
    assert len(content) < MEGABYTE

    def load() -> None:
        with pytest.raises(FedStrataError, match="should hold 7840 values after its header, but has more"):
            read_idx(path)

    grown = peak_growth(load)
    assert grown < 50
    record_property("measured", f"memory grew by {grown:.0f} MB")
    for shape in ((2**31, 28, 28), (2**32 - 1, 2**32 - 1, 2**32 - 1), (1,) * 200):
        path.write_bytes(gzip.compress(idx(shape, 10)))
        with pytest.raises(FedStrataError, match="it promises"):
            read_idx(path)
    path.write_bytes(gzip.compress(idx((10, 28, 28), 7840)))
    assert read_idx(path).shape == (10, 28, 28)


@pytest.mark.attack(
    "A compressed CSV file, or a Parquet file of a few kilobytes, unpacks to more than the memory holds.",
    "It is refused from its footer, or after so much was unpacked and thrown away.",
)
def test_tables_that_unpack_to_too_much_are_refused(tmp_path, monkeypatch):
    ones = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int32)), pa.array([1.5]))
    pq.write_table(pa.table({"a": ones, "ill": ones}), tmp_path / "table.parquet")
    assert (tmp_path / "table.parquet").stat().st_size < 10_000
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(b"a,ill\n" + b"1,0\n" * 10**6))
    monkeypatch.setattr(bounds, "LARGEST_CONTENT", 2 * MEGABYTE)
    with pytest.raises(FedStrataError, match=r"1,000,000 rows of 2 columns"):
        from_table(tmp_path / "table.parquet", label="ill")
    with pytest.raises(FedStrataError, match="unpacks to more than"):
        from_table(tmp_path / "table.csv.gz", label="ill")


@pytest.mark.attack(
    "A label of 1.5: in a Parquet shard, a table, an array, a hospital's file, a dataset made by hand.",
    "It is refused; nothing is rounded to a class.",
)
def test_no_label_is_rounded(tmp_path):
    for part in ("train", "test"):
        shard(tmp_path / f"{part}-00000-of-00001.parquet", small_png(), pa.array([1.5]))
    with pytest.raises(FedStrataError, match=r"not whole numbers, such as 1.5"):
        datasets.make("cifar10").load(tmp_path)
    with pytest.raises(FedStrataError, match=r"not whole numbers, such as 1.5"):
        from_table({"a": [1, 2, 3, 4], "ill": [0, 1, 1.5, 0]}, label="ill")
    with pytest.raises(FedStrataError, match=r"not whole numbers, such as 1.5"):
        from_arrays(torch.rand(4, 2), torch.tensor([0, 1, 1.5, 0]))
    with pytest.raises(FedStrataError, match="labels of the dataset 'own' are of the type float32"):
        Dataset("own", torch.rand(2, 2), torch.tensor([0, 1.5]), np.arange(1), np.arange(1, 2), ("a", "b"))
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        row = ",".join(["1.0"] * 13 + ["1.5"])
        (tmp_path / f"processed.{hospital}.data").write_text(f"{row}\n")
    with pytest.raises(FedStrataError, match=r"the diagnosis of line 1 is 1.5"):
        datasets.make("heart_disease").load(tmp_path)
    for part in ("train", "test"):
        shard(tmp_path / f"{part}-00000-of-00001.parquet", small_png(), pa.array(["cat"]))
    with pytest.raises(FedStrataError, match="column 'label' does not hold whole numbers"):
        datasets.make("cifar10").load(tmp_path)
