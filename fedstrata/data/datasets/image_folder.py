"""A user's own images, one folder per class, of one site or of several."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
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
from fedstrata.data.parts import Part, part_named
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.spec import parameter

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class _Folder(NamedTuple):
    """A folder with one folder per class: whose, and whether to test on."""

    path: Path
    site: str | None
    testing: bool


class _Parts(NamedTuple):
    """The folders to train and to test on, and the names of those beside them that are not used."""

    train: Path
    test: Path | None = None
    unused: tuple[str, ...] = ()


@datasets.register("image_folder")
@dataclass(frozen=True)
class ImageFolder(DatasetSource):
    """Your own images: a folder per class, inside ``train`` and ``test`` folders or without them; or so for each site.

    With sites, ``hospital/class/image.png`` or ``hospital/train/class/image.png``, the sites are natural clients
    (``natural``). Images become colour images of ``size`` x ``size`` pixels. Classes are numbered in the alphabetical
    order of their folders. Parts may be called as people call them (``Training``, ``TEST``, ``val``); without a part to
    test on, that for validation is it, and without both, a fraction of each class (of each site), evenly spaced, is
    held out.
    """

    path: str | None = parameter(
        None,
        "The folder, absolute or inside the current folder or a data root; by default the data root itself.",
        local=True,
    )
    size: int = parameter(32, "Width and height, in pixels, to which each image is scaled.", low=1)
    test_fraction: float = parameter(
        0.25, "The held-out fraction of each class, where there is no folder to test on.", low=0, below=1
    )
    sites: bool | None = parameter(
        None,
        "Whether the outermost folders are sites; by default, if they hold folders of equal names and no images, and "
        "are not called as parts are, such as Train and Test.",
    )

    def load(self, root: Path | None = None) -> Dataset:
        """Decode every image below the folder."""
        found = self.find(root)
        folders = self._folders(found)
        names = tuple(sorted({name for folder in folders if not folder.testing for name in class_folders(folder.path)}))
        files: list[Path] = []
        counts: list[tuple[int, int]] = []
        for number, folder in enumerate(folders):
            for name in class_folders(folder.path):
                if name not in names:
                    known = next(other for other in folders if not other.testing)
                    raise FedStrataError(f"The class '{name}' is in '{folder.path}' but not in '{known.path}'.")
                own = self._images_of(folder.path / name)
                files += own
                counts += [(number, names.index(name))] * len(own)
        trained = {names[label] for number, label in counts if not folders[number].testing}
        if not trained:
            raise FedStrataError(
                f"There are no images to train on in '{folders[0].path}'; put those of each class into its folder."
            )
        for name in names:
            if name not in trained:
                warnings.warn(
                    f"There are no images of the class '{name}' to train on in '{found}', so that no model can predict "
                    "it; remove its folders if it is no class.",
                    FedStrataWarning,
                    stacklevel=2,
                )
        return kept(str(self), found, files, partial(self._decoded, found, folders, files, counts, names), names)

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

    def _folders(self, found: Path) -> list[_Folder]:
        """Find the folders that hold a folder per class: of each part, of each site."""
        outer = _Parts(found) if self.sites and _are_sites(found) else _parts(found)
        divided = self.sites if self.sites is not None else _has_sites(outer.train)
        told = {found: outer}
        folders = []
        for part, testing in ((outer.train, False), (outer.test, True)):
            if part is None:
                continue
            if not divided:
                folders.append(_Folder(part, None, testing))
                continue
            for site in class_folders(part):
                own = told[part / site] = _parts(part / site)
                folders.append(_Folder(own.train, site, testing))
                if own.test is not None:
                    folders.append(_Folder(own.test, site, True))
        _tell(told)
        return folders

    def _images_of(self, folder: Path) -> list[Path]:
        """List the images of a class; what may be no class is refused, and one of files that nobody here can read."""
        inner = _inner(folder)
        if self.sites is None and inner and not _holds_images(folder):
            raise FedStrataError(
                f"'{folder}' holds folders ({_some(path.name for path in inner)}) and no images, so that it may be a "
                "class or a site; write sites=false if it is a class, whose images lie in folders of their own, or "
                "sites=true if the outermost folders are sites."
            )
        own = images_in(folder)
        others = [] if own else [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
        if others:
            kinds = sorted({path.suffix.lower() or path.name for path in others})
            raise FedStrataError(
                f"The class '{folder.name}' has no images in '{folder}' that can be read, but {len(others)} other "
                f"files ({_some(kinds)}); convert them, for instance to .png, or remove them. Images end in "
                f"{', '.join(ENDINGS)}."
            )
        return own


def _parts(folder: Path) -> _Parts:
    """Find the folders to train on and to test on by their names, or else the folder itself."""
    inner = _inner(folder)
    named: dict[Part | None, list[Path]] = {}
    for path in inner:
        named.setdefault(part_named(path.name), []).append(path)
    if "train" not in named:
        if inner and None not in named:
            raise FedStrataError(
                f"'{folder}' holds {_some(path.name for path in inner)} and no part to train on; call that 'train', or "
                "write sites=true if these are sites."
            )
        return _Parts(folder)
    if set(named) == {None, "train"} and not any(map(_inner, named["train"])):
        return _Parts(folder)  # a class that is called so, beside others
    for part, paths in named.items():
        if part is not None and len(paths) > 1:
            raise FedStrataError(
                f"'{folder}' holds {_some(path.name for path in paths)}, of which each would be the {part} part; put "
                "them into one, or write sites=true if these are sites."
            )
    [train] = named["train"]
    test = next(iter(named.get("test") or named.get("validation") or ()), None)
    return _Parts(train, test, tuple(path.name for path in inner if path not in (train, test)))


def _tell(told: Mapping[Path, _Parts]) -> None:
    """Tell once what is tested on where that is no test part, and which folders are not used."""
    sentences: dict[str, list[Path]] = {}
    for folder, parts in told.items():
        words = []
        if parts.test is not None and part_named(parts.test.name) != "test":
            words.append(f"'{parts.test.name}' is the part to test on")
        if parts.unused:
            words.append(f"{_some(parts.unused)} not used")
        if words:
            sentences.setdefault(", and ".join(words), []).append(folder)
    for sentence, folders in sentences.items():
        warnings.warn(f"Of the parts in {_some(map(str, folders))}, {sentence}.", FedStrataWarning, stacklevel=4)


def _are_sites(folder: Path) -> bool:
    """Tell whether folders are sites also where they are called as parts are: sites hold classes, or parts."""
    inner = [own for one in _inner(folder) for own in _inner(one)]
    return any(part_named(own.name) is not None or _holds_images(own) for own in inner)


def _has_sites(folder: Path) -> bool:
    """Tell sites from classes: sites hold folders, some of which have the same names at several, and no images."""
    inner = [folder / name for name in class_folders(folder)]
    if any(map(_holds_images, inner)):
        return False
    names = [part_named(path.name) or path.name for one in inner for path in _inner(one)]
    return len(inner) > 1 and len(set(names)) < len(names)


def _inner(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _holds_images(folder: Path) -> bool:
    return any(path.suffix.lower() in ENDINGS and not path.is_dir() for path in folder.iterdir())


def _some(names: Iterable[str], shown: int = 5) -> str:
    listed = [f"'{name}'" for name in names]
    return ", ".join(listed[:shown]) + (", ..." if len(listed) > shown else "")


def images_in(folder: Path) -> list[Path]:
    """List the images below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and not path.is_dir())


def class_folders(folder: Path) -> tuple[str, ...]:
    """List the sub-folders, each of which is a class."""
    names = tuple(path.name for path in _inner(folder))
    if not names:
        raise FedStrataError(
            f"'{folder}' holds no sub-folders; put the images of each class into a folder with its name."
        )
    return names
