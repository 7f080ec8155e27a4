"""What is kept of the runs of a recipe: a CSV with one line for each cell and seed, from which nothing is run again."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.errors import FedStrataError
from fedstrata.papers.cells import Cell, changes_in_words

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
    seconds: float | None
    bytes: int
    commit: str
    command: str
    device: str
    software: str = ""
    flops: float | None = None
    changes: str = ""
    """Which settings are not the paper's, as ``rounds=30; precision=bf16``; nothing where all are."""

    @property
    def what(self) -> tuple[str, str, str]:
        """What was measured of which run; two cells that ask for the same need one run."""
        return self.settings, self.number, self.at

    def of(self, cell: Cell) -> Kept:
        """The same number as that of another cell that asks for it."""
        return dataclasses.replace(
            self,
            paper=cell.recipe.paper,
            part=cell.recipe.part,
            row=cell.row,
            column=cell.column,
            changes=changes_in_words(cell),
        )


def asked(cell: Cell) -> tuple[str, str, str]:
    """What a cell asks for, as :attr:`Kept.what` has it."""
    return cell.settings, f"{cell.recipe.number} ({cell.recipe.unit})", cell.recipe.at


_FIELDS = {field.name: field for field in dataclasses.fields(Kept)}
_KINDS: Mapping[str, type[int] | type[float]] = {
    "seed": int, "rounds": int, "bytes": int, "value": float, "seconds": float, "flops": float,
}  # fmt: skip
_MAY_BE_UNKNOWN = ("seconds", "flops")
_DIGITS = 8


def read_results(paths: Iterable[Path]) -> list[Kept]:
    """Read what was kept in some files, in the ``results.csv`` of folders, or in those of the folders inside of one."""
    return [one for path in paths for file in _files(path) for one in _read(file)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [path / RESULTS] if (path / RESULTS).exists() else sorted(path.glob(f"*/{RESULTS}"))
    if not found:
        raise FedStrataError(f"There is no '{RESULTS}' in '{path}', nor in a folder in it.")
    return found


def _read(path: Path) -> list[Kept]:
    required = [name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file)
            named = lines.fieldnames or ()
            if set(required) - set(named) or set(named) - set(_FIELDS):
                raise FedStrataError(f"'{path}' holds no results of papers: its columns are not {', '.join(_FIELDS)}.")
            return [Kept(**{name: _value(name, line[name]) for name in named}) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise FedStrataError(f"'{path}' cannot be read: {error}.") from None
    except (ValueError, TypeError) as error:
        raise FedStrataError(f"'{path}' is damaged: {error}.") from None


def _value(name: str, text: str) -> Any:
    if not text and name in _MAY_BE_UNKNOWN:
        return None
    return _KINDS.get(name, str)(text)


def write_results(path: Path, kept: Sequence[Kept]) -> None:
    """Write what is kept, one line for each cell and seed, always in the same order and digits: so it diffs well."""
    order = sorted(kept, key=lambda one: (one.paper, one.part, one.row, one.column, one.number, one.at, one.changes,
                                          one.seed, one.settings))  # fmt: skip
    lines = [{name: _written(value) for name, value in dataclasses.asdict(one).items()} for one in order]
    write_csv(path, list(_FIELDS), lines)


def _written(value: Any) -> Any:
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else "" if value is None else value


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.make_folder(path.parent)
    files.write_atomically(path, text.getvalue())


def merged(before: Iterable[Kept], new: Iterable[Kept]) -> list[Kept]:
    """Put results together: a cell with the same seed and settings counts once, as it is now."""
    kept = {(one.paper, one.part, one.row, one.column, one.seed, *one.what): one for one in (*before, *new)}
    return list(kept.values())
