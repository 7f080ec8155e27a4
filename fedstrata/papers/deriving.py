"""Columns that are made of others: the mean over a row's columns, and the mean rank of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstrata.papers.judging import NOT_COMPARABLE, NOT_PUBLISHED, NOT_RUN, Judged, JudgedCell
from fedstrata.papers.reading import Recipe
from fedstrata.ranks import mean_ranks
from fedstrata.runs.metrics import higher_is_better
from fedstrata.significance import Estimate
from fedstrata.verdicts import cell_verdict

RANKS_AGREE = 1.0
"""Mean ranks that differ by less than a place are alike."""


def with_derived(judged: Judged, others: Mapping[str, Judged] | None = None) -> Judged:
    """Add the columns that are made of others, of the same part or of another one."""
    recipe = judged.recipe
    added: list[JudgedCell] = []
    rows = list(dict.fromkeys(one.row for one in judged.cells)) or list(recipe.rows)
    for column in recipe.columns:
        told = recipe.told("", column)
        source = judged if "of" not in told else (others or {}).get(told["of"])
        if "derived" in told and source is not None:
            numbers = _means(source, rows) if told["derived"] == "mean" else _ranks(source)
            added += [_cell(recipe, row, column, numbers.get(row), source, told["derived"]) for row in rows]
    return Judged(recipe, (*judged.cells, *added), judged.claims)


def _means(judged: Judged, rows: Sequence[str]) -> dict[str, float]:
    """The mean over all columns of a row, where all of them were run."""
    found = {row: [one.ours.mean for one in judged.cells if one.row == row and one.ours is not None] for row in rows}
    return {row: sum(numbers) / len(numbers) for row, numbers in found.items() if _whole(judged, row, len(numbers))}


def _whole(judged: Judged, row: str, run: int) -> bool:
    return run > 0 and run == sum(judged.recipe.has_run(row, column) for column in judged.recipe.columns)


def _ranks(judged: Judged) -> dict[str, float]:
    """The mean rank of each row over the columns that were run for all rows."""
    rows = list(dict.fromkeys(one.row for one in judged.cells))
    run = {(one.row, one.column): one.ours.mean for one in judged.cells if one.ours is not None}
    columns = [column for column in judged.recipe.columns if all((row, column) in run for row in rows)]
    if len(rows) < 2 or not columns:
        return {}
    best_is_high = not judged.recipe.number.endswith(".std") and higher_is_better(judged.recipe.number) is not False
    return mean_ranks({row: [run[row, column] for column in columns] for row in rows}, best_is_high)


def _cell(recipe: Recipe, row: str, column: str, value: float | None, source: Judged, kind: str) -> JudgedCell:
    published = recipe.published_at(row, column)
    if value is None:
        return JudgedCell(row, column, published, None, NOT_RUN, published.note)
    if any(one.verdict == NOT_COMPARABLE for one in source.cells):
        verdict = NOT_COMPARABLE
    elif published.mean is None:
        verdict = NOT_PUBLISHED
    else:
        margin = RANKS_AGREE if kind == "mean_rank" or recipe.unit == "percent" else 0.01 * abs(published.mean)
        verdict = cell_verdict(published.mean, published.std, [value], margin=margin)
    return JudgedCell(row, column, published, Estimate(value, None, 1), verdict, published.note)
