"""Recipes: the settings of a paper, its tables and figures, and the numbers that it published.

    recipes/PAPER/paper.toml    title, citation, link, what its ± means, and what its parts share: the [experiment], the
                                number, and what [rows] and [columns] are that several parts have
    recipes/PAPER/PART.toml     a table or a figure: which runs make its rows and columns, and which number is reported
    published.csv               paper, part, row, column, mean, std, note

What is misspelt is refused with the name of the file.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from fedstrata import scores
from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.experiment import Experiment, read_pinned
from fedstrata.papers.figures.asked import Asked, read_charts
from fedstrata.papers.inheriting import (
    ENTRIES,
    Entries,
    completed,
    entries_of_paper,
    entries_of_part,
    flat,
    laid_over_cells,
)
from fedstrata.papers.of_clients import BEFORE, WEIGHTED
from fedstrata.papers.published import PUBLISHED, Published, read_published
from fedstrata.report.labels import LABELS
from fedstrata.runs.metrics import describe_clients
from fedstrata.verdicts import Middle, Spread

PAPERS = Path(__file__).parent
RECIPES = "recipes"
PAPER_FILE = "paper.toml"
KINDS = ("table", "figure")
VALIDATED = "validated"
WHEN = ("last", "last_ten", "best", VALIDATED, BEFORE)
UNITS = ("percent", "fraction", "plain", "seconds", "MB", "TFLOPs a client", "percent of dense")
UNIT_WORDS: Mapping[str, str] = {
    "percent": "%",
    "seconds": "s",
    "MB": "MB",
    "TFLOPs a client": "TFLOPs a client",
    "percent of dense": "% of dense",
}
"""Units as they stand behind a name."""
SPREADS: tuple[Spread, ...] = get_args(Spread)
MIDDLES: tuple[Middle, ...] = get_args(Middle)
_STATISTICS = ("published_seeds", "spread", "middle")
"""How many runs are behind a published number, what its ± is, and what was taken of the runs."""
_OF_ALL_PARTS = ("number", "at", *_STATISTICS)
"""What a paper may say for all its parts; the number only for those that report one."""
_PAPER_KEYS = ("title", "citation", "link", "note", *_OF_ALL_PARTS, "experiment", *ENTRIES)
_PART_KEYS = (
    "title", "kind", "like", "number", "at", "unit", "seeds", "runs", "note", "experiment", "rows", "columns", "cells",
    "claims", "charts", "over_clients", "against", *_STATISTICS,
)  # fmt: skip
_INHERITED = (
    "number", "at", "unit", "over_clients", "against", "seeds", "experiment", "rows", "columns", "cells", *_STATISTICS,
)  # fmt: skip
_REPORTED = ("number", "at", "unit", *_STATISTICS)
_OWN_SETTING = "own_setting"
_OWN_KEYS = (*_REPORTED, "runs", "columns", "derived", "of", "reading_of", _OWN_SETTING)
"""What rows, columns and cells may say beside changes of the experiment: their own number, and where there are none."""
DERIVED = ("mean", "mean_rank")
"""What a column may be made of, instead of runs: the other columns of its part, or those ``of`` another part."""
VARIANCE, INCENTIVE = "variance", "incentive"
OVER_CLIENTS = (VARIANCE, INCENTIVE)
"""What is computed over clients, of each client's number in the middle of all runs: how unequal they are (Eq. A.5 of
PLayer-FL), or which part of them fares better than in the rows ``against`` which this is measured (Eq. A.6)."""
_ALWAYS_MEASURED = ("accuracy", "loss")
_CLAIM_KEYS = ("row", "over", "by", "columns", "note", "main")
_TEXTS = ("title", "citation", "link", "note", "like", "number", "over_clients", "of", "reading_of")
_COUNTS = ("seeds", "published_seeds")
_FLAGS = ("runs", "main", _OWN_SETTING)
_LISTS = ("against",)
_LISTS_OF_ENTRIES = ("columns",)
"""Keys by the kind of their values: texts, whole numbers, true or false, and lists, some of which are so in entries."""
SECONDS = ".seconds"
"""With what the name of a number ends that is the mean time of a phase of rounds."""
_NOT_OF_CLIENTS = ("train", "global", "validation")
"""What is measured of one model, and has no statistics over clients."""
_METRIC = re.compile(r"(?P<name>[^.(]*)(?:\(.*\))?(?:\.(?P<statistic>.*))?")
_FRACTIONS = ("accuracy", "f1", "auc", "recall", "precision")

Name = TypeVar("Name", bound=str)
_NAMES: Mapping[str, Sequence[str]] = {
    "kind": KINDS, "at": WHEN, "unit": UNITS, "spread": SPREADS, "middle": MIDDLES, "derived": DERIVED,
}  # fmt: skip
"""Keys whose values are names, and which these are."""
Changes = Mapping[str, Any]
"""Keys of an experiment, or parameters inside one of its texts (``partition.alpha``), and their values."""


@dataclass(frozen=True)
class StatedClaim:
    """Who beats whom, by about how much, in which columns (none: in all); the main ones stand for their paper."""

    row: str
    over: str
    by: float | None = None
    columns: tuple[str, ...] = ()
    main: bool = False


@dataclass(frozen=True)
class Recipe:
    """A table or a figure of a paper: rows and columns of runs, and the number that is reported of each."""

    paper: str
    part: str
    title: str
    kind: str
    number: str = "client_after.accuracy.mean"
    at: str = "last"
    unit: str = "percent"
    seeds: int = 1
    runs: bool = True
    note: str = ""
    shared: Changes = field(default_factory=dict)
    """What the paper says, and over it what this part says."""
    rows: Mapping[str, Changes] = field(default_factory=dict)
    columns: Mapping[str, Changes] = field(default_factory=dict)
    claims: tuple[StatedClaim, ...] = ()
    charts: tuple[Asked, ...] = ()
    """What its figure shows."""
    published: Mapping[tuple[str, str], Published] = field(default_factory=dict)
    cells: Mapping[tuple[str, str], Changes] = field(default_factory=dict)
    """What single cells change after all others, by row and column."""
    own: Mapping[tuple[str, str], Changes] = field(default_factory=dict)
    """What rows ``(row, "")``, columns ``("", column)`` and cells say of themselves, such as a number of their own."""
    published_seeds: int = 1
    """How many runs are behind each published number; where nobody says so, it is the single number that it is."""
    spread: Spread = "deviation"
    """What the paper writes behind ±."""
    middle: Middle = "mean"
    """What the paper takes of its runs, and we of ours."""
    over_clients: str = ""
    """What is computed over clients, of their own numbers over all runs; nothing where each run has a number."""
    against: tuple[str, ...] = ()
    """The rows than which clients fare better that have a reason to take part."""
    counted: bool = True
    """Whether it is said how many runs are behind its published numbers."""
    place: Path | None = None
    """The folder of somebody's own recipes that it is from; none of those that come along."""

    def has_run(self, row: str, column: str) -> bool:
        """Tell whether a cell is a run: not where rows and columns do not meet, and not what is derived from others."""
        told = self.told(row, column)
        return bool(told.get("runs", True)) and "derived" not in told and column in told.get("columns", (column,))

    def told(self, row: str, column: str) -> dict[str, Any]:
        """All that is said of a cell beside its experiment: by its row, over it by its column, over both by itself."""
        return {
            key: value for of in ((row, ""), ("", column), (row, column)) for key, value in self.own.get(of, {}).items()
        }

    def of_cell(self, row: str, column: str) -> Recipe:
        """The recipe as one cell has it, with the number that is reported there."""
        told = {key: value for key, value in self.told(row, column).items() if key in _REPORTED}
        if "number" in told and "unit" not in told and self.unit == _unit_of(self.number, self.over_clients):
            told["unit"] = _unit_of(
                told["number"], self.over_clients
            )  # as that of the part, where it says nothing else
        return dataclasses.replace(self, **told) if told else self

    @property
    def name(self) -> str:
        """The paper and the part, as one writes them in a command."""
        return f"{self.paper} {self.part}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The other parts that columns are derived from."""
        told = (self.told("", column) for column in self.columns)
        return tuple(dict.fromkeys(one["of"] for one in told if "derived" in one and "of" in one))

    @property
    def own_settings(self) -> frozenset[str]:
        """The columns that the paper does not have, such as another model: what shows in them is not its claim."""
        return frozenset(column for column in self.columns if self.own.get(("", column), {}).get(_OWN_SETTING))

    @property
    def is_derived(self) -> bool:
        """Whether all columns are made of others, and none of runs."""
        return all("derived" in self.told("", column) for column in self.columns)

    def read_as(self, row: str) -> str:
        """The row of the paper that a row is another reading of; of most rows that is themselves."""
        return str(self.own.get((row, ""), {}).get("reading_of", row))

    def published_at(self, row: str, column: str) -> Published:
        """The published number of a cell; nothing where the paper has none.

        Where a paper does not say how a number was found, each reading of it is held against that same number.
        """
        papers = self.read_as(row)
        found = self.published.get((papers, column), Published(None, None))
        if papers == row or found.mean is None:
            return found
        return dataclasses.replace(found, note=f"another reading of the row {papers}, beside its published number")


@dataclass(frozen=True)
class Paper:
    """A paper and its recipes, in the order of their names."""

    name: str
    title: str
    citation: str
    link: str
    parts: Mapping[str, Recipe]
    note: str = ""
    """What of its settings is not the paper's own, and why."""

    def part(self, name: str) -> Recipe:
        """Find a table or a figure by its name."""
        if name not in self.parts:
            raise unknown_name(f"part of the paper '{self.name}' called", name, self.parts)
        return self.parts[name]


def read_papers(place: Path = PAPERS) -> dict[str, Paper]:
    """Read all papers of a folder with recipes and published numbers: those that come along, or somebody's own."""
    if not (place / PUBLISHED).is_file():
        raise FedStrataError(f"'{place}' holds no papers: there is no '{PUBLISHED}' beside a folder '{RECIPES}'.")
    numbers = read_published(place / PUBLISHED)
    folders = sorted(path.parent for path in (place / RECIPES).glob(f"*/{PAPER_FILE}"))
    papers = {folder.name: _read_paper(folder, numbers) for folder in folders}
    if place != PAPERS:
        papers = {name: _placed(paper, place) for name, paper in papers.items()}
    known = {(paper.name, part) for paper in papers.values() for part in paper.parts}
    for paper, part in dict.fromkeys((paper, part) for paper, part, *_ in numbers):
        if (paper, part) not in known:
            raise FedStrataError(
                f"'{PUBLISHED}' has numbers of '{paper} {part}', but there is no recipe '{paper}/{part}.toml'; "
                "write one, with runs = false where nothing is run for it."
            )
    return papers


def _placed(paper: Paper, place: Path) -> Paper:
    """Note of a paper's recipes where they are from."""
    parts = {name: dataclasses.replace(recipe, place=place) for name, recipe in paper.parts.items()}
    return dataclasses.replace(paper, parts=parts)


def find_paper(papers: Mapping[str, Paper], name: str) -> Paper:
    """Find a paper by its name."""
    if name not in papers:
        raise unknown_name("paper called", name, papers)
    return papers[name]


def _read_paper(folder: Path, numbers: Mapping[tuple[str, str, str, str], Published]) -> Paper:
    content, where = _read_toml(folder / PAPER_FILE)
    _refuse_unknown(content, _PAPER_KEYS, where)
    _refuse_odd_values(content, where)
    content["experiment"] = _changes(content.get("experiment", {}), where)
    entries = _checked(entries_of_paper(content, where), where)
    name = folder.name
    files = sorted((path for path in folder.glob("*.toml") if path.name != PAPER_FILE), key=_order)
    parts = {file.stem: _read_part(file, name, content, entries, numbers) for file in files}
    texts = [_text(content, key, where) for key in ("title", "citation", "link")]
    paper = Paper(name, texts[0], texts[1], texts[2], parts, str(content.get("note", "")))
    for part in parts.values():
        for source in part.sources:
            paper.part(source)
    _refuse_idle(entries, paper, where)
    return paper


def _checked(entries: Entries, where: str) -> Entries:
    """Refuse what is misspelt in the rows and columns of a paper, with the name of its own file."""
    for kind, one in ENTRIES.items():
        for name, entry in entries[kind].items():
            of = (name, "") if kind == "rows" else ("", name)
            _changes(_without_own(entry, {}, of, where), where, f"{one} '{name}'")
    return entries


def _refuse_idle(entries: Entries, paper: Paper, where: str) -> None:
    """Refuse parameters of methods that no part has: they would change nothing."""
    there = {key for part in paper.parts.values() for column in part.columns.values() for key in column}
    for key in (key for column in entries["columns"].values() for key in column if key.startswith("method.")):
        if key not in there:
            raise FedStrataError(f"'{key}' in the columns of {where} is a parameter of no row's method in any part.")


def _order(path: Path) -> tuple[str, str, int]:
    """Order parts as a paper numbers them: figure2 before figure10."""
    word = path.stem.rstrip("0123456789")
    number = path.stem[len(word) :]
    return ("0" if word.startswith("table") else "1", word, int(number or 0))


def _read_part(
    file: Path, paper: str, of_paper: Mapping[str, Any], entries: Entries,
    numbers: Mapping[tuple[str, str, str, str], Published],
) -> Recipe:  # fmt: skip
    content, where = _read_whole(file, entries)
    shared, experiment = of_paper["experiment"], _changes(content.get("experiment", {}), where)
    named = completed(content, entries, experiment, shared, where)
    taken = _OF_ALL_PARTS if content.get("runs", True) else _STATISTICS
    content = {**{key: of_paper[key] for key in taken if key in of_paper}, **content}
    own: dict[tuple[str, str], Changes] = {}
    rows = {
        name: _changes(_without_own(given, own, (name, ""), where), where, f"row '{name}'")
        for name, given in named["rows"].items()
    }
    columns = {
        name: _changes(_without_own(given, own, ("", name), where), where, f"column '{name}'")
        for name, given in named["columns"].items()
    }
    cells = {
        (row, column): _changes(_without_own(given, own, (row, column), where), where, f"cell '{row}', '{column}'")
        for row, of_row in content.get("cells", {}).items()
        for column, given in of_row.items()
        if row in rows and column in columns
    }
    number, over_clients = content.get("number", Recipe.number), content.get("over_clients", "")
    # A figure that draws a table shows that table's numbers.
    drawn = content["like"] if content.get("kind") == "figure" and "like" in content else file.stem
    published = {key[2:]: one for key, one in numbers.items() if key[:2] in ((paper, file.stem), (paper, drawn))}
    recipe = Recipe(
        paper,
        file.stem,
        _text(content, "title", where),
        _one_of(content.get("kind", "table"), KINDS, "kind", where),
        number,
        _one_of(content.get("at", "last"), WHEN, "at", where),
        _one_of(content.get("unit", _unit_of(number, over_clients)), UNITS, "unit", where),
        content.get("seeds", 1),
        content.get("runs", True),
        content.get("note", ""),
        {**shared, **experiment},
        rows or {"": {}},
        columns or {"": {}},
        tuple(claim for given in _tables(content, "claims", where) for claim in _claims(given, rows, columns, where)),
        read_charts(content.get("charts", {}), list(rows), list(columns), where),
        published,
        cells,
        own,
        content.get("published_seeds", 1),
        _one_of(content.get("spread", "deviation"), SPREADS, "spread", where),
        _one_of(content.get("middle", "mean"), MIDDLES, "middle", where),
        over_clients,
        tuple(content.get("against", ())),
        "published_seeds" in content or any("published_seeds" in told for told in own.values()),
    )
    _refuse_odd_clients(recipe, where)
    _refuse_unknown_metrics(recipe, where)
    _refuse_unknown_columns(recipe, where)
    if recipe.runs:
        if "published_seeds" not in content:
            _refuse_uncounted(recipe, where)
        _refuse_without_method(recipe, where)
        _refuse_foreign_numbers(recipe, where)
        _refuse_published_settings(recipe, where)
        _refuse_foreign_readings(recipe, where)
    return recipe


def _read_whole(file: Path, entries: Entries, begun: Sequence[Path] = ()) -> tuple[dict[str, Any], str]:
    """Read a part; one that is ``like`` another begins with that one's rows, columns, cells and number.

    ``begun`` are the parts that are being read, because they are like this one.
    """
    content, where = _read_toml(file)
    _refuse_unknown(content, _PART_KEYS, where)
    _refuse_odd_values(content, where)
    first: dict[str, Any] = {}
    if "like" in content:
        other = file.with_name(f"{content['like']}.toml")
        if other in begun:
            raise FedStrataError(f"{where} is like '{content['like']}', which is like it; one of them has to begin.")
        if not other.is_file() or other == file:
            raise FedStrataError(f"{where} is like '{content['like']}', but its paper has no other part of that name.")
        first = {
            key: value for key, value in _read_whole(other, entries, (*begun, file))[0].items() if key in _INHERITED
        }
    experiment = {**first.get("experiment", {}), **flat(content.get("experiment", {}), "[experiment]", where)}
    named = entries_of_part(content, first, entries, where)
    cells = laid_over_cells(_tables_of_cells(content, where), first.get("cells", {}))
    content = {**first, **content, **named, "experiment": experiment, "cells": cells}
    for row, of_row in content.get("cells", {}).items():
        if "like" not in content and row not in content["rows"]:
            raise unknown_name(f"row in {where}, of which it has cells, called", row, content["rows"])
        for column in of_row:
            if "like" not in content and column not in content["columns"]:
                raise unknown_name(f"column in {where}, of which it has cells, called", column, content["columns"])
    return content, where


def _without_own(given: object, own: dict[tuple[str, str], Changes], of: tuple[str, str], where: str) -> object:
    """Take out of a row, a column or a cell what it says of itself, and note that; what is left changes experiments."""
    if not isinstance(given, Mapping):
        return given
    said = {key: value for key, value in given.items() if key in _OWN_KEYS}
    row, column = of
    name = f"cell '{row}', '{column}'" if row and column else f"row '{row}'" if row else f"column '{column}'"
    _refuse_odd_values(said, f"the {name} of {where}", _LISTS_OF_ENTRIES)
    if _OWN_SETTING in said and row:
        raise FedStrataError(f"Only whole columns are settings of one's own, but {where} says so of the {name}.")
    if said:
        own[of] = said
    return {key: value for key, value in given.items() if key not in said}


def _changes(given: object, where: str, of: str = "[experiment]") -> dict[str, Any]:
    """Read changes of an experiment, by the names by which ``--sweep`` has them; unknown keys are refused.

    ``"none"`` takes back what others say of a key that may be without a value.
    """
    known = {one.name: one.default for one in dataclasses.fields(Experiment)}
    changes = flat(given, of, where)
    if "imports" in changes and of != "[experiment]":
        raise FedStrataError(f"The {of} of {where} names files to import; these stand in [experiment].")
    for key in changes:
        if key.split(".")[0] not in known:
            raise unknown_name(f"key of an experiment, as the {of} of {where} has it, called", key, known)
    return {key: None if value == "none" and known.get(key, "") is None else value for key, value in changes.items()}


def _claims(given: Mapping[str, Any], rows: Changes, columns: Changes, where: str) -> list[StatedClaim]:
    """Read a claim; where ``by`` is a table of columns and numbers, it is one for each of them."""
    by = given.get("by")
    if not isinstance(by, Mapping):
        return [_claim(given, rows, columns, where)]
    if "columns" in given:
        raise FedStrataError(f"A claim in {where} has columns beside a 'by' for each of them; leave the columns out.")
    return [_claim({**given, "by": one, "columns": [name]}, rows, columns, where) for name, one in by.items()]


def _claim(given: Mapping[str, Any], rows: Changes, columns: Changes, where: str) -> StatedClaim:
    _refuse_unknown(given, _CLAIM_KEYS, where)
    _refuse_odd_values(given, f"a claim in {where}", _LISTS_OF_ENTRIES)
    for key in ("row", "over"):
        if str(given.get(key)) not in rows:
            raise unknown_name(f"row in {where}, which a claim names, called", str(given.get(key)), rows)
    named: Sequence[str] = given.get("columns", ())
    for column in named:
        if column not in columns:
            raise unknown_name(f"column in {where}, which a claim names, called", column, columns)
    by = given.get("by")
    if by is not None and not (isinstance(by, int | float) and 0 < by < math.inf):
        raise FedStrataError(
            f"A claim in {where} says by how much '{given['row']}' is better than '{given['over']}', a number above 0, "
            f"not {by!r}. Where it is worse, turn the claim round."
        )
    size = None if by is None else float(by)
    return StatedClaim(given["row"], given["over"], size, tuple(named), given.get("main", False))


def _refuse_without_method(recipe: Recipe, where: str) -> None:
    for row, changes in recipe.rows.items():
        everywhere = all("method" in column for column in recipe.columns.values())
        if (
            recipe.own.get((row, ""), {}).get("runs", True)
            and "method" not in changes
            and "method" not in recipe.shared
            and not everywhere
        ):
            raise FedStrataError(f"The row '{row}' of {where} has no method; write it like {row or 'FedBN'} = 'fedbn'.")


def _refuse_foreign_numbers(recipe: Recipe, where: str) -> None:
    for row, column in recipe.published:
        if row not in recipe.rows or column not in recipe.columns:
            raise FedStrataError(
                f"'{PUBLISHED}' has a number of '{recipe.name}' in the row '{row}' and the column '{column}', "
                f"which {where} does not have; rows and columns are named alike in both."
            )


def _refuse_published_settings(recipe: Recipe, where: str) -> None:
    """Refuse published numbers in columns that the paper is said not to have."""
    for row, column in recipe.published:
        if column in recipe.own_settings:
            raise FedStrataError(
                f"'{PUBLISHED}' has a number of '{recipe.name}' in the row '{row}' and the column '{column}', which "
                f"{where} says the paper does not have; leave out the number, or {_OWN_SETTING} = true."
            )


def _refuse_foreign_readings(recipe: Recipe, where: str) -> None:
    """Refuse readings of rows that are not there, of readings, and of those that have numbers of their own."""
    readings = {row: papers for row in recipe.rows if (papers := recipe.read_as(row)) != row}
    for row, papers in readings.items():
        if papers not in recipe.rows:
            raise unknown_name(f"row in {where}, of which '{row}' is a reading, called", papers, recipe.rows)
        if papers in readings or any(row == one for one, _ in recipe.published):
            raise FedStrataError(
                f"The row '{row}' of {where} is a reading of '{papers}', so that it has no published number of its "
                "own, and is compared with that of a row that has one."
            )
    for (row, column), said in recipe.own.items():
        if "reading_of" in said and (column or row not in recipe.rows):
            raise FedStrataError(f"Only whole rows are readings of others, but {where} says so of '{column}'.")


def _refuse_odd_clients(recipe: Recipe, where: str) -> None:
    """Refuse what cannot be computed over clients, and claims of it: these are about numbers that each run has."""
    if recipe.over_clients:
        _one_of(recipe.over_clients, OVER_CLIENTS, "over_clients", where)
    for row in recipe.against:
        if row not in recipe.rows:
            raise unknown_name(f"row in {where}, which is against it, called", row, recipe.rows)
    if (recipe.over_clients == INCENTIVE) != bool(recipe.against):
        raise FedStrataError(
            f"{where} has to name the rows that an incentive is measured against, and for an incentive only: "
            'over_clients = "incentive" and against = ["Local", "FedAvg"].'
        )
    if recipe.over_clients and recipe.claims:
        raise FedStrataError(f"{where} has a number of all runs together, so that no claim can be tested by its runs.")


def _refuse_unknown_metrics(recipe: Recipe, where: str) -> None:
    """Refuse numbers of models that nothing measures, before runs are made for them; files that are imported may."""
    numbers = (recipe.number, *(one["number"] for one in recipe.own.values() if "number" in one))
    for number in dict.fromkeys(numbers):
        label, _, rest = number.partition(".")
        found = _METRIC.fullmatch(rest)
        if label not in LABELS or label == "train":
            continue
        name, known = found["name"] if found else rest, (*_ALWAYS_MEASURED, *scores.metrics.names())
        if name not in known and "imports" not in recipe.shared:
            raise unknown_name(f"metric, as {where} has it in '{number}',", name, known)
        _refuse_odd_statistic(number, found["statistic"] if found else None, label, recipe, where)


def _refuse_odd_statistic(number: str, statistic: str | None, label: str, recipe: Recipe, where: str) -> None:
    """Refuse what is no statistic over clients, or one where there are no clients, or each has its own number."""
    known = () if recipe.over_clients or label in _NOT_OF_CLIENTS else (*describe_clients(()), WEIGHTED)
    if known and statistic is None:
        raise FedStrataError(
            f"{where} reports '{number}', of which each client has its own; write '{number}.{known[0]}', or another "
            f"one of {', '.join(known)}."
        )
    if not known and statistic is not None:
        whole = number.removesuffix(f".{statistic}")
        raise FedStrataError(f"{where} reports '{number}', which is not summed up over clients; write '{whole}'.")
    if statistic is not None and statistic not in known:
        raise unknown_name(f"statistic over clients, as {where} has it in '{number}', called", statistic, known)


def _refuse_unknown_columns(recipe: Recipe, where: str) -> None:
    """Refuse rows that are run in columns which there are not, and so would not be run."""
    for (row, _), said in recipe.own.items():
        for column in said.get("columns", ()):
            if column not in recipe.columns:
                raise unknown_name(f"column in {where}, which the row '{row}' names, called", column, recipe.columns)


def _refuse_uncounted(recipe: Recipe, where: str) -> None:
    """Refuse a ± of which nobody says over how many runs it is: nothing can be made of it."""
    for (row, column), number in recipe.published.items():
        own = recipe.of_cell(row, column)
        if number.std is not None and own.spread != "layers" and "published_seeds" not in recipe.told(row, column):
            raise FedStrataError(
                f"'{PUBLISHED}' has a std of '{recipe.name}' in the row '{row}' and the column '{column}', but {where} "
                "does not say of how many runs; write it like published_seeds = 3, there or for all of the paper."
            )


def _unit_of(number: str, over_clients: str) -> str:
    return {VARIANCE: "plain", INCENTIVE: "percent"}.get(over_clients, unit_of(number))


def unit_of(number: str) -> str:
    """Papers write accuracies in percent, and everything else as it is, such as seconds."""
    if number.endswith(SECONDS):
        return "seconds"
    return "percent" if any(word in number for word in _FRACTIONS) else "plain"


def _read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Read a file of a recipe. Files to import are looked for from its folder on."""
    where = f"'{path.parent.name}/{path.name}'"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedStrataError(f"{where} is not a TOML file: {error}.") from None
    experiment = content.get("experiment")
    if isinstance(experiment, dict) and "imports" in experiment:
        files = Experiment(imports=experiment["imports"]).imports
        experiment["imports"] = [text if read_pinned(text) else str(path.parent / text) for text in files]
    return content, where


def _text(content: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(content.get(key), str):
        raise FedStrataError(f'{where} has no {key}; write it like {key} = "...".')
    return str(content[key])


def _tables(content: Mapping[str, Any], key: str, where: str) -> Sequence[Mapping[str, Any]]:
    given = content.get(key, ())
    if not isinstance(given, list | tuple) or not all(isinstance(one, Mapping) for one in given):
        raise FedStrataError(f"The {key} of {where} are no tables: {given!r}; write each below a line [[{key}]].")
    return given


def _tables_of_cells(content: Mapping[str, Any], where: str) -> Mapping[str, Mapping[str, Any]]:
    given = content.get("cells", {})
    if not isinstance(given, Mapping):
        raise FedStrataError(f"The cells of {where} are no table of rows and columns: {given!r}.")
    for row, of_row in given.items():
        if not isinstance(of_row, Mapping) or not all(isinstance(one, Mapping) for one in of_row.values()):
            raise FedStrataError(
                f"The [cells] of {where} have {of_row!r} in the row '{row}'; write its columns, and what each changes, "
                f'like "{row}" = {{ "a column" = {{ rounds = 3 }} }}.'
            )
    return given


def _refuse_odd_values(said: Mapping[str, Any], where: str, lists: Sequence[str] = ()) -> None:
    """Refuse values that are not of their keys' kind, in a file or in a part of it; ``lists`` are so only there."""
    for key, value in said.items():
        possible = ""
        if key in _TEXTS and not isinstance(value, str):
            possible = f'a text, {key} = "..."'
        elif key in _COUNTS and (type(value) is not int or value < 1):
            possible = "a whole number of at least 1"
        elif key in _FLAGS and not isinstance(value, bool):
            possible = "true or false"
        elif key in (*_LISTS, *lists) and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            possible = f'a list of names, {key} = ["..."]'
        elif key in _NAMES:
            _one_of(value, _NAMES[key], key, where)
        if possible:
            raise FedStrataError(f"The {key} of {where} is {value!r}; write {possible}.")


def _one_of(given: object, known: Sequence[Name], key: str, where: str) -> Name:
    for name in known:
        if name == given:
            return name
    raise unknown_name(f"{key}, which {where} asks for, called", str(given), known)


def _refuse_unknown(content: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise unknown_name(f"key in {where} called", key, known)
