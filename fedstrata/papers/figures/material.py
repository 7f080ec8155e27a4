"""What the charts are made of: the runs and the numbers of each row and column, and what there is none of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedstrata.errors import FedStrataError
from fedstrata.papers.at_hand import RunsAtHand
from fedstrata.papers.cells import Cell, by_settings
from fedstrata.papers.figures.asked import Asked
from fedstrata.papers.judging import Judged, JudgedCell
from fedstrata.papers.numbers import number_of
from fedstrata.papers.reading import Changes, Recipe
from fedstrata.report.groups import Group
from fedstrata.report.published import PublishedRun
from fedstrata.report.reading import Run
from fedstrata.significance import Estimate, estimate
from fedstrata.spec import parse

Pair = tuple[str, str]


@dataclass
class Material:
    """The numbers of a part, and its runs as far as they are at hand; notes what was looked for in vain."""

    judged: Judged
    cells: Sequence[Cell]
    at_hand: RunsAtHand
    missing: dict[str, list[Pair]] = field(default_factory=dict)
    """Why something is not drawn, and of which rows and columns."""
    _runs: dict[Pair, tuple[Run, ...]] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the part."""
        return self.judged.recipe

    def judged_at(self, pair: Pair) -> JudgedCell | None:
        """The numbers of a cell, where it was asked for."""
        return next((one for one in self.judged.cells if (one.row, one.column) == pair), None)

    def pairs(self, asked: Asked) -> list[Pair]:
        """The rows and columns that a chart is about, in the order of the recipe."""
        there = {(cell.row, cell.column) for cell in self.cells}
        found = []
        for row in asked.rows or self.recipe.rows:
            for column in asked.columns or self.recipe.columns:
                if (row, column) in there:
                    found.append((row, column))
                elif self.recipe.has_run(row, column):
                    self.lacks("it was not asked for", (row, column))
        return found

    def runs(self, pair: Pair) -> tuple[Run, ...]:
        """The finished runs of a cell, seed by seed; where there are none it is noted."""
        if pair not in self._runs:
            own = by_settings(cell for cell in self.cells if (cell.row, cell.column) == pair)
            self._runs[pair] = tuple(filter(None, map(self.at_hand.find, own.values())))
        if not self._runs[pair]:
            one = self.judged_at(pair)
            kept = one is not None and one.ours is not None
            reason = "of its run only the number is kept here" if kept else "it was not run"
            self.lacks(reason, pair)
        return self._runs[pair]

    def group(self, label: str, pair: Pair) -> Group[Run]:
        """The runs of a cell, under a name."""
        return Group(label, self.runs(pair))

    def lacks(self, reason: str, pair: Pair) -> None:
        """Note that something is not drawn of a cell."""
        told = self.missing.setdefault(reason, [])
        if pair not in told:
            told.append(pair)

    def number(self, pair: Pair, name: str = "") -> Estimate | None:
        """A number over seeds: that of the recipe, or another one of the runs in their last round."""
        recipe = self.recipe.of_cell(*pair)
        if name in ("", recipe.number):
            one = self.judged_at(pair)
            if one is None or one.ours is None:
                self.lacks("it was not run", pair)
                return None
            return one.ours
        own = dataclasses.replace(recipe, number=name, at="last", unit="plain")
        runs = self.runs(pair)
        if any(isinstance(run, PublishedRun) for run in runs):
            self.lacks(f"of its run only tables are kept here, which do not tell '{name}'", pair)
            return None
        try:
            found = [number_of(own, run.folder) for run in runs]
        except FedStrataError:
            self.lacks(f"its run holds no '{name}'", pair)
            return None
        return estimate(value for value in found if math.isfinite(value))


@dataclass(frozen=True)
class Place:
    """Where a cell stands on the axis of a sweep; what has no number there stands at its end, by its name."""

    number: float | None
    name: str


def value_of(changes: Changes, key: str) -> Any:
    """Find what changes of an experiment set a key to, alone or inside a text; none where they do not.

    The last name of a key is enough: ``sparsity`` is that of any method.

    >>> value_of({"method.ssfl.sparsity": 0.5}, "sparsity"), value_of({"method": "lips(every=5)"}, "method.lips.every")
    (0.5, 5)
    """
    for name, value in changes.items():
        if name == key or ("." not in key and name.endswith(f".{key}")):
            return value
    head, *owner, last = key.split(".") if "." in key else ("", key)
    text = changes.get(head)
    for call in parse(text) if isinstance(text, str) else ():
        if not owner or owner == [call.name]:
            for name, value in call.keywords:
                if name == last:
                    return value
    return None


@dataclass(frozen=True)
class Axis:
    """The rows or columns along which a key is swept, those that are otherwise alike together under what they share."""

    by: str
    groups: Mapping[str, Mapping[str, Place]]


def axis_of(recipe: Recipe, asked: Asked, key: str) -> Axis | None:
    """Find the columns, or else the rows, that set a key to some numbers; none where neither do."""
    for by, named, all_changes in (
        ("columns", asked.columns, recipe.columns),
        ("rows", asked.rows, recipe.rows),
    ):
        chosen = {name: all_changes[name] for name in named or all_changes}
        values = {name: value_of(changes, key) for name, changes in chosen.items()}
        swept = {name: value for name, value in values.items() if _is_number(value)}
        if len(swept) > 1:
            others = {name: _others(chosen[name], key) for name in swept}
            alike = [[name for name in swept if others[name] == kind] for kind in _distinct(others.values())]
            if all(len(names) == 1 for names in alike):
                alike = [list(swept)]  # something else is always changed with it, such as rounds with steps
            if named and len(alike) == 1:
                alike = [[*alike[0], *(name for name in chosen if name not in swept)]]
            groups = {
                shared_name(names, key): {name: Place(swept.get(name), _own_name(name, key)) for name in names}
                for names in alike
            }
            return Axis(by, groups)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _others(changes: Changes, key: str) -> dict[str, Any]:
    """What changes set beside a key; of a text with the key inside, which components it names."""
    last = key.rsplit(".", 1)[-1]
    rest = {name: value for name, value in changes.items() if value_of({name: value}, key) is None}
    # One column may set the same thing for several methods: sparsity for one, density for another.
    rest = {name: value for name, value in rest.items() if not (last == key and name.startswith("method."))}
    return {name: value for name, value in rest.items() if name != key.split(".")[0]}


def _distinct(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in items:
        if one not in found:
            found.append(one)
    return found


def shared_name(names: Sequence[str], key: str) -> str:
    """The words that several names share, without that of the key.

    >>> shared_name(["C10 60 samples", "C10 100 samples"], "partition.samples"), shared_name(["K=1", "K=5"], "clients")
    ('C10', '')
    """
    words = [name.split() for name in names]
    shared = [word for word in words[0] if all(word in other for other in words)]
    return " ".join(word for word in shared if word != key.rsplit(".", 1)[-1])


def _own_name(name: str, key: str) -> str:
    """What a name says of a key that has no number: IID of ``N_c=IID``."""
    return name.rsplit("=", 1)[-1]
