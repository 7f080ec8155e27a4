"""CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning multiple layers of features from tiny images", 2009)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets, not_found, pooled, search_places
from fedstrata.data.decoded import kept
from fedstrata.data.download import HUB_DATASETS
from fedstrata.data.formats.cifar_batches import (
    read_binary_batch,
    read_pickled_batch,
    read_pickled_names,
    read_text_names,
)
from fedstrata.data.formats.parquet import choose_shards, find_shards, read_shards
from fedstrata.data.formats.samples import Samples, join
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

Parts = tuple[Samples, Samples]


@dataclass(frozen=True)
class Batches:
    """How one distributed version names its files."""

    folder: str
    train: tuple[str, ...]
    test: str
    names: str


@dataclass(frozen=True)
class Cifar(DatasetSource, ABC):
    """What both versions share: three formats, of which the first that is found is read."""

    shards: int | None = parameter(
        None,
        "How many training files to use (each a fifth in the sharded and batched versions); all by default.",
        low=1,
    )

    classes: ClassVar[int]
    parquet_label: ClassVar[str]
    pickled: ClassVar[Batches]
    pickled_label: ClassVar[str]
    pickled_names: ClassVar[str]
    binary: ClassVar[Batches]
    label_bytes: ClassVar[int]

    def load(self, root: Path | None = None) -> Dataset:
        """Read Parquet shards, pickled batches or the binary version, whichever is found first."""
        return self.find(root)()

    def find(self, root: Path | None = None) -> Callable[[], Dataset]:
        """Find the files of one of the versions, and return what reads them."""
        places = search_places(self.name, root)
        for place in places:
            shards = self._find_parquet(place)
            if shards is not None:
                train, test = shards
                decode = partial(self._from_parquet, train, test)
                return partial(kept, str(self), train[0].parent, [*train, *test], decode)
            if folder := _batch_folder(place, self.pickled):
                return partial(self._from_pickles, folder, self._batch_files(folder, self.pickled))
            if folder := _batch_folder(place, self.binary):
                return partial(self._from_binary, folder, self._batch_files(folder, self.binary))
        expected = (
            f"Parquet shards (train-*.parquet and test-*.parquet), "
            f"the pickled batches ({self.pickled.folder}/{self.pickled.test}, ...) or"
            f" the binary version ({self.binary.folder}/{self.binary.test}, ...)"
        )
        raise not_found(self.name, places, expected)

    def _find_parquet(self, place: Path) -> tuple[list[Path], list[Path]] | None:
        for folder in (place, place / "data", place / HUB_DATASETS[self.name].folder):
            if train := find_shards(folder, "train"):
                test = find_shards(folder, "test")
                if not test:
                    raise FedStrataError(f"'{folder}' holds training shards but no test-*.parquet; fetch it again.")
                return choose_shards(train, self.shards), choose_shards(test, None)
        return None

    def _from_parquet(self, train: Sequence[Path], test: Sequence[Path]) -> Dataset:
        first, last = (read_shards(shards, self.parquet_label, "RGB", 32) for shards in (train, test))
        return self._pooled((first, last))

    def _pooled(self, parts: Parts) -> Dataset:
        names = parts[0].class_names or tuple(str(label) for label in range(self.classes))
        return pooled(str(self), *parts, names, self.statistics)

    def _from_pickles(self, folder: Path, files: Sequence[Path]) -> Dataset:
        names = read_pickled_names(folder / self.pickled.names, self.pickled_names)
        read = [read_pickled_batch(path, self.pickled_label) for path in files]
        return self._pooled((_with_names(join(read[:-1]), names), read[-1]))

    def _from_binary(self, folder: Path, files: Sequence[Path]) -> Dataset:
        names = read_text_names(folder / self.binary.names)
        read = [read_binary_batch(path, self.label_bytes) for path in files]
        return self._pooled((_with_names(join(read[:-1]), names), read[-1]))

    def _batch_files(self, folder: Path, batches: Batches) -> Sequence[Path]:
        """List the training files that are asked for, and then the test file."""
        if self.shards is not None and self.shards > len(batches.train):
            raise FedStrataError(
                f"{self.shards} training files are asked for, but there are {len(batches.train)} in '{folder}'; "
                f"ask for no more."
            )
        files = [folder / name for name in (*batches.train[: self.shards], batches.test)]
        for path in files:
            if not path.is_file():
                raise FedStrataError(f"The file '{path}' is missing beside its companions; fetch it again.")
        return files


def _batch_folder(place: Path, batches: Batches) -> Path | None:
    return next((folder for folder in (place / batches.folder, place) if (folder / batches.train[0]).is_file()), None)


def _with_names(samples: Samples, names: tuple[str, ...] | None) -> Samples:
    return Samples(samples.inputs, samples.labels, names)


@datasets.register("cifar10")
@dataclass(frozen=True)
class Cifar10(Cifar):
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 pixels in 10 classes.

    Read from Hugging Face style Parquet shards, from the pickled batches that torchvision unpacks, or from the binary
    version.
    """

    classes = 10
    statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    parquet_label = "label"
    pickled = Batches(
        "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"
    )
    pickled_label = "labels"
    pickled_names = "label_names"
    binary = Batches(
        "cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt"
    )
    label_bytes = 1


@datasets.register("cifar100")
@dataclass(frozen=True)
class Cifar100(Cifar):
    """CIFAR-100: 50,000 + 10,000 colour images of 32 x 32 pixels in 100 classes (the fine labels).

    Read from Hugging Face style Parquet shards, from the pickled batches that torchvision unpacks, or from the binary
    version.
    """

    classes = 100
    statistics = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    parquet_label = "fine_label"
    pickled = Batches("cifar-100-python", ("train",), "test", "meta")
    pickled_label = "fine_labels"
    pickled_names = "fine_label_names"
    binary = Batches("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt")
    label_bytes = 2
