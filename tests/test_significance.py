import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.significance import Estimate, estimate, holm, paired_comparison, smallest_sign_test_p


def test_estimate_uses_the_sample_standard_deviation() -> None:
    assert estimate([1.0, 2.0, 3.0, 4.0]) == Estimate(2.5, math.sqrt(5 / 3), 4)
    assert estimate([0.7]) == Estimate(0.7, None, 1)
    assert estimate([]) is None


def test_paired_t_test_against_the_closed_form_for_two_degrees_of_freedom() -> None:
    # t = 0.04 / (0.02 / sqrt(3)) = 2 sqrt(3); two degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14).
    compared = paired_comparison([0.02, 0.04, 0.06], "fedavg")
    assert compared.difference is not None
    assert compared.difference.mean == pytest.approx(0.04)
    assert compared.difference.std == pytest.approx(0.02)
    assert compared.p_value == pytest.approx(1 - math.sqrt(12 / 14))
    assert compared.adjusted == compared.p_value
    assert "3 seeds" in compared.note
    assert "p = 0.25" in compared.note


def test_paired_t_test_is_two_sided_and_has_no_note_with_six_pairs() -> None:
    ahead = paired_comparison([0.01, 0.02, 0.03, 0.02, 0.01, 0.04])
    behind = paired_comparison([-0.01, -0.02, -0.03, -0.02, -0.01, -0.04])
    assert ahead.p_value == pytest.approx(behind.p_value)
    assert ahead.note == behind.note == ""


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([], "nothing to pair"),
        ([0.1], "no test"),
        ([0.0, 0.0, 0.0], "Equal to fedavg"),
        ([0.9 - 0.8, 0.8 - 0.7, 0.3 - 0.2], "the same for every seed"),
        ([0.1, math.nan], "not a finite number"),
    ],
)
def test_no_test_where_none_is_possible_and_the_reason_is_said(differences: list[float], expected: str) -> None:
    compared = paired_comparison(differences, "fedavg")
    assert compared.p_value is None
    assert compared.adjusted is None
    assert expected in compared.note


def test_smallest_reachable_p_of_the_sign_test() -> None:
    assert [smallest_sign_test_p(pairs) for pairs in (1, 2, 3, 5, 6)] == [1.0, 0.5, 0.25, 0.0625, 0.03125]


def test_holm_by_hand() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04; the last is raised to the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_raw_and_the_bonferroni_values_and_keeps_their_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for raw, corrected in zip(p_values, adjusted, strict=True):
        assert raw <= corrected <= min(1.0, len(p_values) * raw)
    pairs = sorted(zip(p_values, adjusted, strict=True))
    assert [corrected for _, corrected in pairs] == sorted(adjusted)
