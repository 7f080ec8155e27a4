"""The published numbers of papers, one line for each cell of a table, as ``published.csv`` has them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedstrata.errors import FedStrataError

PUBLISHED = "published.csv"
_COLUMNS_OF_CSV = ("paper", "part", "row", "column", "mean", "std", "note")


@dataclass(frozen=True)
class Published:
    """A number of a paper, in its unit, with what stands behind ±; the note tells what is known to be wrong with it."""

    mean: float | None
    std: float | None
    note: str = ""


def read_published(path: Path) -> dict[tuple[str, str, str, str], Published]:
    """Read the published numbers, by paper, part, row and column."""
    numbers: dict[tuple[str, str, str, str], Published] = {}
    for where, line in _lines(path):
        key = (line["paper"], line["part"], line["row"], line["column"])
        if key in numbers:
            raise FedStrataError(f"{where} repeats {' / '.join(key)}; a cell has one number.")
        mean, std = (_number(line[name], name, where) for name in ("mean", "std"))
        if std is not None and std < 0:
            raise FedStrataError(f"The std '{line['std']}' in {where} is below 0; write what stands behind the ±.")
        numbers[key] = Published(mean, std, line["note"])
    return numbers


def _lines(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Read the lines of a CSV, each with where it stands; a byte-order mark, as Excel writes it, is passed over."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            head = next(lines, [])
            if tuple(head) != _COLUMNS_OF_CSV:
                raise FedStrataError(
                    f"'{path.name}' does not begin with the columns {','.join(_COLUMNS_OF_CSV)}, but with "
                    f"'{','.join(head)[:100]}'; commas stand between them."
                )
            for values in filter(None, lines):
                where = f"line {lines.line_num} of '{path.name}'"
                if len(values) != len(_COLUMNS_OF_CSV):
                    raise FedStrataError(
                        f"There are {len(values)} values in {where}, not {len(_COLUMNS_OF_CSV)}; {_HOW_TO_WRITE}."
                    )
                line = dict(zip(_COLUMNS_OF_CSV, values, strict=True))
                if _is_number(line["note"]):
                    raise FedStrataError(
                        f"The note '{line['note']}' in {where} is a number, and so none; {_HOW_TO_WRITE}."
                    )
                yield where, line
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedStrataError(f"'{path}' cannot be read as a CSV in UTF-8: {error}.") from None


_HOW_TO_WRITE = "numbers have a decimal point, as in 95.0, and a text with a comma stands in double quotes"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str, name: str, where: str) -> float | None:
    if not text:
        return None
    if not _is_number(text) or not math.isfinite(float(text)):
        raise FedStrataError(f"The {name} '{text}' in {where} is no number; leave it empty where none is given.")
    return float(text)
