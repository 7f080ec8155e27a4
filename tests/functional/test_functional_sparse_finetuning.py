"""Sparse fine-tuning: the empirical Fisher information and the five rules of selection."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.functional import fisher, scaled_rounds, select
from fedstrata.functional.sparse_finetuning import RULES, progressive_sparsity, select_further, soften

SCORES = torch.tensor([0.5, 0.1, 0.4, 0.05, 0.9])
WEIGHTS = torch.tensor([0.3, -0.8, 0.05, 0.6, -0.1])


def as_bits(mask: torch.Tensor) -> list[int]:
    return mask.int().tolist()


def test_golden_cases() -> None:
    assert as_bits(select(SCORES, 0.4, "least")) == [0, 1, 1, 1, 0]
    assert as_bits(select(SCORES, 0.4, "most")) == [1, 0, 1, 0, 1]
    assert as_bits(select(WEIGHTS, 0.4, "highest-magnitude")) == [1, 1, 0, 1, 0]
    assert as_bits(select(WEIGHTS, 0.4, "lowest-magnitude")) == [1, 0, 1, 0, 1]
    assert fisher(torch.tensor([[1.0, 2.0], [-1.0, 2.0]])).tolist() == [1, 4]


def test_fisher_is_not_the_squared_gradient_of_the_batch() -> None:
    grads = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])
    assert grads.mean(0).square().tolist() == [0, 4]
    assert fisher(grads).tolist() == [1, 4]


def test_fisher_of_a_model() -> None:
    weight = torch.tensor([[0.5, -1.0], [0.0, 2.0]], dtype=torch.float64)
    inputs, labels = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]], dtype=torch.float64), torch.tensor([0, 1, 1])

    def loss(weight: torch.Tensor, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(weight @ features, label)

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, inputs, labels)
    # d/dW = (softmax - onehot) x^T, so F_ij is the mean of (p_i - y_i)^2 x_j^2.
    surplus = torch.softmax(inputs @ weight.T, dim=1) - torch.nn.functional.one_hot(labels, 2)
    torch.testing.assert_close(fisher(grads), (surplus.square().T @ inputs.square()) / 3)


def test_fisher_of_one_sample_of_zeros_and_of_many_clients() -> None:
    assert fisher(torch.tensor([[3.0, -2.0]])).tolist() == [9, 4]
    assert fisher(torch.zeros(4, 2)).tolist() == [0, 0]
    assert fisher(torch.zeros(4, 0)).shape == (0,)
    assert fisher(torch.tensor([1.0, 3.0])).item() == 5
    grads = torch.randn(6, 3, 4)
    torch.testing.assert_close(fisher(grads)[1], fisher(grads[:, 1]))


def test_fisher_larger_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = torch.randn(9, 5)
    whole = fisher(grads)
    monkeypatch.setattr("fedstrata.functional._entries.PIECE_ENTRIES", 11)
    torch.testing.assert_close(fisher(grads), whole)


def test_fisher_adds_up_small_squares_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision 1 + 1e-8 is 1, as often as it is added."""
    monkeypatch.setattr("fedstrata.functional._entries.PIECE_ENTRIES", 1)
    grads = torch.tensor([1.0] + [1e-4] * 99).reshape(100, 1)
    assert fisher(grads).item() == pytest.approx((1 + 99e-8) / 100, rel=1e-7)


def test_fisher_of_half_precision_does_not_underflow() -> None:
    values = fisher(torch.tensor([[1e-4]], dtype=torch.float16))
    assert values.dtype is torch.float32
    assert values.item() > 0


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8))
def test_fisher_does_not_depend_on_sign_or_order(values: list[float]) -> None:
    grads = torch.tensor(values, dtype=torch.float64)[:, None]
    assert fisher(grads).item() >= 0
    torch.testing.assert_close(fisher(-grads), fisher(grads))
    torch.testing.assert_close(fisher(grads.flip(0)), fisher(grads))
    torch.testing.assert_close(fisher(3 * grads), 9 * fisher(grads))


def test_fisher_refuses_no_samples() -> None:
    with pytest.raises(FedStrataError, match="no samples"):
        fisher(torch.zeros(0, 3))
    with pytest.raises(FedStrataError, match=r"^The tensor of gradients is a single number"):
        fisher(torch.tensor(1.0))


@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=60),
    st.integers(0, 99),
    st.sampled_from(RULES),
)
def test_the_trained_fraction_is_one_minus_sparsity(values: list[float], percent: int, rule: str) -> None:
    mask = select(torch.tensor(values), percent / 100, rule)
    assert mask.dtype is torch.bool
    assert int(mask.sum()) == len(values) - math.floor(Fraction(percent, 100) * len(values))


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=30), st.integers(1, 99))
def test_rules_rank_in_their_order(values: list[float], percent: int) -> None:
    scores = torch.tensor(values)
    for rule, worth in (
        ("least", -scores),
        ("most", scores),
        ("lowest-magnitude", -scores.abs()),
        ("highest-magnitude", scores.abs()),
    ):
        mask = select(scores, percent / 100, rule)
        if not bool(mask.all()):
            assert worth[mask].min() >= worth[~mask].max()


def test_ties_freeze_the_lower_index_first() -> None:
    for rule in ("least", "most", "lowest-magnitude", "highest-magnitude"):
        assert as_bits(select(torch.zeros(5), 0.4, rule)) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("rule", RULES)
def test_a_dict_is_ranked_as_one_vector(rule: str) -> None:
    scores = {"a": SCORES[:2].reshape(1, 2), "none": torch.zeros(0), "b": SCORES[2:]}
    masks = select(scores, 0.4, rule)
    assert [mask.shape for mask in masks.values()] == [score.shape for score in scores.values()]
    assert torch.equal(torch.cat([mask.flatten() for mask in masks.values()]), select(SCORES, 0.4, rule))


@pytest.mark.parametrize("rule", RULES)
def test_sparsity_zero_trains_all_and_one_entry_is_always_trained(rule: str) -> None:
    assert bool(select(SCORES, 0.0, rule).all())
    assert int(select(SCORES, math.nextafter(1, 0), rule).sum()) == 1
    assert bool(select(torch.tensor([7.0]), 0.9, rule).all())
    assert select(torch.zeros(0, 2), 0.5, rule).shape == (0, 2)
    assert select({}, 0.5, rule) == {}


def test_random_selection_depends_on_the_seed_alone() -> None:
    assert torch.equal(select(torch.zeros(1000), 0.5, "random"), select(torch.zeros(1000), 0.5, "random", seed=0))
    first = select(torch.zeros(1000), 0.5, "random", seed=1)
    assert torch.equal(first, select(torch.randn(1000), 0.5, "random", seed=1))
    assert not torch.equal(first, select(torch.zeros(1000), 0.5, "random", seed=2))
    # Two independent halves of 1000 entries agree in 500 entries, give or take 16.
    agreement = int((first == select(torch.zeros(1000), 0.5, "random", seed=2)).sum())
    assert 400 < agreement < 600
    # The trained entries spread evenly: of either half of the tensor, 250 give or take 8.
    assert 200 < int(first[:500].sum()) < 300


@given(st.integers(0, 10**9))
def test_random_selection_is_nested(seed: int) -> None:
    scores = torch.zeros(40)
    assert not bool((select(scores, 0.8, "random", seed=seed) & ~select(scores, 0.3, "random", seed=seed)).any())


def test_select_refuses() -> None:
    with pytest.raises(FedStrataError, match=r"no selection rule 'leest'. Did you mean 'least'"):
        select(SCORES, 0.4, "leest")
    with pytest.raises(FedStrataError, match="'head' holds NaN"):
        select({"body": SCORES, "head": torch.tensor([math.nan])}, 0.4, "least")
    for sparsity in (-0.1, 1.0, math.nan):
        with pytest.raises(FedStrataError, match=r"^sparsity is"):
            select(SCORES, sparsity, "least")


def test_what_is_frozen_stays_frozen() -> None:
    """Whatever it scores now, and however large the scores of the rest are."""
    frozen = {"a": torch.tensor([False, True, True]), "b": torch.tensor([[True, True, False]])}
    scores = {"a": torch.tensor([0.0, 5.0, 1e30]), "b": torch.tensor([[0.0, 3.0, 0.0]])}
    least = select_further(scores, frozen, 0.5, "least")
    assert [as_bits(mask) for mask in least.values()] == [[0, 1, 0], [[1, 1, 0]]]
    scores["a"][0] = scores["b"][0, 2] = 9e30
    most = select_further(scores, frozen, 0.5, "most")
    assert [as_bits(mask) for mask in most.values()] == [[0, 1, 1], [[0, 1, 0]]]
    same = select_further(scores, frozen, 0.34, "most")
    assert all(torch.equal(same[name], frozen[name]) for name in frozen)


def test_further_selection_is_for_rules_that_rank_estimates() -> None:
    with pytest.raises(FedStrataError, match="no rule that ranks by estimates called 'random'"):
        select_further({"a": SCORES}, {"a": torch.ones(5, dtype=torch.bool)}, 0.5, "random")


def test_every_round_freezes_the_same_part_of_the_rest() -> None:
    assert [progressive_sparsity(0.9, round, 2) for round in (1, 2)] == pytest.approx([1 - 0.1**0.5, 0.9])
    left = [1 - progressive_sparsity(0.2, round, 4) for round in range(5)]
    assert left[0] == 1
    assert [later / earlier for earlier, later in pairwise(left)] == pytest.approx([0.8**0.25] * 4)


def test_a_soft_mask_leaves_a_tenth() -> None:
    model = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    softened = soften(model, {"a": torch.tensor([True, False])})
    assert softened["a"].tolist() == pytest.approx([1, 0.2])
    assert softened["b"] is model["b"]
    assert soften(model, {"a": torch.tensor([False, True])}, 0.5)["a"].tolist() == [0.5, 2.0]
    assert model["a"].tolist() == [1, 2]


def test_scaled_rounds() -> None:
    assert [scaled_rounds(steps) for steps in (1, 4, 8, 16, 1000)] == [800, 200, 100, 50, 1]
    assert scaled_rounds(4, 1, 1) == 1
    assert scaled_rounds(3, 2, 5) == 3
    for values, name in (((0, 1, 1), "steps"), ((1, 0, 1), "reference_steps"), ((1, 1, 0), "reference_rounds")):
        with pytest.raises(FedStrataError, match=f"^{name} is 0"):
            scaled_rounds(*values)
