"""What is kept of the runs of a recipe: a CSV with one line for each cell and seed, from which nothing is run again."""

from __future__ import annotations

import csv
import dataclasses
import io
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.errors import FedStrataError
from fedstrata.papers.cells import Cell

RESULTS = "results.csv"


@dataclass(frozen=True)
class Kept:
    """The number of one cell with one seed, in the paper's unit, and all one must know to get it again."""

    paper: str
    part: str
    row: str
    column: str
    seed: int
    value: float
    number: str
    at: str
    settings: str
    rounds: int
    seconds: float
    bytes: int
    commit: str
    command: str
    device: str

    @property
    def what(self) -> tuple[str, str, str]:
        """What was measured of which run; two cells that ask for the same need one run."""
        return self.settings, self.number, self.at

    def of(self, cell: Cell) -> Kept:
        """The same number as that of another cell that asks for it."""
        return dataclasses.replace(
            self, paper=cell.recipe.paper, part=cell.recipe.part, row=cell.row, column=cell.column
        )


def asked(cell: Cell) -> tuple[str, str, str]:
    """What a cell asks for, as :attr:`Kept.what` has it."""
    return cell.settings, f"{cell.recipe.number} ({cell.recipe.unit})", cell.recipe.at


def read_results(paths: Iterable[Path]) -> list[Kept]:
    """Read what was kept in some files, or in the ``results.csv`` of folders."""
    return [one for path in paths for one in _read(path / RESULTS if path.is_dir() else path)]


def _read(path: Path) -> list[Kept]:
    hints = get_type_hints(Kept)
    names = [field.name for field in dataclasses.fields(Kept)]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file)
            if lines.fieldnames != names:
                raise FedStrataError(f"'{path}' holds no results of papers: its columns are not {', '.join(names)}.")
            return [Kept(**{name: hints[name](line[name]) for name in names}) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise FedStrataError(f"'{path}' cannot be read: {error}.") from None
    except (ValueError, TypeError) as error:
        raise FedStrataError(f"'{path}' is damaged: {error}.") from None


def write_results(path: Path, kept: Sequence[Kept]) -> None:
    """Write what is kept, one line for each cell and seed, in the order of the tables, so that it diffs well."""
    write_csv(path, [field.name for field in dataclasses.fields(Kept)], map(dataclasses.asdict, kept))


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.make_folder(path.parent)
    files.write_atomically(path, text.getvalue())


@cache
def commit() -> str:
    """Name the program: the commit of the checkout that it runs from, marked where files differ, or its version."""
    place = Path(__file__).parents[2]
    if not (place / ".git").exists():
        return __version__
    try:
        told = [
            subprocess.run(["git", *words], cwd=place, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "fedstrata"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return told[0] + ("+changed" if told[1] else "")


def merged(before: Iterable[Kept], new: Iterable[Kept]) -> list[Kept]:
    """Put results together: a cell with the same seed and settings counts once, as it is now."""
    kept = {(one.paper, one.part, one.row, one.column, one.seed, *one.what): one for one in (*before, *new)}
    return list(kept.values())
