"""FLASH: weights shared out between layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.functional import share_out


def test_in_proportion_to_importance() -> None:
    assert share_out(12, torch.tensor([3.0, 2.0, 1.0]), torch.tensor([99, 99, 99])).tolist() == [6, 4, 2]


def test_a_full_layer_leaves_the_rest_to_the_others_in_the_same_proportions() -> None:
    """Of 12, the first would get 6 and has room for 3: the others share 9 as 2 to 1."""
    assert share_out(12, torch.tensor([3.0, 2.0, 1.0]), torch.tensor([3, 99, 99])).tolist() == [3, 6, 3]
    assert share_out(12, torch.tensor([3.0, 2.0, 1.0]), torch.tensor([3, 4, 99])).tolist() == [3, 4, 5]


def test_what_rounding_leaves_goes_to_the_largest_remainders() -> None:
    """10 as 1 : 1 : 1.1 is 3.22, 3.22 and 3.55: one is left over, for the last."""
    assert share_out(10, torch.tensor([1.0, 1.0, 1.1]), torch.tensor([9, 9, 9])).tolist() == [3, 3, 4]
    assert share_out(4, torch.ones(3), torch.tensor([9, 9, 9])).tolist() == [2, 1, 1]


def test_only_proportions_count_however_small() -> None:
    assert share_out(6, torch.tensor([0.2, 0.1]), torch.tensor([9, 9])).tolist() == [4, 2]
    assert share_out(6, torch.tensor([1.7, 3.2, 1.1]), torch.tensor([9, 9, 9])).tolist() == [2, 3, 1]


def test_importance_in_float32_is_summed_exactly() -> None:
    """In float32, 2^24 + 1 + 1 is 2^24."""
    importance, room = torch.tensor([2.0**24, 1.0, 1.0]), torch.tensor([2**25, 9, 9])
    assert share_out(2**24 + 2, importance, room).tolist() == [2**24, 1, 1]


def test_a_layer_without_room_gets_nothing_however_important() -> None:
    assert share_out(4, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1, 0, 5])).tolist() == [1, 0, 3]
    assert share_out(5, torch.tensor([1.0, 9.0, 3.0]), torch.tensor([2, 0, 3])).tolist() == [2, 0, 3]


def test_room_for_one_takes_one_and_less_than_nothing_is_nothing() -> None:
    assert share_out(1, torch.tensor([1.0, 1.0]), torch.tensor([1, 1])).tolist() == [1, 0]
    assert share_out(-2, torch.tensor([1.0, 1.0]), torch.tensor([4, 4])).tolist() == [0, 0]


def test_edges() -> None:
    assert share_out(0, torch.ones(2), torch.tensor([3, 3])).tolist() == [0, 0]
    assert share_out(99, torch.ones(2), torch.tensor([3, 4])).tolist() == [3, 4]
    assert share_out(3, torch.zeros(2), torch.tensor([3, 4])).tolist() == [2, 1]
    assert share_out(3, torch.tensor([0.0, 1.0]), torch.tensor([3, 1])).tolist() == [2, 1]
    assert share_out(3, torch.tensor([1.0, 1.0]), torch.tensor([0, 9])).tolist() == [0, 3]


def test_refusals() -> None:
    with pytest.raises(FedStrataError, match="none of it can be negative"):
        share_out(3, torch.tensor([1.0, -1.0]), torch.tensor([3, 4]))
    with pytest.raises(FedStrataError, match="NaN or infinite"):
        share_out(3, torch.tensor([1.0, float("nan")]), torch.tensor([3, 4]))
    with pytest.raises(FedStrataError, match=r"importance has the shape \(2,\).*room has \(3,\)"):
        share_out(3, torch.ones(2), torch.tensor([3, 4, 5]))


layer = st.tuples(st.floats(0, 1e6, width=32), st.integers(0, 1000))


@given(st.lists(st.tuples(st.integers(0, 3000), layer, layer, layer), min_size=1, max_size=4))
def test_counts_are_exact_fit_and_are_the_same_for_each_client_alone(rows) -> None:
    totals = torch.tensor([row[0] for row in rows])
    importance = torch.tensor([[one[0] for one in row[1:]] for row in rows], dtype=torch.float64)
    room = torch.tensor([[one[1] for one in row[1:]] for row in rows])
    shared = share_out(totals, importance, room)
    assert shared.sum(1).tolist() == totals.minimum(room.sum(1)).tolist()
    assert ((shared >= 0) & (shared <= room)).all()
    for row in range(len(rows)):
        assert share_out(int(totals[row]), importance[row], room[row]).tolist() == shared[row].tolist()
