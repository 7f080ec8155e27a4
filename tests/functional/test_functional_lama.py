"""FedLAMA: how many layers can wait."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.functional import lama_cut


def test_by_hand() -> None:
    """In ascending order delta = .125, .375, 1 and 1 - lambda = .524, .048, 0: the second layer crosses and counts."""
    assert lama_cut([0.1, 0.2, 5.0], [100, 100, 10]) == 2
    assert lama_cut(torch.tensor([5.0, 0.2, 0.1]), torch.tensor([10, 100, 100])) == 2


def test_a_large_layer_that_agrees_is_enough() -> None:
    """delta = .5 and 1 - lambda = .1 at once."""
    assert lama_cut([1.0, 9.0], [90, 10]) == 1


def test_a_tie_is_no_crossing() -> None:
    """With equal layers delta = lambda: of ten, the fifth has 1 - lambda = delta = .5, and the sixth crosses."""
    assert lama_cut([0.1] * 10, [1] * 10) == 6
    assert lama_cut([0.3] * 10, [7] * 10) == 6


def test_edges() -> None:
    assert lama_cut([], []) == 0
    assert lama_cut([3.0], [4]) == 1
    assert lama_cut([0.0, 0.0, 0.0], [1, 2, 3]) == 3


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 1000)), min_size=1, max_size=8))
def test_the_order_of_the_layers_does_not_matter(layers: list[tuple[float, int]]) -> None:
    discrepancy, sizes = [value for value, _ in layers], [size for _, size in layers]
    cut = lama_cut(discrepancy, sizes)
    assert 1 <= cut <= len(layers)
    distinct = len(set(discrepancy)) == len(discrepancy)
    if distinct:
        assert lama_cut(discrepancy[::-1], sizes[::-1]) == cut


@pytest.mark.parametrize(
    ("discrepancy", "sizes", "sentence"),
    [
        ([1.0], [1, 2], "give one number per layer"),
        ([[1.0]], [[1]], "give one number per layer"),
        ([1.0, -1.0], [1, 2], "a finite number that is not negative"),
        ([1.0, math.nan], [1, 2], "a finite number that is not negative"),
        ([1.0, 2.0], [1, 0], "each must be positive"),
    ],
)
def test_what_has_no_answer_is_refused(discrepancy: list[float], sizes: list[int], sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        lama_cut(discrepancy, sizes)
