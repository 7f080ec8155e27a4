"""MNIST, Fashion-MNIST and EMNIST: grey images of 28 x 28 pixels in IDX files."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import ClassVar

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import (
    DatasetSource,
    datasets,
    lies_in_folder_of,
    not_found,
    pooled,
    search_places,
    warn_of_shared,
)
from fedstrata.data.decoded import kept
from fedstrata.data.download import HUB_DATASETS
from fedstrata.data.formats.idx import read_idx
from fedstrata.data.formats.parquet import choose_shards, find_shards, read_shards
from fedstrata.data.formats.samples import Samples, damaged
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

SIDE = 28


def find_idx(place: Path, folders: tuple[str, ...], stem: str) -> Path | None:
    """Look for an IDX file such as ``train-images-idx3-ubyte`` (or with ``.idx3``), with or without ``.gz``."""
    dotted = stem.replace("-idx", ".idx")
    candidates = [
        place / folder / f"{name}{ending}" for folder in folders for name in (stem, dotted) for ending in ("", ".gz")
    ]
    return next((path for path in candidates if path.is_file()), None)


def idx_files(place: Path, folders: tuple[str, ...], train: str, test: str) -> list[Path]:
    """List the files of both parts that are there; none where there are no training images."""
    stems = [f"{part}-{what}" for part in (train, test) for what in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    found = [find_idx(place, folders, stem) for stem in stems]
    return [] if found[0] is None else [path for path in found if path is not None]


def read_idx_pair(place: Path, folders: tuple[str, ...], prefix: str) -> Samples:
    """Read the images and the labels of one part."""
    images = find_idx(place, folders, f"{prefix}-images-idx3-ubyte")
    if images is None:
        raise FedStrataError(
            f"There are training images in '{place}' but no '{prefix}-images-idx3-ubyte'; fetch it again."
        )
    labels = find_idx(place, folders, f"{prefix}-labels-idx1-ubyte")
    if labels is None:
        raise FedStrataError(f"'{images}' has no companion '{prefix}-labels-idx1-ubyte'; fetch it again.")
    pixels, marks = read_idx(images), read_idx(labels)
    if pixels.ndim != 3:
        raise damaged(images, f"it holds {pixels.ndim} axes, and images have 3")
    if pixels.shape[1:] != (SIDE, SIDE):
        size = f"{pixels.shape[2]} x {pixels.shape[1]}"
        raise damaged(images, f"its images have {size} pixels, and those of this dataset {SIDE} x {SIDE}")
    if marks.shape != pixels.shape[:1]:
        raise damaged(labels, f"its shape is {marks.shape}, and there are {len(pixels)} images")
    return Samples(pixels[:, None], marks.astype(np.int64))


def read_idx_dataset(place: Path, folders: tuple[str, ...], train: str, test: str) -> tuple[Samples, Samples]:
    """Read both parts."""
    return read_idx_pair(place, folders, train), read_idx_pair(place, folders, test)


@dataclass(frozen=True)
class MnistLike(DatasetSource, ABC):
    """A dataset in MNIST's four IDX files, or in the hub's Parquet shards."""

    class_names: ClassVar[tuple[str, ...]]
    folder: ClassVar[str]

    def load(self, root: Path | None = None) -> Dataset:
        """Read IDX files or Parquet shards, whichever is found first."""
        return self.find(root)()

    def find(self, root: Path | None = None) -> Callable[[], Dataset]:
        """Find the files of one of the versions, and return what reads them."""
        places = search_places(self.name, root)
        folders = ("", "raw", f"{self.folder}/raw")
        for place in places:
            files = idx_files(place, folders, "train", "t10k")
            if files:
                return partial(self._kept, place, files, partial(self._from_idx, place, folders))
            train, test = self._find_parquet(place)
            if train and test:
                decode = partial(self._from_parquet, train, test)
                return partial(self._kept, train[0].parent, [*train, *test], decode)
        raise not_found(
            self.name,
            places,
            "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, "
            "each with or without .gz, or Parquet shards (train-*.parquet and test-*.parquet)",
        )

    def _kept(self, place: Path, files: Sequence[Path], decode: Callable[[], Dataset]) -> Dataset:
        dataset = kept(str(self), place, files, decode)
        if not lies_in_folder_of(files[0].parent, (self.name, self.folder)):
            warn_of_shared(self.name, files[0])
        return dataset

    def _from_idx(self, place: Path, folders: tuple[str, ...]) -> Dataset:
        return pooled(str(self), *read_idx_dataset(place, folders, "train", "t10k"), self.class_names)

    def _find_parquet(self, place: Path) -> tuple[list[Path], list[Path]]:
        for folder in (place, place / HUB_DATASETS[self.name].folder):
            train, test = find_shards(folder, "train"), find_shards(folder, "test")
            if train and test:
                return choose_shards(train, None), choose_shards(test, None)
        return [], []

    def _from_parquet(self, train: Sequence[Path], test: Sequence[Path]) -> Dataset:
        first, last = (read_shards(shards, "label", "L", SIDE) for shards in (train, test))
        return pooled(str(self), first, last, self.class_names)


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

_EMNIST_FOLDERS = ("", "raw", "gzip", "EMNIST/raw", "EMNIST/raw/gzip")


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
        return self.find(root)()

    def find(self, root: Path | None = None) -> Callable[[], Dataset]:
        """Find the files of the version, and return what reads them."""
        places = search_places(self.name, root)
        stem = f"emnist-{self.split}"
        for place in places:
            files = idx_files(place, _EMNIST_FOLDERS, f"{stem}-train", f"{stem}-test")
            if files:
                return partial(kept, str(self), place, files, partial(self._from_idx, place, stem))
        raise not_found(
            self.name,
            places,
            f"{stem}-train-images-idx3-ubyte, {stem}-train-labels-idx1-ubyte, {stem}-test-images-idx3-ubyte and "
            f"{stem}-test-labels-idx1-ubyte, each with or without .gz, as in gzip.zip of NIST's EMNIST page",
        )

    def _from_idx(self, place: Path, stem: str) -> Dataset:
        parts = read_idx_dataset(place, _EMNIST_FOLDERS, f"{stem}-train", f"{stem}-test")
        train, test = (self._upright(part) for part in parts)
        return pooled(str(self), train, test, EMNIST_CLASSES[self.split])

    def _upright(self, samples: Samples) -> Samples:
        first_label = 1 if self.split == "letters" else 0
        return Samples(samples.inputs.swapaxes(2, 3), samples.labels - first_label)
