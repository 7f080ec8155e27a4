"""The named datasets, on small files of each format written here, and on real files where they are."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.model_selection import train_test_split

from fedstrata.data import Dataset, cache_directory, datasets, download
from fedstrata.data.datasets.base import search_places
from fedstrata.data.datasets.mnist import EMNIST_CLASSES
from fedstrata.errors import FedStrataError, FedStrataWarning

REAL = Path(os.environ.get("FEDSTRATA_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")
real_files = pytest.mark.skipif(not (REAL / "cifar10").is_dir(), reason="the real files are not on this machine")


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def pictures(count: int, height: int = 32, width: int = 32, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), dtype=np.uint8)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = BytesIO()
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def write_shard(
    path: Path,
    images: np.ndarray,
    labels: list[int],
    *,
    image_column: str = "img",
    label_column: str = "label",
    kind: str = "PNG",
    metadata: dict[str, str] | None = None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    column = pa.array(
        [{"bytes": encoded(image, kind), "path": None} for image in images],
        type=pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table({image_column: column, label_column: pa.array(labels, type=pa.int64())})
    pq.write_table(table.replace_schema_metadata(metadata), path)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_pickle(path: Path, content: Any) -> None:
    """Write as Python 2 and an old NumPy would: bytes as keys, and the old name of the module that builds arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def load(name: str, root: Path | None) -> Dataset:
    return datasets.make(name).load(root)


def test_digits_have_a_fixed_stratified_test_quarter() -> None:
    dataset = load("digits", None)
    assert dataset.inputs.shape == (1797, 1, 8, 8)
    assert float(dataset.inputs.min()) == 0.0
    assert float(dataset.inputs.max()) == 1.0
    assert (len(dataset.train), len(dataset.test)) == (1346, 451)
    assert np.intersect1d(dataset.train, dataset.test).size == 0
    sizes = np.bincount(dataset.labels.numpy())
    held = np.bincount(dataset.labels.numpy()[dataset.test])
    assert held.tolist() == [int(size / 4 + 0.5) for size in sizes]
    assert dataset.test[:3].tolist() == load("digits", None).test[:3].tolist()
    assert dataset.mean == pytest.approx((float(dataset.inputs[dataset.train].double().mean()),))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_cifar10_from_parquet_shards(tmp_path: Path, kind: str) -> None:
    images = pictures(6)
    names = {"class_names": json.dumps([f"class {label}" for label in range(10)])}
    folder = tmp_path / "cifar10"
    write_shard(folder / "train-00000-of-00002.parquet", images[:2], [3, 1], kind=kind, metadata=names)
    write_shard(folder / "train-00001-of-00002.parquet", images[2:4], [0, 9], kind=kind, metadata=names)
    write_shard(folder / "test-00000-of-00001.parquet", images[4:], [5, 5], kind=kind, metadata=names)
    dataset = load("cifar10", tmp_path)
    assert torch.equal(dataset.inputs, torch.from_numpy(images))
    assert dataset.labels.tolist() == [3, 1, 0, 9, 5, 5]
    assert (dataset.train.tolist(), dataset.test.tolist()) == ([0, 1, 2, 3], [4, 5])
    assert dataset.class_names[7] == "class 7"
    assert dataset.mean == (0.4914, 0.4822, 0.4465)
    first = load("cifar10(shards=1)", folder)
    assert first.labels.tolist() == [3, 1, 5, 5]
    with pytest.raises(FedStrataError, match="3 training shards are asked for, but there are 2"):
        load("cifar10(shards=3)", tmp_path)


def test_cifar100_from_the_hub_layout(tmp_path: Path) -> None:
    images = pictures(2)
    features = {"info": {"features": {"fine_label": {"names": [f"c{label}" for label in range(100)]}}}}
    described = {"huggingface": json.dumps(features)}
    folder = tmp_path / "cifar100" / "cifar100"
    for part, image, label in zip(("train", "test"), images, (99, 0), strict=True):
        path = folder / f"{part}-00000-of-00001.parquet"
        write_shard(path, image[None], [label], label_column="fine_label", metadata=described)
    dataset = load("cifar100", tmp_path)
    assert dataset.labels.tolist() == [99, 0]
    assert dataset.class_names[42] == "c42"
    with pytest.raises(FedStrataError, match=r"columns img, fine_label.*'label' are needed"):
        load("cifar10", folder)


def test_a_missing_shard_is_noticed_unless_it_is_not_needed(tmp_path: Path) -> None:
    images = pictures(2)
    write_shard(tmp_path / "train-00000-of-00003.parquet", images[:1], [1])
    write_shard(tmp_path / "train-00002-of-00003.parquet", images[:1], [1])
    write_shard(tmp_path / "test-00000-of-00001.parquet", images[1:], [2])
    with pytest.raises(FedStrataError, match="Shard 1 of 3 is missing"):
        load("cifar10", tmp_path)
    assert load("cifar10(shards=1)", tmp_path).labels.tolist() == [1, 2]


def test_damaged_shards_get_one_sentence(tmp_path: Path) -> None:
    train, test = (tmp_path / f"{part}-00000-of-00001.parquet" for part in ("train", "test"))
    write_shard(train, pictures(3), [0, 1, 2])
    with pytest.raises(FedStrataError, match=r"no test-\*.parquet"):
        load("cifar10", tmp_path)
    write_shard(test, pictures(1), [0])
    whole = train.read_bytes()
    train.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FedStrataError, match=r"damaged.*Fetch it again"):
        load("cifar10", tmp_path)
    train.write_bytes(b"")
    with pytest.raises(FedStrataError, match="damaged"):
        load("cifar10", tmp_path)
    column = pa.array([{"bytes": b"no picture", "path": None}])
    pq.write_table(pa.table({"img": column, "label": [0]}), train)
    with pytest.raises(
        FedStrataError, match=r"image in row 0 of the column 'img' of '.*train-00000.*' is not a readable image: it is"
    ):
        load("cifar10", tmp_path)
    write_shard(train, pictures(1, 16, 16), [0])
    with pytest.raises(FedStrataError, match="16 x 16 pixels, and those of this dataset 32 x 32"):
        load("cifar10", tmp_path)
    pq.write_table(pa.table({"img": [1], "label": [0]}), train)
    with pytest.raises(FedStrataError, match="must be a struct"):
        load("cifar10", tmp_path)


def write_cifar10_batches(folder: Path, images: np.ndarray) -> None:
    for index in range(5):
        content = {b"data": images[index : index + 1].reshape(1, -1), b"labels": [index], b"batch_label": b"training"}
        write_pickle(folder / f"data_batch_{index + 1}", content)
    write_pickle(folder / "test_batch", {b"data": images[5:].reshape(1, -1), b"labels": [9]})
    write_pickle(folder / "batches.meta", {b"label_names": [f"n{label}".encode() for label in range(10)]})


def test_cifar10_from_pickled_batches(tmp_path: Path) -> None:
    images = pictures(6)
    write_cifar10_batches(tmp_path / "cifar-10-batches-py", images)
    dataset = load("cifar10", tmp_path)
    assert torch.equal(dataset.inputs, torch.from_numpy(images))
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4, 9]
    assert dataset.class_names[3] == "n3"
    assert load("cifar10(shards=2)", tmp_path).labels.tolist() == [0, 1, 9]
    with pytest.raises(FedStrataError, match="6 training files are asked for, but there are 5"):
        load("cifar10(shards=6)", tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(FedStrataError, match=r"data_batch_4' is missing"):
        load("cifar10", tmp_path)


def test_cifar100_from_pickled_batches(tmp_path: Path) -> None:
    images = pictures(2)
    for name, image, label in zip(("train", "test"), images, (42, 7), strict=True):
        content = {b"data": image.reshape(1, -1), b"fine_labels": [label], b"coarse_labels": [1]}
        write_pickle(tmp_path / "cifar-100-python" / name, content)
    dataset = load("cifar100", tmp_path)
    assert dataset.labels.tolist() == [42, 7]
    assert torch.equal(dataset.inputs, torch.from_numpy(images))
    assert dataset.class_names[99] == "99"


class Evil:
    """What a malicious pickle asks for: a call of any function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_that_wants_more_than_arrays_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10_batches(folder, pictures(6))
    trace = tmp_path / "trace"
    content = pickle.dumps({b"data": Evil(trace)})
    pickle.loads(content)
    assert trace.exists()
    trace.unlink()
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(FedStrataError, match="only arrays are admitted"):
        load("cifar10", tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x80\x03",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": 1}),
        pickle.dumps({b"data": np.zeros((1, 7), np.uint8), b"labels": [1]}, protocol=3),
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["x"]}, protocol=3),
    ],
)
def test_damaged_pickles_get_one_sentence(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10_batches(folder, pictures(6))
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(FedStrataError, match="data_batch_1' is damaged"):
        load("cifar10", tmp_path)


def test_every_truncation_of_a_pickle_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10_batches(folder, pictures(6))
    whole = (folder / "data_batch_1").read_bytes()
    for length in [*range(0, 150, 7), len(whole) // 2, len(whole) - 1]:
        (folder / "data_batch_1").write_bytes(whole[:length])
        with pytest.raises(FedStrataError, match="damaged"):
            load("cifar10", tmp_path)


def test_cifar_from_the_binary_version(tmp_path: Path) -> None:
    images = pictures(6)
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]):
        (folder / name).write_bytes(bytes([index]) + images[index].tobytes())
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    dataset = load("cifar10", tmp_path)
    assert torch.equal(dataset.inputs, torch.from_numpy(images))
    assert dataset.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert dataset.class_names == tuple("abcdefghij")
    (folder / "data_batch_2.bin").write_bytes(b"\0" * 3072)
    with pytest.raises(FedStrataError, match="3072 bytes are not a whole number of records of 3073"):
        load("cifar10", tmp_path)

    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes([19, 98]) + images[0].tobytes())
    (folder / "test.bin").write_bytes(bytes([3, 55]) + images[1].tobytes())
    dataset = load("cifar100", tmp_path)
    assert dataset.labels.tolist() == [98, 55]
    assert torch.equal(dataset.inputs, torch.from_numpy(images[:2]))


@pytest.mark.parametrize(
    ("name", "folder", "ending"),
    [
        ("mnist", "mnist", ""),
        ("mnist", "mnist", ".gz"),
        ("mnist", "MNIST/raw", ""),
        ("fashion_mnist", "fashion_mnist/raw", ".gz"),
        ("fashion_mnist", "FashionMNIST/raw", ".gz"),
    ],
)
def test_mnist_from_idx(tmp_path: Path, name: str, folder: str, ending: str) -> None:
    images = pictures(5, 28, 28, 1)
    labels = np.array([7, 0, 9, 3, 3])
    for part, own in (("train", slice(0, 3)), ("t10k", slice(3, 5))):
        write_idx(tmp_path / folder / f"{part}-images-idx3-ubyte{ending}", images[own, 0])
        write_idx(tmp_path / folder / f"{part}-labels-idx1-ubyte{ending}", labels[own])
    dataset = load(name, tmp_path)
    assert torch.equal(dataset.inputs, torch.from_numpy(images))
    assert dataset.labels.tolist() == labels.tolist()
    assert dataset.test.tolist() == [3, 4]
    assert dataset.mean == pytest.approx((images[:3].mean() / 255,))
    assert dataset.deviation == pytest.approx((images[:3].std() / 255,))
    assert dataset.class_names[9] == ("9" if name == "mnist" else "Ankle boot")


def test_mnist_from_the_hub_layout(tmp_path: Path) -> None:
    images = pictures(2, 28, 28, 1)
    for part, image, label in zip(("train", "test"), images, (4, 8), strict=True):
        path = tmp_path / "mnist" / "mnist" / f"{part}-00000-of-00001.parquet"
        write_shard(path, image[None], [label], image_column="image")
    dataset = load("mnist", tmp_path)
    assert torch.equal(dataset.inputs, torch.from_numpy(images))
    assert dataset.labels.tolist() == [4, 8]


@pytest.mark.parametrize(
    ("split", "stored", "classes", "names"),
    [
        ("byclass", [0, 61], [0, 61], ("0", "z")),
        ("balanced", [10, 46], [10, 46], ("A", "t")),
        ("letters", [1, 26], [0, 25], ("A", "Z")),
        ("digits", [0, 9], [0, 9], ("0", "9")),
    ],
)
def test_emnist_stands_upright(
    tmp_path: Path, split: str, stored: list[int], classes: list[int], names: tuple[str, str]
) -> None:
    images = pictures(2, 28, 28, 1)
    for part, own in (("train", slice(0, 1)), ("test", slice(1, 2))):
        stem = tmp_path / "emnist" / f"emnist-{split}-{part}"
        write_idx(stem.with_name(f"{stem.name}-images-idx3-ubyte.gz"), images[own, 0].transpose(0, 2, 1))
        write_idx(stem.with_name(f"{stem.name}-labels-idx1-ubyte.gz"), np.array(stored)[own])
    dataset = load(f"emnist(split={split})", tmp_path)
    assert torch.equal(dataset.inputs, torch.from_numpy(images))
    assert dataset.labels.tolist() == classes
    assert tuple(dataset.class_names[label] for label in classes) == names
    with pytest.raises(FedStrataError, match="emnist-mnist-train-images-idx3-ubyte"):
        load("emnist(split=mnist)", tmp_path)


def test_emnist_versions_have_their_number_of_classes() -> None:
    counts = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
    assert {split: len(set(names)) for split, names in EMNIST_CLASSES.items()} == counts


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_files_of_which_only_the_names_are_known_are_told(tmp_path: Path, name: str) -> None:
    """MNIST's four files and those of Fashion-MNIST are called alike."""
    for part in ("train", "t10k"):
        write_idx(tmp_path / "raw" / f"{part}-images-idx3-ubyte", pictures(2, 28, 28, 1)[:, 0])
        write_idx(tmp_path / "raw" / f"{part}-labels-idx1-ubyte", np.array([0, 1]))
    with pytest.warns(FedStrataWarning, match=rf"train-images-idx3-ubyte' is taken for a file of '{name}', although"):
        assert len(load(name, tmp_path).inputs) == 4
    (tmp_path / "raw").rename(tmp_path / name.replace("_", "-").upper())
    assert len(load(name, tmp_path / name.replace("_", "-").upper()).inputs) == 4


def test_shards_of_which_only_the_names_are_known_are_told(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_shard(tmp_path / f"{part}-00000-of-00001.parquet", pictures(1, 28, 28, 1), [4], image_column="image")
    with pytest.warns(FedStrataWarning, match=r"00001\.parquet' is taken for a file of 'fashion_mnist'.* to be sure"):
        load("fashion_mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "emnist(split=digits)"])
def test_images_of_another_size_are_no_mnist(tmp_path: Path, name: str) -> None:
    parts = ("train", "t10k") if name == "mnist" else ("emnist-digits-train", "emnist-digits-test")
    for part in parts:
        write_idx(tmp_path / "mnist" / f"{part}-images-idx3-ubyte", pictures(2, 32, 30, 1)[:, 0])
        write_idx(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte", np.array([0, 1]))
    with pytest.raises(FedStrataError, match="its images have 30 x 32 pixels, and those of this dataset 28 x 28"):
        load(name, tmp_path / "mnist")


def test_damaged_idx_files_get_one_sentence(tmp_path: Path) -> None:
    tmp_path = tmp_path / "mnist"
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", pictures(2, 28, 28, 1)[:, 0])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.array([0, 1]))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(FedStrataError, match="does not decompress"):
        load("mnist", tmp_path)
    path.write_bytes(gzip.decompress(whole)[:-1])
    with pytest.raises(FedStrataError, match="should hold 1568 values after its header, but has 1567"):
        load("mnist", tmp_path)
    path.write_bytes(b"<html>not here</html>")
    with pytest.raises(FedStrataError, match="does not begin like an IDX file"):
        load("mnist", tmp_path)
    path.write_bytes(b"\0\0\x08\x03\0\0")
    with pytest.raises(FedStrataError, match="damaged"):
        load("mnist", tmp_path)
    path.write_bytes(whole)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.array([0, 1, 2]))
    with pytest.raises(FedStrataError, match=r"its shape is \(3,\), and there are 2 images"):
        load("mnist", tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FedStrataError, match="no companion 'train-labels-idx1-ubyte'"):
        load("mnist", tmp_path)


def write_folder(folder: Path, counts: dict[str, int]) -> None:
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("L" if number == 0 else "RGB", (10 + number, 20), 40 * label).save(
                folder / name / f"{number}.png"
            )
        (folder / name / "notes.txt").write_text("no picture")


def test_image_folder_with_a_held_out_fraction(tmp_path: Path) -> None:
    write_folder(tmp_path / "pictures", {"cat": 4, "dog": 8})
    dataset = load(f"image_folder(path='{tmp_path / 'pictures'}', size=6)", None)
    assert dataset.inputs.shape == (12, 3, 6, 6)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.labels[dataset.test].tolist() == [0, 1, 1]
    assert int(dataset.inputs[4:].max()) == 40
    assert torch.equal(load("image_folder(path=pictures, size=6)", tmp_path).inputs, dataset.inputs)


def test_image_folder_with_a_test_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 2, "dog": 1, "eel": 1})
    write_folder(tmp_path / "test", {"dog": 2})
    dataset = load("image_folder", tmp_path)
    assert dataset.inputs.shape == (6, 3, 32, 32)
    assert dataset.labels.tolist() == [0, 0, 1, 2, 1, 1]
    assert dataset.test.tolist() == [4, 5]
    write_folder(tmp_path / "test", {"fox": 1})
    with pytest.raises(FedStrataError, match="The class 'fox' is in"):
        load("image_folder", tmp_path)


@pytest.mark.parametrize("tests", [True, False])
def test_image_folder_of_several_sites(tests: bool, tmp_path: Path) -> None:
    for site, counts in {"north": {"cat": 4, "dog": 8}, "south": {"dog": 4, "eel": 4}}.items():
        write_folder(tmp_path / site / "train" if tests else tmp_path / site, counts)
        if tests:
            write_folder(tmp_path / site / "test", {"dog": 2})
    dataset = load("image_folder(size=4)", tmp_path)
    assert dataset.class_names == ("cat", "dog", "eel")
    assert dataset.sites is not None
    held = list(zip(dataset.sites[dataset.test].tolist(), dataset.labels[dataset.test].tolist(), strict=True))
    if tests:
        assert held == [("north", 1)] * 2 + [("south", 1)] * 2
    else:
        assert held == [("north", 0), ("north", 1), ("north", 1), ("south", 1), ("south", 2)]
    assert len(dataset.train) == (20 if tests else 15)


def test_folders_inside_of_classes_are_no_sites_where_that_is_said(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_folder(tmp_path / name, {"left": 1, "right": 2})
    assert load("image_folder(size=4, sites=false)", tmp_path).class_names == ("cat", "dog")
    assert load("image_folder(size=4)", tmp_path).class_names == ("left", "right")
    (tmp_path / "dog" / "right").rename(tmp_path / "dog" / "rear")
    (tmp_path / "dog" / "left").rename(tmp_path / "dog" / "front")
    with pytest.raises(
        FedStrataError, match=r"cat' holds folders \('left', 'right'\) and no images, so that it may be"
    ):
        load("image_folder(size=4)", tmp_path)
    assert load("image_folder(size=4, sites=false)", tmp_path).class_names == ("cat", "dog")
    assert load("image_folder(size=4, sites=true)", tmp_path).class_names == ("front", "left", "rear", "right")


def test_bad_image_folders_get_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match="needs a path"):
        load("image_folder", None)
    with pytest.raises(FedStrataError, match=r"nowhere.*one sub-folder of images per class"):
        load("image_folder(path=nowhere)", tmp_path)
    with pytest.raises(FedStrataError, match="no sub-folders"):
        load("image_folder", tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(FedStrataError, match="no images"):
        load("image_folder", tmp_path)
    (tmp_path / "cat" / "a.png").write_bytes(b"not a picture")
    with pytest.raises(FedStrataError, match=r"a\.png' is not a readable image"):
        load("image_folder", tmp_path)


def test_heart_disease_by_hand(tmp_path: Path) -> None:
    row = "{age},1,1,145,233,1,2,150,0,2.3,{gap},0,6,{num}\n"
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        lines = [row.format(age=60 + index, gap="?", num=index % 2 * 3) for index in range(8)]
        (tmp_path / f"processed.{hospital}.data").write_text("".join(lines) + row.format(age="?", gap=1, num=0))
    dataset = load("heart_disease", tmp_path)
    assert dataset.inputs.shape == (32, 10)
    assert dataset.sites is not None
    assert dataset.sites[dataset.test].tolist() == sorted(
        [*["cleveland"] * 2, *["hungarian"] * 2, *["switzerland"] * 2, *["va"] * 2]
    )
    ages = torch.arange(60.0, 68.0)[dataset.train[:6]]
    assert torch.allclose(dataset.inputs[dataset.train[:6], 0], (ages - ages.mean()) / ages.std(correction=0))
    assert dataset.inputs[:, 1].abs().max() == 0
    assert dataset.labels[:4].tolist() == [0, 3, 0, 3]
    assert load("heart_disease(classes=2)", tmp_path).labels[:4].tolist() == [0, 1, 0, 1]
    halves = load("heart_disease(test_fraction=0.5)", tmp_path)
    assert np.array_equal(np.bincount(halves.labels.numpy()[halves.test]), [8, 0, 0, 8])
    _, held = train_test_split(np.arange(8), test_size=0.4, random_state=42)
    theirs = load("heart_disease(test_fraction=0.4, split=player-fl)", tmp_path)
    assert theirs.test.tolist() == sorted(8 * hospital + place for hospital in range(4) for place in held.tolist())
    assert sorted([*theirs.train, *theirs.test]) == list(range(32))
    path = tmp_path / "processed.va.data"
    whole = path.read_text()
    path.write_text(whole + "63.0,1.0\n")
    with pytest.raises(FedStrataError, match="line 10 has 2 values instead of 14"):
        load("heart_disease", tmp_path)
    path.write_text(whole.replace("233", "much"))
    with pytest.raises(FedStrataError, match="line 1 holds something else than numbers"):
        load("heart_disease", tmp_path)
    for endless in ("nan", "inf", "-Infinity"):
        path.write_text(whole.replace("233", endless))
        with pytest.raises(
            FedStrataError, match=r"processed\.va\.data.*line 1 holds a number that is not finite; .*'\?'"
        ):
            load("heart_disease", tmp_path)
    path.unlink()
    with pytest.raises(FedStrataError, match=r"Expected: processed\.cleveland\.data"):
        load("heart_disease", tmp_path)


def test_roots_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = tmp_path / "given", tmp_path / "named"
    monkeypatch.setenv("FEDSTRATA_DATA", str(named))
    cached = cache_directory()
    assert cached == tmp_path / "cache-home" / "fedstrata"
    assert search_places("mnist", given) == [given / "mnist", given, named / "mnist", named, cached / "mnist", cached]
    for label, folder in enumerate([cached / "mnist", named, given / "mnist"]):
        for part in ("train", "t10k"):
            write_idx(folder / f"{part}-images-idx3-ubyte", pictures(1, 28, 28, 1)[:, 0])
            write_idx(folder / f"{part}-labels-idx1-ubyte", np.array([label]))
        with pytest.warns(FedStrataWarning, match="to be sure") if folder == named else nullcontext():
            assert load("mnist", given).labels.tolist() == [label, label]


def test_the_cache_directory_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "fedstrata"


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist", "emnist", "heart_disease"])
def test_missing_files_say_where_and_what_and_offer_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "named"))
    with pytest.raises(FedStrataError) as raised:
        load(name, tmp_path / "given")
    message = str(raised.value)
    for place in search_places(name, tmp_path / "given"):
        assert f"'{place}'" in message
    assert "Expected: " in message
    assert "--data-root or FEDSTRATA_DATA" in message
    assert (f"fedstrata download {name}" in message) == (name not in ("emnist", "heart_disease"))


def test_unknown_names_and_parameters_are_answered_with_the_nearest() -> None:
    with pytest.raises(FedStrataError, match="Did you mean 'cifar10'"):
        datasets.make("cifar1")
    with pytest.raises(FedStrataError, match="Did you mean 'shards'"):
        datasets.make("cifar10(shard=1)")
    with pytest.raises(FedStrataError, match="Did you mean 'balanced'"):
        datasets.make("emnist:balance")


class Hub:
    """Stands in for huggingface_hub: notes the request and writes what the repository holds."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def snapshot_download(self, **request: Any) -> str:
        self.requests.append(request)
        for part in ("train", "test"):
            path = Path(request["local_dir"]) / "plain_text" / f"{part}-00000-of-00001.parquet"
            write_shard(path, pictures(1), [6])
        return str(request["local_dir"])


def test_download_fetches_what_the_loader_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert download("cifar10", tmp_path) == tmp_path / "cifar10"
    assert hub.requests == [
        {
            "repo_id": "uoft-cs/cifar10",
            "repo_type": "dataset",
            "allow_patterns": ["plain_text/*.parquet"],
            "local_dir": str(tmp_path / "cifar10"),
        }
    ]
    assert load("cifar10", tmp_path).labels.tolist() == [6, 6]
    assert download("cifar10") == cache_directory() / "cifar10"
    assert load("cifar10", None).labels.tolist() == [6, 6]


def test_download_without_the_extra_or_the_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FedStrataError, match=r"pip install 'fedstrata\[hub\]'"):
        download("cifar10", tmp_path)
    with pytest.raises(FedStrataError, match="Did you mean 'cifar10'"):
        download("cifar11", tmp_path)

    class Offline:
        def snapshot_download(self, **request: Any) -> str:
            raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Offline())
    with pytest.raises(FedStrataError, match=r"uoft-cs/cifar10.*no route to host"):
        download("cifar10", tmp_path)


@real_files
def test_real_cifar() -> None:
    dataset = load("cifar10(shards=1)", REAL)
    assert dataset.inputs.shape == (20_000, 3, 32, 32)
    assert dataset.class_names[0] == "airplane"
    assert np.bincount(dataset.labels.numpy()[dataset.test]).tolist() == [1000] * 10
    mean = dataset.inputs[dataset.train].double().mean((0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor(dataset.mean, dtype=torch.float64), atol=5e-3)


@real_files
def test_real_heart_disease() -> None:
    dataset = load("heart_disease", REAL)
    names, counts = np.unique(dataset.sites, return_counts=True)  # type: ignore[arg-type]
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        "cleveland": 303,
        "hungarian": 261,
        "switzerland": 46,
        "va": 130,
    }
    train = dataset.inputs[dataset.train]
    assert torch.allclose(train.mean(0), torch.zeros(10), atol=1e-5)
    assert torch.allclose(train.std(0, correction=0), torch.ones(10), atol=1e-5)
    assert len(dataset.test) == 187
