"""What a dataset's source is, and where its files are looked for."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from fedstrata.data.cache import cache_directory
from fedstrata.data.channels import channel_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.download import download_offer
from fedstrata.data.formats.samples import Samples
from fedstrata.errors import FedStrataError, FedStrataWarning, NotHereError
from fedstrata.spec import Registry, Spec

ROOT_VARIABLE = "FEDSTRATA_DATA"


@dataclass(frozen=True)
class DatasetSource(Spec, ABC):
    """A dataset by name: its parameters, and the way to load it.

    ``statistics`` are mean and deviation of its channels, where they are published constants.
    """

    statistics: ClassVar[tuple[tuple[float, ...], tuple[float, ...]] | None] = None

    def find(self, root: Path | None = None) -> object:
        """Find what :meth:`load` reads, without reading it; what is missing is told in the same sentence as there.

        What is returned is for ``load``. Nothing is looked for where no files are needed, or a dataset of somebody's
        own does not say which.
        """
        return None

    @abstractmethod
    def load(self, root: Path | None = None) -> Dataset:
        """Read the dataset, from files in ``root``, in ``$FEDSTRATA_DATA`` or in the cache directory, in this order."""


datasets: Registry[DatasetSource] = Registry("dataset")


def data_roots(root: Path | None) -> list[Path]:
    """List the folders that may hold datasets, first the most specific."""
    named = os.environ.get(ROOT_VARIABLE)
    roots = [root, Path(named) if named else None, cache_directory()]
    return list(dict.fromkeys(folder.expanduser() for folder in roots if folder is not None))


def search_places(name: str, root: Path | None) -> list[Path]:
    """List the folders that may hold one dataset: each root's sub-folder of that name, then the root itself."""
    return [place for folder in data_roots(root) for place in (folder / name, folder)]


def lies_in_folder_of(folder: Path, names: Sequence[str]) -> bool:
    """Tell whether files of this folder lie in one that is called as their dataset is, or in a folder of that.

    >>> [lies_in_folder_of(Path(place), ("fashion_mnist",)) for place in ("/data/Fashion-MNIST/raw", "/data")]
    [True, False]
    """
    above = [place for path in (folder.absolute(), folder.resolve()) for place in (path.name, path.parent.name)]
    return bool({_letters(name) for name in names} & set(map(_letters, above)))


def warn_of_shared(name: str, file: Path) -> None:
    """Tell that a file was taken for one of this dataset only because of a name that files of other ones have too."""
    warnings.warn(
        f"'{file}' is taken for a file of '{name}', although files of other datasets are called so too; put those of "
        f"'{name}' into a folder called '{name}' to be sure.",
        FedStrataWarning,
        stacklevel=3,
    )


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def find_own(name: str, path: str | None, root: Path | None, expected: str) -> Path:
    """Find a user's own file or folder: at its path, inside a data root, or without a path the data root itself."""
    if path is None and root is None:
        raise FedStrataError(f"The dataset '{name}' needs a path; write {name}(path=...) or give a data root.")
    if path is None:
        places = data_roots(root)[:1]
    else:
        places = [Path(path).expanduser(), *(folder / path for folder in data_roots(root))]
    found = next((place for place in dict.fromkeys(places) if place.exists()), None)
    if found is None:
        raise not_found(name, places, expected)
    return found


def is_path(name: str) -> bool:
    """Tell what leads elsewhere from the mere name of a file."""
    return bool(set("/\\~\0") & set(name)) or name in (".", "..")


def not_found(name: str, places: Sequence[Path], expected: str) -> NotHereError:
    """Build the error for files that are nowhere: where one looked, what was expected, and how to get it."""
    looked = ", ".join(f"'{place}'" for place in places)
    offer = download_offer(name)
    return NotHereError(
        f"The files of the dataset '{name}' are in none of {looked}. Expected: {expected}. "
        f"Name their folder with --data-root or {ROOT_VARIABLE}{offer}.",
        f"{name}: {expected}{offer.partition(' (')[0]}.",
    )


def pooled(
    name: str,
    train: Samples,
    test: Samples,
    class_names: tuple[str, ...],
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Dataset:
    """Put training and test samples into one pool; channel statistics, unless given, are of the training part."""
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise FedStrataError(
            f"The training samples of '{name}' have the shape {train.inputs.shape[1:]}, "
            f"but its test samples {test.inputs.shape[1:]}; fetch its files again."
        )
    inputs = torch.from_numpy(np.concatenate([train.inputs, test.inputs]))
    labels = torch.from_numpy(np.concatenate([train.labels, test.labels]).astype(np.int64))
    first, last = np.split(np.arange(len(inputs)), [len(train.inputs)])
    mean, deviation = statistics or channel_statistics(inputs[: len(train.inputs)])
    return Dataset(name, inputs, labels, first, last, class_names, None, mean, deviation, estimated=statistics is None)
