"""Densities, pruning, regrowth and overlap of masks."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedstrata import functional
from fedstrata.errors import FedStrataError
from fedstrata.functional import (
    erk_densities,
    feddst_densities,
    layer_masks,
    overlap,
    overlaps,
    prune,
    readjust,
    readjusted_at,
    regrow,
)

shapes_of_models = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=6)
few_values = st.sampled_from([0.0, 0.5, 1.0, 2.0])
masks_and_scores = st.lists(st.tuples(st.booleans(), few_values), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("erk_densities", ["shapes", "density"]),
        ("feddst_densities", ["shapes", "density"]),
        ("layer_masks", ["scores", "densities"]),
        ("prune", ["mask", "scores", "count"]),
        ("regrow", ["mask", "scores", "count"]),
        ("readjust", ["mask", "weight", "growth", "fraction"]),
        ("readjusted_at", ["round", "total", "alpha"]),
        ("overlap", ["mask_a", "mask_b"]),
        ("overlaps", ["masks"]),
    ],
)
def test_order_of_arguments(name: str, arguments: list[str]) -> None:
    parameters = inspect.signature(getattr(functional, name)).parameters.values()
    assert [item.name for item in parameters if item.kind is not item.KEYWORD_ONLY] == arguments


# Erdos-Renyi-Kernel --------------------------------------------------------------------------------------------------


def test_densities_follow_the_sum_over_the_product_of_the_axes() -> None:
    """8 / 16 and 16 / 64, so 1 to 1/2; the mean over 80 entries is (16 * 2e + 64 * e) / 80 = 0.5: e = 0.41667."""
    assert erk_densities([(4, 4), (8, 8)], 0.5) == pytest.approx([5 / 6, 5 / 12])


def test_a_kernel_counts_with_all_its_axes() -> None:
    """(4 + 2 + 3 + 3) / 72 = 1/6 and (6 + 6) / 36 = 1/3: 72 e/6 + 36 e/3 = 24 e = 0.25 * 108 gives e = 1.125."""
    assert erk_densities([(4, 2, 3, 3), (6, 6)], 0.25) == pytest.approx([0.1875, 0.375])


def test_what_would_exceed_one_is_dense_and_the_rest_makes_up_for_it() -> None:
    """120 entries at 0.5 leave 60 - 20 = 40 of the large tensor's 100."""
    assert erk_densities([(10, 10), (10,), (2, 5)], 0.5) == pytest.approx([0.4, 1.0, 1.0])


def test_dense_tensors_are_found_one_after_the_other() -> None:
    """The bias exceeds one at once; only the room that it leaves makes the middle tensor exceed it too."""
    densities = erk_densities([(40, 40), (3, 3), (4,)], 0.5)
    assert densities[1:] == [1.0, 1.0]
    assert densities[0] == pytest.approx((0.5 * 1613 - 13) / 1600)


def test_no_and_full_density() -> None:
    assert erk_densities([(3, 4), (5,)], 1.0) == [1.0, 1.0]
    assert erk_densities([(3, 4), (5,)], 0.0) == [0.0, 0.0]
    assert erk_densities([], 0.5) == []
    assert erk_densities([(0, 3), (2, 2)], 0.5) == [1.0, 0.5]


def test_feddst_scales_sparsities_instead() -> None:
    """1 - 1/2 of 16 and 1 - 1/4 of 64 entries are 8 and 48 of the 40 that go: c = 40/56, sparsities 5/14 and 15/28."""
    assert feddst_densities([(4, 4), (8, 8)], 0.5) == pytest.approx([9 / 14, 13 / 28])


def test_the_densities_of_a_lenet_by_both_rules() -> None:
    """The network of the authors' CIFAR-10 runs at their sparsity of 0.8, without biases."""
    shapes = [(6, 3, 5, 5), (16, 6, 5, 5), (120, 6400), (84, 120), (10, 84)]
    assert feddst_densities(shapes, 0.2) == pytest.approx([0.227, 0.204, 0.200, 0.209, 0.283], abs=5e-4)
    assert erk_densities(shapes, 0.2) == pytest.approx([0.969, 0.306, 0.195, 0.465, 1.0], abs=5e-4)


def test_small_tensors_stay_dense_unless_there_is_no_other_way() -> None:
    """(1, 4) and a bias have no fewer entries than axes add up to: 0.25 of 72 entries go, all from (8, 8)."""
    assert feddst_densities([(1, 4), (8, 8), (4,)], 0.75) == pytest.approx([1.0, 1 - 18 / 64, 1.0])
    assert feddst_densities([(1, 4), (4,)], 0.25) == pytest.approx([0.25, 0.25])
    assert feddst_densities([(1, 4), (8, 8), (4,)], 4 / 72) == pytest.approx([0.5, 0.0, 0.5])
    assert feddst_densities([(0, 3), (4, 4)], 0.5) == [1.0, 0.5]
    assert feddst_densities([(4, 4), (5,)], 1.0) == [1.0, 1.0]


@pytest.mark.parametrize("divide", [erk_densities, feddst_densities])
@pytest.mark.parametrize("density", [-0.1, 1.1, math.nan])
def test_a_density_outside_zero_to_one_is_refused(divide, density: float) -> None:
    with pytest.raises(FedStrataError, match=r"density is .* from 0 to 1"):
        divide([(2, 2)], density)


@pytest.mark.parametrize("divide", [erk_densities, feddst_densities])
@given(shapes_of_models, st.integers(0, 100))
def test_the_mean_over_all_entries_is_the_global_density(divide, shapes: list[list[int]], percent: int) -> None:
    densities = divide(shapes, percent / 100)
    sizes = [math.prod(shape) for shape in shapes]
    kept = sum(own * size for own, size in zip(densities, sizes, strict=True))
    assert kept == pytest.approx(percent / 100 * sum(sizes))
    assert all(-1e-12 <= own <= 1 + 1e-12 for own in densities)


@given(shapes_of_models, st.integers(0, 100))
def test_the_densities_of_tensors_that_are_not_full_have_one_scale(shapes: list[list[int]], percent: int) -> None:
    densities, sizes = erk_densities(shapes, percent / 100), [math.prod(shape) for shape in shapes]
    sparse = [(own, sum(shape) / size) for own, shape, size in zip(densities, shapes, sizes, strict=True) if own < 1]
    scales = [own / raw for own, raw in sparse]
    assert scales == pytest.approx([scales[0]] * len(scales)) if scales else True


def test_masks_keep_the_highest_scores_of_each_tensor() -> None:
    scores = {"large": torch.arange(64.0).view(8, 8), "small": -torch.arange(16.0).view(4, 4)}
    densities = erk_densities([(8, 8), (4, 4)], 0.5)
    masks = layer_masks(scores, densities)
    assert [int(mask.sum()) for mask in masks.values()] == [26, 13]
    assert masks["large"].flatten()[-26:].all()
    assert masks["small"].flatten()[:13].all()
    both = {name: torch.stack((tensor, -tensor)) for name, tensor in scores.items()}
    stacked = layer_masks(both, densities, batched=True)
    assert all(torch.equal(stacked[name][0], masks[name]) for name in masks)
    assert stacked["small"][1].flatten()[-13:].all()
    assert not layer_masks({"none": torch.ones(3)}, [0.0])["none"].any()


# Pruning and regrowth ------------------------------------------------------------------------------------------------


@given(masks_and_scores, st.integers(0, 35))
def test_pruning_drops_the_lowest_kept_entries(entries: list[tuple[bool, float]], count: int) -> None:
    mask, scores = torch.tensor([kept for kept, _ in entries]), torch.tensor([score for _, score in entries])
    kept = [place for place in range(len(entries)) if mask[place]]
    gone = set(sorted(kept, key=lambda place: (entries[place][1], place))[:count])
    expected = [bool(mask[place]) and place not in gone for place in range(len(entries))]
    assert prune(mask, scores, count).tolist() == expected


@given(masks_and_scores, st.integers(0, 35))
def test_regrowth_adds_the_highest_other_entries(entries: list[tuple[bool, float]], count: int) -> None:
    mask, scores = torch.tensor([kept for kept, _ in entries]), torch.tensor([score for _, score in entries])
    others = [place for place in range(len(entries)) if not mask[place]]
    back = set(sorted(others, key=lambda place: (-entries[place][1], -place))[:count])
    expected = [bool(mask[place]) or place in back for place in range(len(entries))]
    assert regrow(mask, scores, count).tolist() == expected


def test_each_client_has_its_own_count() -> None:
    mask = torch.tensor([[True, True, True, False], [True, True, True, False], [True, False, False, False]])
    scores = torch.tensor([[3.0, 1.0, 2.0, 9.0]] * 3)
    counts = torch.tensor([0, 2, 5])
    assert prune(mask, scores, counts, batched=True).tolist() == [
        [True, True, True, False],
        [True, False, False, False],
        [False, False, False, False],
    ]
    assert regrow(~mask, scores, counts, batched=True).tolist() == [
        [False, False, False, True],
        [True, False, True, True],
        [True, True, True, True],
    ]


@pytest.mark.parametrize("change", [prune, regrow])
def test_a_stack_gives_the_masks_of_one_call_per_client(change) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.randint(2, (5, 4, 6), generator=generator).bool()
    scores = torch.randint(4, (5, 4, 6), generator=generator).double()
    counts = torch.tensor([0, 3, 7, 24, 1])
    each = torch.stack([change(*row) for row in zip(mask, scores, counts, strict=True)])
    assert torch.equal(change(mask, scores, counts, batched=True), each)


def test_a_random_mask_with_an_exact_count() -> None:
    grown = regrow(torch.zeros(3, 50, dtype=torch.bool), torch.rand(3, 50), 17, batched=True)
    assert grown.sum(1).tolist() == [17, 17, 17]


def test_scores_that_cannot_be_ranked_and_other_shapes_are_refused() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(FedStrataError, match="holds NaN or infinite numbers"):
        prune(mask, torch.tensor([1.0, math.nan, 2.0]), 1)
    with pytest.raises(FedStrataError, match=r"The mask has the shape \(3,\) but the tensor of scores has \(2,\)"):
        regrow(mask, torch.zeros(2), 1)


# Readjustment --------------------------------------------------------------------------------------------------------


def test_the_fraction_falls_along_a_cosine() -> None:
    values = [readjusted_at(round, 4, 0.5) for round in range(6)]
    assert values == pytest.approx([0.5, 0.25 * (1 + math.sqrt(0.5)), 0.25, 0.25 * (1 - math.sqrt(0.5)), 0, 0])


@pytest.mark.parametrize(("round", "total", "alpha"), [(-1, 4, 0.5), (1, 0, 0.5), (1, 4, 1.0), (1, 4, -0.1)])
def test_impossible_schedules_are_refused(round: int, total: int, alpha: float) -> None:
    with pytest.raises(FedStrataError):
        readjusted_at(round, total, alpha)


def test_the_smallest_weights_go_and_the_largest_growth_comes() -> None:
    mask = torch.tensor([True, True, True, False, False, False])
    weight = torch.tensor([0.3, -0.9, 0.1, 0.0, 0.0, 0.0])
    growth = torch.tensor([0.2, 9.0, 0.0, 0.1, 0.5, 0.4])
    assert readjust(mask, weight, growth, 0.0).tolist() == mask.tolist()
    assert readjust(mask, weight, growth, 0.3).tolist() == [True, True, False, False, True, False]
    assert readjust(mask, weight, growth, 0.5).tolist() == [False, True, False, False, True, True]


def test_the_fraction_is_read_as_it_was_written() -> None:
    """Of 10 entries 0.3 are 3, although 0.3 * 10 and 0.1 * 3 * 10 round differently."""
    mask, scores = torch.ones(20, dtype=torch.bool), torch.arange(20.0)
    mask[10:] = False
    for fraction in (0.3, 0.1 * 3):
        assert int((readjust(mask, scores, scores, fraction) & mask).sum()) == 7


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 99), st.integers(0, 5))
def test_a_mask_keeps_its_count(kept: list[bool], percent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([kept, kept[::-1]])
    weight, growth = (torch.rand(mask.shape, generator=generator) for _ in range(2))
    moved = readjust(mask, weight, growth, percent / 100, batched=True)
    assert moved.sum(1).tolist() == mask.sum(1).tolist()
    assert torch.equal(moved[0], readjust(mask[0], weight[0], growth[0], percent / 100))


# Overlap -------------------------------------------------------------------------------------------------------------


def bits(text: str) -> Tensor:
    return torch.tensor([character == "1" for character in text])


def test_golden_overlap() -> None:
    assert overlap(bits("1100"), bits("1010")) == 0.5


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("1100", "1100", 1.0),
        ("1100", "0011", 0.0),
        ("1100", "1000", 0.75),
        ("1000", "1100", 0.5),
        ("1000", "0111", -1.0),
        ("0000", "0000", 1.0),
        ("0000", "1000", 0.0),
    ],
)
def test_overlap_is_relative_to_the_first_mask(first: str, second: str, expected: float) -> None:
    assert overlap(bits(first), bits(second)) == expected
    assert (
        overlap({"a": bits(first)[:1], "b": bits(first)[1:]}, {"a": bits(second)[:1], "b": bits(second)[1:]})
        == expected
    )


def test_overlap_refuses_masks_that_do_not_match() -> None:
    with pytest.raises(FedStrataError, match="different names"):
        overlap({"a": bits("1")}, {"b": bits("1")})
    with pytest.raises(FedStrataError, match="shape"):
        overlap(bits("10"), bits("101"))


@given(st.integers(1, 4), st.integers(1, 30), st.integers(0, 99))
def test_overlaps_are_those_of_all_pairs(clients: int, entries: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    masks = {name: torch.randint(2, (clients, entries), generator=generator).bool() for name in "ab"}
    table = overlaps(masks)
    for i in range(clients):
        for j in range(clients):
            first, second = ({name: mask[row] for name, mask in masks.items()} for row in (i, j))
            size = sum(int(mask.sum()) for mask in first.values())
            distance = sum(int((mask ^ second[name]).sum()) for name, mask in first.items())
            expected = 1 - distance / (2 * size) if size else float(distance == 0)
            assert float(table[i, j]) == pytest.approx(expected)
            assert overlap(first, second) == float(table[i, j])
