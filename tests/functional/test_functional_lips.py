"""LIPS: the schedule, the sensitivity and the mask of one layer."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import keep_mask, sensitivity, sparsity_at

# Few distinct values, so that ties are the rule.
scores_with_ties = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]), min_size=1, max_size=40)
hundredths = st.integers(0, 99)


def mask_by_sorting(scores: Tensor, count: int) -> Tensor:
    """The definition, as a stable sort: slow and plain."""
    mask = torch.ones(scores.numel(), dtype=torch.bool)
    mask[scores.flatten().argsort(stable=True)[:count]] = False
    return mask.reshape(scores.shape)


def test_golden_case() -> None:
    before, after = torch.tensor([0.5, -0.2, 0.1, 0.4]), torch.tensor([0.6, -0.1, 0.1, -0.3])
    scores = sensitivity(before, after)
    torch.testing.assert_close(scores, torch.tensor([0.06, 0.01, 0.0, 0.21]))
    assert keep_mask(scores, 0.5).tolist() == [True, False, False, True]


def test_schedule() -> None:
    assert sparsity_at(5, 300, 0.7) == pytest.approx(0.68833333, abs=1e-8)
    assert sparsity_at(300, 300, 0.7) == 0
    assert sparsity_at(0, 300, 0.7) == 0.7
    assert sparsity_at(150, 300, 0.5) == 0.25
    assert sparsity_at(3, 10, 0.0) == 0


@given(st.integers(1, 500), st.data())
def test_schedule_falls_from_tau0_to_zero(total: int, data: st.DataObject) -> None:
    round = data.draw(st.integers(0, total - 1))
    assert 0.7 >= sparsity_at(round, total, 0.7) > sparsity_at(round + 1, total, 0.7) >= 0


@pytest.mark.parametrize(("round", "total", "tau0"), [(-1, 10, 0.5), (11, 10, 0.5), (0, 0, 0.5)])
def test_schedule_refuses_rounds_that_do_not_exist(round: int, total: int, tau0: float) -> None:
    with pytest.raises(FedStrataError, match="does not exist"):
        sparsity_at(round, total, tau0)


@pytest.mark.parametrize("tau0", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_schedule_refuses_a_fraction_outside_zero_to_one(tau0: float) -> None:
    with pytest.raises(FedStrataError, match=r"tau0 is .* at least 0 and less than 1"):
        sparsity_at(1, 10, tau0)


def test_sensitivity_of_a_stack_is_that_of_each_client() -> None:
    before, after = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    each = torch.stack([sensitivity(old, new) for old, new in zip(before, after, strict=True)])
    assert torch.equal(sensitivity(before, after), each)


def test_sensitivity_of_what_did_not_move_or_ended_at_zero_is_zero() -> None:
    assert sensitivity(torch.tensor([2.0, 5.0]), torch.tensor([2.0, 0.0])).tolist() == [0, 0]
    assert sensitivity(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_sensitivity_of_half_precision_does_not_underflow() -> None:
    before = torch.tensor([0.0, 0.0], dtype=torch.float16)
    after = torch.tensor([1e-4, 2e-4], dtype=torch.float16)
    scores = sensitivity(before, after)
    assert scores.dtype is torch.float32
    assert 0 < scores[0] < scores[1]


def test_sensitivity_refuses_different_shapes() -> None:
    with pytest.raises(FedStrataError, match=r"before training has the shape \(3,\).*after it has \(2, 3\)"):
        sensitivity(torch.zeros(3), torch.zeros(2, 3))


def test_sensitivity_carries_no_gradient() -> None:
    assert not sensitivity(torch.zeros(3), torch.nn.Parameter(torch.ones(3))).requires_grad


@given(scores_with_ties, hundredths)
def test_mask_is_that_of_a_stable_sort(values: list[float], percent: int) -> None:
    scores = torch.tensor(values)
    count = len(values) * percent // 100
    mask = keep_mask(scores, percent / 100)
    assert torch.equal(mask, mask_by_sorting(scores, count))
    assert int((~mask).sum()) == count


@given(st.integers(1, 100_000), st.integers(0, 9_999))
def test_counts_are_those_of_the_decimal_number(entries: int, numerator: int) -> None:
    drop = numerator / 10_000
    dropped = int((~keep_mask(torch.zeros(entries), drop)).sum())
    assert dropped == math.floor(Fraction(numerator, 10_000) * entries)


@pytest.mark.parametrize(
    ("drop", "entries", "dropped"),
    [
        (0.29, 100, 29),  # 28.999999999999996 in floating point
        (0.57, 100, 57),  # 56.99999999999999
        (0.7, 10, 7),
        (1 - 0.9, 10, 1),  # 0.9999999999999998
        (sparsity_at(30, 300, 0.7), 100, 63),
        (0.1 + 0.2, 10, 3),  # 3.0000000000000004
        (0.999, 10, 9),
        (math.nextafter(1, 0), 10, 9),  # the last entry always stays
        (math.nextafter(1, 0), 1, 0),
        (1e-300, 10, 0),
        (0.0999, 10, 0),
        (0.0, 10, 0),
    ],
)
def test_counts_at_the_edges_of_floating_point(drop: float, entries: int, dropped: int) -> None:
    assert int((~keep_mask(torch.arange(float(entries)), drop)).sum()) == dropped


def test_ties_drop_the_lower_index_first() -> None:
    assert keep_mask(torch.zeros(5), 0.4).tolist() == [False, False, True, True, True]
    assert keep_mask(torch.tensor([1.0, 0.0, 1.0, 1.0]), 0.5).tolist() == [False, False, True, True]
    assert keep_mask(torch.tensor([[0.0, -0.0], [0.0, 1.0]]), 0.5).tolist() == [[False, False], [True, True]]


@given(scores_with_ties, hundredths, hundredths)
def test_more_dropped_is_a_smaller_mask_inside_the_larger(values: list[float], first: int, second: int) -> None:
    scores, (low, high) = torch.tensor(values), sorted((first, second))
    assert not bool((keep_mask(scores, high / 100) & ~keep_mask(scores, low / 100)).any())


@given(st.permutations(range(12)), hundredths)
def test_without_ties_the_mask_follows_its_entries(order: list[int], percent: int) -> None:
    scores = torch.linspace(-1, 1, 12).square() + torch.arange(12) * 1e-3
    assert torch.equal(keep_mask(scores[order], percent / 100), keep_mask(scores, percent / 100)[order])


@given(scores_with_ties, hundredths, st.sampled_from([0.25, 2.0, 1024.0]))
def test_scale_of_the_scores_does_not_matter(values: list[float], percent: int, scale: float) -> None:
    scores = torch.tensor(values)
    assert torch.equal(keep_mask(scale * scores, percent / 100), keep_mask(scores, percent / 100))


@given(st.integers(1, 5), st.integers(0, 12), hundredths, st.data())
def test_a_stack_gets_the_masks_of_each_client(clients: int, entries: int, percent: int, data: st.DataObject) -> None:
    flat = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=clients * entries, max_size=clients * entries))
    scores = torch.tensor(flat).reshape(clients, entries, 1)
    together = keep_mask(scores, percent / 100, batched=True)
    assert torch.equal(together, torch.stack([keep_mask(client, percent / 100) for client in scores]))


def test_a_stack_may_be_a_view() -> None:
    scores = torch.randn(4, 3, 6).transpose(1, 2)
    assert torch.equal(
        keep_mask(scores, 0.3, batched=True), torch.stack([keep_mask(client.clone(), 0.3) for client in scores])
    )


def test_empty_layers_and_no_clients() -> None:
    assert keep_mask(torch.zeros(0, 3), 0.5).shape == (0, 3)
    assert keep_mask(torch.zeros(2, 0), 0.5, batched=True).shape == (2, 0)
    assert keep_mask(torch.zeros(0, 2), 0.5, batched=True).shape == (0, 2)
    assert keep_mask(torch.tensor(3.0), 0.9).tolist() is True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_kind_of_number_is_ranked(dtype: torch.dtype) -> None:
    scores = torch.tensor([4, 1, 3, 2], dtype=dtype)
    assert keep_mask(scores, 0.5).tolist() == [True, False, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    scores = torch.ones(3, 4)
    scores[1, 2] = bad
    with pytest.raises(FedStrataError, match=r"The tensor of scores holds NaN or infinite numbers \(1 of 12\)"):
        keep_mask(scores, 0.5)
    with pytest.raises(FedStrataError, match="scores of client 1 holds NaN"):
        keep_mask(scores, 0.5, batched=True)
    with pytest.raises(FedStrataError, match="NaN"):
        keep_mask(scores, 0.0)


@pytest.mark.parametrize("drop", [-0.1, 1.0, 1.5, math.nan])
def test_a_fraction_outside_zero_to_one_is_refused(drop: float) -> None:
    with pytest.raises(FedStrataError, match=r"drop is .* at least 0 and less than 1"):
        keep_mask(torch.ones(3), drop)


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(FedStrataError, match=r"torch\.bool"):
        keep_mask(torch.ones(3, dtype=torch.bool), 0.5)
    with pytest.raises(FedStrataError, match="single number"):
        keep_mask(torch.tensor(1.0), 0.5, batched=True)
