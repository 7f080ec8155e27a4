"""A user's own images, one folder per class, of one site or of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedstrata.data.channels import channel_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets, find_own
from fedstrata.data.datasets.tiny_imagenet import is_official_layout
from fedstrata.data.decoded import kept
from fedstrata.data.formats.images import decode_images
from fedstrata.data.held_out import groups_of, hold_out_for_testing
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class _Folder(NamedTuple):
    """A folder with one folder per class: whose, and whether to test on."""

    path: Path
    site: str | None
    testing: bool


@datasets.register("image_folder")
@dataclass(frozen=True)
class ImageFolder(DatasetSource):
    """Your own images: a folder per class, inside ``train`` and ``test`` folders or without them; or so for each site.

    With sites, ``hospital/class/image.png`` or ``hospital/train/class/image.png``, the sites are natural clients
    (``natural``). Images become colour images of ``size`` x ``size`` pixels. Classes are numbered in the alphabetical
    order of their folders. Without a ``test`` folder, a fraction of each class (of each site), evenly spaced, is held
    out.
    """

    path: str | None = parameter(
        None,
        "The folder, absolute or inside the current folder or a data root; by default the data root itself.",
        local=True,
    )
    size: int = parameter(32, "Width and height, in pixels, to which each image is scaled.", low=1)
    test_fraction: float = parameter(
        0.25, "The held-out fraction of each class, where there is no test folder.", low=0, below=1
    )
    sites: bool | None = parameter(
        None,
        "Whether the outermost folders are sites; by default, if they hold folders of equal names and no images.",
    )

    def load(self, root: Path | None = None) -> Dataset:
        """Decode every image below the folder."""
        found = self.find(root)
        folders = list(self._folders(found))
        names = tuple(sorted({name for folder in folders if not folder.testing for name in class_folders(folder.path)}))
        files: list[Path] = []
        counts: list[tuple[int, int]] = []
        for number, folder in enumerate(folders):
            for name in class_folders(folder.path):
                if name not in names:
                    known = next(other for other in folders if not other.testing)
                    raise FedStrataError(f"The class '{name}' is in '{folder.path}' but not in '{known.path}'.")
                own = images_in(folder.path / name)
                files += own
                counts += [(number, names.index(name))] * len(own)
        return kept(str(self), found, files, partial(self._decoded, found, folders, files, counts, names))

    def find(self, root: Path | None = None) -> Path:
        """Find the folder."""
        expected = (
            "a folder with one sub-folder of images per class, or with such folders in train and test, or per site"
        )
        found = find_own(self.name, self.path, root, expected)
        if not found.is_dir():
            raise FedStrataError(f"'{found}' is no folder; the dataset '{self.name}' needs {expected}.")
        if is_official_layout(found):
            raise FedStrataError(
                f"'{found}' is Tiny ImageNet, whose validation images lie in no folders of classes; "
                f"name it with --data tiny_imagenet --data-root '{found}'."
            )
        return found

    def _decoded(
        self,
        found: Path,
        folders: Sequence[_Folder],
        files: Sequence[Path],
        counts: Sequence[tuple[int, int]],
        names: tuple[str, ...],
    ) -> Dataset:
        inputs = torch.from_numpy(decode_images(files, "RGB", self.size, str(found)))
        whose, labels = np.array(counts, dtype=np.int64).T
        sites = None if folders[0].site is None else np.array([folder.site for folder in folders])[whose]
        testing = np.array([folder.testing for folder in folders])[whose]
        marks = torch.from_numpy(np.ascontiguousarray(labels))
        if testing.any():
            train, test = np.flatnonzero(~testing), np.flatnonzero(testing)
        else:
            train, test = hold_out_for_testing(groups_of(marks, sites), self.test_fraction)
        mean, deviation = channel_statistics(inputs[torch.from_numpy(train)])
        return Dataset(str(self), inputs, marks, train, test, names, sites, mean, deviation, estimated=True)

    def _folders(self, folder: Path) -> Iterator[_Folder]:
        """Find the folders that hold a folder per class: of each part, of each site."""
        for part, testing in _parts(folder):
            if self.sites if self.sites is not None else _has_sites(part):
                for site in class_folders(part):
                    for own, held in _parts(part / site):
                        yield _Folder(own, site, testing or held)
            else:
                yield _Folder(part, None, testing)


def _parts(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Find the folders to train on and to test on: ``train`` and ``test``, or the folder itself."""
    divided = (folder / "train").is_dir()
    yield (folder / "train" if divided else folder), False
    if divided and (folder / "test").is_dir():
        yield folder / "test", True


def _has_sites(folder: Path) -> bool:
    """Tell sites from classes: sites hold folders, some of which have the same names at several, and no images."""
    inner = [folder / name for name in class_folders(folder)]
    if any(path.suffix.lower() in ENDINGS for one in inner for path in one.iterdir()):
        return False
    names = [path.name for one in inner for path in one.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return len(inner) > 1 and len(set(names)) < len(names)


def images_in(folder: Path) -> list[Path]:
    """List the images below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and not path.is_dir())


def class_folders(folder: Path) -> tuple[str, ...]:
    """List the sub-folders, each of which is a class."""
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not names:
        raise FedStrataError(
            f"'{folder}' holds no sub-folders; put the images of each class into a folder with its name."
        )
    return names
