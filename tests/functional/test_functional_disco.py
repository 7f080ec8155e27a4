"""FedDisco: shares from sizes and label histograms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.functional import disco_shares

SIZES, COUNTS = [0.5, 0.3, 0.2], [[25, 25], [30, 0], [5, 15]]


def test_golden_case() -> None:
    shares = disco_shares(SIZES, COUNTS, 0.5, 0.1)
    assert shares.tolist() == pytest.approx([0.67566016, 0.06016349, 0.26417635], abs=1e-8)
    assert shares.dtype == torch.float64


def test_golden_case_of_the_released_code() -> None:
    shares = disco_shares(SIZES, COUNTS, 0.5, 0.1, normalise=True)
    assert shares.tolist() == pytest.approx([0.73115464, 0, 0.26884536], abs=1e-8)


@pytest.mark.parametrize(
    ("distance", "distances"),
    [
        ("l1", [0.0, 1.0, 0.5]),
        ("l2", [0.0, math.sqrt(0.5), math.sqrt(0.125)]),
        ("cosine", [0.0, 1 - 1 / math.sqrt(2), 1 - 1 / math.sqrt(1.25)]),
    ],
)
def test_other_distances(distance: str, distances: list[float]) -> None:
    raw = [max(0.0, size - 0.2 * value + 0.05) for size, value in zip(SIZES, distances, strict=True)]
    expected = [value / sum(raw) for value in raw]
    assert disco_shares(SIZES, COUNTS, 0.2, 0.05, distance).tolist() == pytest.approx(expected, abs=1e-12)


def test_only_relative_sizes_matter() -> None:
    assert torch.equal(
        disco_shares(torch.tensor([50, 30, 20]), torch.tensor(COUNTS), 0.5, 0.1), disco_shares(SIZES, COUNTS, 0.5, 0.1)
    )


def test_without_a_and_b_shares_are_sizes() -> None:
    assert disco_shares([30, 10], [[3, 1], [0, 4]], 0.0, 0.0).tolist() == [0.75, 0.25]


@pytest.mark.parametrize("normalise", [False, True])
def test_equal_labels_leave_equal_sizes_equal(normalise: bool) -> None:
    assert disco_shares([7, 7], [[2, 2], [9, 9]], 0.5, 0.1, normalise=normalise).tolist() == [0.5, 0.5]


def test_where_nobody_would_get_anything_sizes_decide() -> None:
    assert disco_shares([3, 1], [[5, 0], [0, 5]], 10.0, 0.1).tolist() == [0.75, 0.25]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6),
    st.floats(0, 3),
    st.floats(0, 1),
    st.sampled_from(["kl", "l1", "l2", "cosine"]),
    st.booleans(),
)
def test_shares_are_a_distribution(
    clients: list[tuple[int, int, int]], a: float, b: float, distance: str, normalise: bool
) -> None:
    shares = disco_shares([size for size, *_ in clients], [counts for _, *counts in clients], a, b, distance, normalise)
    assert float(shares.sum()) == pytest.approx(1)
    assert bool((shares >= 0).all())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sizes": [1, 2]}, "The sizes have the shape"),
        ({"sizes": [0, 0, 0]}, "at least one client must hold samples"),
        ({"sizes": [1, -1, 1]}, "must be a finite number that is not negative"),
        ({"label_counts": [1, 2, 3]}, "give one histogram per client"),
        ({"label_counts": [[1, 1], [0, 0], [1, 1]]}, "not all zero"),
        ({"label_counts": [[1, 1], [math.nan, 0], [1, 1]]}, "must be finite"),
        ({"a": math.inf}, "give finite numbers"),
        ({"distance": "lk"}, "no distance of label distributions 'lk'"),
    ],
)
def test_what_has_no_answer_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        disco_shares(**{"sizes": SIZES, "label_counts": COUNTS, "a": 0.5, "b": 0.1, **arguments})


def test_equal_labels_are_no_distance_to_divide_by() -> None:
    """Nobody is far from uniform, so that sizes and b decide: (.75 + .1) / 1.2."""
    shares = disco_shares([3, 1], [[2, 2], [9, 9]], 0.5, 0.1, normalise=True)
    assert shares.tolist() == pytest.approx([0.85 / 1.2, 0.35 / 1.2], abs=1e-12)


def test_a_client_may_have_no_share_beforehand() -> None:
    assert disco_shares([1, 0], [[1, 1], [1, 1]], 0.0, 0.0).tolist() == [1.0, 0.0]


def test_one_negative_count_is_refused() -> None:
    with pytest.raises(FedStrataError, match="not negative"):
        disco_shares(SIZES, [[3, -1], [1, 1], [1, 1]], 0.5, 0.1)
