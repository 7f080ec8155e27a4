"""Tiny ImageNet, on small files in its official layout and in the hub's shards."""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedstrata.data import Dataset, datasets
from fedstrata.errors import FedStrataError
from fedstrata.testing import check_dataset

NUMBERS = ("n02124075", "n01443537", "n03126707")
WORDS = "n01443537\tgoldfish, Carassius auratus\nn02124075\tcrane, Egyptian cat\nn03126707\tcrane\nn00000001\tnothing\n"


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def jpeg(shade: int, mode: str = "RGB", side: int = 64) -> bytes:
    buffer = BytesIO()
    Image.new(mode, (side, side), shade if mode == "L" else (shade, 0, 0)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Three classes with two training images, one of them grey, and one validation image of each."""
    folder = tmp_path / "root" / "tiny-imagenet-200"
    for number in NUMBERS:
        images = folder / "train" / number / "images"
        images.mkdir(parents=True)
        (images.parent / f"{number}_boxes.txt").write_text(f"{number}_0.JPEG\t0\t10\t63\t58\n")
        (images / f"{number}_0.JPEG").write_bytes(jpeg(40 * (1 + NUMBERS.index(number))))
        (images / f"{number}_1.JPEG").write_bytes(jpeg(200, "L"))
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "test" / "images").mkdir(parents=True)
    (folder / "test" / "images" / "test_0.JPEG").write_bytes(jpeg(1))
    lines = []
    for place, number in enumerate(NUMBERS):
        (folder / "val" / "images" / f"val_{place}.JPEG").write_bytes(jpeg(10 * (1 + place)))
        lines.append(f"val_{place}.JPEG\t{number}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(NUMBERS) + "\n")
    (folder / "words.txt").write_text(WORDS)
    return folder


def load(root: Path) -> Dataset:
    return datasets.make("tiny_imagenet").load(root)


@pytest.mark.parametrize("inner", [True, False])
def test_the_official_layout(archive: Path, inner: bool) -> None:
    dataset = load(archive if inner else archive.parent)
    assert dataset.inputs.shape == (9, 3, 64, 64)
    assert dataset.inputs.dtype == torch.uint8
    # In the order of the WordNet numbers, and not of wnids.txt.
    assert dataset.labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 0, 2]
    assert (dataset.train.tolist(), dataset.test.tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    assert dataset.class_names == ("goldfish", "crane (n02124075)", "crane (n03126707)")
    middles = dataset.inputs[:, :, 32, 32].int()
    assert middles[[0, 2, 4, 6, 7, 8], 0].tolist() == pytest.approx([80, 40, 120, 10, 20, 30], abs=2)
    assert middles[1].tolist() == [200, 200, 200]
    check_dataset(dataset)


def test_the_hubs_shards(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    told = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["n01443537", "n01629819"]}}}})}
    for part, shades in (("train", [10, 20, 30]), ("valid", [40])):
        blobs = [{"bytes": jpeg(shade, "L" if shade == 20 else "RGB"), "path": None} for shade in shades]
        table = pa.table({"image": pa.array(blobs, kind), "label": [shade // 10 % 2 for shade in shades]})
        path = tmp_path / "tiny_imagenet" / "data" / f"{part}-00000-of-00001-1359597a978bc4fa.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata(told), path)
    dataset = load(tmp_path)
    assert dataset.labels.tolist() == [1, 0, 1, 0]
    assert dataset.class_names == ("n01443537", "n01629819")
    assert dataset.test.tolist() == [3]
    assert dataset.inputs[1, :, 5, 5].tolist() == [20, 20, 20]


def test_image_folder_points_here(archive: Path) -> None:
    with pytest.raises(FedStrataError, match=r"is Tiny ImageNet.*--data tiny_imagenet --data-root"):
        datasets.make("image_folder").load(archive)


def test_missing_files_say_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match=r"val_annotations\.txt.*valid-.*fedstrata download tiny_imagenet"):
        load(tmp_path)


def damage(archive: Path, what: str) -> None:
    annotations = archive / "val" / "val_annotations.txt"
    if what == "class":
        annotations.write_text(annotations.read_text().replace(NUMBERS[1], "n99999999"))
    elif what == "elsewhere":
        annotations.write_text(annotations.read_text().replace("val_1", "../../train/x"))
    elif what == "twice":
        (archive / "wnids.txt").write_text(f"{NUMBERS[0]}\n{NUMBERS[0]}\n")
    elif what == "path":
        (archive / "wnids.txt").write_text("../secret\n")
    elif what == "folder":
        (archive / "wnids.txt").write_text("\n".join((*NUMBERS, "n09999999")))
    elif what == "size":
        (archive / "val" / "images" / "val_1.JPEG").write_bytes(jpeg(3, side=32))
    elif what == "image":
        (archive / "val" / "images" / "val_1.JPEG").write_bytes(b"no image")
    elif what == "gone":
        (archive / "val" / "images" / "val_1.JPEG").unlink()
    else:
        annotations.write_text("\n")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("class", "line 2 does not tell a file and one of the classes"),
        ("elsewhere", "line 2 does not tell a file"),
        ("twice", "names a class twice"),
        ("path", "no WordNet numbers"),
        ("folder", "The class n09999999 of wnids.txt has no images"),
        ("size", r"val_1.JPEG' has 32 x 32 pixels, and those of this dataset 64 x 64"),
        ("image", r"val_1.JPEG' is not a readable image"),
        ("gone", r"val_1.JPEG' leads nowhere"),
        ("empty", "it names no images"),
    ],
)
def test_damaged_archives_get_one_sentence(archive: Path, what: str, sentence: str) -> None:
    damage(archive, what)
    with pytest.raises(FedStrataError, match=sentence):
        load(archive)


def test_decoded_images_are_kept(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", str(archive.parent / "cache"))
    monkeypatch.setattr("fedstrata.data.decoded.SMALLEST", 1)
    first = load(archive)
    with monkeypatch.context() as patched:
        module = sys.modules["fedstrata.data.datasets.tiny_imagenet"]
        patched.setattr(module, "decode_images", lambda *_: pytest.fail("decoded again"))
        assert torch.equal(load(archive).inputs, first.inputs)
    annotations = archive / "val" / "val_annotations.txt"
    annotations.write_text(annotations.read_text().replace(NUMBERS[0], NUMBERS[2]))
    assert np.array_equal(load(archive).labels[-3:], [2, 0, 2])
