"""What a recipe asks to be drawn, under ``[charts]``; what is misspelt there is refused.

One table may ask for several kinds of charts; where they show different rows or columns, each is a table of its own:

    [[charts]]
    sweep = "partition.alpha"
    y = ["shrinking.tau", "shrinking.ratio"]
    rows = ["Learned factor"]

    [[charts]]
    curves = "global.accuracy"
    columns = ["C10 .1"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.errors import FedStrataError, unknown_name

KINDS: Mapping[str, str] = {
    "curves": "metrics of rounds, over rounds",
    "sweep": "the number of each cell, or what 'y' names, over keys of experiments",
    "layers": "metrics of layers, over rounds",
    "layers_last": "metrics of layers in the last round, layer by layer",
    "bars": "numbers as bars, row by row",
    "histogram": "'weights': where the weights of the whole model lie in the end",
    "clients": "'labels': who holds which classes; or a metric of single clients",
    "matrices": "metrics of pairs of clients",
}
"""The kinds of charts, and what they show of runs."""
GAIN = "gain"
"""As what a sweep draws (``y``): by how much the number of each row exceeds that of the first one."""
LABELS = "labels"
WEIGHTS = "weights"
LINES = ("rows", "columns")
_OPTIONS = ("y", "rows", "columns", "lines", "together", "relative")

_FLAGS: Mapping[str, str] = {"together": "layers", "relative": "layers_last"}
"""Options that are true or false, and the kind of chart that has them."""


@dataclass(frozen=True)
class Asked:
    """A kind of chart, and of what: metrics, or the keys that a sweep is drawn over."""

    kind: str
    of: tuple[str, ...]
    y: tuple[str, ...] = ()
    """What a sweep draws; nothing: the number of the recipe."""
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    """Only these; nothing: all."""
    lines: str = "rows"
    """What the lines of a panel are; the others have panels of their own."""
    together: bool = False
    """Whether the layers of all rows stand in one panel, by dashes, where they are lines."""
    relative: bool = False
    """Whether layers in the last round are shown as a percentage of the first one."""


def read_charts(given: object, rows: Sequence[str], columns: Sequence[str], where: str) -> tuple[Asked, ...]:
    """Read what is asked for; ``rows`` and ``columns`` are those of the recipe, ``where`` names it in errors."""
    tables = given if isinstance(given, list) else [given]
    return tuple(asked for table in tables for asked in _read(table, rows, columns, where))


def _read(table: object, rows: Sequence[str], columns: Sequence[str], where: str) -> list[Asked]:
    if not isinstance(table, Mapping):
        raise FedStrataError(f"The [charts] of {where} are no table: '{table}'; write it like curves = 'global.loss'.")
    known = (*KINDS, *_OPTIONS)
    for key in table:
        if key not in known:
            raise unknown_name(f"chart or option of charts in {where} called", str(key), known)
    of = f"[charts] of {where}"
    named = {key: _texts(table.get(key, ()), key, of) for key in ("y", "rows", "columns")}
    for key, there in (("rows", rows), ("columns", columns)):
        for name in named[key]:
            if name not in there:
                raise unknown_name(f"one of the {key} in {where}, which its [charts] name, called", name, there)
    lines = str(table.get("lines", LINES[0]))
    if lines not in LINES:
        raise unknown_name(f"lines of charts, which {where} asks for, called", lines, LINES)
    kinds = [key for key in table if key in KINDS]
    if table and not kinds:
        raise FedStrataError(f"The {of} name no chart; there are {', '.join(KINDS)}.")
    if named["y"] and "sweep" not in kinds:
        raise FedStrataError(f"The {of} have a 'y', but no 'sweep' that would be drawn with it.")
    flags = {key: table.get(key, False) for key in _FLAGS}
    for key, kind in _FLAGS.items():
        if not isinstance(flags[key], bool) or (flags[key] and kind not in kinds):
            raise FedStrataError(f"'{key}' in the {of} is true or false, and only goes with '{kind}'.")
    found = [
        Asked(
            kind,
            _texts(table[kind], kind, of),
            named["y"] if kind == "sweep" else (),
            named["rows"],
            named["columns"],
            lines,
            *(flag and kind == _FLAGS[key] for key, flag in flags.items()),
        )
        for kind in kinds
    ]
    for one in found:
        if one.kind == "histogram" and one.of != (WEIGHTS,):
            raise FedStrataError(f"The {of} ask for a histogram of {', '.join(one.of)}; there is one of '{WEIGHTS}'.")
    return found


def _texts(given: object, key: str, of: str) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) and one for one in listed):
        raise FedStrataError(f"'{key}' in the {of} is no name, and no list of names: '{given}'.")
    if isinstance(given, list) and not given:
        raise FedStrataError(f"'{key}' in the {of} is an empty list; leave it out.")
    names: list[Any] = list(listed)
    return tuple(names)
