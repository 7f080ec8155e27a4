"""SSFL: saliency, its average over clients, and the global mask."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import aggregate_scores, keep_mask, mask_error, mean_saliency, saliency, top_mask

FIRST, SECOND = [0.40, 0.10, 0.02, 0.32], [0.00, 0.60, 0.20, 0.10]


def test_golden_case() -> None:
    scores = aggregate_scores(torch.tensor([FIRST, SECOND]), [30, 10])
    torch.testing.assert_close(scores, torch.tensor([0.30, 0.225, 0.065, 0.265]))
    assert top_mask(scores, 0.5).tolist() == [True, False, False, True]
    unweighted = aggregate_scores(torch.tensor([FIRST, SECOND]), [1, 1])
    assert top_mask(unweighted, 0.5).tolist() == [False, True, False, True]


def test_absolute_value_comes_before_the_average() -> None:
    scores = []
    for features, target in ((torch.tensor([2.0, 0.5]), 0.0), (torch.tensor([1.0, 1.0]), 1.0)):
        weight = torch.tensor([1.0, -2.0], requires_grad=True)
        (grad,) = torch.autograd.grad(0.5 * (weight @ features - target) ** 2, weight)
        scores.append(saliency(grad, weight))
    assert scores[0].tolist() == [2, 1]
    assert scores[1].tolist() == [2, 4]
    assert aggregate_scores(torch.stack(scores), [1, 1]).tolist() == [2, 2.5]


def test_saliency_of_a_stack_is_that_of_each_client() -> None:
    grads, weights = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(saliency(grads, weights)[1], saliency(grads[1], weights[1]))
    assert not saliency(grads, weights.requires_grad_()).requires_grad


def test_saliency_of_half_precision_is_in_single_precision() -> None:
    small = torch.tensor([1e-4], dtype=torch.float16)
    assert saliency(small, small).dtype is torch.float32
    assert saliency(small, small).item() > 0


def test_saliency_refuses_different_shapes() -> None:
    with pytest.raises(FedStrataError, match=r"gradient has the shape \(2,\).*weight has \(3,\)"):
        saliency(torch.ones(2), torch.ones(3))


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=20),
)
def test_equal_clients_give_back_their_scores(values: list[float], sizes: list[int]) -> None:
    scores = torch.tensor(values)
    assert torch.equal(aggregate_scores(scores.expand(len(sizes), -1), sizes), scores)


@given(
    st.lists(st.floats(0, 1e3, width=32), min_size=2, max_size=12),
    st.lists(st.integers(0, 1000), min_size=2, max_size=2),
    st.permutations([0, 1]),
)
def test_average_lies_between_the_clients_in_any_order(values: list[float], sizes: list[int], order: list[int]) -> None:
    stack = torch.tensor(values[: len(values) // 2 * 2]).reshape(2, -1)
    if not any(sizes):
        sizes = [1, 0]
    mean = aggregate_scores(stack, sizes)
    assert bool((mean >= stack.amin(0)).all())
    assert bool((mean <= stack.amax(0)).all())
    torch.testing.assert_close(aggregate_scores(stack[order], [sizes[index] for index in order]), mean)
    torch.testing.assert_close(aggregate_scores(stack, [7 * size for size in sizes]), mean)


def test_average_of_one_client_and_of_a_client_without_samples() -> None:
    stack = torch.tensor([[1.0, 2.0], [5.0, 7.0]])
    assert torch.equal(aggregate_scores(stack[:1], [3]), stack[0])
    assert torch.equal(aggregate_scores(stack, [0, 4]), stack[1])
    assert torch.equal(aggregate_scores(stack, torch.tensor([4, 0])), stack[0])
    assert aggregate_scores(torch.tensor([1.0, 3.0]), [1, 1]).item() == 2
    assert aggregate_scores(torch.zeros(3, 0, 2), [1, 2, 3]).shape == (0, 2)


def test_average_over_more_entries_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, sizes = torch.rand(7, 10, dtype=torch.float64), [1, 2, 3, 4, 5, 6, 7]
    whole = aggregate_scores(stack, sizes)
    monkeypatch.setattr("fedstrata.functional._entries.PIECE_ENTRIES", 25)
    torch.testing.assert_close(aggregate_scores(stack, sizes), whole, rtol=1e-14, atol=0)
    torch.testing.assert_close(whole, (stack * torch.tensor(sizes)[:, None]).sum(0) / 28, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0, 0], "at least one client must hold samples"),
        ([3, -1], "not negative"),
        ([3, math.nan], "finite number"),
        ([3, math.inf], "finite number"),
        ([1, 2, 3], r"shape \(3,\) for 2 clients"),
        ([], r"shape \(0,\) for 2 clients"),
    ],
)
def test_average_refuses_sizes_that_are_no_weights(sizes: list[float], message: str) -> None:
    with pytest.raises(FedStrataError, match=message):
        aggregate_scores(torch.ones(2, 3), sizes)


def test_average_refuses_scores_that_have_none() -> None:
    with pytest.raises(FedStrataError, match="no clients"):
        aggregate_scores(torch.ones(0, 3), [])
    with pytest.raises(FedStrataError, match="single number"):
        aggregate_scores(torch.tensor(1.0), [1])
    with pytest.raises(FedStrataError, match="scores of client 1 holds NaN"):
        aggregate_scores(torch.tensor([[1.0], [math.nan]]), [1, 0])
    with pytest.raises(FedStrataError, match="scores of client 1 holds NaN"):
        aggregate_scores(torch.tensor([1.0, math.inf]), [1, 1])


@pytest.mark.parametrize(
    ("sparsity", "entries", "kept"),
    [
        (0.9, 10, 1),
        (0.5, 5, 2),
        (0.0, 5, 5),
        (0.9, 5, 0),
        (0.3, 10, 7),
        (0.71, 100, 29),
        (1e-300, 4, 4),
        (0.999, 10, 0),
    ],
)
def test_counts(sparsity: float, entries: int, kept: int) -> None:
    assert int(top_mask(torch.zeros(entries), sparsity).sum()) == kept
    assert int(top_mask(torch.arange(float(entries)), sparsity).sum()) == kept


@given(st.integers(0, 20_000), st.integers(0, 999))
def test_counts_are_those_of_the_decimal_number(entries: int, thousandths: int) -> None:
    kept = int(top_mask(torch.zeros(entries), thousandths / 1000).sum())
    assert kept == math.floor((1 - Fraction(thousandths, 1000)) * entries)


def test_ties_drop_the_lower_index_first_across_tensors() -> None:
    assert top_mask(torch.ones(4), 0.5).tolist() == [False, False, True, True]
    masks = top_mask({"a": torch.ones(3), "b": torch.ones(2, 1)}, 0.8)
    assert masks["a"].tolist() == [False, False, False]
    assert masks["b"].tolist() == [[False], [True]]


layers = st.dictionaries(
    st.sampled_from(["conv", "norm", "head", "bias"]),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=10),
    max_size=4,
)


@given(layers, st.integers(0, 99))
def test_a_dict_is_ranked_as_one_vector(values: dict[str, list[float]], percent: int) -> None:
    scores = {name: torch.tensor(entries) for name, entries in values.items()}
    masks = top_mask(scores, percent / 100)
    assert list(masks) == list(scores)
    if scores:
        assert torch.equal(torch.cat(list(masks.values())), top_mask(torch.cat(list(scores.values())), percent / 100))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=20), st.integers(0, 99), st.integers(0, 99))
def test_sparser_masks_lie_inside_denser_ones(values: list[float], first: int, second: int) -> None:
    scores, (low, high) = torch.tensor(values), sorted((first, second))
    assert not bool((top_mask(scores, high / 100) & ~top_mask(scores, low / 100)).any())
    kept = scores[top_mask(scores, low / 100)]
    dropped = scores[~top_mask(scores, low / 100)]
    if kept.numel() and dropped.numel():
        assert kept.min() >= dropped.max()


def test_clients_get_masks_of_their_own() -> None:
    scores = {"a": torch.rand(3, 4, 2), "b": torch.rand(3, 5), "c": torch.rand(3)}
    together = top_mask(scores, 0.6, batched=True)
    for client in range(3):
        alone = top_mask({name: tensor[client] for name, tensor in scores.items()}, 0.6)
        assert all(torch.equal(together[name][client], alone[name]) for name in scores)


def test_tensors_of_different_precision_are_ranked_together() -> None:
    masks = top_mask({"a": torch.tensor([1.0, 3.0], dtype=torch.bfloat16), "b": torch.tensor([2.0])}, 0.3)
    assert masks["a"].tolist() == [False, True]
    assert masks["b"].tolist() == [True]


def test_empty_layers_and_empty_dicts() -> None:
    assert top_mask({}, 0.5) == {}
    masks = top_mask({"none": torch.zeros(0, 3), "some": torch.tensor([1.0, 2.0])}, 0.5)
    assert masks["none"].shape == (0, 3)
    assert masks["some"].tolist() == [False, True]
    assert top_mask(torch.zeros(0), 0.5).shape == (0,)


def test_scores_that_are_not_finite_are_refused_by_name() -> None:
    scores = {"conv.weight": torch.ones(2, 3), "head.weight": torch.tensor([[1.0, 2.0], [math.nan, 3.0]])}
    with pytest.raises(FedStrataError, match=r"'head.weight' holds NaN"):
        top_mask(scores, 0.5)
    with pytest.raises(FedStrataError, match=r"'head.weight' of client 1 holds NaN"):
        top_mask(scores, 0.5, batched=True)


def test_stacks_of_different_clients_are_refused() -> None:
    with pytest.raises(FedStrataError, match=r"differ in their number of clients \(2, 3\)"):
        top_mask({"a": torch.ones(2, 4), "b": torch.ones(3, 4)}, 0.5, batched=True)


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 2.0, math.nan])
def test_a_sparsity_outside_zero_to_one_is_refused(sparsity: float) -> None:
    with pytest.raises(FedStrataError, match=r"sparsity is .* at least 0 and less than 1"):
        top_mask(torch.ones(3), sparsity)


def test_the_mask_agrees_with_the_one_that_drops_the_rest() -> None:
    scores: Tensor = torch.randint(0, 5, (50,)).float()
    assert torch.equal(top_mask(scores, 0.5), keep_mask(scores, 0.5))


def test_mask_error_is_the_rate_of_wrong_entries() -> None:
    assert mask_error(torch.tensor([1, 0, 0, 1]), torch.tensor([1, 0, 1, 0])) == 0.5
    assert mask_error(torch.tensor([True, False]), torch.tensor([1.0, 0.0])) == 0.0
    masks = {"a": torch.tensor([[True, True]]), "b": torch.tensor([True, False, False])}
    truth = {"b": torch.tensor([False, True, False]), "a": torch.tensor([[True, True]])}
    assert mask_error(masks, truth) == 0.4
    assert mask_error({}, {}) == 0.0
    assert mask_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_mask_error_refuses_masks_of_other_tensors() -> None:
    with pytest.raises(FedStrataError, match="dicts with different names"):
        mask_error({"a": torch.ones(2)}, {"b": torch.ones(2)})
    with pytest.raises(FedStrataError, match=r"mask a has the shape \(2,\).*oracle's has \(3,\)"):
        mask_error({"a": torch.ones(2)}, {"a": torch.ones(3)})


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_mask_error_counts(mask: list[bool], other: list[bool]) -> None:
    truth = other[: len(mask)]
    wrong = sum(one != two for one, two in zip(mask, truth, strict=True))
    assert mask_error(torch.tensor(mask), torch.tensor(truth)) == wrong / len(mask)


def test_every_minibatch_has_its_own_absolute_value() -> None:
    """Gradients (3, 1) and (-1, 1) at (2, -1): scores (6, 1) and (2, 1), mean (4, 1), not |mean| = (2, 1)."""
    weights = {"a": torch.tensor([2.0]), "b": torch.tensor([-1.0])}
    grads = [{"a": torch.tensor([value]), "b": torch.tensor([1.0]), "bias": torch.ones(3)} for value in (3.0, -1.0)]
    scores = mean_saliency(iter(grads), weights)
    assert {name: score.tolist() for name, score in scores.items()} == {"a": [4], "b": [1]}
    assert mean_saliency(grads[:1], weights)["a"].tolist() == [6]
    assert mean_saliency(grads * 3, weights)["a"].tolist() == [4]
    with pytest.raises(FedStrataError, match="no minibatches whose scores could be averaged"):
        mean_saliency([], weights)


def test_mask_error_adds_up_over_tensors_and_any_number_but_zero_keeps() -> None:
    masks = {"a": torch.tensor([True, True]), "b": torch.tensor([True, False, False])}
    truth = {"a": torch.tensor([False, True]), "b": torch.tensor([False, True, False])}
    assert mask_error(masks, truth) == 3 / 5
    assert mask_error(torch.tensor([2, 0]), torch.tensor([1, 0])) == 0
    assert mask_error(torch.tensor([1, 0]), torch.tensor([2, 0])) == 0
    with pytest.raises(FedStrataError, match=r"^The mask has the shape \(2,\).*oracle's has \(3,\)"):
        mask_error(torch.ones(2), torch.ones(3))


def test_the_refusal_of_sizes_names_them() -> None:
    with pytest.raises(FedStrataError, match=r"(?<!\w)sizes(?!\w)"):
        aggregate_scores(torch.ones(2, 3), [3, -1])
