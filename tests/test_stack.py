from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedstrata.stack
from fedstrata.stack import (
    Stack,
    align,
    apart,
    clone,
    concatenate,
    copy_,
    per_client,
    put_,
    repeat,
    squared_norm,
    subtract,
    take,
    take_first,
    under,
    weighted_mean,
    weighted_means,
    zeros_like,
)


@pytest.fixture
def stack():
    return {"weight": torch.arange(12.0).reshape(3, 2, 2), "scale": torch.tensor([1.0, 2.0, 3.0])}


# Groups --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def grouped():
    """Names in groups, groups in groups, and names that only begin like a group."""
    names = ("mask/a", "mask/conv.b", "mask/deep/c", "mask", "masked", "mask2/a", "other/mask/a")
    return Stack({name: torch.tensor(place) for place, name in enumerate(names)})


def test_a_group_is_what_stands_behind_its_name_and_a_stroke(grouped):
    assert grouped.group("mask") == {"a": 0, "conv.b": 1, "deep/c": 2}
    assert grouped.group("mask/deep") == grouped.group("mask").group("deep") == {"c": 2}
    assert grouped.group("other").group("mask") == {"a": 6}
    assert grouped.group("mas") == grouped.group("a") == grouped.group("masked") == {}
    assert isinstance(grouped.group("mask"), Stack)
    assert grouped.group("mask")["a"] is grouped["mask/a"]


def test_groups_are_left_out_whole(grouped):
    assert grouped.without("mask") == {"mask": 3, "masked": 4, "mask2/a": 5, "other/mask/a": 6}
    assert set(grouped.without("mask", "mask2", "nothing")) == {"mask", "masked", "other/mask/a"}
    assert set(grouped.without("mask/deep")) == set(grouped) - {"mask/deep/c"}
    assert grouped.without() == grouped
    assert isinstance(grouped.without("mask"), Stack)
    assert len(grouped) == 7


def test_what_is_put_under_a_group_stands_in_it(stack):
    nested = under("memory/part", under("mask", stack))
    assert set(nested) == {"memory/part/mask/weight", "memory/part/mask/scale"}
    assert isinstance(nested, Stack)
    assert nested.group("memory").group("part/mask") == nested.group("memory/part/mask")
    assert nested.group("memory/part/mask")["weight"] is stack["weight"]
    assert under("mask", {}) == {}


def test_joining_takes_the_others_where_both_have_a_name():
    left, right = Stack(a=torch.tensor(1), b=torch.tensor(2)), {"b": torch.tensor(3), "c": torch.tensor(4)}
    both = left | right
    assert both == {"a": 1, "b": 3, "c": 4}
    assert isinstance(both, Stack)
    assert both.group("x") == {}
    assert left == {"a": 1, "b": 2}
    assert right == {"b": 3, "c": 4}
    assert both["a"] is left["a"]


def test_joining_in_place_leaves_a_stack_that_others_hold_alone():
    """Hooks join what they remember to what they were given; whoever gave it must not notice."""
    held = Stack(a=torch.tensor(1), b=torch.tensor(2))
    memory = held
    memory |= {"b": torch.tensor(3)}
    memory |= under("mask", {"a": torch.tensor(4)})
    assert memory == {"a": 1, "b": 3, "mask/a": 4}
    assert isinstance(memory, Stack)
    assert held == {"a": 1, "b": 2}


# All clients at once -------------------------------------------------------------------------------------------------


def test_stacks_stay_stacks(stack):
    rows = torch.tensor([1])
    for made in (take(stack, None), take(stack, rows), clone(stack), concatenate([stack, stack]), concatenate([])):
        assert isinstance(made, Stack)
    taken = take(stack, None)
    taken["more"] = torch.zeros(3)
    assert "more" not in stack


def test_take_and_put_are_inverse(stack):
    rows = torch.tensor([2, 0])
    taken = take(stack, rows)
    assert taken["weight"].tolist() == [[[8, 9], [10, 11]], [[0, 1], [2, 3]]]
    assert taken["scale"].tolist() == [3, 1]
    put_(stack, rows, {"weight": -taken["weight"], "scale": taken["scale"] + 10})
    assert stack["weight"].tolist() == [[[0, -1], [-2, -3]], [[4, 5], [6, 7]], [[-8, -9], [-10, -11]]]
    assert stack["scale"].tolist() == [11, 2, 13]


def test_take_everybody_copies_nothing(stack):
    taken = take(stack, None)
    assert taken["weight"] is stack["weight"]
    new = torch.zeros(3)
    put_(stack, None, {"scale": new})
    assert stack["scale"] is new
    assert "weight" in stack


def test_what_all_clients_share_is_not_copied_for_some_of_them(stack):
    shared = repeat({"weight": torch.arange(4.0)}, 3)
    taken = take(shared | stack, torch.tensor([2, 0]))
    assert taken["weight"].tolist() == [[[8, 9], [10, 11]], [[0, 1], [2, 3]]]
    taken = take(shared, torch.tensor([2, 0]))
    assert taken["weight"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert taken["weight"].data_ptr() == shared["weight"].data_ptr()


def test_put_leaves_autograd_behind(stack):
    put_(stack, torch.tensor([1]), {"scale": torch.tensor([5.0], requires_grad=True)})
    assert stack["scale"].tolist() == [1, 5, 3]
    assert not stack["scale"].requires_grad


def test_repeat_clone_and_first(stack):
    model = take_first(stack)
    assert model["scale"].tolist() == 1
    many = repeat(model, 4)
    assert many["weight"].shape == (4, 2, 2)
    own = clone(many)
    own["weight"][0] += 1
    assert torch.equal(many["weight"][1], model["weight"])
    assert torch.equal(own["weight"][1], model["weight"])
    transposed = clone({"weight": torch.zeros(2, 3, requires_grad=True).T})["weight"]
    assert transposed.is_contiguous()
    assert not transposed.requires_grad


def test_tensors_that_share_memory_are_put_apart(stack):
    """One of them stays itself, the others and what repeats inside itself are copied; the values are the same."""
    whole = stack["weight"]
    shared = {"first": whole, "again": whole, "part": whole[1:], "turned": whole.mT, "many": torch.ones(1).expand(3)}
    mine = apart({**shared, "alone": stack["scale"]})
    assert isinstance(mine, Stack)
    assert list(mine) == [*shared, "alone"]
    assert mine["first"] is whole
    assert mine["alone"] is stack["scale"]
    for name, tensor in shared.items():
        assert torch.equal(mine[name], tensor)
        assert mine[name].is_contiguous()
    before = clone(mine)
    for name, tensor in mine.items():
        tensor += 1
        assert all(torch.equal(other, before[one]) for one, other in mine.items() if one != name)
        tensor -= 1


def test_concatenate_and_subtract(stack):
    both = concatenate([take(stack, torch.tensor([0])), take(stack, torch.tensor([1, 2]))])
    assert all(torch.equal(both[name], stack[name]) for name in stack)
    assert concatenate([]) == {}
    less = subtract({"scale": stack["scale"]}, {**stack, "scale": torch.ones(3)})
    assert list(less) == ["scale"]
    assert less["scale"].tolist() == [0, 1, 2]


def test_squared_norm_over_tensors_of_any_rank(stack):
    # 0 + 1 + 4 + 9 + 1, 16 + 25 + 36 + 49 + 4, 64 + 81 + 100 + 121 + 9
    assert squared_norm(stack).tolist() == [15, 130, 375]
    assert squared_norm({"empty": torch.zeros(2, 0), "one": torch.tensor([[3.0], [4.0]])}).tolist() == [9, 16]


def test_per_client_flattens_all_but_the_clients():
    assert per_client(torch.zeros(3, 4, 5)).shape == (3, 20)
    assert per_client(torch.zeros(3)).shape == (3, 1)
    assert per_client(torch.zeros(3, 0, 2)).shape == (3, 0)


def test_align():
    tensor = torch.ones(2, 3, 4)
    assert (align(torch.tensor([1.0, 2.0]), tensor) * tensor)[:, 0, 0].tolist() == [1, 2]


def test_weighted_mean():
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 8.0]])
    shares = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    mean = weighted_mean(tensor, shares)
    assert mean.tolist() == [2.5, 4.0]
    assert mean.dtype == torch.float32


def test_weighted_mean_under_masks_is_over_those_who_hold_the_entry():
    tensor = torch.tensor([[1.0, 2.0, 0.0, 7.0], [3.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    # Both: (0.25 + 2.25) / 1; the first alone: its own value; nobody: what the server has.
    assert weighted_mean(tensor, shares, mask, torch.tensor([9.0, 9.0, 9.0, 9.0])).tolist() == [2.5, 2.0, 9.0, 7.0]
    assert weighted_mean(tensor, shares, mask).tolist() == [2.5, 2.0, 0.0, 7.0]


def test_weighted_mean_with_a_mask_that_broadcasts():
    tensor = torch.arange(8.0).reshape(2, 2, 2)
    rows = torch.tensor([[[True], [False]], [[True], [True]]])
    shares = torch.tensor([0.5, 0.5])
    assert weighted_mean(tensor, shares, rows, torch.full((2, 2), -1.0)).tolist() == [[2, 3], [6, 7]]
    common = torch.tensor([[[True], [False]]])
    assert weighted_mean(tensor, shares, common, torch.full((2, 2), -1.0)).tolist() == [[2, 3], [-1, -1]]


def test_a_holder_without_a_share_counts_as_nobody():
    tensor, mask = torch.tensor([[5.0], [0.0]]), torch.tensor([[True], [False]])
    assert weighted_mean(tensor, torch.tensor([0.0, 1.0]), mask, torch.tensor([3.0])).tolist() == [3.0]


def test_weighted_mean_of_counters_is_rounded():
    counters = torch.tensor([10, 11, 13])
    mean = weighted_mean(counters, torch.tensor([0.25, 0.25, 0.5]))
    assert mean.tolist() == 12  # 11.75
    assert mean.dtype == torch.int64
    large = torch.tensor([[2**40 + 1], [2**40 + 3]])
    assert weighted_mean(large, torch.tensor([0.5, 0.5])).tolist() == [2**40 + 2]
    held = torch.tensor([[True], [False]])
    assert weighted_mean(large, torch.tensor([0.5, 0.5]), held, torch.tensor([7])).tolist() == [2**40 + 1]


def test_weighted_mean_keeps_the_gradient():
    tensor = torch.tensor([[1.0], [2.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(weighted_mean(tensor, torch.tensor([0.25, 0.75])).sum(), tensor)
    assert gradient.tolist() == [[0.25], [0.75]]


SHAPES = st.lists(st.integers(1, 3), max_size=2)


@st.composite
def replies(draw):
    """Draw tensors of some clients, some of them counters, some under masks, and what the server has."""
    clients, generator = draw(st.integers(1, 3)), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    stack, masks, otherwise = {}, {}, {}
    for number in range(draw(st.integers(0, 6))):
        name, shape = f"tensor {number}", draw(SHAPES)
        values = torch.randn(clients, *shape, generator=generator, dtype=torch.float64)
        counts = draw(st.booleans())
        stack[name] = (10 * values).long() if counts else values
        otherwise[name] = torch.full(shape, 7, dtype=stack[name].dtype)
        if draw(st.booleans()):
            rows = draw(st.sampled_from((1, clients)))
            masks[name] = torch.rand(rows, *shape, generator=generator) < 0.5
    shares = torch.rand(clients, generator=generator, dtype=torch.float64)
    return stack, shares, masks, otherwise


@given(drawn=replies(), small=st.sampled_from((0, 4, 10**6)), at_once=st.sampled_from((1, 12, 10**6)))
def test_weighted_means_are_those_of_single_tensors(drawn, small, at_once):
    stack, shares, masks, otherwise = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstrata.stack._SIDE_BY_SIDE", {"cpu": small})
        patch.setattr("fedstrata.stack._AT_ONCE", at_once)
        means = weighted_means(stack, shares, masks, otherwise)
    assert list(means) == list(stack)
    for name, mean in means.items():
        expected = weighted_mean(stack[name], shares, masks.get(name), otherwise[name])
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
        assert mean.untyped_storage().nbytes() == mean.nbytes, "nothing else is kept alive by it"


def test_small_tensors_of_a_kind_are_averaged_in_one_call(monkeypatch):
    sizes = []
    real = fedstrata.stack.weighted_mean
    monkeypatch.setattr(
        "fedstrata.stack.weighted_mean", lambda *given: [sizes.append(given[0].numel()), real(*given)][1]
    )
    monkeypatch.setattr("fedstrata.stack._SIDE_BY_SIDE", {"cpu": 4})
    stack = {
        "small": torch.ones(2, 2),
        "large": torch.ones(2, 3),
        "single": torch.ones(2),
        "count": torch.ones(2).long(),
    }
    weighted_means(stack, torch.tensor([0.5, 0.5]))
    assert sorted(sizes) == [2, 6, 6], "the counter, the large one, and two small ones together"
    sizes.clear()
    monkeypatch.setattr("fedstrata.stack._AT_ONCE", 8)
    weighted_means({str(number): torch.ones(2, 1) for number in range(7)}, torch.tensor([0.5, 0.5]))
    assert sizes == [8, 6], "no more than fits, and not one by one"


def test_zeros_are_like_what_is_given():
    zeros = zeros_like({"a": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones(1).expand(4)})
    assert {name: tensor.tolist() for name, tensor in zeros.items()} == {"a": [[0.0] * 3] * 2, "b": [0.0] * 4}
    assert zeros["a"].dtype == torch.float64
    assert zeros["b"].is_contiguous()
    assert zeros_like({}) == {}


# Copies --------------------------------------------------------------------------------------------------------------


def test_a_stretch_of_clients_is_no_copy(stack):
    some = take(stack, slice(2))
    assert some["scale"].tolist() == [1, 2]
    assert all(some[name].data_ptr() == stack[name].data_ptr() for name in stack)


def test_values_are_written_whatever_their_kind_and_however_they_lie():
    places = {name: torch.zeros(2, 3) for name in ("alike", "turned", "shared", "other", "itself")}
    places |= {"count": torch.zeros(2, dtype=torch.int64), "untouched": torch.ones(2)}
    numbers = torch.arange(6.0).reshape(2, 3)
    values = {
        "alike": numbers,
        "turned": numbers.T.contiguous().T,
        "shared": numbers[:1].expand(2, 3),
        "other": numbers.to(torch.float64),
        "itself": places["itself"],
        "count": torch.tensor([4, 5]),
    }
    copy_(places, values)
    assert all(torch.equal(places[name], value.to(places[name].dtype)) for name, value in values.items())
    assert places["untouched"].tolist() == [1, 1]


def test_a_clone_shares_nothing_and_is_contiguous(stack):
    shared = repeat({"weight": torch.tensor([1.0, 2.0], requires_grad=True)}, 3)
    copied = clone({**stack, "shared": shared["weight"], "turned": torch.arange(6).reshape(2, 3).T})
    for tensor in copied.values():
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        tensor.zero_()
    assert stack["scale"].tolist() == [1, 2, 3]
    assert shared["weight"].tolist() == [[1, 2]] * 3
