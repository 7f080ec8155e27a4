"""Folders of images as people have them: parts and sites by any of their names, classes without images, many shades."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedstrata.data import Dataset, datasets
from fedstrata.errors import FedStrataError, FedStrataWarning


def write(*places: str | Path) -> None:
    """Write two images into each of the folders."""
    for shade, place in enumerate(places):
        folder = Path(place)
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (5, 5), (shade, number, 0)).save(folder / f"{number}.png")


def load(folder: Path, parameters: str = "size=5") -> Dataset:
    return datasets.make(f"image_folder(path='{folder}', {parameters})").load()


@pytest.mark.parametrize(
    ("train", "test"), [("Train", "Test"), ("Training", "Testing"), ("TRAIN", "TEST"), ("train", "testing")]
)
def test_parts_are_known_by_each_of_their_names_and_are_no_sites(tmp_path: Path, train: str, test: str) -> None:
    write(*(tmp_path / part / name for part in (train, test) for name in ("cat", "dog")))
    dataset = load(tmp_path)
    assert dataset.sites is None
    assert dataset.class_names == ("cat", "dog")
    assert dataset.inputs[dataset.train][:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    assert dataset.inputs[dataset.test][:, 0, 0, 0].tolist() == [2, 2, 3, 3]


def test_parts_are_known_at_each_site(tmp_path: Path) -> None:
    write(*(tmp_path / place / "cat" for place in ("north/Train", "north/Test", "south/training", "south/testing")))
    dataset = load(tmp_path)
    assert dataset.sites is not None
    assert dataset.class_names == ("cat",)
    assert dataset.sites[dataset.test].tolist() == ["north"] * 2 + ["south"] * 2
    assert dataset.inputs[dataset.test][:, 0, 0, 0].tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("inside", ["", "train"])
def test_sites_may_be_called_like_parts_where_that_is_said(tmp_path: Path, inside: str) -> None:
    write(*(tmp_path / site / inside / "cat" for site in ("Test", "Train")))
    dataset = load(tmp_path, "size=5, sites=true, test_fraction=0.5")
    assert dataset.sites is not None
    assert dataset.sites.tolist() == ["Test"] * 2 + ["Train"] * 2
    assert len(dataset.train) == 2


def test_sites_inside_of_parts_need_no_classes_in_common_where_they_are_said(tmp_path: Path) -> None:
    write(*(tmp_path / place for place in ("train/north/cat", "train/south/dog", "test/north/cat")))
    dataset = load(tmp_path, "size=5, sites=true")
    assert dataset.sites is not None
    assert dataset.sites[dataset.train].tolist() == ["north"] * 2 + ["south"] * 2
    assert dataset.sites[dataset.test].tolist() == ["north"] * 2


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write(*(tmp_path / name for name in ("Train", "bus", "car")))
    assert load(tmp_path).class_names == ("Train", "bus", "car")


@pytest.mark.parametrize("name", ["val", "Valid", "validation"])
def test_without_a_test_part_the_one_for_validation_is_tested_on_and_that_is_told(tmp_path: Path, name: str) -> None:
    write(tmp_path / "train" / "cat", tmp_path / "train" / "dog", tmp_path / name / "cat")
    with pytest.warns(FedStrataWarning, match=rf"Of the parts in '{tmp_path}', '{name}' is the part to test on\."):
        dataset = load(tmp_path)
    assert dataset.train.tolist() == [0, 1, 2, 3]
    assert dataset.inputs[dataset.test][:, 0, 0, 0].tolist() == [2, 2]


def test_folders_beside_the_parts_are_told(tmp_path: Path) -> None:
    write(*(tmp_path / part / "cat" for part in ("train", "val", "test", "more")))
    with pytest.warns(FedStrataWarning, match=r"'more', 'val' not used\."):
        dataset = load(tmp_path)
    assert dataset.inputs[dataset.test][:, 0, 0, 0].tolist() == [2, 2]


def test_what_many_sites_have_in_common_is_told_once(tmp_path: Path) -> None:
    write(*(tmp_path / site / part / "cat" for site in ("north", "south") for part in ("train", "val")))
    with pytest.warns(FedStrataWarning) as told:
        load(tmp_path)
    [one] = told
    assert f"'{tmp_path / 'north'}', '{tmp_path / 'south'}', 'val' is the part to test on." in str(one.message)


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        (
            ("train/cat", "Training/cat"),
            "'Training', 'train', of which each would be the train part; put them into one",
        ),
        (("train/cat", "val/cat", "valid/cat"), "'val', 'valid', of which each would be the validation part"),
        (
            ("test/cat", "val/cat"),
            "holds 'test', 'val' and no part to train on; call that 'train', or write sites=true",
        ),
        (("north/train/cat", "south/cat"), r"north' holds folders \('train'\) and no images, so that .* sites=true"),
        (
            ("train/north/cat", "train/south/dog"),
            r"north' holds folders \('cat'\) and no images, so that .* sites=false",
        ),
    ],
)
def test_folders_that_may_be_several_things_get_one_sentence(
    tmp_path: Path, places: tuple[str, ...], sentence: str
) -> None:
    write(*(tmp_path / place for place in places))
    with pytest.raises(FedStrataError, match=sentence):
        load(tmp_path)


def test_a_class_of_files_that_nobody_can_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "cat")
    (tmp_path / "dog").mkdir()
    for name in ("1.DCM", "2.dcm", "LICENCE"):
        (tmp_path / "dog" / name).write_bytes(b"DICM")
    sentence = (
        r"The class 'dog' has no images in '.*dog' that can be read, but 3 other files \('.dcm', 'LICENCE'\); convert"
    )
    with pytest.raises(FedStrataError, match=sentence):
        load(tmp_path)


def test_a_class_without_images_is_told_and_one_that_a_single_site_lacks_is_not(tmp_path: Path) -> None:
    write(*(tmp_path / place for place in ("north/cat", "north/dog", "south/cat")))
    (tmp_path / "south" / "dog").mkdir()
    assert load(tmp_path).class_names == ("cat", "dog")
    for site in ("north", "south"):
        (tmp_path / site / "eel").mkdir()
    (tmp_path / "south" / "eel" / ".keep").touch()
    with pytest.warns(FedStrataWarning, match="There are no images of the class 'eel' to train on"):
        assert load(tmp_path).class_names == ("cat", "dog", "eel")


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "test" / "cat")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(FedStrataError, match=r"no images to train on in '.*train'"):
        load(tmp_path)


def test_classes_are_the_same_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedstrata.data.decoded.SMALLEST", 1)
    write(tmp_path / "own" / "cat", tmp_path / "own" / "dog")
    assert load(tmp_path / "own").class_names == ("cat", "dog")
    (tmp_path / "own" / "bee").mkdir()
    for _ in range(2):
        with pytest.warns(FedStrataWarning, match="of the class 'bee'"):
            dataset = load(tmp_path / "own")
        assert dataset.class_names == ("bee", "cat", "dog")
        assert dataset.labels.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(("ending", "kind", "mode"), [("png", np.uint16, "I;16"), ("tif", np.float32, "F")])
def test_images_of_more_shades_than_a_byte_holds_are_refused(
    tmp_path: Path, ending: str, kind: type, mode: str
) -> None:
    write(tmp_path / "cat")
    shades = np.linspace(0, 4095 if kind is np.uint16 else 1, 25).reshape(5, 5).astype(kind)
    Image.fromarray(shades).save(tmp_path / "cat" / f"deep.{ending}")
    sentence = rf"deep\.{ending}' has more than 256 shades of grey \({mode}\), .*; scale the images to 256 shades"
    with pytest.raises(FedStrataError, match=sentence):
        load(tmp_path)


def test_nothing_is_told_of_what_is_plain(tmp_path: Path) -> None:
    write(*(tmp_path / place for place in ("train/cat", "train/dog", "test/cat")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(tmp_path).test) == 2
