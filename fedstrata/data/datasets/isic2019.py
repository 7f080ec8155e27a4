"""ISIC 2019: photographs of skin lesions from six centres, divided as FLamby does.

The photographs are those of HAM10000 (Tschandl et al., 2018), MSK (Codella et al., 2018) and BCN20000 (Combalia et al.,
2019); the division is that of "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic
Healthcare Settings" (du Terrail et al., NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from fedstrata.data.channels import channel_statistics
from fedstrata.data.columns import read_column, read_numbers, read_table, read_texts
from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets, not_found, search_places
from fedstrata.data.decoded import kept
from fedstrata.data.formats.images import decode_images
from fedstrata.data.formats.samples import damaged
from fedstrata.data.held_out import groups_of, hold_out_for_testing
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

DIAGNOSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
FOUR = ("BCC", "BKL", "MEL", "NV")
CENTRES = ("BCN", "HAM_rosendahl", "HAM_vidir_modern", "HAM_vidir_molemax", "HAM_vienna_dias", "MSK4")
TRUTH = "ISIC_2019_Training_GroundTruth.csv"
METADATA = "ISIC_2019_Training_Metadata.csv"
CENTRE_METADATA = "ISIC_2019_Training_Metadata_FL.csv"
HAM_METADATA = ("HAM10000_metadata", "HAM10000_metadata.csv")
PREPARED = "ISIC_2019_Training_Input_preprocessed"
FOLDERS = (PREPARED, "ISIC_2019_Training_Input")
_NORM = 6


class Photograph(NamedTuple):
    """An image's name, its diagnosis and its centre."""

    image: str
    diagnosis: str
    centre: str


@datasets.register("isic2019")
@dataclass(frozen=True)
class Isic2019(DatasetSource):
    """ISIC 2019: 23,247 photographs of skin lesions in 8 classes; the six centres are natural clients (``natural``).

    As in FLamby, the centre is told by the number of the lesion (BCN, HAM, MSK4) and, for HAM10000, by the source in
    its own metadata; photographs without a lesion's number are left out. Each is scaled so that its shorter side has
    ``shorter`` pixels, its colours are corrected by the shades of grey (Finlayson and Trezzi, 2004, norm 6), and the
    middle ``size`` x ``size`` pixels are kept. Where FLamby's preprocessed images are there, these are cut only.
    PLayer-FL takes four diagnoses, four centres and at most 5,000 photographs of each: ``isic2019(classes=4,
    centres=4, most=5000)``. There is no official test set: a fifth of each diagnosis of each centre, evenly spaced, is
    held out; as in both papers, several photographs of one lesion may be on both sides.
    """

    classes: int = parameter(8, "8: all diagnoses; 4: BCC, BKL, MEL and NV.", choices=(4, 8))
    centres: int = parameter(
        6, "How many centres: the first of BCN, three of HAM10000 by name, Vienna's slides, MSK4.", low=1, high=6
    )
    most: int | None = parameter(
        None, "Photographs per centre at most, evenly spaced in the order of the metadata; by default all.", low=1
    )
    size: int = parameter(200, "Width and height, in pixels, of the middle that is kept.", low=1)
    shorter: int = parameter(224, "Pixels of the shorter side before that.", low=1)
    test_fraction: float = parameter(0.2, "The held-out fraction of each diagnosis of each centre.", low=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > self.shorter:
            raise FedStrataError(
                f"{self.size} pixels cannot be cut out of images whose shorter side has {self.shorter}; "
                f"use size={self.shorter} or less, or a larger 'shorter'."
            )

    def load(self, root: Path | None = None) -> Dataset:
        """Read the ground truth, who took which photograph, and the photographs."""
        place = self.find(root)
        centres, tables = read_centres(place)
        chosen = self._chosen(read_diagnoses(place / TRUTH), centres)
        folder = next((place / name for name in FOLDERS if (place / name / f"{chosen[0].image}.jpg").is_file()), None)
        if folder is None:
            raise FedStrataError(
                f"The photograph '{chosen[0].image}.jpg' is in none of the folders {', '.join(FOLDERS[:2])} of "
                f"'{place}'; unpack ISIC_2019_Training_Input.zip there."
            )
        files = [folder / f"{photograph.image}.jpg" for photograph in chosen]
        sources = [place / TRUTH, *tables, *files]
        return kept(str(self), place, sources, partial(self._decoded, folder, files, chosen))

    def find(self, root: Path | None = None) -> Path:
        """Find the folder with the ground truth, and see that the metadata and the folder of photographs are there."""
        places = search_places(self.name, root)
        place = next((place for place in places if (place / TRUTH).is_file()), None)
        if place is None:
            raise not_found(
                self.name,
                places,
                f"{TRUTH}, {METADATA} and the folder {FOLDERS[1]} of the ISIC challenge 2019, and {HAM_METADATA[0]} of "
                f"HAM10000 (or FLamby's {CENTRE_METADATA})",
            )
        find_metadata(place)
        if not any((place / name).is_dir() for name in FOLDERS):
            raise FedStrataError(
                f"There is none of the folders {', '.join(FOLDERS)} in '{place}'; unpack ISIC_2019_Training_Input.zip "
                "there."
            )
        return place

    def _chosen(self, diagnoses: dict[str, str], centres: dict[str, str]) -> list[Photograph]:
        """Choose photographs, centre after centre."""
        names = FOUR if self.classes == 4 else DIAGNOSES
        chosen: list[Photograph] = []
        for centre in CENTRES[: self.centres]:
            own = [
                Photograph(image, diagnoses[image], centre)
                for image, other in centres.items()
                if other == centre and diagnoses.get(image) in names
            ]
            if self.most is not None and len(own) > self.most:
                spaced = (np.arange(self.most) + 0.5) * len(own) / self.most
                own = [own[place] for place in spaced.astype(np.int64).tolist()]
            chosen += own
        if not chosen:
            raise FedStrataError(
                f"None of the photographs has one of the diagnoses {', '.join(names)}; fetch them again."
            )
        return chosen

    def _decoded(self, folder: Path, files: Sequence[Path], chosen: Sequence[Photograph]) -> Dataset:
        names = FOUR if self.classes == 4 else DIAGNOSES
        prepare = partial(prepared, shorter=self.shorter, size=self.size, correct=folder.name != PREPARED)
        inputs = torch.from_numpy(decode_images(files, "RGB", None, str(folder), prepare=prepare))
        labels = torch.tensor([names.index(photograph.diagnosis) for photograph in chosen], dtype=torch.int64)
        sites = np.array([photograph.centre for photograph in chosen])
        train, test = hold_out_for_testing(groups_of(labels, sites), self.test_fraction)
        mean, deviation = channel_statistics(inputs[torch.from_numpy(train)])
        return Dataset(str(self), inputs, labels, train, test, names, sites, mean, deviation, estimated=True)


def read_diagnoses(path: Path) -> dict[str, str]:
    """Read the diagnosis of each image: the column with a one; those that nobody knows (UNK) are left out."""
    table = _columns(path, ("image", *DIAGNOSES))
    ones = np.stack([read_numbers(table, name, f"'{path}'").values for name in DIAGNOSES], axis=1) == 1
    if (ones.sum(axis=1) > 1).any():
        raise damaged(path, f"row {int((ones.sum(axis=1) > 1).argmax())} has several diagnoses")
    images = _names(path, table, "image")
    known = np.flatnonzero(ones.any(axis=1))
    return {images[row]: DIAGNOSES[ones[row].argmax()] for row in known.tolist()}


def find_metadata(place: Path) -> list[Path]:
    """Find the files that tell the centres: FLamby's, or the challenge's and HAM10000's."""
    told, path = place / CENTRE_METADATA, place / METADATA
    if told.is_file():
        return [told]
    sources = next((place / name for name in HAM_METADATA if (place / name).is_file()), None)
    if not path.is_file() or sources is None:
        missing = METADATA if sources is not None else HAM_METADATA[0]
        raise FedStrataError(
            f"'{place / missing}' is missing, without which the centres of the photographs are not known; put it "
            f"there, or FLamby's {CENTRE_METADATA}."
        )
    return [path, sources]


def read_centres(place: Path) -> tuple[dict[str, str], list[Path]]:
    """Tell the centre of each image, in the order of the metadata, and the files that this was read from."""
    path, *others = files = find_metadata(place)
    if not others:
        table = _columns(path, ("image", "dataset"))
        pairs = zip(_names(path, table, "image"), read_texts(table, "dataset").values, strict=True)
        return {image: _centre(str(source).removesuffix("nan"), path) for image, source in pairs}, files
    [sources] = others
    ham = _columns(sources, ("image_id", "dataset"))
    source_of = dict(zip(_names(sources, ham, "image_id"), _names(sources, ham, "dataset"), strict=True))
    table = _columns(path, ("image", "lesion_id"))
    lesions = () if read_column(table, "lesion_id", f"'{path}'") is None else read_texts(table, "lesion_id").values
    centres = {}
    for image, lesion in zip(_names(path, table, "image"), lesions, strict=False):
        if lesion is not None:
            start = str(lesion)[:4]
            centres[image] = _centre(f"HAM_{source_of.get(image, '')}" if start == "HAM_" else start, path)
    return centres, files


def prepared(image: Image.Image, shorter: int, size: int, correct: bool) -> Image.Image:
    """Scale an image by its shorter side, correct its colours and cut the middle out."""
    if min(image.size) != shorter:
        ratio = shorter / min(image.size)
        width, height = (max(shorter, int(side * ratio)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if correct:
        image = Image.fromarray(shades_of_grey(np.asarray(image)))
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def shades_of_grey(pixels: np.ndarray) -> np.ndarray:
    """Divide each channel by its share of the light: its norm e_c = (mean p^6)^(1/6), scaled so that grey stays grey.

    With the unit vector e of these norms, a channel is multiplied by 1 / (sqrt(3) e_c). What gets brighter than white
    is white; in FLamby's code it begins again at black.
    """
    values = pixels.astype(np.float64)
    light = (values**_NORM).mean(axis=(0, 1)) ** (1 / _NORM)
    light = np.where(light > 0, light, 1.0)
    factors = np.linalg.norm(light) / (np.sqrt(3) * light)
    corrected: np.ndarray = np.clip(values * factors, 0, 255).astype(np.uint8)
    return corrected


def _centre(name: str, path: Path) -> str:
    name = name.rstrip("_")
    if name not in CENTRES:
        raise damaged(path, f"'{name}' is none of the centres {', '.join(CENTRES)}")
    return name


def _columns(path: Path, names: Sequence[str]) -> pa.Table:
    table = read_table(path, f"'{path}'")
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise damaged(path, f"it has no column '{missing[0]}'")
    return table.select(list(names))


def _names(path: Path, table: pa.Table, column: str) -> list[str]:
    """Read a column of names, none of which leads elsewhere."""
    names = read_texts(table, column).values.tolist()
    for row, name in enumerate(names):
        if not isinstance(name, str) or Path(name).name != name:
            raise damaged(path, f"row {row} of its column '{column}' is no plain name")
    return [str(name) for name in names]
