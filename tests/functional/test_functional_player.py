"""PLayer-FL: federation sensitivity and the split point."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import federation_sensitivity, split_point


def tensors(*layers: list[float]) -> list[Tensor]:
    return [torch.tensor(layer) for layer in layers]


WEIGHTS = tensors([1, 2.0], [0.5, -1, 2, 0], [3.0])
FIRST = tensors([0.1, 0.1], [0.2, 0.1, 0.05, 3], [0.2])
SECOND = tensors([0.2, 0], [0.4, 0.2, 0.1, 1], [0.1])


def test_golden_case() -> None:
    first, second = federation_sensitivity(WEIGHTS, FIRST), federation_sensitivity(WEIGHTS, SECOND)
    torch.testing.assert_close(first, torch.tensor([0.025, 0.0325, 0.3925]))
    torch.testing.assert_close(second, torch.tensor([0.02, 0.05, 0.14]))
    total = first + second
    torch.testing.assert_close(total, torch.tensor([0.045, 0.0825, 0.5325]))
    assert split_point(total, 2.0) == 2
    assert split_point(total, 1.8) == 1
    assert split_point(total, 6.5) == 3


def test_a_stack_gives_one_row_per_client() -> None:
    weights = [torch.stack([weight, weight]) for weight in WEIGHTS]
    grads = [torch.stack(pair) for pair in zip(FIRST, SECOND, strict=True)]
    rows = federation_sensitivity(weights, grads, batched=True)
    assert torch.equal(rows[0], federation_sensitivity(WEIGHTS, FIRST))
    assert torch.equal(rows[1], federation_sensitivity(WEIGHTS, SECOND))


def test_a_stack_larger_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, grads = [torch.randn(5, 4, 2), torch.randn(5, 3)], [torch.randn(5, 4, 2), torch.randn(5, 3)]
    whole = federation_sensitivity(weights, grads, batched=True)
    monkeypatch.setattr("fedstrata.functional._entries.PIECE_ENTRIES", 9)
    assert torch.equal(federation_sensitivity(weights, grads, batched=True), whole)


def test_the_mean_runs_over_all_tensors_of_a_layer() -> None:
    cut = federation_sensitivity([[WEIGHTS[1][:3], WEIGHTS[1][3:]]], [[FIRST[1][:3], FIRST[1][3:]]])
    torch.testing.assert_close(cut, torch.tensor([0.0075]))


def test_layers_without_entries_add_nothing() -> None:
    empty = torch.zeros(0)
    values = federation_sensitivity([WEIGHTS[0], empty, [], WEIGHTS[2]], [FIRST[0], empty, [], FIRST[2]])
    torch.testing.assert_close(values, torch.tensor([0.025, 0.025, 0.025, 0.385]))
    assert federation_sensitivity([torch.zeros(3)], [torch.ones(3)]).tolist() == [0]
    assert federation_sensitivity([torch.tensor(2.0)], [torch.tensor(3.0)]).tolist() == [36]


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_values_never_fall_and_grow_with_the_square_of_the_gradient(depth: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(3, generator=generator) for _ in range(depth)]
    grads = [torch.randn(3, generator=generator) for _ in range(depth)]
    values = federation_sensitivity(weights, grads)
    assert bool((values.diff() >= 0).all())
    doubled = federation_sensitivity(weights, [2 * grad for grad in grads])
    torch.testing.assert_close(doubled, 4 * values)
    assert split_point(doubled, 1.5) == split_point(values, 1.5)


@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_precision(dtype: torch.dtype, result: torch.dtype) -> None:
    values = federation_sensitivity([torch.ones(2, dtype=dtype)], [torch.ones(2, dtype=dtype)])
    assert values.dtype is result
    assert values.tolist() == [1]


def test_numbers_that_are_not_finite_are_refused_by_layer() -> None:
    bad = [FIRST[0], FIRST[1].clone(), FIRST[2]]
    bad[1][2] = math.nan
    with pytest.raises(FedStrataError, match="layer 1 hold NaN"):
        federation_sensitivity(WEIGHTS, bad)
    stacked = [torch.stack(pair) for pair in zip(FIRST, bad, strict=True)]
    with pytest.raises(FedStrataError, match="layer 1 of client 1 hold NaN"):
        federation_sensitivity([torch.stack([weight] * 2) for weight in WEIGHTS], stacked, batched=True)


def test_layers_that_do_not_match_are_refused() -> None:
    with pytest.raises(FedStrataError, match="3 layers of weights and 2 of gradients"):
        federation_sensitivity(WEIGHTS, FIRST[:2])
    with pytest.raises(FedStrataError, match="0 layers of weights"):
        federation_sensitivity([], [])
    with pytest.raises(FedStrataError, match=r"weight of layer 0 has the shape \(2,\)"):
        federation_sensitivity(WEIGHTS[:1], [torch.ones(3)])
    with pytest.raises(FedStrataError, match="Layer 0 has 2 weight tensors but 1 gradients"):
        federation_sensitivity([[torch.ones(1), torch.ones(1)]], [[torch.ones(1)]])
    with pytest.raises(FedStrataError, match=r"\[2, 3\] clients"):
        federation_sensitivity([torch.ones(2, 1), torch.ones(3, 1)], [torch.ones(2, 1), torch.ones(3, 1)], batched=True)
    with pytest.raises(FedStrataError, match="single number"):
        federation_sensitivity([torch.tensor(1.0)], [torch.tensor(1.0)], batched=True)


@pytest.mark.parametrize(
    ("values", "threshold", "layers"),
    [
        ([1.0, 2.0, 9.0], 1e-9, 1),  # next to zero: one layer
        ([1.0, 2.0, 9.0], 0.0, 1),
        ([1.0, 2.0, 9.0], math.inf, 3),  # no crossing: all
        ([1.0, 2.0, 9.0], 2.0, 2),  # exactly twice is not more than twice
        ([1.0, 2.0, 9.0], 4.5, 3),
        ([1.0, 1.0, 1.0], 1.0, 3),
        ([1.0, 1.0, 1.0], 0.99, 1),
        ([0.0, 0.0, 5.0], 1e6, 2),  # from nothing to something
        ([0.0, 0.0, 5.0], math.inf, 3),
        ([0.0, 0.0, 0.0], 2.0, 3),
        ([0.0, 0.0, 0.0], 1e-9, 1),
        ([4.0], 0.5, 1),
        ([4.0], 100.0, 1),
    ],
)
def test_split_points_by_hand(values: list[float], threshold: float, layers: int) -> None:
    assert split_point(torch.tensor(values), threshold) == layers
    assert split_point(values, threshold) == layers


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=12),
    st.floats(0, 100),
    st.floats(0, 100),
    st.sampled_from([0.25, 8.0]),
)
def test_a_higher_threshold_never_federates_less(steps: list[float], first: float, second: float, scale: float) -> None:
    values = torch.tensor(steps, dtype=torch.float64).cumsum(0)
    low, high = sorted((first, second))
    assert 1 <= split_point(values, low) <= split_point(values, high) <= len(steps)
    assert split_point(scale * values, low) == split_point(values, low)


def test_split_point_refuses() -> None:
    for threshold in (-1.0, math.nan):
        with pytest.raises(FedStrataError, match="threshold"):
            split_point([1.0, 2.0], threshold)
    with pytest.raises(FedStrataError, match="summed over the clients"):
        split_point(torch.ones(2, 3), 2.0)
    with pytest.raises(FedStrataError, match="one number per layer"):
        split_point([], 2.0)
    with pytest.raises(FedStrataError, match="holds NaN"):
        split_point([1.0, math.nan], 2.0)
    with pytest.raises(FedStrataError, match="never negative"):
        split_point([-1.0, 2.0], 2.0)


def test_small_growth_is_seen_in_double_precision() -> None:
    ones = [torch.ones(1, dtype=torch.float64), torch.full((1,), 1e-5, dtype=torch.float64)]
    curve = federation_sensitivity(ones, [torch.ones(1, dtype=torch.float64)] * 2)
    assert curve[1] - curve[0] == pytest.approx(1e-10, rel=1e-3)
    assert split_point([1.0, 1.0 + 1e-10], 1.0) == 1
