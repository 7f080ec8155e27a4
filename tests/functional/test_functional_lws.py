"""FedLWS: the shrinking factor of a layer, and what it does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import shrink, shrink_factor, shrinking

FIRST = torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
SECOND = torch.tensor([0.0, 2.0]), torch.tensor([[3.0, 0.0], [-3.0, 0.0]])
HALVES = [0.5, 0.5]


def merged(weight: Tensor, updates: Tensor, shares: list[float]) -> Tensor:
    return weight + torch.tensordot(torch.tensor(shares), updates, dims=1)


def test_golden_case_by_layer() -> None:
    factor = shrink_factor(*FIRST, HALVES, 0.1)
    assert factor == pytest.approx(100 / 101, rel=1e-12)
    new = shrink(FIRST[0], merged(*FIRST, HALVES), factor)
    torch.testing.assert_close(new, torch.tensor([3.46534653, 4.45544554]))
    assert shrink_factor(*SECOND, HALVES, 0.1) == 1
    assert shrink(SECOND[0], merged(*SECOND, HALVES), 1.0).tolist() == [0, 2]


def test_golden_case_of_the_whole_model() -> None:
    factor = shrink_factor([FIRST[0], SECOND[0]], [FIRST[1], SECOND[1]], HALVES, 0.1)
    assert factor == pytest.approx(0.96110286, abs=1e-8)


def test_disagreement_is_unweighted_and_the_step_is_weighted() -> None:
    # tau = sqrt(1/2) whatever the shares; the step (3/4, 1/4) has length sqrt(10) / 4; ||w|| = 5.
    expected = 5 / (0.1 * math.sqrt(0.5) * math.sqrt(10) / 4 + 5)
    assert shrink_factor(*FIRST, [0.75, 0.25], 0.1) == pytest.approx(expected, rel=1e-12)
    assert shrink_factor(*FIRST, torch.tensor([0.75, 0.25]), 0.1) == pytest.approx(expected, rel=1e-12)


def test_a_layer_is_one_vector_however_it_is_cut() -> None:
    weight, updates = torch.randn(4, 3), torch.randn(5, 4, 3)
    whole = shrink_factor(weight, updates, [0.2] * 5, 0.3)
    cut = shrink_factor([weight[:1], weight[1:]], [updates[:, :1], updates[:, 1:]], [0.2] * 5, 0.3)
    assert cut == pytest.approx(whole, rel=1e-12)
    assert whole < 1


def test_more_entries_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, updates = torch.randn(7), torch.randn(9, 7)
    whole = shrink_factor(weight, updates, [1 / 9] * 9, 0.3)
    monkeypatch.setattr("fedstrata.functional._entries.PIECE_ENTRIES", 20)
    assert shrink_factor(weight, updates, [1 / 9] * 9, 0.3) == pytest.approx(whole, rel=1e-12)


def test_step_of_the_server_replaces_the_weighted_sum() -> None:
    step = 0.5 * FIRST[1][0] + 0.5 * FIRST[1][1]
    assert shrink_factor(*FIRST, None, 0.1, step=step) == pytest.approx(100 / 101, rel=1e-12)
    twice = shrink_factor(*FIRST, None, 0.1, step=2 * step)
    assert twice == pytest.approx(5 / (0.1 * math.sqrt(0.5) * 2 * math.sqrt(0.5) + 5), rel=1e-12)
    with pytest.raises(FedStrataError, match="no shares"):
        shrink_factor(*FIRST, None, 0.1)
    with pytest.raises(FedStrataError, match=r"Tensor 0 of the layer has the shape \(2,\) but that of step has"):
        shrink_factor(*FIRST, None, 0.1, step=torch.ones(3))


def test_what_the_factor_comes_from() -> None:
    # ||w|| = 5, the step has length sqrt(1/2), tau = sqrt(1/2).
    tau = length = math.sqrt(0.5)
    assert shrinking(*FIRST, HALVES, 0.1) == pytest.approx((100 / 101, tau, 0.1 * tau), rel=1e-9)
    assert shrinking(*FIRST, HALVES, 10.0, clamp=(0.01, 0.2))[2] == pytest.approx(0.2, rel=1e-9)
    assert shrinking(*FIRST, HALVES, fixed=0.8) == pytest.approx((0.8, tau, 0.2 * 5 / (0.8 * length)), rel=1e-12)
    assert shrinking(*FIRST, HALVES, 7.0, fixed=1.25) == pytest.approx((1.25, tau, -0.25 * 5 / (1.25 * length)))
    assert shrinking(*FIRST, HALVES) == (1.0, pytest.approx(tau), 0.0)


def test_a_pull_without_a_step_is_infinite_and_no_pull_is_none() -> None:
    assert shrinking(*SECOND, HALVES, 0.1) == (1.0, 3.0, 0.0)
    assert shrinking(*SECOND, HALVES, fixed=0.5) == (0.5, 3.0, math.inf)
    assert shrinking(*FIRST, HALVES, fixed=0.0)[2] == math.inf
    assert shrinking(torch.zeros(2), FIRST[1], HALVES, fixed=0.5)[::2] == (0.5, 0.0)
    assert shrinking([], [], HALVES, 0.1) == (1.0, 0.0, 0.0)
    assert shrinking([], [], HALVES, fixed=0.9) == (0.9, 0.0, 0.0)


def test_clamp_bounds_the_strength() -> None:
    # ||w|| = 5 and the step has length sqrt(1/2); beta * tau is 0.0707 at beta 0.1.
    length = math.sqrt(0.5)
    released = (0.01, 0.2)
    assert shrink_factor(*FIRST, HALVES, 100.0, clamp=released) == pytest.approx(5 / (0.2 * length + 5), rel=1e-12)
    assert shrink_factor(*FIRST, HALVES, 0.0, clamp=released) == pytest.approx(5 / (0.01 * length + 5), rel=1e-12)
    assert shrink_factor(*FIRST, HALVES, 0.1, clamp=released) == pytest.approx(100 / 101, rel=1e-12)
    assert shrink_factor(*FIRST, HALVES, 9.0, clamp=(0.0, 0.0)) == 1
    assert shrink_factor(*FIRST, HALVES, 9.0, clamp=(0.0, 0.1)) == pytest.approx(5 / (0.1 * length + 5), rel=1e-12)
    for clamp in ((0.2, 0.01), (-0.1, 0.2)):
        with pytest.raises(FedStrataError, match="clamp"):
            shrink_factor(*FIRST, HALVES, 0.1, clamp=clamp)


@given(st.integers(1, 6), st.floats(0, 10), st.integers(0, 2**31))
def test_factor_lies_between_zero_and_one_and_falls_with_beta(clients: int, beta: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, updates = torch.randn(4, generator=generator), torch.randn(clients, 4, generator=generator)
    shares = [1 / clients] * clients
    factor = shrink_factor(weight, updates, shares, beta)
    assert 0 < factor <= 1
    assert shrink_factor(weight, updates, shares, beta + 1) <= factor
    shuffled = torch.randperm(clients, generator=generator)
    assert shrink_factor(weight, updates[shuffled], shares, beta) == pytest.approx(factor, rel=1e-12)
    # Twice the updates is four times the pull: tau and the step both double.
    assert shrink_factor(weight, 2 * updates, shares, beta) == pytest.approx(
        shrink_factor(weight, updates, shares, 4 * beta), rel=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_to_shrink_is_exactly_one(dtype: torch.dtype) -> None:
    weight, update = torch.randn(5, dtype=dtype), torch.randn(5, dtype=dtype)
    assert shrink_factor(weight, update[None], [1.0], 0.1) == 1
    assert shrink_factor(weight, update.expand(8, -1), [1 / 8] * 8, 0.1) == 1  # eight: a mean without rounding
    assert shrink_factor(weight, torch.randn(3, 5, dtype=dtype), [1 / 3] * 3, 0.0) == 1
    assert shrink_factor(weight, torch.zeros(3, 5, dtype=dtype), [1 / 3] * 3, 0.1) == 1


def test_layers_of_zeros_and_without_entries_are_left_alone() -> None:
    assert shrink_factor(torch.zeros(2), FIRST[1], HALVES, 0.1) == 1
    assert shrink_factor(torch.zeros(2), torch.zeros(2, 2), HALVES, 0.1) == 1
    assert shrink_factor(torch.zeros(0), torch.zeros(2, 0), HALVES, 0.1) == 1
    assert shrink_factor([], [], HALVES, 0.1) == 1
    with_empty = shrink_factor([FIRST[0], torch.zeros(0, 3)], [FIRST[1], torch.zeros(2, 0, 3)], HALVES, 0.1)
    assert with_empty == pytest.approx(100 / 101, rel=1e-12)


def test_a_small_layer_shrinks_too() -> None:
    # ||w|| = 1/2, tau = 1, the step 1.
    assert shrink_factor(torch.tensor([0.5]), torch.tensor([[0.0], [2.0]]), HALVES, 1.0) == pytest.approx(0.5 / 1.5)


def test_shares_may_be_off_by_rounding() -> None:
    assert shrink_factor(*FIRST, [0.5, 0.5 + 0.9e-5], 0.1) == pytest.approx(100 / 101, rel=1e-6)
    with pytest.raises(FedStrataError, match="not to one"):
        shrink_factor(*FIRST, [0.5, 0.5 + 1.1e-5], 0.1)


def test_a_layer_may_be_a_single_number() -> None:
    # tau = 1, step 0 + 1 = 1, ||w|| = 2.
    assert shrink_factor(torch.tensor(2.0), torch.tensor([0.0, 2.0]), HALVES, 0.5) == pytest.approx(2 / 2.5)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([0.5, 0.6], "shares sum to 1.1, not to one"),
        ([0.0, 0.0], "shares sum to 0, not to one"),
        ([1.5, -0.5], "not negative"),
        ([math.nan, 0.5], "finite"),
        ([1.0], r"The shares have the shape \(1,\) for 2 clients"),
    ],
)
def test_shares_that_are_none_are_refused(shares: list[float], message: str) -> None:
    with pytest.raises(FedStrataError, match=message):
        shrink_factor(*FIRST, shares, 0.1)


@pytest.mark.parametrize("beta", [-0.1, math.nan, math.inf])
def test_beta_must_not_be_negative(beta: float) -> None:
    with pytest.raises(FedStrataError, match="beta"):
        shrink_factor(*FIRST, HALVES, beta)


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(FedStrataError, match="1 tensors but each client's update has 2"):
        shrink_factor([FIRST[0]], [FIRST[1], FIRST[1]], HALVES, 0.1)
    with pytest.raises(FedStrataError, match=r"Tensor 0 of the layer has the shape \(3,\)"):
        shrink_factor(torch.ones(3), FIRST[1], HALVES, 0.1)
    with pytest.raises(FedStrataError, match="Tensor 1 of the updates has 3 clients where the first has 2"):
        shrink_factor([torch.ones(2), torch.ones(2)], [FIRST[1], torch.ones(3, 2)], HALVES, 0.1)
    with pytest.raises(FedStrataError, match="0 clients"):
        shrink_factor(torch.ones(2), torch.ones(0, 2), [], 0.1)
    with pytest.raises(FedStrataError, match="single number"):
        shrink_factor(torch.tensor(1.0), torch.tensor(1.0), [1.0], 0.1)


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    bad = torch.tensor([[1.0, 0.0], [0.0, math.nan]])
    with pytest.raises(FedStrataError, match="Tensor 0 of the updates of client 1 holds NaN"):
        shrink_factor(FIRST[0], bad, HALVES, 0.1)
    with pytest.raises(FedStrataError, match="Tensor 1 of the layer holds NaN"):
        shrink_factor([FIRST[0], torch.tensor([math.inf, 1.0])], [FIRST[1], FIRST[1]], HALVES, 0.1)
    with pytest.raises(FedStrataError, match="Tensor 0 of the step holds NaN"):
        shrink_factor(*FIRST, None, 0.1, step=torch.tensor([math.nan, 1.0]))


def test_parameters_with_gradients_are_taken_as_numbers() -> None:
    weight = torch.nn.Parameter(FIRST[0].clone())
    factor = shrink_factor(weight, FIRST[1], HALVES, 0.1)
    assert factor == pytest.approx(100 / 101, rel=1e-12)
    assert not shrink(weight, weight + 1, factor).requires_grad


def test_modes_by_hand() -> None:
    old, new = torch.tensor([2.0, -4.0]), torch.tensor([4.0, 0.0])
    assert shrink(old, new, 0.75).tolist() == [3, 0]
    assert shrink(old, new, 0.75, "both").tolist() == [3, 0]
    assert shrink(old, new, 0.75, mode="reg").tolist() == [3.5, 1]
    assert shrink(old, new, 0.75, mode="opt").tolist() == [3.5, -1]


@given(st.floats(0, 1), st.integers(0, 2**31))
def test_the_two_terms_make_the_method(factor: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, new = torch.randn(2, 5, dtype=torch.float64, generator=generator)
    both, pull, step = (shrink(old, new, factor, mode) for mode in ("both", "reg", "opt"))
    torch.testing.assert_close(both, step + (pull - new))


@pytest.mark.parametrize("mode", ["both", "reg", "opt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_factor_of_one_changes_no_bit(mode: str, dtype: torch.dtype) -> None:
    old, new = torch.randn(1000, dtype=dtype), torch.randn(1000, dtype=dtype)
    new[0], old[0] = -0.0, -1.0
    kept = shrink(old, new, 1.0, mode)
    assert torch.equal(kept, new)
    assert bool(kept[0].signbit())
    assert kept.data_ptr() != new.data_ptr()


def test_precision_stays() -> None:
    old = torch.randn(3, dtype=torch.bfloat16)
    assert all(shrink(old, old + 1, 0.9, mode).dtype is torch.bfloat16 for mode in ("both", "reg", "opt"))


def test_shrink_refuses() -> None:
    with pytest.raises(FedStrataError, match=r"no shrinking mode 'bth'. Did you mean 'both'"):
        shrink(torch.ones(2), torch.ones(2), 0.5, "bth")
    with pytest.raises(FedStrataError, match="same shape"):
        shrink(torch.ones(2), torch.ones(3), 0.5)
    for factor in (-0.1, 1.1, math.nan):
        with pytest.raises(FedStrataError, match="between 0 and 1"):
            shrink(torch.ones(2), torch.ones(2), factor)
