"""A user's own images, one folder per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedstrata.data.channels import channel_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, data_roots, datasets, not_found, pooled
from fedstrata.data.formats.images import decode_images
from fedstrata.data.formats.samples import Samples
from fedstrata.data.held_out import hold_out_for_testing
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@datasets.register("image_folder")
@dataclass(frozen=True)
class ImageFolder(DatasetSource):
    """Your own images: one folder per class, inside ``train`` and ``test`` folders or without them.

    Images become colour images of ``size`` x ``size`` pixels. Classes are numbered in the alphabetical order of their
    folders. Without a ``test`` folder, a fraction of each class, evenly spaced, is held out.
    """

    path: str | None = parameter(
        None, "The folder, absolute or inside the current folder or a data root; by default the data root itself."
    )
    size: int = parameter(32, "Width and height, in pixels, to which each image is scaled.", low=1)
    test_fraction: float = parameter(
        0.25, "The held-out fraction of each class, where there is no test folder.", low=0, below=1
    )

    def load(self, root: Path | None = None) -> Dataset:
        """Decode every image below the folder."""
        folder = self._find(root)
        train_folder = folder / "train" if (folder / "train").is_dir() else folder
        names = class_folders(train_folder)
        train = self._read(train_folder, names)
        if train_folder != folder and (folder / "test").is_dir():
            unknown = sorted(set(class_folders(folder / "test")) - set(names))
            if unknown:
                raise FedStrataError(f"The class '{unknown[0]}' is in '{folder / 'test'}' but not in '{train_folder}'.")
            return pooled(str(self), train, self._read(folder / "test", names), names)
        first, last = hold_out_for_testing(train.labels, self.test_fraction)
        inputs = torch.from_numpy(train.inputs)
        mean, deviation = channel_statistics(inputs[torch.from_numpy(first)])
        labels = torch.from_numpy(train.labels)
        return Dataset(str(self), inputs, labels, first, last, names, None, mean, deviation, estimated=True)

    def _find(self, root: Path | None) -> Path:
        if self.path is None and root is None:
            raise FedStrataError(
                "The dataset 'image_folder' needs a folder; write image_folder(path=...) or give a data root."
            )
        if self.path is None:
            places = data_roots(root)[:1]
        else:
            places = [Path(self.path).expanduser(), *(folder / self.path for folder in data_roots(root))]
        found = next((place for place in dict.fromkeys(places) if place.is_dir()), None)
        if found is None:
            raise not_found(
                self.name,
                places,
                "a folder with one sub-folder of images per class, or with such folders in train and test",
            )
        return found

    def _read(self, folder: Path, names: tuple[str, ...]) -> Samples:
        files = [
            sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in ENDINGS) for name in names
        ]
        labels = np.repeat(np.arange(len(names)), [len(part) for part in files])
        return Samples(decode_images([path for part in files for path in part], "RGB", self.size, str(folder)), labels)


def class_folders(folder: Path) -> tuple[str, ...]:
    """List the sub-folders, each of which is a class."""
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not names:
        raise FedStrataError(
            f"'{folder}' holds no sub-folders; put the images of each class into a folder with its name."
        )
    return names
