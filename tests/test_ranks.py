"""Ranks over datasets: the worked example of Demšar 2006, and what must hold for every table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedstrata.errors import FedStrataError
from fedstrata.ranks import critical_difference, friedman, indistinguishable, mean_ranks, rank_correlation, ranks

# Demšar 2006, table 6: AUC of C4.5 on 14 datasets, with the minimal number of examples in a leaf (m) or pruning (cf)
# tuned, or both. On "voting" two are equal as printed and ranked 2 and 3: the last digit of one is lowered here.
DEMSAR = {
    "C4.5": [.763, .599, .954, .628, .882, .936, .661, .583, .775, 1., .940, .619, .972, .957],
    "C4.5+m": [.768, .591, .971, .661, .888, .931, .668, .583, .838, 1., .962, .666, .981, .978],
    "C4.5+cf": [.771, .590, .968, .654, .886, .916, .609, .563, .866, 1., .965, .614, .975, .946],
    "C4.5+m+cf": [.798, .569, .967, .657, .898, .931, .685, .625, .875, 1., .962, .669, .974, .970],
}  # fmt: skip
TABLES = st.integers(3, 5).flatmap(
    lambda methods: st.integers(2, 6).flatmap(
        lambda datasets: st.lists(
            st.lists(st.integers(0, 4).map(float), min_size=datasets, max_size=datasets),
            min_size=methods,
            max_size=methods,
        )
    )
)


def named(rows: list[list[float]]) -> dict[str, list[float]]:
    return {f"method {number}": row for number, row in enumerate(rows)}


def test_the_published_example_of_ranks() -> None:
    mean = mean_ranks(DEMSAR)
    assert {name: round(rank, 3) for name, rank in mean.items()} == {
        "C4.5": 3.143, "C4.5+m": 2.0, "C4.5+cf": 2.893, "C4.5+m+cf": 1.964
    }  # fmt: skip
    # The paper's chi-square, 9.28, leaves ties uncorrected; its F of 3.69 follows from it.
    plain = 12 * 14 / (4 * 5) * (sum(rank**2 for rank in mean.values()) - 4 * 5**2 / 4)
    assert plain == pytest.approx(9.28, abs=0.005)
    assert 13 * plain / (14 * 3 - plain) == pytest.approx(3.69, abs=0.005)
    tested = friedman(DEMSAR)
    # Ties: mushroom four equals (4^3 - 4 = 60), iris, lung cancer and primary tumor two each (6): 78 of 14 * 60.
    assert tested.statistic == pytest.approx(plain / (1 - 78 / 840))
    assert tested.p_value < 0.05
    assert tested.f_statistic > 3.69
    assert (tested.methods, tested.datasets) == (4, 14)


def test_the_published_critical_differences() -> None:
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert critical_difference(4, 14, 0.90) == pytest.approx(1.12, abs=0.005)
    # Demšar 2006, table 5(a), q at 0.05; the difference of k methods over k (k + 1) / 6 datasets is q itself.
    for methods, quantile in ((2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)):
        factor = math.sqrt(methods * (methods + 1) / 6)
        assert critical_difference(methods, 1) / factor == pytest.approx(quantile, abs=0.0011)


def test_bars_of_the_published_example() -> None:
    mean = mean_ranks(DEMSAR)
    at_ten = indistinguishable(mean, critical_difference(4, 14, 0.90))
    assert at_ten == [("C4.5+m+cf", "C4.5+m", "C4.5+cf"), ("C4.5+cf", "C4.5")]
    assert indistinguishable(mean, critical_difference(4, 14)) == [("C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5")]
    assert indistinguishable({"a": 1.0, "b": 3.0}, 1.0) == []


def test_lower_is_better_and_a_diverged_run_is_the_worst_either_way() -> None:
    assert mean_ranks({"a": [1.0], "b": [2.0], "c": [math.nan]}) == {"a": 2.0, "b": 1.0, "c": 3.0}
    assert mean_ranks({"a": [1.0], "b": [2.0], "c": [math.nan]}, higher_is_better=False) == {"a": 1.0, "b": 2.0, "c": 3}


@given(TABLES)
def test_ranks_of_a_dataset_sum_to_those_without_ties(rows: list[list[float]]) -> None:
    count = len(rows)
    table = np.array(list(ranks(named(rows)).values()))
    assert np.allclose(table.sum(axis=0), count * (count + 1) / 2)
    assert sum(mean_ranks(named(rows)).values()) == pytest.approx(count * (count + 1) / 2)


@given(TABLES, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_the_order_of_methods_and_datasets_does_not_matter(rows: list[list[float]], random) -> None:  # type: ignore[no-untyped-def]
    table = named(rows)
    names, places = list(table), list(range(len(rows[0])))
    random.shuffle(names)
    random.shuffle(places)
    other = {name: [table[name][place] for place in places] for name in names}
    assert mean_ranks(other) == pytest.approx(mean_ranks(table))
    ones, others = friedman(table), friedman(other)
    assert ones.statistic == pytest.approx(others.statistic, nan_ok=True)


@given(TABLES)
@settings(max_examples=40)
def test_friedman_is_scipys(rows: list[list[float]]) -> None:
    ours = friedman(named(rows))
    if all(len(set(column)) == 1 for column in zip(*rows, strict=True)):
        assert math.isnan(ours.statistic)
        return
    theirs = stats.friedmanchisquare(*rows)
    assert ours.statistic == pytest.approx(theirs.statistic, abs=1e-9)
    assert ours.p_value == pytest.approx(theirs.pvalue, abs=1e-9)
    assert (ours.f_statistic > 0) == (ours.statistic > 1e-9)


def test_the_same_order_everywhere_is_certain() -> None:
    tested = friedman({"a": [3.0, 3.0], "b": [2.0, 2.0], "c": [1.0, 1.0]})
    assert (tested.statistic, tested.f_statistic, tested.f_p_value) == (pytest.approx(4.0), math.inf, 0.0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a": [1.0, 2.0], "b": [1.0, 2.0]}, "at least 3 methods"),
        ({"a": [1.0], "b": [1.0], "c": [2.0]}, "at least 2 datasets"),
        ({"a": [1.0, 2.0], "b": [1.0], "c": [2.0]}, "Leave out what not all have"),
        ({}, "no numbers"),
    ],
)
def test_tables_that_cannot_be_tested_are_refused(table: dict[str, list[float]], words: str) -> None:
    with pytest.raises(FedStrataError, match=words):
        friedman(table)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=8))
@settings(max_examples=40)
def test_correlations_are_scipys(pairs: list[tuple[int, int]]) -> None:
    ones, others = ([float(pair[place]) for pair in pairs] for place in (0, 1))
    found = rank_correlation(ones, others)
    if len(set(ones)) == 1 or len(set(others)) == 1:
        assert math.isnan(found.spearman)
        assert math.isnan(found.kendall)
        return
    assert found.spearman == pytest.approx(stats.spearmanr(ones, others).statistic, abs=1e-9)
    assert found.kendall == pytest.approx(stats.kendalltau(ones, others).statistic, abs=1e-9)


def test_correlations_by_hand() -> None:
    # Four methods, two neighbours swapped: 1 - 6 * 2 / (4 * 15) = 0.8, and five of six pairs agree: 4 / 6.
    found = rank_correlation([4, 3, 2, 1], [40, 20, 30, 10])
    assert (found.spearman, found.kendall, found.count) == (pytest.approx(0.8), pytest.approx(2 / 3), 4)
    assert rank_correlation([1, 2], [2, 1]).spearman == -1
    assert math.isnan(rank_correlation([1, math.nan], [1, 2]).kendall)
    with pytest.raises(FedStrataError, match="here are 2 and 1"):
        rank_correlation([1, 2], [1])
