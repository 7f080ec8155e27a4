"""Images that were decoded once are mapped into memory, if everything is as it was; else they are decoded again."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedstrata.data import Dataset, cache_directory, datasets
from fedstrata.data import decoded as entries
from fedstrata.data.contents import fingerprint
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.runs import preparing


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Let everything be kept, in a folder of the test's own."""
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "SMALLEST", 1)
    return tmp_path / "cache" / "decoded"


@pytest.fixture
def decoding(monkeypatch):
    """Count the images that are decoded."""
    from fedstrata.data.formats import images

    counted, decode = [], images._decode
    monkeypatch.setattr(images, "_decode", lambda *rest: counted.append(1) or decode(*rest))
    return counted


def png(seed: int, side: int = 32) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_shard(path: Path, seeds) -> None:
    images = pa.array([{"bytes": png(seed), "path": None} for seed in seeds])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"img": images, "label": pa.array([seed % 10 for seed in seeds])}), path)


@pytest.fixture
def cifar(tmp_path):
    root = tmp_path / "data"
    write_shard(root / "cifar10" / "train-00000-of-00001.parquet", range(8))
    write_shard(root / "cifar10" / "test-00000-of-00001.parquet", range(20, 23))
    return root


@pytest.fixture
def folder(tmp_path):
    for site, name, seed in (("a", "cat", 1), ("a", "dog", 2), ("b", "cat", 3), ("b", "dog", 4), ("b", "dog", 5)):
        path = tmp_path / "own" / site / name / f"{seed}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(seed, 9))
    return tmp_path / "own"


@pytest.fixture
def idx(tmp_path):
    root = tmp_path / "data" / "mnist"
    root.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 4)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for what, array in (("images-idx3", pixels), ("labels-idx1", np.arange(count, dtype=np.uint8))):
            header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (root / f"{part}-{what}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return root.parent


def same(one: Dataset, other: Dataset) -> bool:
    tensors = all(
        torch.equal(getattr(one, name), getattr(other, name)) and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("inputs", "labels")
    )
    arrays = all(
        np.array_equal(getattr(one, name), getattr(other, name)) and type(getattr(one, name)) is np.ndarray
        for name in ("train", "test")
    )
    sites = (one.sites is None and other.sites is None) or np.array_equal(one.sites, other.sites)
    rest = ("name", "class_names", "mean", "deviation", "estimated", "classes", "input_shape")
    return tensors and arrays and sites and all(getattr(one, key) == getattr(other, key) for key in rest)


def loaded(text: str, root: Path | None = None) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return datasets.make(text).load(root)


@pytest.mark.parametrize("kind", ["cifar", "folder", "idx"])
def test_the_second_time_nothing_is_decoded_and_everything_is_the_same(kind, request, cache, decoding, monkeypatch):
    place = request.getfixturevalue(kind)
    text, root = {
        "cifar": ("cifar10", place), "folder": (f"image_folder(path={place}, size=8)", None), "idx": ("mnist", place),
    }[kind]  # fmt: skip
    first, counted = loaded(text, root), len(decoding)
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["fedstrata.data.datasets.mnist"], "read_idx", None)
        second = loaded(text, root)
    assert len(decoding) == counted
    assert counted == {"cifar": 11, "folder": 5, "idx": 0}[kind]
    assert same(first, second)
    monkeypatch.setenv("FEDSTRATA_CACHE", "off")
    assert same(loaded(text, root), second)


def test_other_parameters_are_another_entry(folder, cache):
    small, large = (loaded(f"image_folder(path={folder}, size={size})") for size in (4, 8))
    assert small.input_shape == (3, 4, 4)
    assert large.input_shape == (3, 8, 8)
    assert len(list(cache.iterdir())) == 2


def test_a_changed_source_is_noticed_even_with_the_size_and_the_time_of_the_old_one(folder, cache, decoding):
    text, changed = f"image_folder(path={folder}, size=9)", folder / "b" / "dog" / "7.bmp"
    Image.new("RGB", (9, 9), (1, 2, 3)).save(changed)
    before, status = loaded(text), changed.stat()
    Image.new("RGB", (9, 9), (1, 2, 4)).save(changed)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert changed.stat().st_size == status.st_size
    after = loaded(text)
    assert before.inputs[-1].flatten(1)[:, 0].tolist() == [1, 2, 3]
    assert after.inputs[-1].flatten(1)[:, 0].tolist() == [1, 2, 4]
    assert len(decoding) == 12
    assert len(list(cache.iterdir())) == 1, "the old entry is replaced"


def test_files_that_come_and_go_are_noticed(folder):
    text = f"image_folder(path={folder}, size=8)"
    assert len(loaded(text).inputs) == 5
    (folder / "b" / "dog" / "6.png").write_bytes(png(6, 9))
    assert len(loaded(text).inputs) == 6
    (folder / "b" / "dog" / "6.png").rename(folder / "b" / "cat" / "6.png")
    assert loaded(text).labels.tolist() == [0, 1, 0, 0, 1, 1]
    (folder / "b" / "cat" / "6.png").unlink()
    assert len(loaded(text).inputs) == 5


def test_another_decoder_decodes_again(cifar, decoding, monkeypatch):
    loaded("cifar10", cifar)
    monkeypatch.setattr("PIL.__version__", "0.0")
    loaded("cifar10", cifar)
    assert len(decoding) == 22


@pytest.mark.parametrize("damage", ["pixel", "label", "mean", "cut", "empty", "header", "text"])
def test_a_damaged_entry_is_told_and_made_again(cifar, cache, decoding, damage):
    first = loaded("cifar10", cifar)
    (entry,) = cache.iterdir()
    content = bytearray(entry.read_bytes())
    if damage in ("pixel", "label"):
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        start = header["inputs" if damage == "pixel" else "labels"]["data_offsets"][0]
        content[8 + int.from_bytes(content[:8], "little") + start] ^= 1
    elif damage == "mean":
        content = content.replace(b"0.4914", b"0.4915")
    else:
        content = {"cut": content[:-5], "empty": b"", "header": b"\0" * len(content), "text": b"hello"}[damage]
    entry.write_bytes(content)
    with pytest.warns(FedStrataWarning, match=r"are damaged; they are decoded again\."):
        second = datasets.make("cifar10").load(cifar)
    assert same(first, second)
    assert len(decoding) == 22
    assert same(loaded("cifar10", cifar), first)
    assert len(decoding) == 22


def test_what_is_written_into_the_samples_stays_in_memory(cifar):
    loaded("cifar10", cifar)
    mapped = loaded("cifar10", cifar)
    before = fingerprint(mapped)
    mapped.inputs.zero_()
    mapped.labels.fill_(3)
    assert fingerprint(mapped) != before, "samples that somebody had in hand are looked at again"
    assert fingerprint(loaded("cifar10", cifar)) == before


def test_the_samples_are_mapped_and_not_read(cifar):
    """A mapped file stands in the list of the process's mappings."""
    loaded("cifar10", cifar)
    mapped = loaded("cifar10", cifar)
    assert len(mapped.inputs) == 11
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(cache_directory()) in maps.read_text()


def test_a_run_asks_for_the_fingerprint_once(cifar, monkeypatch):
    from fedstrata.data import contents
    from fedstrata.experiment import Experiment

    experiment = Experiment(data="cifar10", data_root=str(cifar))
    known = fingerprint(preparing.load_data(experiment))
    second = preparing.load_data(experiment)
    monkeypatch.setattr(contents, "sha256", None)
    assert fingerprint(second) == known


@pytest.mark.parametrize("way", ["off", "sites", "small"])
def test_nothing_is_kept_where_nothing_shall_be(cifar, cache, decoding, monkeypatch, way):
    if way == "off":
        monkeypatch.setenv("FEDSTRATA_CACHE", "off")
    if way == "small":
        monkeypatch.setattr(entries, "SMALLEST", 2**20)
    with entries.nothing_kept() if way == "sites" else nullcontext():
        for _ in range(2):
            loaded("cifar10", cifar)
    assert len(decoding) == 22
    assert not cache.exists()


def test_where_the_cache_cannot_be_written_data_is_loaded_as_ever(cifar, tmp_path, decoding, monkeypatch):
    (tmp_path / "file").write_text("a file, and no folder")
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "file"))
    assert len(loaded("cifar10", cifar).inputs) == 11
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "full"))
    monkeypatch.setattr(entries, "_SPARED", 10**15)
    assert len(loaded("cifar10", cifar).inputs) == 11
    assert list((tmp_path / "full" / "decoded").iterdir()) == []
    assert len(decoding) == 22


def test_an_entry_is_its_owners_alone(cifar, cache):
    loaded("cifar10", cifar)
    (entry,) = cache.iterdir()
    assert entry.stat().st_mode & 0o077 == 0
    assert cache.stat().st_mode & 0o077 == 0


def test_what_is_wrong_with_the_sources_is_said_as_ever(folder):
    text = f"image_folder(path={folder}, size=8)"
    loaded(text)
    (folder / "a" / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(FedStrataError, match=r"1\.png' is not a readable image"):
        loaded(text)


def test_several_at_once_make_and_read_the_same_entry(cifar):
    with ThreadPoolExecutor(4) as pool:
        read = [pool.submit(loaded, "cifar10", cifar) for _ in range(8)]
        assert all(same(one.result(), read[0].result()) for one in read)
