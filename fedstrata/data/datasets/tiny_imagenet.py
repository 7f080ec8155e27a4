"""Tiny ImageNet: 200 classes of ImageNet in 64 x 64 pixels (Le and Yang, "Tiny ImageNet visual recognition", 2015)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets, not_found, pooled, search_places
from fedstrata.data.decoded import kept
from fedstrata.data.formats.bounds import refuse_irregular
from fedstrata.data.formats.images import decode_images
from fedstrata.data.formats.parquet import choose_shards, find_shards, read_shards
from fedstrata.data.formats.samples import Samples, damaged
from fedstrata.errors import FedStrataError

FOLDER = "tiny-imagenet-200"
SIDE = 64
_ENDING = ".jpeg"
_TEST_SHARDS = ("valid", "validation", "val", "test")


def is_official_layout(folder: Path) -> bool:
    """Tell the unpacked archive by the two files that no other folder of images has."""
    return (folder / "wnids.txt").is_file() and (folder / "val" / "val_annotations.txt").is_file()


@datasets.register("tiny_imagenet")
@dataclass(frozen=True)
class TinyImageNet(DatasetSource):
    """Tiny ImageNet: 100,000 + 10,000 colour images of 64 x 64 pixels in 200 classes.

    Read from the unpacked archive (``tiny-imagenet-200``) or from Parquet shards as on the Hugging Face hub. The
    labels of the official test part were never published: the validation part is the one to test on, as in all papers.
    Classes are numbered in the alphabetical order of their WordNet numbers. Grey images, some two in a hundred, become
    colour images. The boxes around objects are not used.
    """

    def load(self, root: Path | None = None) -> Dataset:
        """Read the official layout or Parquet shards, whichever is found first."""
        return self.find(root)()

    def find(self, root: Path | None = None) -> Callable[[], Dataset]:
        """Find the files of one of the versions, and return what reads them."""
        places = search_places(self.name, root)
        for place in places:
            official = next((folder for folder in (place, place / FOLDER) if is_official_layout(folder)), None)
            if official is not None:
                return partial(self._from_folders, official)
            for folder in (place, place / "data"):
                train = find_shards(folder, "train")
                test = next((shards for part in _TEST_SHARDS if (shards := find_shards(folder, part))), [])
                if train and test:
                    train, test = choose_shards(train, None), choose_shards(test, None)
                    decode = partial(self._from_parquet, train, test)
                    return partial(kept, str(self), folder, [*train, *test], decode)
        raise not_found(
            self.name,
            places,
            f"the unpacked archive ({FOLDER}/wnids.txt, {FOLDER}/train, {FOLDER}/val/val_annotations.txt), or Parquet "
            "shards (train-*.parquet and valid-*.parquet)",
        )

    def _from_folders(self, folder: Path) -> Dataset:
        numbers = read_numbers(folder / "wnids.txt")
        train = [(path, label) for label, number in enumerate(numbers) for path in _images_of(folder / "train", number)]
        test = read_annotations(folder / "val" / "val_annotations.txt", numbers)
        names = class_names(folder / "words.txt", numbers)
        words = [path for path in (folder / "words.txt",) if path.is_file()]
        sources = [folder / "wnids.txt", folder / "val" / "val_annotations.txt", *words]
        sources += [path for path, _ in (*train, *test)]
        return kept(str(self), folder, sources, partial(self._decoded, folder, train, test, names))

    def _decoded(
        self,
        folder: Path,
        train: Sequence[tuple[Path, int]],
        test: Sequence[tuple[Path, int]],
        names: tuple[str, ...],
    ) -> Dataset:
        first, last = (
            Samples(
                decode_images([path for path, _ in part], "RGB", None, str(folder), SIDE),
                np.array([label for _, label in part], dtype=np.int64),
            )
            for part in (train, test)
        )
        return pooled(str(self), first, last, names)

    def _from_parquet(self, train: Sequence[Path], test: Sequence[Path]) -> Dataset:
        first, last = (read_shards(shards, "label", "RGB", SIDE) for shards in (train, test))
        classes = 1 + int(max(first.labels.max(), last.labels.max()))
        names = first.class_names or tuple(str(label) for label in range(classes))
        return pooled(str(self), first, last, names)


def read_numbers(path: Path) -> tuple[str, ...]:
    """Read the WordNet numbers of the classes, one on a line, and sort them."""
    refuse_irregular(path)
    numbers = path.read_text(encoding="utf-8", errors="replace").split()
    if not numbers or len(set(numbers)) < len(numbers):
        raise damaged(path, "it names a class twice" if numbers else "it names no classes")
    if any("/" in number or "\\" in number or number.startswith(".") for number in numbers):
        raise damaged(path, "what it names are no WordNet numbers")
    return tuple(sorted(numbers))


def read_annotations(path: Path, numbers: Sequence[str]) -> list[tuple[Path, int]]:
    """Read which class each validation image has: a file's name, a WordNet number and a box, with tabs between."""
    labels = {number: label for label, number in enumerate(numbers)}
    found = []
    for place, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        cells = line.split("\t")
        if not line.strip():
            continue
        if len(cells) < 2 or cells[1].strip() not in labels or Path(cells[0]).name != cells[0]:
            raise damaged(path, f"line {place} does not tell a file and one of the classes of wnids.txt")
        found.append((path.parent / "images" / cells[0], labels[cells[1].strip()]))
    if not found:
        raise damaged(path, "it names no images")
    return found


def class_names(path: Path, numbers: Sequence[str]) -> tuple[str, ...]:
    """Name each class by the first of its words, with its WordNet number where another class is called the same."""
    if not path.is_file():
        return tuple(numbers)
    lines = (line.partition("\t") for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    words = {number: names.split(",")[0].strip() for number, _, names in lines}
    first = [words.get(number) or number for number in numbers]
    return tuple(
        name if first.count(name) == 1 else f"{name} ({number})" for name, number in zip(first, numbers, strict=True)
    )


def _images_of(train: Path, number: str) -> list[Path]:
    folder = train / number / "images"
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() == _ENDING) if folder.is_dir() else []
    if not found:
        raise FedStrataError(f"The class {number} of wnids.txt has no images in '{folder}'; unpack the archive again.")
    return found
