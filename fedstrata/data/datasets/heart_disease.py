"""UCI Heart Disease: the patients of four hospitals (Janosi, Steinbrunn, Pfisterer, Detrano, 1988)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedstrata.data.channels import channel_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets, not_found, search_places
from fedstrata.data.formats.samples import damaged
from fedstrata.data.held_out import hold_out_for_testing
from fedstrata.spec import parameter

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FEATURES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
# Mostly missing outside Cleveland: slope, ca and thal, between the features and the diagnosis.
_DROPPED = 3
_COLUMNS = len(FEATURES) + _DROPPED + 1
_SEED = 42  # of PLayer-FL's code, which divides by scikit-learn's train_test_split


@datasets.register("heart_disease")
@dataclass(frozen=True)
class HeartDisease(DatasetSource):
    """UCI Heart Disease: 740 patients of four hospitals, 10 features; the hospitals are natural clients (``natural``).

    As in FLamby (du Terrail et al., NeurIPS 2022), the columns slope, ca and thal are left out, then the patients
    with gaps: 303, 261, 46 and 130 remain. Features are standardised with the mean and deviation of all training
    patients. There is no official test set: a part of each diagnosis of each hospital, evenly spaced, is held out. With
    ``split=player-fl`` they are drawn at each hospital once and for all, whatever their diagnosis, as in PLayer-FL's
    released code (gaiters-aerials/player_fl, ``_split_data``); with ``test_fraction=0.2``, as there, they are the same.
    """

    classes: int = parameter(5, "5: the severity 0 to 4; 2: disease or none.", choices=(2, 5))
    test_fraction: float = parameter(0.25, "The part of the patients that is held out.", above=0, below=1)
    split: str = parameter(
        "even",
        "Who is held out: the same part of each diagnosis, or drawn as by PLayer-FL's code, which takes a fifth.",
        choices=("even", "player-fl"),
    )

    def find(self, root: Path | None = None) -> list[Path]:
        """Find the file of each hospital."""
        places = search_places(self.name, root)
        names = [f"processed.{hospital}.data" for hospital in HOSPITALS]
        found = next((place for place in places if all((place / name).is_file() for name in names)), None)
        if found is None:
            raise not_found(self.name, places, f"{', '.join(names)}, as in the archive of the UCI repository")
        return [found / name for name in names]

    def load(self, root: Path | None = None) -> Dataset:
        """Read the four ``processed.*.data`` files."""
        tables = [read_hospital(path) for path in self.find(root)]
        sites = np.repeat(np.array(HOSPITALS), [len(table) for table in tables])
        table = np.concatenate(tables)
        severity = table[:, -1].astype(np.int64)
        numbers = np.repeat(np.arange(len(tables)), [len(part) for part in tables])
        train, test = self._held_out(numbers, severity)
        features = torch.from_numpy(table[:, :-1])
        mean, deviation = (
            torch.tensor(values, dtype=torch.float64)
            for values in channel_statistics(features[torch.from_numpy(train)])
        )
        inputs = ((features - mean) / deviation).float()
        labels = torch.from_numpy(severity if self.classes == 5 else (severity > 0).astype(np.int64))
        names = ("none", "1", "2", "3", "4") if self.classes == 5 else ("none", "disease")
        return Dataset(str(self), inputs, labels, train, test, names, sites)

    def _held_out(self, hospitals: np.ndarray, severity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Divide the patients into training and test positions."""
        if self.split == "even":
            return hold_out_for_testing(hospitals * 5 + severity, self.test_fraction)
        held = np.zeros(len(hospitals), dtype=bool)
        for own in (np.flatnonzero(hospitals == number) for number in range(len(HOSPITALS))):
            count = min(len(own) - 1, math.ceil(self.test_fraction * len(own)))
            held[own[np.random.RandomState(_SEED).permutation(len(own))[:count]]] = True
        return np.flatnonzero(~held), np.flatnonzero(held)


def read_hospital(path: Path) -> np.ndarray:
    """Read one hospital's file: the kept features and the diagnosis of the patients without gaps."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split(), start=1):
        cells = line.split(",")
        if len(cells) != _COLUMNS:
            raise damaged(path, f"line {number} has {len(cells)} values instead of {_COLUMNS}")
        kept = [*cells[: len(FEATURES)], cells[-1]]
        if "?" not in kept:
            try:
                rows.append([float(cell) for cell in kept])
            except ValueError:
                raise damaged(path, f"line {number} holds something else than numbers") from None
            if not all(map(math.isfinite, rows[-1])):
                raise damaged(path, f"line {number} holds a number that is not finite; a gap is written '?'")
            if not rows[-1][-1].is_integer():
                raise damaged(path, f"the diagnosis of line {number} is {cells[-1]}, and no whole number")
    if not rows:
        raise damaged(path, "it holds no patient without gaps")
    return np.array(rows, dtype=np.float64)
