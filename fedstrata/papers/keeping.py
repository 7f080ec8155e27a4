"""What is kept of the runs of a recipe, so that nothing is run again: three files, in which everything stands once.

``results.csv`` has a line for each row, column and seed, with the name of the run, and a column for each number that a
table or a figure has of it, headed like ``table1: global.accuracy (percent), best``, or for those of each client, with
blanks between them. ``runs.csv`` has a line for each run: the hash of its settings, and what it cost. ``commands.json``
tells which command made runs, at which commit, on which device and with which software. A run has a name of its own,
because the same settings may be run again at another commit: the numbers of either keep saying where they are from.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.errors import FedStrataError
from fedstrata.papers.cells import Cell, changes_in_words

RESULTS = "results.csv"
RUNS = "runs.csv"
COMMANDS = "commands.json"


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
    clients: tuple[float, ...] = ()
    """The number of each client, where its part is computed of these; then ``value`` is their mean."""

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
    recipe = cell.recipe
    return cell.settings, recipe.number + (_OF_CLIENTS if recipe.over_clients else f" ({recipe.unit})"), recipe.at


def mean_of(clients: Sequence[float]) -> float:
    """The mean of the clients that have a number.

    >>> mean_of((0.5, math.nan, 1.0))
    0.75
    """
    known = [value for value in clients if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


_OF_CLIENTS = " of each client"
"""With what the name of a number ends that every client has."""
_OF_A_RESULT = ("paper", "row", "column", "seed", "changes")
_HEAD = re.compile(r"(?P<part>[^:]+): (?P<number>.+), (?P<at>\w+)")
_OF_A_RUN = ("settings", "rounds", "seconds", "bytes", "flops")
_OF_A_COMMAND = ("commit", "device", "software", "command")
_RUN = "run"
"""The column that names a run, in the lines of results and of runs."""
_MADE_BY = "made_by"
"""The column of runs that names an entry of the commands."""
_TOGETHER = f"{RESULTS}, {RUNS} and {COMMANDS} belong together, so copy all three from one folder"
_KINDS: Mapping[str, type[int] | type[float]] = {
    "seed": int, "rounds": int, "bytes": int, "seconds": float, "flops": float,
}  # fmt: skip
_MAY_BE_UNKNOWN = ("seconds", "flops")
_DIGITS, _DIGITS_OF_CLIENTS = 8, 5


def read_results(paths: Iterable[Path]) -> list[Kept]:
    """Read what was kept in some files, in the ``results.csv`` of folders, or in those of the folders inside of one.

    Beside each lie the files that tell of its runs.
    """
    return [one for path in paths for file in _files(path) for one in _read(file)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [path / RESULTS] if (path / RESULTS).exists() else sorted(path.glob(f"*/{RESULTS}"))
    if not found:
        raise FedStrataError(f"There is no '{RESULTS}' in '{path}', nor in a folder in it.")
    return found


def _read(path: Path) -> list[Kept]:
    lines = _lines(path, (*_OF_A_RESULT, _RUN), "results of papers", numbers=True)
    runs = _read_runs(path)
    _refuse_unknown({line[_RUN] for line in lines}, "run", runs, path.with_name(RUNS), path)
    return [
        Kept(**_values(path, line, _OF_A_RESULT), **_numbers(path, line[name], **head), **head, **runs[line[_RUN]])
        for line in lines
        for name, head in _heads(line).items()
        if line[name]
    ]


def _numbers(path: Path, text: str, number: str, **head: str) -> dict[str, Any]:
    """Read a number, or those of all clients."""
    try:
        if not number.endswith(_OF_CLIENTS):
            return {"value": float(text)}
        clients = tuple(map(float, text.split()))
    except ValueError as error:
        raise FedStrataError(f"'{path}' is damaged: {error}.") from None
    return {"value": mean_of(clients), "clients": clients}


def _heads(columns: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the heads of columns of numbers tell, among all columns.

    >>> _heads(["run", "my-table: f1 (percent), best"])
    {'my-table: f1 (percent), best': {'part': 'my-table', 'number': 'f1 (percent)', 'at': 'best'}}
    """
    return {name: found.groupdict() for name in columns if (found := _HEAD.fullmatch(name))}


def _read_runs(results: Path) -> dict[str, dict[str, Any]]:
    """Read what is known of the runs behind some results, by the names of these runs."""
    path = _beside(results, RUNS)
    lines = _lines(path, (_RUN, *_OF_A_RUN, _MADE_BY), "runs of papers")
    commands = _read_commands(_beside(results, COMMANDS))
    _refuse_unknown({line[_MADE_BY] for line in lines}, "command", commands, path.with_name(COMMANDS), path)
    return {line[_RUN]: {**_values(path, line, _OF_A_RUN), **commands[line[_MADE_BY]]} for line in lines}


def _read_commands(path: Path) -> dict[str, dict[str, str]]:
    commands = files.from_json(files.read_bytes(path), path)
    for name, told in commands.items():
        if not _is_command(told):
            raise FedStrataError(f"'{path}' is damaged: '{name}' does not tell {', '.join(_OF_A_COMMAND)}.")
    return commands


def _is_command(told: object) -> bool:
    return (
        isinstance(told, dict)
        and set(told) == set(_OF_A_COMMAND)
        and all(isinstance(value, str) for value in told.values())
    )


def _beside(results: Path, name: str) -> Path:
    path = results.with_name(name)
    if not path.exists():
        raise FedStrataError(f"There is no '{path}', without which '{results}' tells of no run: {_TOGETHER}.")
    return path


def _refuse_unknown(named: set[str], kind: str, known: Collection[str], there: Path, path: Path) -> None:
    """Refuse a file that names what the one beside it does not hold: the two are not from one folder."""
    unknown = sorted(named.difference(known))
    if unknown:
        more = f" and {len(unknown) - 1} more that" if len(unknown) > 1 else ", which"
        raise FedStrataError(f"'{there}' does not hold the {kind} '{unknown[0]}'{more} '{path}' names: {_TOGETHER}.")


def _lines(path: Path, columns: Sequence[str], what: str, numbers: bool = False) -> list[dict[str, str]]:
    """Read the lines of a CSV that has exactly these columns, and perhaps those of ``numbers``."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file)
            heads = list(lines.fieldnames or ())
            if set(heads).difference(_heads(heads) if numbers else ()) != set(columns):
                further = ", and those of numbers" if numbers else ""
                raise FedStrataError(f"'{path}' holds no {what}: its columns are not {', '.join(columns)}{further}.")
            found = list(lines)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedStrataError(f"'{path}' cannot be read: {error}.") from None
    for number, line in enumerate(found, start=2):
        if None in line or None in line.values():
            raise FedStrataError(f"'{path}' is damaged: line {number} does not have {len(heads)} values.")
    return found


def _values(path: Path, line: Mapping[str, str], names: Iterable[str]) -> dict[str, Any]:
    try:
        return {name: _value(name, line[name]) for name in names}
    except ValueError as error:
        raise FedStrataError(f"'{path}' is damaged: {error}.") from None


def _value(name: str, text: str) -> Any:
    if not text and name in _MAY_BE_UNKNOWN:
        return None
    return _KINDS.get(name, str)(text)


def write_results(path: Path, kept: Sequence[Kept]) -> None:
    """Write what is kept, always in the same order and digits, so that it diffs well; the runs go beside it.

    Of the commands that have read numbers off one run, the first is kept: it is the one that made it. The results are
    written last, so that at any moment there is a run for each.
    """
    first: dict[str, Kept] = {}
    lines: defaultdict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for one in kept:
        first.setdefault(_run_name(one), one)
    for one in sorted(kept, key=lambda one: (one.paper, one.row, one.column, one.changes, one.seed, _run_name(one))):
        line = {**_written(one, _OF_A_RESULT), _RUN: _run_name(one)}
        numbers = " ".join(f"{number:.{_DIGITS_OF_CLIENTS}g}" for number in one.clients) or _text(one.value)
        lines[tuple(line.values())] |= {**line, _head(one): numbers}
    runs = {line[_RUN]: first[line[_RUN]] for line in lines.values()}
    commands = {_command_name(one): _written(one, _OF_A_COMMAND) for one in runs.values()}
    files.make_folder(path.parent)
    files.write_atomically(path.with_name(COMMANDS), files.to_json(commands))
    write_csv(
        path.with_name(RUNS),
        (_RUN, *_OF_A_RUN, _MADE_BY),
        ({_RUN: name, **_written(one, _OF_A_RUN), _MADE_BY: _command_name(one)} for name, one in runs.items()),
    )
    write_csv(path, (*_OF_A_RESULT, _RUN, *sorted(set(map(_head, kept)))), lines.values())


def _head(one: Kept) -> str:
    """The head of the column in which the number stands, which :func:`_heads` reads."""
    return f"{one.part}: {one.number}, {one.at}"


def _run_name(one: Kept) -> str:
    """Name a run by all that is known of it but the command, which is another one for each table of the same run."""
    return _hash(_written(one, (*_OF_A_RUN, *_OF_A_COMMAND[:-1])), digits=10)


def _command_name(one: Kept) -> str:
    return _hash(_written(one, _OF_A_COMMAND), digits=6)


def _hash(told: Mapping[str, str], digits: int) -> str:
    return sha256("\n".join(told.values()).encode()).hexdigest()[:digits]


def _written(one: Kept, names: Iterable[str]) -> dict[str, str]:
    return {name: _text(getattr(one, name)) for name in names}


def _text(value: float | str | None) -> str:
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else "" if value is None else str(value)


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
