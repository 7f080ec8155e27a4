"""Samples held out to test on, at each client, and for the server."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data.dataset import Dataset
from fedstrata.data.held_out import hold_out_at_clients, hold_out_for_server, hold_out_for_testing
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError


def test_for_testing_it_takes_the_middle_of_equal_segments() -> None:
    train, test = hold_out_for_testing(np.array([0] * 8 + [1] * 4), 0.25)
    assert test.tolist() == [2, 6, 10]
    assert train.tolist() == [0, 1, 3, 4, 5, 7, 8, 9, 11]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 0.99))
def test_for_testing_it_keeps_every_group_in_training_and_every_sample_once(groups: list[int], fraction: float) -> None:
    values = np.array(groups)
    train, test = hold_out_for_testing(values, fraction)
    assert sorted([*train, *test]) == list(range(len(groups)))
    for group, size in zip(*np.unique(values, return_counts=True), strict=True):
        assert (values[test] == group).sum() == min(size - 1, int(size * fraction + 0.5))


def split_of(*sizes: int, test: tuple[np.ndarray, ...] | None = None) -> Split:
    starts = np.cumsum((0, *sizes))
    train = tuple(np.arange(first, last) for first, last in pairwise(starts))
    return Split(train, test or tuple(np.empty(0, dtype=np.int64) for _ in sizes))


@given(st.lists(st.integers(2, 20), min_size=1, max_size=5), st.floats(0.01, 0.99), st.integers(0, 3))
def test_at_clients_it_leaves_every_sample_on_one_side(sizes: list[int], fraction: float, seed: int) -> None:
    split = split_of(*sizes)
    left, held = hold_out_at_clients(split, fraction, seed)
    for client, size in enumerate(sizes):
        assert sorted([*left.train[client], *held[client]]) == split.train[client].tolist()
        assert len(held[client]) == min(max(1, round(fraction * size)), size - 1)


def test_at_clients_it_depends_on_the_seed_and_on_nobody_else() -> None:
    first, second = split_of(20, 30), split_of(20, 7)
    held = hold_out_at_clients(first, 0.5, 0)[1][0]
    assert held.tolist() == hold_out_at_clients(second, 0.5, 0)[1][0].tolist()
    assert held.tolist() != hold_out_at_clients(first, 0.5, 1)[1][0].tolist()


def test_at_clients_nobody_trains_on_another_copy_of_what_is_held_out() -> None:
    """Some partitions give a client a sample more than once."""
    split = Split((np.array([0, 0, 1, 1, 2, 2, 3, 3]),), (np.empty(0, dtype=np.int64),))
    for seed in range(5):
        left, (held,) = hold_out_at_clients(split, 0.5, seed)
        assert set(held) | set(left.train[0]) == {0, 1, 2, 3}
        assert not set(held) & set(left.train[0])
    with pytest.raises(FedStrataError, match="Client 0 has the same training sample 3 times"):
        hold_out_at_clients(Split((np.array([4, 4, 4]),), (np.empty(0, dtype=np.int64),)), 0.5, 0)


def test_at_clients_a_single_sample_cannot_be_divided() -> None:
    with pytest.raises(FedStrataError, match=r"Client 1 has 1 training sample.*at least two"):
        hold_out_at_clients(split_of(2, 1), 0.5, 0)


def labelled(labels: list[int], tested: int) -> tuple[Dataset, Split]:
    """Eight training samples, then test samples that two clients share alike."""
    places = np.arange(8, 8 + tested)
    dataset = Dataset(
        "small", torch.zeros(8 + tested, 2), torch.tensor([0] * 8 + labels), np.arange(8), places, ("a", "b", "c")
    )
    return dataset, split_of(4, 4, test=(places, places))


def test_for_the_server_it_takes_the_classes_alike_and_nobody_is_tested_on_them() -> None:
    dataset, split = labelled([0] * 5 + [1] * 3 + [2], tested=9)
    rest, without, proxy = hold_out_for_server(dataset, split, 5, 0)
    # Two of each class; the third has one sample only.
    assert np.bincount(dataset.labels[proxy]).tolist() == [2, 2, 1]
    assert sorted([*rest.test, *proxy]) == dataset.test.tolist()
    assert all(positions.tolist() == rest.test.tolist() for positions in without.test)
    assert np.array_equal(rest.train, dataset.train)


def test_for_the_server_something_must_be_left_to_test_on() -> None:
    dataset, split = labelled([0, 1, 2], tested=3)
    hold_out_for_server(dataset, split, 2, 0)
    with pytest.raises(FedStrataError, match=r"needs 3 labelled samples, but 'small' has 3 test samples"):
        hold_out_for_server(dataset, split, 3, 0)
