"""The runs that a recipe stands for: a row, a column and a seed are one experiment, known by its settings' hash."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from fedstrata.data import partitions
from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.experiment import Experiment
from fedstrata.papers.of_clients import BEFORE
from fedstrata.papers.reading import VALIDATED, Changes, Paper, Recipe
from fedstrata.plugins import load_imports
from fedstrata.report.formats import plural
from fedstrata.runs.sweeping import METHOD, canonical, with_parameter
from fedstrata.spec import format_value, parse, split_outside

NOT_DECISIVE = frozenset(
    {"data_root", "checkpoint_every", "replay", "device", "engine", "chunk", "deterministic", "evaluate_trained"}
)
"""Keys that say where and how an experiment is run, and what more is measured in it, not what it is."""
_SAMPLES = ("samples", "test_samples", "most", "minimum")
"""Parameters of partitions that are numbers of samples of a client."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Experiment)}


@dataclass(frozen=True)
class Cell:
    """One run of a recipe. ``wanted`` is the hash of the paper's own settings, ``problem`` why it cannot be run."""

    recipe: Recipe
    row: str
    column: str
    experiment: Experiment
    wanted: str
    problem: str = ""

    @property
    def seed(self) -> int:
        """The seed of all draws."""
        return self.experiment.seed

    @property
    def settings(self) -> str:
        """The hash of what decides the numbers of this run."""
        return settings_hash(self.experiment)

    @property
    def comparable(self) -> bool:
        """Whether these are the paper's settings, neither scaled nor shortened."""
        return self.settings == self.wanted


@dataclass(frozen=True)
class Smaller:
    """How a recipe is made smaller: so many rounds, or a part of rounds and samples."""

    rounds: int | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise FedStrataError(f"A scale of {self.scale:g} is not possible; use a part of the whole, such as 0.1.")
        if self.rounds is not None and self.rounds < 1:
            raise FedStrataError(f"{self.rounds} rounds are no run; use at least 1.")

    def change(self, experiment: Experiment) -> Experiment:
        """Make an experiment smaller: rounds, training and test samples, and what is counted in either."""
        rounds = self.rounds or self._part(experiment.rounds)
        changes: dict[str, Any] = {"rounds": rounds, "evaluate_every": min(experiment.evaluate_every, rounds)}
        if experiment.join_round is not None:
            changes["join_round"] = max(2, self._part(experiment.join_round))
        if self.scale < 1:
            changes["data"] = f"fraction(of={format_value(experiment.data)}, keep={self.scale:g})"
            changes["partition"] = self._thinned(experiment.partition)
            if experiment.validation is not None:
                changes["validation"] = self._part(experiment.validation)
        return changed(experiment, changes)

    def _thinned(self, partition: str | None) -> str | None:
        """Let a partition that names numbers of samples name the same part of them; an unknown one stays as it is."""
        if partition is None:
            return None
        try:
            whole = partitions.make(partition)
        except FedStrataError:
            return partition
        counts = {key: self._part(count) for key in _SAMPLES if (count := getattr(whole, key, None)) is not None}
        return str(dataclasses.replace(whole, **counts))

    def _part(self, count: int) -> int:
        return max(1, round(self.scale * count))

    def words(self, cells: Iterable[Cell]) -> str:
        """Say in what these cells are smaller than the paper's, or longer; nothing where nothing is."""
        others = [cell for cell in cells if not cell.comparable]
        further = {cell.experiment.rounds - _of_paper(cell).rounds for cell in others}
        fewer, more = any(count < 0 for count in further), any(count > 0 for count in further)
        smaller = []
        if self.scale < 1 and others:
            rounds = " and of the rounds" if self.rounds is None and fewer else ""
            smaller.append(f"{100 * self.scale:g} % of the samples{rounds}")
        if self.rounds is None:
            longer = ""
        elif fewer and more:
            longer = (
                f"{plural(self.rounds, 'round')} are fewer than some cells have in the paper, and more than others."
            )
        else:
            smaller += [plural(self.rounds, "round")] if fewer else []
            longer = f"Longer than in the paper: {plural(self.rounds, 'round')}." if more else ""
        return " ".join(
            filter(None, (f"Smaller than in the paper: {' and '.join(smaller)}." if smaller else "", longer))
        )


@dataclass(frozen=True)
class Choice:
    """Which cells are asked for: words that name data or columns, rows or methods, and columns.

    The name of a row, as it is written, means that row only, also where other rows have the same method.
    """

    only: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @classmethod
    def read(cls, recipe: Recipe, only: str | None, methods: str | None, columns: str | None) -> Choice:
        """Read what is asked for of a recipe, each a list of words with commas between them."""
        return cls(_listed(only, recipe.columns), _listed(methods, recipe.rows), _listed(columns, recipe.columns))

    def takes(self, cell: Cell) -> bool:
        """Tell whether a cell is asked for."""
        named = (_data_of(cell), cell.column, _model_of(cell))
        return (
            _any(self.only, named, within=True)
            and (not self.methods or any(_called(word, cell) for word in self.methods))
            and _any(self.columns, (cell.column,))
        )

    def refuse_unknown(self, recipe: Recipe, cells: Sequence[Cell]) -> None:
        """Refuse a word that names nothing in a recipe, instead of leaving out what it was to name."""
        columns = [cell.column for cell in cells]
        kinds = {
            "only": ("data, model or column", [*map(_data_of, cells), *map(_model_of, cells), *columns]),
            "methods": ("row or method", [name for cell in cells for name in (cell.row, _method_of(cell))]),
            "columns": ("column", columns),
        }
        for key, (kind, names) in kinds.items():
            for word in getattr(self, key):
                if not any(Choice(**{key: (word,)}).takes(cell) for cell in cells):
                    raise unknown_name(f"{kind} of '{recipe.name}' called", word, dict.fromkeys(names))

    def words(self) -> str:
        """Say what is asked for."""
        return ", ".join((*self.only, *self.methods, *self.columns))


def _listed(text: str | None, names: Iterable[str]) -> tuple[str, ...]:
    """Split a list at its commas, but for those in the names that there are.

    >>> _listed("C10 .1, C10 .5, 300 samples", ["C10 .1", "C10 .5", "C10 .5, 300 samples"])
    ('C10 .1', 'C10 .5, 300 samples')
    """
    known, found = {name.lower() for name in names}, []
    pieces = [] if text is None else split_outside(text, ",")
    while pieces:
        joined = [",".join(pieces[:count]).strip() for count in range(1, len(pieces) + 1)]
        count = max((count for count, name in enumerate(joined, start=1) if name.lower() in known), default=1)
        found.append(joined[count - 1])
        del pieces[:count]
    return tuple(filter(None, found))


def _data_of(cell: Cell) -> str:
    return cell.experiment.data.split("(")[0]


def _method_of(cell: Cell) -> str:
    """Name the parts of a cell's method, without their parameters."""
    return "+".join(part.name for part in parse(cell.experiment.method))


def _model_of(cell: Cell) -> str:
    return cell.experiment.model.split("(")[0]


def _called(word: str, cell: Cell) -> bool:
    if word in cell.recipe.rows:
        return word == cell.row
    return _any((word,), (cell.row, cell.experiment.method, _method_of(cell)))


def _any(asked: Sequence[str], names: Sequence[str], within: bool = False) -> bool:
    """Tell whether one of the names is asked for; without a question, all are."""
    lower = [name.lower() for name in names]
    if not asked or any(one.lower() in lower for one in asked):
        return True
    return within and any(_stands_in(one.lower(), lower[1]) for one in asked)


def _stands_in(word: str, text: str) -> bool:
    """Tell whether a word is in a text, and not in the middle of a number: CIFAR-10 is not in CIFAR-100."""
    before, after = (r"(?<!\d)" if word[:1].isdigit() else "", r"(?!\d)" if word[-1:].isdigit() else "")
    return re.search(before + re.escape(word) + after, text) is not None


def cells_of(
    recipe: Recipe,
    seeds: int | None = None,
    smaller: Smaller | None = None,
    choice: Choice | None = None,
    where: Changes | None = None,
) -> list[Cell]:
    """List the cells of a recipe, seed by seed; ``where`` are keys that decide no number, such as the device.

    Rows bring along those that they are measured against.
    """
    if seeds is not None and seeds < 1:
        raise FedStrataError(f"{seeds} seeds make no table; use at least 1.")
    if not recipe.runs:
        return []
    pairs = [(row, column) for row in recipe.rows for column in recipe.columns if recipe.has_run(row, column)]
    if not pairs:
        return []
    _refuse_idle(recipe)
    first = [_cell(recipe, row, column) for row, column in pairs]
    for cell in first:
        _refuse_without_held_out(cell)
    choice = choice or Choice()
    choice.refuse_unknown(recipe, first)
    columns = {cell.column for cell in first if choice.takes(cell)}
    chosen = [cell for cell in first if choice.takes(cell) or (cell.column in columns and cell.row in recipe.against)]
    if not chosen:
        raise FedStrataError(
            f"No cell of '{recipe.name}' is all of what is asked for: {choice.words()}; ask for less at once."
        )
    change = smaller or Smaller()
    return [_with_seed(cell, seed, change, where or {}) for seed in range(seeds or recipe.seeds) for cell in chosen]


def cells_behind(
    paper: Paper,
    recipe: Recipe,
    seeds: int | None = None,
    smaller: Smaller | None = None,
    choice: Choice | None = None,
    where: Changes | None = None,
) -> list[Cell]:
    """List the cells of a recipe, and those of the other parts from which it is computed."""
    parts = (recipe, *(paper.part(name) for name in recipe.sources))
    return [cell for part in parts for cell in cells_of(part, seeds, smaller, choice, where)]


def _with_seed(cell: Cell, further: int, smaller: Smaller, where: Changes) -> Cell:
    full = changed(cell.experiment, {"seed": cell.seed + further})
    own = changed(smaller.change(full), where)
    return dataclasses.replace(cell, experiment=own, wanted=settings_hash(full))


def changed(experiment: Experiment, changes: Changes) -> Experiment:
    """Change some keys; an experiment of which nothing changes passes through, as most of a list of all papers do."""
    other = {key: value for key, value in changes.items() if getattr(experiment, key) != value}
    return experiment.with_changes(other) if other else experiment


def _cell(recipe: Recipe, row: str, column: str) -> Cell:
    experiment, problem = _experiment(recipe, row, column)
    return Cell(recipe.of_cell(row, column), row, column, experiment, "", problem)


def _experiment(recipe: Recipe, row: str, column: str) -> tuple[Experiment, str]:
    """Put an experiment together: keys first, then parameters inside their texts; what is unknown here is a problem.

    Parameters of named components, such as ``method.lips.tau0`` or ``optimiser.adamw.amsgrad``, change these where they
    stand and leave others alone.
    """
    layers = (recipe.shared, recipe.columns[column], recipe.rows[row], recipe.cells.get((row, column), {}))
    both = {key for key in recipe.columns[column] if key in recipe.rows[row]}
    if both:
        raise FedStrataError(
            f"The row '{row}' and the column '{column}' of '{recipe.name}' both set {', '.join(sorted(both))}; "
            "only one of them may."
        )
    given = {key: value for changes in layers for key, value in changes.items()}
    values = {key: value for key, value in given.items() if "." not in key}
    problem = ""
    try:
        if "imports" in values:  # which register what the other keys name
            values["imports"] = load_imports(Experiment(imports=values["imports"])).imports
        for name, value in given.items():
            if "." in name and not problem:
                values, problem = _with_parameter(values, name, value)
        return Experiment.from_mapping(values), problem
    except FedStrataError as error:
        raise FedStrataError(f"In '{recipe.name}', row '{row}', column '{column}': {error}") from None


def _with_parameter(values: dict[str, Any], name: str, value: Any) -> tuple[dict[str, Any], str]:
    """Set a parameter inside a text; where its components do not exist here, or have no such one, say so."""
    key, *path = name.replace("-", "_").split(".")
    text = values.get(key, _DEFAULTS[key])
    if key in values:
        Experiment.from_mapping({key: text})  # which refuses what is no text where there has to be one
    try:
        changed = with_parameter(key, text, tuple(path), value) if isinstance(text, str) else None
    except FedStrataError as error:
        return values, str(error)
    if changed is not None:
        return {**values, key: changed}, ""
    return values, "" if _names_component(name) else f"There is no '{path[-1]}' to change in the {key} '{text}'."


def _refuse_without_held_out(cell: Cell) -> None:
    """Refuse numbers of models that are chosen on samples held out, where none are."""
    at, experiment = cell.recipe.at, cell.experiment
    if at not in (VALIDATED, BEFORE) or experiment.validation_fraction is not None:
        return
    if at == BEFORE or experiment.validation is None:
        of_all = "" if at == BEFORE else ", or validation = 1000 of all samples"
        raise FedStrataError(
            f"In '{cell.recipe.name}', row '{cell.row}', column '{cell.column}': at = \"{at}\" reports models that are "
            "chosen on samples held out, and none are held out; write validation_fraction = 0.2 of each client's "
            f"samples{of_all} in [experiment], or another at."
        )


def _names_component(name: str) -> bool:
    """Whether a parameter is that of one component, and means nothing to others: ``optimiser.adamw.amsgrad``."""
    return name.startswith(f"{METHOD}.") or name.count(".") > 1


def _refuse_idle(recipe: Recipe) -> None:
    """Refuse parameters of components that no row has: they would change nothing."""
    given = {name: value for column in recipe.columns.values() for name, value in column.items()}
    for name, value in given.items():
        key = name.split(".")[0]
        everywhere = (recipe.shared, *recipe.rows.values(), *recipe.columns.values())
        texts = [text for changes in everywhere if isinstance(text := changes.get(key), str)]
        if _names_component(name) and all(_lacks(key, text, name, value) for text in texts):
            raise FedStrataError(f"'{name}' in the columns of '{recipe.name}' is a parameter of no row's {key}.")


def _lacks(key: str, text: str, name: str, value: Any) -> bool:
    values, problem = _with_parameter({key: text}, name, value)
    return values == {key: text} and not problem


@cache
def settings_hash(experiment: Experiment) -> str:
    """Name an experiment by what decides its numbers: the keys that differ from the defaults, each component once.

    Components are written in one way, ``dirichlet:0.1`` and ``dirichlet(alpha=0.1)`` alike.
    """
    decisive = {
        one.name: _plain(one.name, value)
        for one in dataclasses.fields(Experiment)
        if one.name not in NOT_DECISIVE and (value := getattr(experiment, one.name)) != one.default
    }
    text = json.dumps({**decisive, "seed": experiment.seed}, sort_keys=True, ensure_ascii=True)
    return sha256(text.encode()).hexdigest()[:16]


def differences(experiment: Experiment, paper: Experiment) -> dict[str, Any]:
    """Name the settings that decide numbers in which an experiment is not the paper's, with its own values."""
    return {
        one.name: value
        for one in dataclasses.fields(Experiment)
        if one.name not in NOT_DECISIVE
        and _plain(one.name, value := getattr(experiment, one.name)) != _plain(one.name, getattr(paper, one.name))
    }


def changes_in_words(cell: Cell) -> str:
    """Say in which settings a cell is not the paper's; nothing where it is."""
    if cell.comparable:
        return ""
    return "; ".join(f"{key}={value}" for key, value in differences(cell.experiment, _of_paper(cell)).items())


def _of_paper(cell: Cell) -> Experiment:
    """The experiment of a cell as the paper has it."""
    return changed(_experiment(cell.recipe, cell.row, cell.column)[0], {"seed": cell.seed})


@cache
def _plain(key: str, value: Any) -> Any:
    try:
        return canonical(key, value) if isinstance(value, str) else value
    except FedStrataError:
        return value


def by_settings(cells: Iterable[Cell]) -> Mapping[str, Cell]:
    """One cell for each run: cells of several tables may be the same run."""
    return {cell.settings: cell for cell in cells}
