"""Numbers that are computed over clients, of all runs together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.papers.over_clients import Clients, number_over_clients
from fedstrata.papers.reading import Recipe, read_papers
from fedstrata.significance import Estimate

VARIANCE = Recipe(
    "mine", "table1", "A table", "table", number="client_after.f1", over_clients="variance", middle="median"
)
INCENTIVE = replace(VARIANCE, over_clients="incentive", against=("Local", "FedAvg"))
OWN: Clients = {0: (0.1, 0.9), 1: (0.3, 0.5), 2: (0.2, 0.1)}
"""Medians 0.2 and 0.5, means 0.2 and 0.5 too."""
UNEVEN: Clients = {0: (0.1, 0.9), 1: (0.3, 0.5), 2: (0.8, 0.1)}
"""Medians 0.3 and 0.5, means 0.4 and 0.5."""


def number_of(recipe: Recipe, own: Clients, *against: Clients) -> float | None:
    found = number_over_clients(recipe, own, against)
    return None if found is None else found.mean


def test_the_variance_is_that_of_the_clients_own_middles() -> None:
    assert number_of(VARIANCE, OWN) == pytest.approx(0.15**2)
    assert number_of(VARIANCE, UNEVEN) == pytest.approx(0.1**2)
    assert number_of(replace(VARIANCE, middle="mean"), UNEVEN) == pytest.approx(0.05**2)
    of_each_run = [0.4**2, 0.1**2, 0.05**2]
    assert number_of(VARIANCE, OWN) != pytest.approx(sorted(of_each_run)[1])  # which is something else


@pytest.mark.parametrize(
    ("local", "fedavg", "expected"),
    [
        ({0: (0.1, 0.4)}, {0: (0.0, 0.3)}, 100.0),
        ({0: (0.2, 0.4)}, {0: (0.0, 0.3)}, 50.0),  # as well is not better
        ({0: (0.1, 0.4)}, {0: (0.3, 0.6)}, 0.0),
        ({0: (0.1, math.nan)}, {0: (0.0, 0.3)}, 100.0),  # a client without a number is not counted
    ],
)
def test_the_incentive_is_the_part_that_fares_better_in_the_middle_of_all_runs(
    local: Clients, fedavg: Clients, expected: float
) -> None:
    local, fedavg = (dict.fromkeys(range(3), one[0]) for one in (local, fedavg))
    assert number_of(INCENTIVE, OWN, local, fedavg) == expected


def test_of_a_loss_less_is_better() -> None:
    losses = replace(INCENTIVE, number="client_after.loss")
    assert number_of(losses, {0: (1.0, 3.0)}, {0: (2.0, 2.0)}, {0: (2.0, 2.0)}) == 50.0
    assert number_of(losses, {0: (1.0, 1.0)}, {0: (2.0, 2.0)}, {0: (2.0, 2.0)}) == 100.0


def test_only_seeds_that_all_rows_have_count() -> None:
    assert number_over_clients(INCENTIVE, OWN, [{1: (0.4, 0.4), 5: (0.0, 0.0)}, {1: (0.1, 0.1)}]) == Estimate(
        50.0, None, 1
    )
    assert number_over_clients(INCENTIVE, OWN, [{}, OWN]) is None
    assert number_over_clients(VARIANCE, {}) is None


def test_its_error_is_found_by_drawing_runs_anew() -> None:
    """Two runs: a fourth of all drawings has only the first, a fourth only the second, the rest both."""
    found = number_over_clients(VARIANCE, {0: (0.0, 0.0), 1: (0.0, 4.0)})
    assert found is not None
    assert found.mean == pytest.approx(1.0)  # of the middles 0 and 2
    values = [0.0, 4.0, 1.0, 1.0]
    mean = sum(values) / 4
    expected = math.sqrt(sum((value - mean) ** 2 for value in values) / 4)
    assert found.std == pytest.approx(expected, rel=0.1)
    assert found == number_over_clients(VARIANCE, {0: (0.0, 0.0), 1: (0.0, 4.0)})
    same = number_over_clients(VARIANCE, dict.fromkeys(range(5), (0.0, 1.0)))
    assert same is not None
    assert same.std == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('over_clients = "spread"', "'mine/table1.toml' asks for, called 'spread'"),
        ('over_clients = "incentive"', "has to name the rows that an incentive is measured against"),
        ('against = ["A"]', "for an incentive only"),
        ('over_clients = "incentive"\nagainst = ["C"]', "called 'C'"),
        ('over_clients = "variance"\n[[claims]]\nrow = "A"\nover = "B"', "no claim can be tested by its runs"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "recipes" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "published.csv").write_text("paper,part,row,column,mean,std,note\n")
    (folder / "paper.toml").write_text('title = "A"\ncitation = "B"\nlink = ""\n')
    rows = '[rows]\nA = "fedavg"\nB = "local"\n'
    head, _, claims = text.partition("\n[[claims]]")
    (folder / "table1.toml").write_text(f'title = "T"\n{head}\n{rows}' + (f"[[claims]]{claims}\n" if claims else ""))
    with pytest.raises(FedStrataError, match=words):
        read_papers(tmp_path)
