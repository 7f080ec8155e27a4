"""The rules by which our runs are held against published numbers, on numbers that were computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.verdicts import (
    cell_verdict,
    claim_verdict,
    deviation_of,
    difference_of_groups,
    middle_of,
    number_verdict,
    variance_of_middle,
)

numbers = st.floats(-100, 100)


def test_a_cell_without_runs_was_not_run() -> None:
    assert cell_verdict(70.0, 1.0, []) == "not run"


@pytest.mark.parametrize(
    ("ours", "word"), [(71.0, "agrees"), (69.0, "agrees"), (71.01, "above"), (68.99, "below"), (math.nan, "diverged")]
)
def test_without_any_spread_a_point_decides(ours: float, word: str) -> None:
    assert cell_verdict(70.0, None, [ours]) == word
    assert cell_verdict(70.0, math.nan, [ours]) == word


def test_one_seed_of_ours_is_judged_by_the_published_spread() -> None:
    # Two degrees of freedom: 4.3027 * 1 * sqrt(1/3 + 1) = 4.968.
    assert cell_verdict(70.0, 1.0, [74.96]) == "agrees"
    assert cell_verdict(70.0, 1.0, [74.98]) == "above"
    assert cell_verdict(70.0, 1.0, [65.02]) == "below"


def test_each_side_has_a_spread_of_its_own() -> None:
    # Ours: std 2 over 3 seeds; published: 1 over 3. Variances of the means 4/3 and 1/3, in all 5/3; degrees of freedom
    # (5/3)^2 / ((16/9 + 1/9) / 2) = 50/17 = 2.941, t = 3.2188; 3.2188 * sqrt(5/3) = 4.1554.
    for shift, word in ((4.15, "agrees"), (4.16, "above")):
        assert cell_verdict(70.0, 1.0, [68 + shift, 70 + shift, 72 + shift]) == word


@pytest.mark.parametrize(("published", "ours"), [((1.0, 3), (1.0, 3)), ((2.9, 50), (8.4, 6)), ((8.4, 4), (2.9, 50))])
def test_runs_of_the_same_thing_disagree_in_one_case_of_twenty(published, ours) -> None:
    """Also where few of ours differ more than the many of a paper: pooled, a third of these disagreed."""
    chance, apart, tries = np.random.default_rng(0), 0, 2000
    for _ in range(tries):
        theirs = chance.normal(0, *published)
        word = cell_verdict(theirs.mean(), theirs.std(ddof=1), chance.normal(0, *ours).tolist(), len(theirs), 0.0)
        apart += word in ("above", "below")
    assert 0.02 < apart / tries < 0.08


def test_spreads_may_be_as_small_as_numbers_can_be() -> None:
    assert cell_verdict(0.0, 0.0, [0.0, 5.25e-135]) == "agrees"


def test_two_seeds_without_a_published_spread_do_not_agree_with_everything() -> None:
    # std of (0, 2) is sqrt(2): 4.3027 * sqrt(2) * sqrt(1/3 + 1/2) = 5.5547, not 12.706 * ... = 16.4.
    # Nor is that much to go by: it takes a margin of more than a fifth of that to say that they agree.
    assert cell_verdict(70.0, None, [74.5, 76.5]) == "undecided"
    assert cell_verdict(70.0, None, [74.5, 76.5], margin=1.2) == "agrees"
    assert cell_verdict(70.0, None, [74.6, 76.6]) == "above"


def test_to_agree_says_something_within_five_margins_only() -> None:
    # Of one seed beside 70 +- 1 over three the reach is 4.968, beside 70 +- 1.01 it is 5.018.
    assert [cell_verdict(70.0, std, [70.0]) for std in (1.0, 1.01)] == ["agrees", "undecided"]
    assert [cell_verdict(70.0, std, [75.1]) for std in (1.0, 1.01)] == ["above", "above"]
    assert number_verdict(70.0, 71.0, 5.0, telling=5.0) == "agrees"
    assert number_verdict(70.0, 71.0, 5.1, telling=5.0) == "undecided"
    assert number_verdict(70.0, 71.0, 5.1) == "agrees"


def test_runs_of_which_one_diverged_have_no_middle() -> None:
    for values in ([60.0, math.nan, 40.0, 41.0], [math.nan, 60.0, 41.0, 40.0]):
        assert math.isnan(middle_of(values, "median"))
        assert math.isnan(middle_of(values, "mean"))
        assert cell_verdict(42.0, 1.0, values, middle="median") == "diverged"


def test_a_margin_in_another_unit() -> None:
    assert cell_verdict(0.50, None, [0.55]) == "agrees"
    assert cell_verdict(0.50, None, [0.55], margin=0.01) == "above"


def test_what_stands_behind_a_number_becomes_a_deviation_of_runs() -> None:
    assert deviation_of(1.3, "deviation", 3) == 1.3
    # A standard error over 4 runs: 2 x 0.5.
    assert deviation_of(0.5, "error", 4) == pytest.approx(1.0)
    # Half of an interval around a mean of 10: t_9 = 2.26216, and 1.4 x sqrt(10) / 2.26216 = 1.95704.
    assert deviation_of(1.4, "interval95", 10) == pytest.approx(1.95704, abs=1e-4)
    # Around a median of 10: variance pi / (18 + pi) = 0.148597, error 0.385484; 1.4 / (1.95996 x 0.385484) = 1.85299.
    assert deviation_of(1.4, "interval95", 10, "median") == pytest.approx(1.85299, abs=1e-4)
    assert deviation_of(0.011, "layers", 5) is None
    assert deviation_of(None, "deviation", 5) is deviation_of(1.0, "deviation", 1) is None


def test_an_interval_is_not_taken_for_a_deviation() -> None:
    # 79.3 +- 1.4 over 10 runs and ours 81.5 with one: as a deviation 1.4 reaches t_9 x 1.4 x sqrt(1/10 + 1) = 3.32;
    # as half of an interval of a mean of 50 runs it is a deviation of 1.4 x sqrt(50) / 2.00958 = 4.9262.
    assert cell_verdict(79.3, 1.4, [82.6], 10) == "agrees"
    assert cell_verdict(79.3, 1.4, [82.7], 10) == "above"
    wide = deviation_of(1.4, "interval95", 50)
    assert wide == pytest.approx(4.9262, abs=1e-3)
    # t_49 x 4.9262 x sqrt(1/50 + 1) = 9.998.
    assert cell_verdict(79.3, wide, [89.2], 50) == "undecided"
    assert cell_verdict(79.3, wide, [89.4], 50) == "above"


def test_medians_are_compared_with_medians() -> None:
    # Median 70 and mean 73; std of (70, 70, 79) = 5.19615, published 5.19615 over 3: t_4 x 5.19615 x sqrt(2 x 0.439901)
    # = 13.532, and 11.780 for means.
    ours, std = [70.0, 70.0, 79.0], math.sqrt(27)
    assert variance_of_middle("median", 3) == pytest.approx(math.pi / (4 + math.pi))
    for middle, published, word in (
        ("median", 83.5, "undecided"), ("median", 83.6, "below"), ("mean", 84.7, "undecided"), ("mean", 84.8, "below"),
    ):  # fmt: skip
        assert cell_verdict(published, std, ours, 3, middle=middle) == word, (middle, published)


def test_what_published_numbers_say_of_their_own_difference() -> None:
    # LIPS and FedBN on CIFAR-10 at 0.1: variances 1.66^2 / 3 = 0.91853 and 1.28^2 / 3 = 0.54613, in all 1.46467;
    # degrees of freedom 1.46467^2 / ((0.84370 + 0.29826) / 2) = 3.7571, t = 2.84868; 2.84868 x 1.21023 = 3.4476.
    difference, reach = difference_of_groups((86.21, 1.66, 3), (85.83, 1.28, 3))
    assert (difference, reach) == (pytest.approx(0.38), pytest.approx(3.4476, abs=1e-3))
    assert difference_of_groups((64.08, None, 1), (61.04, None, 1)) == (pytest.approx(3.04), None)


@given(numbers, st.none() | st.floats(0, 10), st.lists(numbers, min_size=1, max_size=5))
def test_above_and_below_mirror_each_other(mean: float, std: float | None, ours: list[float]) -> None:
    mirrored, word = {"above": "below", "below": "above"}, cell_verdict(mean, std, ours)
    assert cell_verdict(-mean, std, [-value for value in ours]) == mirrored.get(word, word)


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
