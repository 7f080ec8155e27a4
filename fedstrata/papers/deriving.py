"""Columns that are made of others: the mean over a row's columns, and the mean rank of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedstrata.papers.cells import Cell
from fedstrata.papers.judging import (
    NOT_COMPARABLE,
    NOT_PUBLISHED,
    NOT_RUN,
    Judged,
    JudgedCell,
    judge,
    more_is_better,
    verdict_on,
)
from fedstrata.papers.keeping import Kept
from fedstrata.papers.published import Published
from fedstrata.papers.reading import Paper, Recipe
from fedstrata.papers.words import seeds_in_words
from fedstrata.ranks import Friedman, friedman, mean_ranks
from fedstrata.significance import Estimate

RANKS_AGREE = 1.0
"""Mean ranks agree where they differ by less than a place: two rows that change places do not."""
ROUNDING = 0.06
"""By how much a printed mean of numbers may differ from what these make: papers have one or two decimals."""


def judge_part(
    paper: Paper, recipe: Recipe, cells: Sequence[Cell], kept: Sequence[Kept], problems: Mapping[str, str] | None = None
) -> Judged:
    """Judge a part with all its columns, also those that are made of other parts, whose cells are among these."""
    others = {name: judge_part(paper, paper.part(name), cells, kept, problems) for name in recipe.sources}
    own = [cell for cell in cells if cell.recipe.part == recipe.part]
    return with_derived(judge(recipe, own, kept, problems), others)


def with_derived(judged: Judged, others: Mapping[str, Judged] | None = None) -> Judged:
    """Add the columns that are made of others, of the same part or of another one."""
    recipe = judged.recipe
    added: list[JudgedCell] = []
    for column in recipe.columns:
        told = recipe.told("", column)
        source = judged if "of" not in told else (others or {}).get(told["of"])
        if told.get("derived") == "mean":
            added += _means(recipe, column, source)
        elif told.get("derived") == "mean_rank":
            added += _ranks(recipe, column, source)
    return Judged(recipe, (*judged.cells, *added), judged.claims)


def _rows(recipe: Recipe, column: str, source: Judged | None) -> list[str]:
    """The rows of a derived column: those that the paper has there, or all where it has no numbers at all."""
    asked = {one.row for one in source.cells} if source is not None else set()
    named = [row for row in recipe.rows if row in asked] or list(recipe.rows)
    return [row for row in named if (row, column) in recipe.published] or named


def _means(recipe: Recipe, column: str, source: Judged | None) -> list[JudgedCell]:
    """The mean over all columns of a row, where all of them were run."""
    cells = []
    for row in _rows(recipe, column, source):
        columns = [] if source is None else _common_columns(source, [row])
        whole = source is not None and columns and len(columns) == _columns_with_runs(source.recipe, row)
        value = sum(_table(source, [row], columns)[row]) / len(columns) if source is not None and whole else None
        published = recipe.published_at(row, column)
        if source is not None and (theirs := _published(source.recipe, [row], columns)):
            published = _as_computed(published, sum(theirs[row]) / len(columns) if whole else None)
        word, within = (NOT_RUN, None) if value is None else verdict_on(recipe, published, [value])
        cells.append(_cell(row, column, value, source, published, word, within))
    return cells


def _columns_with_runs(recipe: Recipe, row: str) -> int:
    return sum(recipe.has_run(row, column) for column in recipe.columns)


def _ranks(recipe: Recipe, column: str, source: Judged | None) -> list[JudgedCell]:
    """The mean rank of each row over the columns that were run for all rows.

    Where these are not all columns and rows of the paper, ours is held against the mean rank of the published numbers
    in the same columns and among the same rows, and the note says so; a rank in one column is held against nothing.
    """
    rows = _rows(recipe, column, source)
    columns = [] if source is None else _common_columns(source, rows)
    if source is None or not columns or len(rows) < 2:
        return [_cell(row, column, None, source, recipe.published_at(row, column), NOT_RUN) for row in rows]
    best_is_high = more_is_better(source.recipe)
    ours = mean_ranks(_table(source, rows, columns), best_is_high)
    published = {row: recipe.published_at(row, column) for row in rows}
    fewer_columns = len(columns) < max(_columns_with_runs(source.recipe, row) for row in rows)
    fewer_rows = len(rows) < sum((row, column) in recipe.published for row in recipe.rows)
    theirs = mean_ranks(known, best_is_high) if (known := _published(source.recipe, rows, columns)) else {}
    if not fewer_columns and not fewer_rows:
        published = {row: _as_computed(one, theirs.get(row)) for row, one in published.items()}
    elif fewer_columns and len(columns) == 1:
        note = f"The rank in {columns[0]} alone, which is no mean rank."
        published = {row: Published(None, None, note) for row in rows}
    else:
        over, among = f" over {', '.join(columns)}" * fewer_columns, f" among {', '.join(rows)}" * fewer_rows
        note = f"Mean rank{over}{among} alone, in our numbers and in the published ones."
        published = {row: Published(theirs.get(row), None, note) for row in rows}
    if uneven := _uneven(source, rows, columns):
        published = {
            row: replace(one, note=" ".join(filter(None, (one.note, uneven)))) for row, one in published.items()
        }
    return [
        _cell(row, column, ours[row], source, published[row], _rank_verdict(published[row].mean, ours[row]))
        for row in rows
    ]


def _published(recipe: Recipe, rows: Sequence[str], columns: Sequence[str]) -> dict[str, list[float]]:
    """The published numbers of some rows in some columns; nothing where one of them is missing."""
    found = {row: [recipe.published_at(row, column).mean for column in columns] for row in rows}
    known = {row: [number for number in numbers if number is not None] for row, numbers in found.items()}
    return known if columns and all(len(numbers) == len(columns) for numbers in known.values()) else {}


def _as_computed(printed: Published, computed: float | None) -> Published:
    """Take what the paper's own numbers make instead of what is printed, where these differ by more than rounding."""
    if printed.mean is None or computed is None or abs(printed.mean - computed) < ROUNDING:
        return printed
    note = printed.note or f"Printed is {printed.mean:g}; the paper's own numbers make {computed:.2f}."
    return replace(printed, mean=computed, note=note)


def _rank_verdict(published: float | None, ours: float) -> str:
    """Compare two mean ranks, which no deviation belongs to."""
    if published is None:
        return NOT_PUBLISHED
    if abs(ours - published) < RANKS_AGREE:
        return "agrees"
    return "above" if ours > published else "below"


def _uneven(judged: Judged, rows: Sequence[str], columns: Sequence[str]) -> str:
    """Say that rows are ranked over different seeds, where they are: the seeds make some of the difference."""
    found = [
        one.ours.count for one in judged.cells if one.ours is not None and one.row in rows and one.column in columns
    ]
    few, most = min(found), max(found)
    return f"Rows are ranked over {seeds_in_words(few, most)}, and seeds differ, too." if few < most else ""


def _common_columns(judged: Judged, rows: Sequence[str]) -> list[str]:
    """The columns that were run for all of some rows; those that are made of others are none of them."""
    recipe, run = judged.recipe, {(one.row, one.column) for one in judged.cells if one.ours is not None}
    own = [column for column in recipe.columns if "derived" not in recipe.told("", column)]
    return [column for column in own if all((row, column) in run for row in rows)]


def _table(judged: Judged, rows: Sequence[str], columns: Sequence[str]) -> dict[str, list[float]]:
    run = {(one.row, one.column): one.ours.mean for one in judged.cells if one.ours is not None}
    return {row: [run[row, column] for column in columns] for row in rows}


def friedman_of(judged: Judged) -> Friedman | None:
    """Test whether the rows of a part differ at all over the columns that all of them have; none with too few."""
    recipe = judged.recipe
    ranked = [column for column in recipe.columns if recipe.told("", column).get("derived") == "mean_rank"]
    if not ranked or recipe.sources:
        return None
    rows = _rows(recipe, ranked[0], judged)
    columns = _common_columns(judged, rows)
    return friedman(_table(judged, rows, columns)) if len(rows) > 2 and len(columns) > 1 else None


def _cell(
    row: str, column: str, value: float | None, source: Judged | None, published: Published, verdict: str,
    within: float | None = None,
) -> JudgedCell:  # fmt: skip
    if value is None or source is None:
        missing = [] if source is None else [one for one in source.cells if one.ours is None]
        told = " ".join(dict.fromkeys(one.problem for one in missing if one.problem))
        return JudgedCell(row, column, published, None, NOT_RUN, told)
    if any(one.verdict == NOT_COMPARABLE for one in source.cells):
        return JudgedCell(row, column, published, Estimate(value, None, 0), NOT_COMPARABLE)
    return JudgedCell(row, column, published, Estimate(value, None, 0), verdict, within=within)
