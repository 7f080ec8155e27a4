"""MNIST, Fashion-MNIST and EMNIST: grey images of 28 x 28 pixels in IDX files."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import ClassVar

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets, not_found, pooled, search_places
from fedstrata.data.download import HUB_DATASETS
from fedstrata.data.formats.idx import read_idx
from fedstrata.data.formats.parquet import choose_shards, find_shards, read_shards
from fedstrata.data.formats.samples import Samples, damaged
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter


def find_idx(place: Path, folders: tuple[str, ...], stem: str) -> Path | None:
    """Look for an IDX file such as ``train-images-idx3-ubyte`` (or with ``.idx3``), with or without ``.gz``."""
    dotted = stem.replace("-idx", ".idx")
    candidates = [
        place / folder / f"{name}{ending}" for folder in folders for name in (stem, dotted) for ending in ("", ".gz")
    ]
    return next((path for path in candidates if path.is_file()), None)


def read_idx_pair(place: Path, folders: tuple[str, ...], prefix: str) -> Samples | None:
    """Read the images and the labels of one part, or nothing where there are no such images."""
    images = find_idx(place, folders, f"{prefix}-images-idx3-ubyte")
    if images is None:
        return None
    labels = find_idx(place, folders, f"{prefix}-labels-idx1-ubyte")
    if labels is None:
        raise FedStrataError(f"'{images}' has no companion '{prefix}-labels-idx1-ubyte'; fetch it again.")
    pixels, marks = read_idx(images), read_idx(labels)
    if pixels.ndim != 3:
        raise damaged(images, f"it holds {pixels.ndim} axes, and images have 3")
    if marks.shape != pixels.shape[:1]:
        raise damaged(labels, f"its shape is {marks.shape}, and there are {len(pixels)} images")
    return Samples(pixels[:, None], marks.astype(np.int64))


def read_idx_dataset(place: Path, folders: tuple[str, ...], train: str, test: str) -> tuple[Samples, Samples] | None:
    """Read both parts, or nothing where there are no training images."""
    first = read_idx_pair(place, folders, train)
    if first is None:
        return None
    last = read_idx_pair(place, folders, test)
    if last is None:
        raise FedStrataError(
            f"There are training images in '{place}' but no '{test}-images-idx3-ubyte'; fetch it again."
        )
    return first, last


@dataclass(frozen=True)
class MnistLike(DatasetSource, ABC):
    """A dataset in MNIST's four IDX files, or in the hub's Parquet shards."""

    class_names: ClassVar[tuple[str, ...]]
    folder: ClassVar[str]

    def load(self, root: Path | None = None) -> Dataset:
        """Read IDX files or Parquet shards, whichever is found first."""
        places = search_places(self.name, root)
        for place in places:
            folders = ("", "raw", f"{self.folder}/raw")
            parts = read_idx_dataset(place, folders, "train", "t10k") or self._from_parquet(place)
            if parts is not None:
                return pooled(str(self), *parts, self.class_names)
        raise not_found(
            self.name,
            places,
            "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, "
            "each with or without .gz, or Parquet shards (train-*.parquet and test-*.parquet)",
        )

    def _from_parquet(self, place: Path) -> tuple[Samples, Samples] | None:
        for folder in (place, place / HUB_DATASETS[self.name].folder):
            train, test = find_shards(folder, "train"), find_shards(folder, "test")
            if train and test:
                return read_shards(choose_shards(train, None), "label", "L", 28), read_shards(
                    choose_shards(test, None), "label", "L", 28
                )
        return None


@datasets.register("mnist")
@dataclass(frozen=True)
class Mnist(MnistLike):
    """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28 grey pixels (LeCun et al., 1998)."""

    class_names = tuple(digits)
    folder = "MNIST"


@datasets.register("fashion_mnist")
@dataclass(frozen=True)
class FashionMnist(MnistLike):
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes in 10 classes, 28 x 28 grey pixels (Xiao et al., 2017)."""

    class_names = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    folder = "FashionMNIST"


# Merging joins the lower-case letters that look like their capitals: c i j k l m o p s u v w x y z.
_MERGED = (*digits, *ascii_uppercase, *"abdefghnqrt")
EMNIST_CLASSES: dict[str, tuple[str, ...]] = {
    "byclass": (*digits, *ascii_uppercase, *ascii_lowercase),
    "bymerge": _MERGED,
    "balanced": _MERGED,
    "letters": tuple(ascii_uppercase),
    "digits": tuple(digits),
    "mnist": tuple(digits),
}


@datasets.register("emnist")
@dataclass(frozen=True)
class Emnist(DatasetSource):
    """EMNIST: handwritten letters and digits, 28 x 28 grey pixels, in six versions (Cohen et al., 2017).

    The files keep images transposed and number the letters from 1; here images stand upright and classes start at 0.
    """

    split: str = parameter(
        "balanced", "Which version: all 62 classes, look-alikes merged, or a part.", choices=tuple(EMNIST_CLASSES)
    )

    def load(self, root: Path | None = None) -> Dataset:
        """Read the four IDX files of the version."""
        places = search_places(self.name, root)
        stem = f"emnist-{self.split}"
        for place in places:
            folders = ("", "raw", "gzip", "EMNIST/raw", "EMNIST/raw/gzip")
            parts = read_idx_dataset(place, folders, f"{stem}-train", f"{stem}-test")
            if parts is not None:
                train, test = (self._upright(part) for part in parts)
                return pooled(str(self), train, test, EMNIST_CLASSES[self.split])
        raise not_found(
            self.name,
            places,
            f"{stem}-train-images-idx3-ubyte, {stem}-train-labels-idx1-ubyte, {stem}-test-images-idx3-ubyte and "
            f"{stem}-test-labels-idx1-ubyte, each with or without .gz, as in gzip.zip of NIST's EMNIST page",
        )

    def _upright(self, samples: Samples) -> Samples:
        first_label = 1 if self.split == "letters" else 0
        return Samples(samples.inputs.swapaxes(2, 3), samples.labels - first_label)
