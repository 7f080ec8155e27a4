"""A user's own tables: one with a column for the site, or one file per site."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, datasets, find_own, is_path
from fedstrata.data.tables import Table, from_table
from fedstrata.spec import parameter


@datasets.register("table")
@dataclass(frozen=True)
class TableFiles(DatasetSource):
    """Your own table: a CSV or Parquet file, with a column for the site or without, or a folder of one file per site.

    Files of a folder that are all called as parts, such as train.csv and test.csv, are these parts and no sites. Texts,
    truth values and categories become zeros and ones, missing numbers the median of the training rows. Sites whose
    tables do not lie on one machine agree on an ``encoding``: the file that ``dataset.table.write`` makes in Python.
    """

    path: str | None = parameter(
        None,
        "The file or folder, absolute or inside the current folder or a data root; by default the data root.",
        local=True,
    )
    label: str | int | None = parameter(
        None, "The column with the class; by default the one that is called label, labels or target."
    )
    site: str | int | None = parameter(
        None, "The column with the owner of each row, who is then a client; by default each file is one, if several."
    )
    test: str | int | None = parameter(
        None,
        "Another file, or a column that is true for the rows to test on; by default some are held out.",
        local=True,
    )
    test_fraction: float = parameter(
        0.25,
        "The held-out fraction of each class of each site, where nothing else says what to test on.",
        low=0,
        below=1,
    )
    features: str | int | None = parameter(None, "The columns to learn from, joined by '+'; by default all others.")
    drop: str | int | None = parameter(None, "Columns not to learn from, joined by '+', such as a patient's number.")
    encoding: str | None = parameter(
        None, "The file that says how columns become inputs; by default the data does.", local=True
    )

    def local_values(self) -> dict[str, Any]:
        """Tell what names a place on a machine: a path, or another file elsewhere than beside the table."""
        return {name: value for name, value in super().local_values().items() if name == "path" or is_path(str(value))}

    def find(self, root: Path | None = None) -> Path:
        """Find the file or the folder."""
        expected = "a CSV or Parquet file with a line of column names, or a folder with one such file per site"
        return find_own(self.name, self.path, root, expected)

    def load(self, root: Path | None = None) -> Dataset:
        """Read the file, or all tables of the folder."""
        return self._load(root, None)

    def load_as(self, encoding: Table, root: Path | None = None) -> Dataset:
        """Read them with an encoding that is known already, such as that of a model."""
        return self._load(root, encoding)

    def _load(self, root: Path | None, known: Table | None) -> Dataset:
        found = self.find(root)
        test: str | Path | None = None if self.test is None else str(self.test)
        beside = None if test is None else _beside(str(test), found, root)
        encoding = None if self.encoding is None else _beside(self.encoding, found, root) or Path(self.encoding)
        return from_table(
            found,
            label=None if self.label is None else str(self.label),
            site=None if self.site is None else str(self.site),
            test=beside or test,
            test_fraction=self.test_fraction,
            features=None if self.features is None else str(self.features).split("+"),
            drop=() if self.drop is None else str(self.drop).split("+"),
            encoding=known or encoding,
            name=str(self),
        )


def _beside(path: str, table: Path, root: Path | None) -> Path | None:
    """Look for another file: beside the table, in the data root, in the current folder."""
    places = [table.parent / path, *([] if root is None else [root / path]), Path(path).expanduser()]
    return next((place for place in places if place.exists()), None)
