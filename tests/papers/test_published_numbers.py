"""The published numbers: those of the papers' texts, whole tables at once, and what their own ranks say of them."""

from __future__ import annotations

import re
from functools import cache
from math import fsum

import pytest

from fedstrata.papers.cells import cells_of
from fedstrata.papers.reading import Recipe, read_papers

SUMS = """
lips | table1 | 6 | 330.82 | 4.15
lips | table2 | 72 | 3563.05 | 52.51
lips | table3 | 12 | 733.18 |
lips | table4 | 12 | 852.38 | 9.06
lips | table5 | 12 | 862.76 | 9.93
lips | table6 | 6 | 266.3 | 2.22
lips | table7 | 18 | 1008.54 | 6.4
ssfl | table1 | 35 | 5186.52 | 44.66
ssfl | table2 | 36 | 4581.26 | 34.4
ssfl | table3 | 15 | 724.99 |
ssfl | table5 | 8 | 426.2 |
ssfl | table6 | 10 | 859.08 |
ssfl | figure3 | 2 | 2.73 |
fedlws | table1 | 143 | 8326.35 |
fedlws | table2 | 20 | 1663.57 |
fedlws | table3 | 15 | 74.242 |
fedlws | table4 | 12 | 655.07 |
fedlws | table5 | 24 | 1356.5 |
fedlws | table6 | 28 | 1563.86 |
fedlws | table7 | 10 | 523.5 |
fedlws | table8 | 15 | 826.03 |
fedlws | table9 | 8 | 618.48 |
fedlws | table10 | 15 | 800.93 |
fedlws | table11 | 28 | 1191.618 |
fedlws | table12 | 4 | 3.845 | 0.077
fedlws | figure1 | 1 | 0.86 |
player | table1 | 96 | 4755.3 | 125.1
player | table2 | 20 | 110.0 |
player | tableA5 | 80 | 56.1238 |
player | tableA6 | 80 | 1418.6 |
player | tableA7 | 96 | 6275.5 | 79.9
player | tableA8 | 80 | 56.36721 |
player | tableA9 | 80 | 1501.7 |
player | tableA10 | 96 | 5346.0 | 156.8
player | tableA11 | 80 | 60.29463 |
player | tableA12 | 80 | 2221.6 |
sparse-ft | table1 | 4 | 343.69 |
sparse-ft | table2 | 7 | 543.42 |
sparse-ft | table3 | 15 | 1199.87 |
sparse-ft | figure2 | 13 | 735.5 |
"""
"""How many numbers a table has, their sum and that of what stands behind ±, added up from the papers' texts."""

HIGHER_IS_BETTER = {
    **dict.fromkeys(("table1", "tableA6", "tableA7", "tableA9", "tableA12"), True),
    **dict.fromkeys(("tableA5", "tableA8", "tableA10", "tableA11"), False),
}
"""PLayer-FL's tables that end with a mean rank."""

SAME = re.compile(r"Table (\d+)'s number for the same setting")

papers = cache(read_papers)


@pytest.mark.parametrize("line", SUMS.strip().splitlines())
def test_all_numbers_of_a_table_together_are_the_papers(line: str) -> None:
    paper, part, count, means, deviations = (word.strip() for word in line.split("|"))
    numbers = papers()[paper].part(part).published.values()
    assert len(numbers) == int(count)
    assert fsum(one.mean or 0.0 for one in numbers) == pytest.approx(float(means), abs=1e-7)
    assert fsum(one.std or 0.0 for one in numbers) == pytest.approx(float(deviations or 0), abs=1e-7)


@pytest.mark.parametrize("part", HIGHER_IS_BETTER)
def test_mean_ranks_are_what_the_numbers_allow_or_have_a_note(part: str) -> None:
    """Equal numbers may have been told apart before they were rounded, so that each has a range of ranks."""
    recipe = papers()["player"].part(part)
    for row, (lowest, highest) in _ranges(recipe, HIGHER_IS_BETTER[part]).items():
        number = recipe.published_at(row, "Mean rank")
        assert number.mean is not None
        assert number.note or lowest - 0.26 < number.mean < highest + 0.26, (part, row, lowest, highest)


def _ranges(recipe: Recipe, higher: bool) -> dict[str, tuple[float, float]]:
    """The lowest and the highest mean rank of each row, however equal numbers are told apart."""
    rows = [row for row in recipe.rows if (row, "Mean rank") in recipe.published]
    columns = [column for column in recipe.columns if column != "Mean rank"]
    found = dict.fromkeys(rows, (0.0, 0.0))
    for column in columns:
        values = {row: (-1 if higher else 1) * (recipe.published_at(row, column).mean or 0.0) for row in rows}
        for row, (lowest, highest) in found.items():
            before = sum(one < values[row] for one in values.values())
            equal = sum(one == values[row] for one in values.values())
            found[row] = lowest + (before + 1) / len(columns), highest + (before + equal) / len(columns)
    return found


def test_numbers_of_figures_are_those_of_the_same_runs_in_a_table() -> None:
    """What a figure has from a table is the number that the table has of a run with the same settings."""
    for figure in (part for paper in papers().values() for part in paper.parts.values()):
        drawn = {pair: one for pair, one in figure.published.items() if SAME.fullmatch(one.note)}
        runs = {(cell.row, cell.column): cell for cell in cells_of(figure, seeds=1)} if drawn else {}
        for pair, number in drawn.items():
            table = papers()[figure.paper].part(SAME.sub(r"table\1", number.note))
            found = {
                (one.mean, one.std)
                for cell in cells_of(table, seeds=1)
                if (cell.settings, cell.recipe.number) == (runs[pair].settings, runs[pair].recipe.number)
                for one in [table.published_at(cell.row, cell.column)]
            }
            assert found == {(number.mean, number.std)}, (figure.name, *pair)
