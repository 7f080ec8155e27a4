"""What our numbers say: each cell beside the published one, and each claim of who beats whom, in a word."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedstrata.papers.cells import Cell
from fedstrata.papers.keeping import Kept
from fedstrata.papers.over_clients import number_over_clients
from fedstrata.papers.published import Published
from fedstrata.papers.reading import INCENTIVE, SECONDS, Recipe, StatedClaim
from fedstrata.ranks import RankCorrelation, rank_correlation
from fedstrata.report.formats import numbered
from fedstrata.runs.metrics import higher_is_better
from fedstrata.significance import Estimate, estimate
from fedstrata.verdicts import (
    TELLING,
    Claim,
    allowed_difference,
    cell_verdict,
    claim_verdict,
    deviation_of,
    difference_of_groups,
    middle_of,
    number_verdict,
    reach_of_statistic,
)

NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
NOT_PUBLISHED = "not published"
ROWS_OF_AN_ORDER = 3


@dataclass(frozen=True)
class JudgedCell:
    """A cell of a table: what the paper says, what we found over our seeds (in its mean or median), what that means."""

    row: str
    column: str
    published: Published
    ours: Estimate | None
    verdict: str
    problem: str = ""
    """Why it was not run, or not with all seeds that were asked for."""
    within: float | None = None
    """By how much the two may differ and agree; none where there is nothing to compare."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it: what the paper's number is known to be wrong in, and why there is none of ours."""
        return tuple(filter(None, (self.published.note, self.problem)))

    @property
    def difference(self) -> float | None:
        """Ours minus the published one."""
        if self.ours is None or self.published.mean is None:
            return None
        return self.ours.mean - self.published.mean


@dataclass(frozen=True)
class JudgedClaim:
    """A claim of the paper, with what seeds that both rows have say of it.

    ``published`` is the difference of the published numbers and half of its 95 % interval by their own spreads; none of
    the latter where they have none. ``single`` tells that each is a single number, without any deviation over runs.
    ``own_setting`` tells that these columns are settings of ours, ``reading`` that it is of another reading of a row,
    beside that row's own claim.
    """

    stated: StatedClaim
    columns: tuple[str, ...]
    found: Claim | None
    word: str
    published: tuple[float, float | None] | None = None
    single: bool = False
    own_setting: bool = False
    reading: bool = False


@dataclass(frozen=True)
class Order(RankCorrelation):
    """How alike the paper's order of rows and ours are, and of how many seeds the rows are: the fewest, and the most.

    Where these are not the same, rows differ by their seeds, too.
    """

    seeds: tuple[int, int]


@dataclass(frozen=True)
class Judged:
    """A table or a figure with all its verdicts."""

    recipe: Recipe
    cells: tuple[JudgedCell, ...]
    claims: tuple[JudgedClaim, ...]

    @property
    def orders(self) -> dict[str, Order]:
        """How alike the paper's order of rows and ours are, by column, where there are at least three of both.

        Where all numbers of one side are the same, there is no order; further readings of a row have no place in it.
        """
        found: defaultdict[str, list[tuple[float, Estimate]]] = defaultdict(list)
        for one in self.cells:
            if one.ours is not None and one.published.mean is not None and self.recipe.read_as(one.row) == one.row:
                found[one.column].append((one.published.mean, one.ours))
        return {
            column: _order(pairs)
            for column, pairs in found.items()
            if len(pairs) >= ROWS_OF_AN_ORDER and all(len(set(side)) > 1 for side in _sides(pairs))
        }

    def lines(self) -> list[dict[str, Any]]:
        """The cells as flat lines, for a CSV."""
        return [
            {
                "paper": self.recipe.paper,
                "part": self.recipe.part,
                "row": one.row,
                "column": one.column,
                "published": one.published.mean,
                "published_std": one.published.std,
                "ours": None if one.ours is None else round(one.ours.mean, 6),
                "ours_std": None if one.ours is None or one.ours.std is None else round(one.ours.std, 6),
                "seeds": 0 if one.ours is None else one.ours.count,
                "difference": None if one.difference is None else round(one.difference, 6),
                "agrees_within": None if one.within is None else round(one.within, 6),
                "verdict": one.verdict,
                "note": " ".join(one.notes),
            }
            for one in self.cells
        ]

    def told(self) -> dict[str, Any]:
        """All of it as plain data."""
        claims = [
            {
                **asdict(claim.stated),
                "columns": list(claim.columns),
                "verdict": claim.word,
                "published": claim.published,
                "published_without_deviation": claim.single,
                "own_setting": claim.own_setting,
                "reading": claim.reading,
                **({} if claim.found is None else {"found": asdict(claim.found)}),
            }
            for claim in self.claims
        ]
        return {
            "paper": self.recipe.paper,
            "part": self.recipe.part,
            "title": self.recipe.title,
            "cells": self.lines(),
            "claims": claims,
            "orders": {column: asdict(found) for column, found in self.orders.items()},
        }


def _order(pairs: Sequence[tuple[float, Estimate]]) -> Order:
    """Compare the order of published numbers with that of ours."""
    found = rank_correlation(*_sides(pairs))
    counts = [ours.count for _, ours in pairs]
    return Order(**asdict(found), seeds=(min(counts), max(counts)))


def _sides(pairs: Sequence[tuple[float, Estimate]]) -> tuple[list[float], list[float]]:
    """The published numbers, and ours."""
    return [published for published, _ in pairs], [ours.mean for _, ours in pairs]


LINE = ("paper", "part", "row", "column", "published", "published_std", "ours", "ours_std", "seeds", "difference",
        "agrees_within", "verdict", "note")  # fmt: skip
"""The columns of the CSV of cells."""


def judge(
    recipe: Recipe, cells: Sequence[Cell], kept: Iterable[Kept], problems: Mapping[str, str] | None = None
) -> Judged:
    """Judge the cells that were asked for; only runs with the paper's own settings are called what they show."""
    pairs = list(dict.fromkeys((cell.row, cell.column) for cell in cells))
    smaller = {(cell.row, cell.column) for cell in cells if not cell.comparable}
    return judge_pairs(recipe, pairs, kept, smaller, _reasons(cells, problems or {}))


def _reasons(cells: Sequence[Cell], problems: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Say why cells have no number; the seeds are named where it is not the same with all that were asked for."""
    asked: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    having: defaultdict[tuple[str, str], defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        asked[cell.row, cell.column].add(cell.seed)
        if cell.settings in problems:
            having[cell.row, cell.column][problems[cell.settings]].append(cell.seed)
    return {
        pair: " ".join(
            text if set(seeds) == asked[pair] else f"{numbered('Seed', seeds)}: {text}" for text, seeds in texts.items()
        )
        for pair, texts in having.items()
    }


def judge_pairs(
    recipe: Recipe,
    pairs: Sequence[tuple[str, str]],
    kept: Iterable[Kept],
    smaller: Collection[tuple[str, str]],
    why: Mapping[tuple[str, str], str] | None = None,
) -> Judged:
    """Judge cells by their rows and columns; ``smaller`` runs, with other settings than the paper's, show nothing."""
    values: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    clients: defaultdict[tuple[str, str], dict[int, Sequence[float]]] = defaultdict(dict)
    for one in kept:
        if (one.paper, one.part) == (recipe.paper, recipe.part):
            values[one.row, one.column][one.seed] = one.value
            clients[one.row, one.column][one.seed] = one.clients

    def of_cell(pair: tuple[str, str]) -> JudgedCell:
        own, problem = recipe.of_cell(*pair), (why or {}).get(pair, "")
        if recipe.over_clients:
            against = [clients[row, pair[1]] for row in recipe.against]
            return _judge_over_clients(
                own, pair, number_over_clients(own, clients[pair], against), pair in smaller, problem
            )
        return _judge_cell(own, pair, list(values[pair].values()), pair in smaller, problem)

    judged = tuple(map(of_cell, pairs))
    claims = (claim for stated in recipe.claims for claim in _judge_claim(recipe, stated, pairs, values, smaller))
    return Judged(recipe, judged, tuple(claims))


def _judge_cell(
    recipe: Recipe, pair: tuple[str, str], ours: Sequence[float], smaller: bool, problem: str
) -> JudgedCell:
    published, found = recipe.published_at(*pair), _summed_up(recipe, ours)
    if found is None:
        return JudgedCell(*pair, published, None, NOT_RUN, problem)
    if smaller:
        return JudgedCell(*pair, published, found, NOT_COMPARABLE, problem)
    verdict, within = verdict_on(recipe, published, ours)
    return JudgedCell(*pair, published, found, verdict, problem, within)


def verdict_on(recipe: Recipe, published: Published, ours: Sequence[float]) -> tuple[str, float | None]:
    """Say in a word what our runs, with the paper's settings, are to its number, and by how much they may differ.

    Seconds of two devices are nothing to each other.
    """
    if published.mean is None:
        return NOT_PUBLISHED, None
    if recipe.number.endswith(SECONDS):
        return NOT_COMPARABLE, None
    known = (published_deviation(recipe, published), ours, recipe.published_seeds)
    margin = _margin(recipe, published.mean)
    return cell_verdict(published.mean, *known, margin, recipe.middle), allowed_difference(
        *known, margin, recipe.middle
    )


def _judge_over_clients(
    recipe: Recipe, pair: tuple[str, str], ours: Estimate | None, smaller: bool, problem: str
) -> JudgedCell:
    """Judge a number that is computed over clients, of all runs together."""
    published = recipe.published_at(*pair)
    if ours is None:
        return JudgedCell(*pair, published, None, NOT_RUN, problem)
    if smaller or published.mean is None:
        return JudgedCell(*pair, published, ours, NOT_COMPARABLE if smaller else NOT_PUBLISHED, problem)
    margin = _margin(recipe, published.mean)
    within = max(margin, reach_of_statistic(ours.std, ours.count, recipe.published_seeds))
    word = number_verdict(published.mean, ours.mean, within, TELLING * margin)
    return JudgedCell(*pair, published, ours, word, problem, within)


def published_deviation(recipe: Recipe, published: Published) -> float | None:
    """The standard deviation of single runs behind a published number, by what the paper's ± is."""
    return deviation_of(published.std, recipe.spread, recipe.published_seeds, recipe.middle)


def _summed_up(recipe: Recipe, ours: Sequence[float]) -> Estimate | None:
    """Sum up our runs as the paper does its own; the deviation is that over seeds."""
    found = estimate(ours)
    return found if found is None else replace(found, mean=middle_of(ours, recipe.middle))


def _margin(recipe: Recipe, mean: float) -> float:
    """A point of a percentage, or a hundredth of a number that is none."""
    return {"percent": 1.0, "percent of dense": 1.0, "fraction": 0.01}.get(recipe.unit, 0.01 * abs(mean))


def more_is_better(recipe: Recipe) -> bool:
    """Tell whether a row with larger numbers is the better one; of metrics, they themselves know.

    A loss, a variance over clients, bytes, seconds and operations should be small, an incentive large.
    """
    if recipe.over_clients:
        return recipe.over_clients == INCENTIVE
    number = recipe.number
    costs = number.endswith((".std", SECONDS, "flops")) or number.startswith("bytes.")
    return not costs and higher_is_better(number) is not False


def _sign(recipe: Recipe) -> int:
    return 1 if more_is_better(recipe) else -1


def _judge_claim(
    recipe: Recipe,
    claim: StatedClaim,
    pairs: Sequence[tuple[str, str]],
    values: defaultdict[tuple[str, str], dict[int, float]],
    smaller: Collection[tuple[str, str]],
) -> list[JudgedClaim]:
    """Judge a claim by the differences of the same seed, each the mean over the claim's columns.

    They are by how much the one row is better than the other, whichever way the number should go. Where columns have
    numbers of their own, such as accuracies and bytes, the claim is one of each.
    """
    named = claim.columns or tuple(recipe.columns)
    alike: defaultdict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for column in named:
        if (claim.row, column) in pairs and (claim.over, column) in pairs:
            own = recipe.of_cell(claim.row, column)
            alike[own.number, own.unit, more_is_better(own)].append(column)
    return [_judge_alike(recipe, claim, tuple(columns), values, smaller) for columns in alike.values()]


def _judge_alike(
    recipe: Recipe,
    claim: StatedClaim,
    columns: tuple[str, ...],
    values: defaultdict[tuple[str, str], dict[int, float]],
    smaller: Collection[tuple[str, str]],
) -> JudgedClaim:
    """Judge a claim over columns of the same number."""
    own = recipe.of_cell(claim.row, columns[0])
    of_columns = [(values[claim.row, one], values[claim.over, one]) for one in columns]
    seeds = [seed for seed in of_columns[0][0] if all(seed in a and seed in b for a, b in of_columns)]
    published, single = _published_claim(recipe, claim, columns)
    in_ours = all(column in recipe.own_settings for column in columns)
    reading = any(recipe.read_as(row) != row for row in (claim.row, claim.over))
    if not seeds:
        return JudgedClaim(claim, columns, None, NOT_RUN, published, single, in_ours, reading)
    sign = _sign(own)
    differences = [sign * sum(a[seed] - b[seed] for a, b in of_columns) / len(columns) for seed in seeds]
    found = claim_verdict(differences, claim.by, practical=1.0 if own.unit == "percent" else 0.01)
    other = any((row, column) in smaller for row in (claim.row, claim.over) for column in columns)
    word = NOT_COMPARABLE if other else found.word
    return JudgedClaim(claim, columns, found, word, published, single, in_ours, reading)


def _published_claim(
    recipe: Recipe, claim: StatedClaim, columns: Sequence[str]
) -> tuple[tuple[float, float | None] | None, bool]:
    """What the paper's own numbers say of its claim, over all its columns, and whether they are single numbers."""
    found = []
    for column in columns:
        pair = [_published_group(recipe.of_cell(row, column), row, column) for row in (claim.row, claim.over)]
        if pair[0] is None or pair[1] is None:
            return None, False
        found.append(difference_of_groups(pair[0], pair[1], recipe.middle))
    if not found:
        return None, False
    reaches = [reach for _, reach in found if reach is not None]
    sign = _sign(recipe.of_cell(claim.row, columns[0]))
    mean = sign * sum(difference for difference, _ in found) / len(found)
    whole = len(reaches) == len(found)
    return (mean, math.hypot(*reaches) / len(found) if whole else None), not whole


def _published_group(recipe: Recipe, row: str, column: str) -> tuple[float, float | None, int] | None:
    """A published number, the deviation of single runs and their number."""
    published = recipe.published_at(row, column)
    if published.mean is None:
        return None
    return published.mean, published_deviation(recipe, published), recipe.published_seeds
