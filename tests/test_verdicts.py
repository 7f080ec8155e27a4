"""The rules by which our runs are held against published numbers, on numbers that were computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.verdicts import cell_verdict, claim_verdict

numbers = st.floats(-100, 100)


def test_a_cell_without_runs_was_not_run() -> None:
    assert cell_verdict(70.0, 1.0, []) == "not run"


@pytest.mark.parametrize(
    ("ours", "word"), [(71.0, "agrees"), (69.0, "agrees"), (71.01, "above"), (68.99, "below"), (math.nan, "below")]
)
def test_without_any_spread_a_point_decides(ours: float, word: str) -> None:
    assert cell_verdict(70.0, None, [ours]) == word
    assert cell_verdict(70.0, math.nan, [ours]) == word


def test_one_seed_of_ours_is_judged_by_the_published_spread() -> None:
    # Two degrees of freedom: 4.3027 * 1 * sqrt(1/3 + 1) = 4.968.
    assert cell_verdict(70.0, 1.0, [74.96]) == "agrees"
    assert cell_verdict(70.0, 1.0, [74.98]) == "above"
    assert cell_verdict(70.0, 1.0, [65.02]) == "below"


def test_spreads_of_both_sides_are_pooled() -> None:
    # Ours: std 2 over 3 seeds; published: 1 over 3. Pooled sqrt((2 * 4 + 2 * 1) / 4) = sqrt(2.5) = 1.5811; four degrees
    # of freedom: 2.7764 * 1.5811 * sqrt(2/3) = 3.5844.
    for shift, word in ((3.58, "agrees"), (3.59, "above")):
        assert cell_verdict(70.0, 1.0, [68 + shift, 70 + shift, 72 + shift]) == word


def test_two_seeds_without_a_published_spread_do_not_agree_with_everything() -> None:
    # std of (0, 2) is sqrt(2): 4.3027 * sqrt(2) * sqrt(1/3 + 1/2) = 5.5547, not 12.706 * ... = 16.4.
    assert cell_verdict(70.0, None, [74.5, 76.5]) == "agrees"
    assert cell_verdict(70.0, None, [74.6, 76.6]) == "above"


def test_a_margin_in_another_unit() -> None:
    assert cell_verdict(0.50, None, [0.55]) == "agrees"
    assert cell_verdict(0.50, None, [0.55], margin=0.01) == "above"


@given(numbers, st.none() | st.floats(0, 10), st.lists(numbers, min_size=1, max_size=5))
def test_above_and_below_mirror_each_other(mean: float, std: float | None, ours: list[float]) -> None:
    mirrored = {"agrees": "agrees", "above": "below", "below": "above"}
    assert cell_verdict(-mean, std, [-value for value in ours]) == mirrored[cell_verdict(mean, std, ours)]


def test_a_claim_is_shown_where_the_interval_lies_above_nothing() -> None:
    # Mean 4, std 2, n = 3: 4.3027 * 2 / sqrt(3) = 4.968. Mean 3, std sqrt(2/3), n = 4: 3.1824 * sqrt(2/3) / 2 = 1.299.
    wide = claim_verdict([2.0, 4.0, 6.0], by=4.8)
    assert wide.word == "undecided"
    assert wide.interval == (pytest.approx(-0.9683, abs=1e-4), pytest.approx(8.9683, abs=1e-4))
    assert wide.p_value == pytest.approx(1 - math.sqrt(12 / 14))
    assert wide.about is True
    narrow = claim_verdict([2.0, 4.0, 3.0, 3.0], by=4.8)
    assert narrow.word == "shown"
    assert narrow.interval == (pytest.approx(3 - 1.29922, abs=1e-4), pytest.approx(3 + 1.29922, abs=1e-4))
    assert narrow.about is False
    assert (narrow.mean, narrow.seeds, narrow.test) == (3.0, 4, "paired t-test")


def test_a_claim_is_not_shown_where_a_difference_that_counts_is_excluded() -> None:
    # Mean 0, std 1, n = 3: 2.484 to either side; half of 6 lies outside, half of 4 inside.
    assert claim_verdict([-1.0, 0.0, 1.0], by=6.0).word == "not shown"
    assert claim_verdict([-1.0, 0.0, 1.0], by=4.0).word == "undecided"
    assert claim_verdict([-0.1, 0.0, 0.1]).word == "not shown"
    assert claim_verdict([-1.0, 0.0, 1.0]).word == "undecided"
    assert claim_verdict([-3.0, -3.1, -2.9], by=1.0).word == "not shown"


def test_one_seed_decides_nothing() -> None:
    alone = claim_verdict([5.0], by=5.0)
    assert (alone.word, alone.mean, alone.interval, alone.p_value, alone.about) == ("undecided", 5.0, None, None, None)
    assert claim_verdict([], by=5.0).word == "undecided"
    assert claim_verdict([5.0, math.nan], by=5.0).word == "undecided"


def test_equal_differences_are_left_to_the_sign_test() -> None:
    assert claim_verdict([0.0, 0.0]).word == "not shown"
    five, six = (claim_verdict([2.0] * count) for count in (5, 6))
    assert (five.word, five.p_value) == ("undecided", 0.0625)
    assert (six.word, six.p_value, six.interval) == ("shown", 0.03125, (2.0, 2.0))


def test_a_claim_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(FedStrataError, match="Turn the claim round"):
        claim_verdict([1.0, 2.0], by=-1.0)


@given(st.lists(numbers, max_size=6), st.none() | st.floats(0.1, 10))
def test_no_claim_is_shown_both_ways(differences: list[float], by: float | None) -> None:
    words = {claim_verdict(differences, by).word, claim_verdict([-one for one in differences], by).word}
    assert words != {"shown"}
    if len(differences) < 2:
        assert words == {"undecided"}
