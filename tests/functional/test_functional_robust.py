"""Merging where some clients lie."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.functional import (
    alie,
    bounding_factors,
    coordinate_median,
    geometric_median_shares,
    krum_scores,
    trimmed_mean,
    trust_weights,
)

FIVE = torch.tensor([[0.0], [1.0], [2.0], [4.0], [900.0]])
HONEST = st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=6)
LIES = st.lists(st.floats(-1e30, 1e30), min_size=0, max_size=2)


# Entry by entry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "middle"), [([3.0], 3), ([1.0, 4.0], 2.5), ([9.0, 1.0, 2.0], 2), ([5, 1, 2, 3], 2.5)]
)
def test_the_median_of_few(values: list[float], middle: float) -> None:
    assert coordinate_median(torch.tensor(values)).item() == middle
    assert coordinate_median(torch.tensor(values).reshape(-1, 1, 1)).shape == (1, 1)


def test_the_median_runs_over_those_who_sent_an_entry() -> None:
    """Two sent the first entry, all three the second, one the third, nobody the last."""
    clients = torch.tensor([[1.0, 1.0, 7.0, 0.0], [3.0, 2.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [False, True, False, False]])
    assert coordinate_median(clients, mask=mask, otherwise=torch.full((4,), -5.0)).tolist() == [2, 2, 7, -5]
    assert coordinate_median(clients, mask=mask).tolist() == [2, 2, 7, 0]
    assert trimmed_mean(clients, 0.4, mask=mask, otherwise=torch.full((4,), -5.0)).tolist() == [2, 2, 7, -5]
    common = torch.tensor([[True, False, False, True]])
    assert coordinate_median(clients, mask=common, otherwise=torch.full((4,), -5.0)).tolist() == [1, -5, -5, 0]


@pytest.mark.parametrize(
    ("trim", "mean"), [(0, 907 / 5), (0.1, 907 / 5), (0.2, 7 / 3), (0.3, 7 / 3), (0.4, 2), (0.49, 2)]
)
def test_what_is_trimmed_is_counted_in_whole_clients(trim: float, mean: float) -> None:
    """Of five clients .2 is one, though .2 * 5 might fall short of it; .49 is two, and one is left."""
    assert trimmed_mean(FIVE.double(), trim).item() == pytest.approx(mean)


def test_whole_numbers_have_a_middle_too() -> None:
    assert coordinate_median(torch.tensor([4, 7, 2**40])).item() == 7
    assert trimmed_mean(torch.tensor([4, 7, 2**40]), 0.4).item() == 7


@given(HONEST, LIES)
def test_liars_cannot_push_an_entry_beyond_the_honest(honest: list[float], lies: list[float]) -> None:
    clients = torch.tensor([*honest, *lies], dtype=torch.float64)
    trim = len(lies) / len(clients)
    for merged in (coordinate_median(clients), trimmed_mean(clients, trim)):
        assert min(honest) - 1e-5 <= merged.item() <= max(honest) + 1e-5


# Krum -----------------------------------------------------------------------------------------------------------------


def test_krum_scores_by_the_nearest_and_over_all_tensors_together() -> None:
    """With one liar among five, two neighbours count: 1 + 4, 1 + 1, 1 + 4, 4 + 9, and far away."""
    assert krum_scores(FIVE, 1).tolist() == [5, 2, 5, 13, 896**2 + 898**2]
    assert krum_scores([FIVE, FIVE.reshape(5, 1, 1)], 1).tolist() == [10, 4, 10, 26, 2 * (896**2 + 898**2)]
    assert krum_scores(FIVE, 0).tolist() == [1 + 4 + 16, 1 + 1 + 9, 1 + 4 + 4, 4 + 9 + 16, 896**2 + 898**2 + 899**2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_few_clients_one_neighbour_counts(count: int) -> None:
    assert krum_scores(FIVE[:count], 0).tolist() == [[0.0], [1.0, 1.0], [1.0, 1.0, 1.0]][count - 1]


@pytest.mark.parametrize(("clients", "byzantine"), [(4, 1), (5, 2), (6, 2), (5, -1)])
def test_more_liars_than_krum_can_tell_are_refused(clients: int, byzantine: int) -> None:
    with pytest.raises(FedStrataError, match=f"cannot tell {byzantine} liars among {clients} clients"):
        krum_scores(torch.zeros(clients, 2), byzantine)


def test_a_liar_far_away_does_not_blur_how_far_the_honest_are_apart() -> None:
    """Distances are taken client by client: a sum with 1e150 in it would have lost all of them."""
    honest = torch.tensor([[0.0], [1e-3], [3e-3], [7e-3]], dtype=torch.float64)
    for lie in (1e20, 1e150, 1e200):
        scores = krum_scores(torch.cat([honest, torch.full((1, 1), lie, dtype=torch.float64)]), 1)
        assert scores[:4].tolist() == pytest.approx([1e-6 + 9e-6, 1e-6 + 4e-6, 4e-6 + 9e-6, 16e-6 + 36e-6])
        assert scores[4] > 1e30


# The geometric median -------------------------------------------------------------------------------------------------


def test_the_first_step_of_weiszfeld_counts_by_lengths() -> None:
    """Lengths 1, 1 and 50: 1, 1 and 1/50 over their sum."""
    updates = torch.tensor([[1.0, 0.0], [0.0, 1.0], [30.0, 40.0]])
    shares = geometric_median_shares(updates, iterations=1)
    assert shares.tolist() == pytest.approx([1 / 2.02, 1 / 2.02, 0.02 / 2.02])
    assert geometric_median_shares([updates[:, :1], updates[:, 1:]], iterations=1).tolist() == shares.tolist()


def test_it_converges_to_the_point_with_the_smallest_sum_of_distances() -> None:
    """Of an equilateral triangle it is the centre; of a square with one far corner, where the diagonals meet."""
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=torch.float64)
    assert geometric_median_shares(triangle, 200).tolist() == pytest.approx([1 / 3] * 3, abs=1e-6)
    square = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0], [100.0, 100.0]], dtype=torch.float64)
    assert (geometric_median_shares(square, 500) @ square).tolist() == pytest.approx([1.5, 1.5], abs=1e-3)


@pytest.mark.parametrize("lie", [1e3, 1e30])
def test_a_single_liar_cannot_carry_few_steps_away(lie: float) -> None:
    """From the mean, which the liar moves, four steps would end at 4e-5 of the lie, however far that is."""
    honest = torch.tensor([[1.0, 0.0], [0.9, 0.1], [1.1, -0.1], [1.0, 0.1]], dtype=torch.float64)
    clients = torch.cat([honest, torch.tensor([[0.0, lie]], dtype=torch.float64)])
    merged = geometric_median_shares(clients) @ clients
    assert merged.tolist() == pytest.approx([1.0, 0.05], abs=0.1)


def test_clients_that_agree_are_their_median() -> None:
    shares = geometric_median_shares(torch.ones(4, 3))
    assert shares.tolist() == [0.25] * 4
    assert geometric_median_shares(torch.zeros(2, 3)).tolist() == [0.5, 0.5]


# Bounds and trust -----------------------------------------------------------------------------------------------------


def test_bounding_factors() -> None:
    """Lengths 5, 1, 50 and 0 over two tensors; their median is 3."""
    updates = [torch.tensor([[3.0], [0.6], [30.0], [0.0]]), torch.tensor([[4.0], [0.8], [40.0], [0.0]])]
    assert bounding_factors(updates, 10.0).tolist() == pytest.approx([1, 1, 0.2, 1])
    assert bounding_factors(updates).tolist() == pytest.approx([3 / 5, 1, 3 / 50, 1])
    assert bounding_factors(torch.zeros(2, 3)).tolist() == [1, 1]


def test_trust_goes_by_the_angle_and_lengths_by_the_server() -> None:
    """Cosines .8, -.8 and 1, lengths 10, 5 and 2, the server's 5: .8 / 1.8 * 5 / 10, 0, 1 / 1.8 * 5 / 2."""
    updates, own = torch.tensor([[6.0, 8.0], [-3.0, -4.0], [0.0, 2.0]]), torch.tensor([0.0, 5.0])
    expected = [0.8 / 1.8 / 2, 0, 2.5 / 1.8]
    assert trust_weights(updates, own).tolist() == pytest.approx(expected)
    assert trust_weights([updates[:, :1], updates[:, 1:]], [own[:1], own[1:]]).tolist() == pytest.approx(expected)
    merged = trust_weights(updates, own) @ updates.double()
    assert float(merged.norm()) <= 5


def test_where_nobody_is_trusted_nobody_counts() -> None:
    assert trust_weights(torch.tensor([[-1.0], [0.0]]), torch.tensor([2.0])).tolist() == [0, 0]
    assert trust_weights(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0])).tolist() == [0, 0]


def test_a_little_is_enough() -> None:
    """Mean 2 and 5, deviations 1 and 0."""
    assert alie(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), 2.0).tolist() == [0, 5]
    assert alie(torch.tensor([[4.0]])).tolist() == [4]


# What has no answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        coordinate_median,
        lambda updates: trimmed_mean(updates, 0.2),
        lambda updates: krum_scores(updates, 0),
        geometric_median_shares,
        bounding_factors,
        lambda updates: trust_weights(updates, torch.zeros(2)),
        alie,
    ],
)
def test_what_cannot_be_merged_is_refused(call) -> None:
    with pytest.raises(FedStrataError, match="of client 1 holds NaN or infinite"):
        call(torch.tensor([[1.0, 2.0], [math.nan, 0.0], [3.0, math.inf]]))
    with pytest.raises(FedStrataError, match="at least one"):
        call(torch.zeros(0, 2))
    with pytest.raises(FedStrataError, match="first axis must be the clients"):
        call(torch.tensor(1.0))


def test_odd_numbers_are_refused() -> None:
    for trim in (-0.1, 0.5, math.nan):
        with pytest.raises(FedStrataError, match=r"less than 0\.5"):
            trimmed_mean(FIVE, trim)
    with pytest.raises(FedStrataError, match="above 0"):
        bounding_factors(FIVE, 0.0)
    with pytest.raises(FedStrataError, match="at least one iteration"):
        geometric_median_shares(FIVE, 0)
    with pytest.raises(FedStrataError, match="same number, at least one, in each"):
        krum_scores([FIVE, FIVE[:3]], 0)
    with pytest.raises(FedStrataError, match="the server's own"):
        trust_weights(FIVE, torch.zeros(2))
    with pytest.raises(FedStrataError, match="no updates to compare"):
        krum_scores([], 0)
