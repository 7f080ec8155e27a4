"""Partitions: golden counts, exact sizes, disjointness, coverage, determinism, and bad input."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.data import Dataset, Partitioner, datasets, from_arrays, partitions
from fedstrata.data.partitions.classes import balanced_slots
from fedstrata.data.partitions.dirichlet import rounded_counts
from fedstrata.data.partitions.dirichlet_balanced import balanced_counts
from fedstrata.data.partitions.dirichlet_clients import client_counts, filled_up
from fedstrata.data.partitions.drawing import (
    dirichlet_log_shares,
    draw,
    largest_remainders,
    local_test,
    normalised_logarithms,
)
from fedstrata.errors import FedStrataError

pytestmark = pytest.mark.filterwarnings("ignore:The label .* is only in the test samples")

DRAWN = ["iid", "dirichlet", "dirichlet-clients(minimum=1)", "dirichlet-balanced", "classes:1"]
DISJOINT = ["iid", "dirichlet-clients(minimum=1)", "dirichlet-balanced"]


def dataset_of(train: list[int], test: list[int], classes: int) -> Dataset:
    """A dataset of which only the labels matter."""
    names = [str(label) for label in range(classes)]
    return from_arrays(np.zeros((len(train), 1)), train, np.zeros((len(test), 1)), test, class_names=names)


def balanced(classes: int, train: int, test: int) -> Dataset:
    return dataset_of(list(range(classes)) * train, list(range(classes)) * test, classes)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.make("digits").load()


@st.composite
def label_sets(draw_value: st.DrawFn) -> Dataset:
    classes = draw_value(st.integers(1, 5))
    label = st.integers(0, classes - 1)
    train = draw_value(st.lists(label, min_size=1, max_size=60))
    test = draw_value(st.lists(label, min_size=1, max_size=40))
    return dataset_of(train, test, classes)


@pytest.mark.parametrize(
    ("total", "shares", "counts"),
    [
        (10, [0.55, 0.30, 0.15], [6, 3, 1]),
        (4, [0.4, 0.4, 0.2], [2, 2, 0]),
        (3, [0.5, 0.5, 0.0], [2, 1, 0]),
        (10, [0.24, 0.24, 0.24, 0.28], [2, 2, 2, 4]),
        (7, [1.0], [7]),
    ],
)
def test_counts_of_lips(total: int, shares: list[float], counts: list[int]) -> None:
    assert rounded_counts(total, np.array(shares)).tolist() == counts


@pytest.mark.parametrize(
    ("total", "shares", "counts"),
    [
        (7, [0.5, 0.3, 0.2], [4, 2, 1]),
        (5, [0.5, 0.5], [2, 3]),
        (3, [0.5, 0.5, 0.0], [2, 1, 0]),
        (0, [0.5, 0.5], [0, 0]),
    ],
)
def test_counts_of_fedlws_round_half_to_even(total: int, shares: list[float], counts: list[int]) -> None:
    assert client_counts(total, np.array(shares)).tolist() == counts


@pytest.mark.parametrize(
    ("total", "shares", "counts"),
    [
        (7, [0.5, 0.3, 0.2], [3, 2, 2]),  # 3.5, 2.1, 1.4
        (10, [0.19, 0.28, 0.24, 0.29], [1, 2, 2, 5]),  # 1.9, 2.8, 2.4, 2.9: each of the first three loses what it had
        (5, [0.5, 0.5], [2, 3]),
        (3, [0.99, 0.01], [2, 1]),
        (9, [0.0, 1.0], [0, 9]),
        (0, [0.5, 0.5], [0, 0]),
    ],
)
def test_counts_of_player_fl_are_cut_down(total: int, shares: list[float], counts: list[int]) -> None:
    assert client_counts(total, np.array(shares), "down").tolist() == counts


def test_rounding_down_leaves_more_to_the_last_client(digits: Dataset) -> None:
    nearest, down = (
        partitions.make(f"dirichlet-clients(alpha=100, minimum=1, rounding={rounding}, seed=3)")
        .split(digits, 20)
        .label_counts(digits)
        for rounding in ("nearest", "down")
    )
    assert (down[:-1] <= nearest[:-1]).all()
    assert 0 < (nearest[:-1] - down[:-1]).max() <= 1
    assert (down[-1] >= nearest[-1]).all()
    assert down[-1].sum() > nearest[-1].sum() + 40


def test_the_first_samples_are_divided_where_there_is_a_most(digits: Dataset) -> None:
    """As PLayer-FL does: the first 5 x 40 training samples, and a fifth of each client's own to test on."""
    text = "dirichlet-clients(minimum=1, rounding=down, most=40, test_fraction=0.2, seed=1)"
    split = partitions.make(text).split(digits, 5)
    held = np.concatenate([*split.train, *split.test])
    assert np.array_equal(np.sort(held), np.sort(digits.train)[:200])
    sizes = split.sizes + split.test_sizes
    assert split.test_sizes.tolist() == [int(size / 5 + 0.5) for size in sizes]
    without = partitions.make(text.replace(", test_fraction=0.2", "")).split(digits, 5)
    assert without.sizes.tolist() == sizes.tolist()
    assert all(np.isin(test, digits.test).all() for test in without.test)
    more_than_there_are = partitions.make("dirichlet-clients(most=1000, seed=1)").split(digits, 5)
    assert more_than_there_are.hash == partitions.make("dirichlet-clients(seed=1)").split(digits, 5).hash


def test_a_client_with_one_sample_trains_on_it() -> None:
    dataset = dataset_of([0, 1], [0, 1], 2)
    split = partitions.make("dirichlet-clients(minimum=1, test_fraction=0.9)").split(dataset, 2)
    assert (split.sizes.tolist(), split.test_sizes.tolist()) == ([1, 1], [0, 0])


def test_wishes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(FedStrataError, match="gets 10 samples at least, but 5 on average at most"):
        partitions.make("dirichlet-clients(most=5)")
    with pytest.raises(FedStrataError, match=r"from the test part .* or from each client's own .*, not from both"):
        partitions.make("dirichlet-clients(test_samples=5, test_fraction=0.2)")


def test_largest_remainders_by_hand() -> None:
    assert largest_remainders(10, np.array([0.25, 0.25, 0.5])).tolist() == [3, 2, 5]
    assert largest_remainders(5, np.array([0.0, 2.0, 1.0])).tolist() == [0, 3, 2]


@given(
    st.integers(0, 500), st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda shares: sum(shares) > 0.01)
)
def test_every_rule_hands_out_the_total(total: int, given_shares: list[float]) -> None:
    shares = np.array(given_shares) / sum(given_shares)
    for rule in (rounded_counts, client_counts, partial(client_counts, rounding="down"), largest_remainders):
        counts = rule(total, shares)
        assert counts.sum() == total
        assert (counts >= 0).all()
    assert (np.abs(largest_remainders(total, shares) - total * shares) < 1 + 1e-6).all()


def test_filling_up_takes_from_the_largest() -> None:
    assert filled_up(np.array([[5, 0], [0, 4], [0, 1]]), 3).tolist() == [[3, 0], [0, 4], [2, 1]]
    assert filled_up(np.array([[1, 0], [0, 1]]), 1).tolist() == [[1, 0], [0, 1]]


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_filling_up_moves_and_never_loses(clients: int, classes: int, data: st.DataObject) -> None:
    counts = np.array([[data.draw(st.integers(0, 9)) for _ in range(classes)] for _ in range(clients)])
    minimum = int(counts.sum()) // clients
    filled = filled_up(counts, minimum)
    assert filled.sum(0).tolist() == counts.sum(0).tolist()
    assert filled.sum(1).min() >= minimum
    enough = counts.sum(1) >= minimum
    assert (filled.sum(1)[enough] <= counts.sum(1)[enough]).all()


def test_balanced_counts_give_each_what_it_wants_where_that_is_possible() -> None:
    wishes = np.log(np.array([[1.0, 1e-300], [1e-300, 1.0]]))
    counts = balanced_counts(wishes, np.array([5, 3]), np.array([5, 3]), np.random.default_rng(0))
    assert counts.tolist() == [[5, 0], [0, 3]]


def test_balanced_counts_cannot_stall() -> None:
    """Everybody wants the first class with a mass that leaves nothing, in floating point, for the others."""
    wishes = np.tile(np.array([0.0, -1e300, -2e300]), (4, 1))
    counts = balanced_counts(wishes, np.full(4, 6), np.array([8, 8, 8]), np.random.default_rng(0))
    assert counts.sum(0).tolist() == [8, 8, 8]
    assert counts.sum(1).tolist() == [6, 6, 6, 6]


@given(st.integers(1, 30), st.integers(1, 12), st.data())
def test_slots_are_distinct_and_even(clients: int, classes: int, data: st.DataObject) -> None:
    per_client = data.draw(st.integers(1, classes))
    held = balanced_slots(clients, per_client, classes, np.random.default_rng(data.draw(st.integers(0, 9))))
    assert all(len(set(row)) == per_client for row in held.tolist())
    uses = np.bincount(held.ravel(), minlength=classes)
    assert uses.max() - uses.min() <= 1


def test_draws_repeat_only_where_there_are_too_few() -> None:
    pool = np.arange(10, 15)
    generator = np.random.default_rng(0)
    assert len(set(draw(pool, 4, generator).tolist())) == 4
    assert np.bincount(draw(pool, 12, generator))[10:].tolist().count(2) == 3
    assert draw(pool, 0, generator).tolist() == []


def test_shares_have_the_moments_of_the_dirichlet_distribution() -> None:
    generator = np.random.default_rng(0)
    for alpha in (0.1, 1.0, 10.0):
        shares = np.exp([dirichlet_log_shares(alpha, 5, generator) for _ in range(4000)])
        assert shares.sum(1) == pytest.approx(np.ones(4000))
        assert shares.mean(0) == pytest.approx(np.full(5, 0.2), abs=0.03)
        assert shares.var(0) == pytest.approx(np.full(5, 0.16 / (5 * alpha + 1)), rel=0.15)


@pytest.mark.parametrize("alpha", [1e-320, 1e-9, 1e-3, 1e300, float("inf")])
def test_shares_of_any_concentration_are_finite(alpha: float) -> None:
    shares = np.exp(dirichlet_log_shares(alpha, 10, np.random.default_rng(0)))
    assert shares.sum() == pytest.approx(1)
    assert shares.max() == pytest.approx(1 if alpha < 1 else 0.1, abs=1e-3)


def test_logarithms_are_normalised_however_small() -> None:
    assert np.exp(normalised_logarithms(np.array([-1e300, -1e300]))) == pytest.approx([0.5, 0.5])


def test_a_local_test_set_is_as_large_as_possible_without_repeats() -> None:
    pools = [np.arange(6), np.arange(6, 26)]
    generator = np.random.default_rng(0)
    free = local_test(pools, np.array([0.5, 0.5]), None, 100, generator)
    assert np.bincount(free < 6).tolist() == [6, 6]
    assert len(set(free.tolist())) == 12
    assert len(local_test(pools, np.array([0.5, 0.5]), None, 4, generator)) == 4
    forced = local_test(pools, np.array([0.5, 0.5]), 40, 100, generator)
    assert np.bincount(forced < 6).tolist() == [20, 20]
    missing = local_test([pools[0][:0], pools[1]], np.array([0.5, 0.5]), None, 10, generator)
    assert len(missing) == 10
    assert missing.min() >= 6
    assert len(local_test([pools[0][:0], pools[1]], np.array([1.0, 0.0]), None, 10, generator)) == 0


@settings(max_examples=40)
@given(label_sets(), st.integers(1, 12), st.integers(0, 3), st.sampled_from(DISJOINT))
def test_disjoint_partitions_hand_out_every_sample_once(dataset: Dataset, clients: int, seed: int, text: str) -> None:
    clients = min(clients, len(dataset.train))
    partition = partitions.make(text).with_seed(seed)
    split = partition.split(dataset, clients)
    assert split.clients == clients
    assert np.sort(np.concatenate(split.train)).tolist() == dataset.train.tolist()
    if not text.startswith("dirichlet-clients"):
        assert split.sizes.max() - split.sizes.min() <= 1
    assert split.sizes.min() >= 1
    assert partition.split(dataset, clients).hash == split.hash


@settings(max_examples=40)
@given(label_sets(), st.integers(1, 12), st.integers(1, 50), st.integers(1, 50), st.sampled_from([0.01, 0.5, 100.0]))
def test_dirichlet_has_exact_sizes(dataset: Dataset, clients: int, samples: int, tests: int, alpha: float) -> None:
    partition = partitions.make(f"dirichlet(alpha={alpha}, samples={samples}, test_samples={tests}, seed=1)")
    split = partition.split(dataset, clients)
    assert split.sizes.tolist() == [samples] * clients
    assert [len(part) for part in split.test] == [tests] * clients
    for own in split.train:
        counts = np.bincount(own)
        labels = dataset.labels.numpy()[own]
        for label in np.unique(labels):
            pool = int((dataset.labels.numpy()[dataset.train] == label).sum())
            repeats = counts[np.unique(own[labels == label])]
            assert repeats.max() == -(-int((labels == label).sum()) // pool)
    assert all(np.isin(part, dataset.test).all() for part in split.test)


@settings(max_examples=40)
@given(label_sets(), st.integers(1, 12), st.sampled_from(["dirichlet", *DISJOINT]))
def test_default_test_sets_never_repeat_and_hold_only_trained_classes(
    dataset: Dataset, clients: int, text: str
) -> None:
    clients = min(clients, len(dataset.train))
    split = partitions.make(text).split(dataset, clients)
    labels = dataset.labels.numpy()
    for own, tested in zip(split.train, split.test, strict=True):
        assert len(set(tested.tolist())) == len(tested) <= len(own)
        assert np.isin(tested, dataset.test).all()
        if text != "dirichlet":
            assert np.isin(labels[tested], labels[own]).all()


def test_clients_that_draw_classes_apart_may_hold_the_same_samples() -> None:
    """100 clients, 10 classes of 90 samples: with two classes each has 10 / 200 of 90 of each, so four of both."""
    dataset = dataset_of(np.repeat(np.arange(10), 90).tolist(), [0, 1, 2] * 10, 10)
    partition = partitions.make("classes(per_client=2, apart=true, seed=1)")
    split = partition.split(dataset, 100)
    labels = dataset.labels.numpy()
    for own in split.train:
        assert len(set(own.tolist())) == len(own) == 8
        assert np.bincount(labels[own])[np.unique(labels[own])].tolist() == [4, 4]
    holders = np.bincount(np.concatenate([np.unique(labels[own]) for own in split.train]), minlength=10)
    assert holders.sum() == 200
    assert holders.max() - holders.min() > 1
    assert len(set(split.train_parts.joined().tolist())) < 800
    assert len({tuple(own.tolist()) for own in split.train}) == 100
    assert partition.split(dataset, 100) == split
    few = partitions.make("classes(per_client=10, apart=true, seed=1)").split(dataset, 2)
    assert [np.bincount(labels[own]).tolist() for own in few.train] == [[45] * 10] * 2


def test_dirichlet_gives_what_there_is_where_a_class_is_empty() -> None:
    """With so small an alpha, most clients put all their mass, in floating point, on one class that may be empty."""
    dataset = dataset_of([1, 2] * 10, [0, 2] * 10, 4)
    split = partitions.make("dirichlet(alpha=0.0001, samples=5, test_samples=4, seed=0)").split(dataset, 30)
    assert split.sizes.tolist() == [5] * 30
    assert [len(part) for part in split.test] == [4] * 30


def test_a_client_of_dirichlet_does_not_depend_on_the_others(digits: Dataset) -> None:
    partition = partitions.make("dirichlet(alpha=0.1, samples=50, seed=3)")
    few, many = partition.split(digits, 4), partition.split(digits, 9)
    for client in range(4):
        assert few.train[client].tolist() == many.train[client].tolist()
        assert few.test[client].tolist() == many.test[client].tolist()


@pytest.mark.parametrize("text", DRAWN)
def test_seeds_decide(digits: Dataset, text: str) -> None:
    partition = partitions.make(text)
    assert partition.seed is None
    assert partition.split(digits, 20).hash == partition.with_seed(0).split(digits, 20).hash
    assert partition.with_seed(1).split(digits, 20).hash != partition.with_seed(0).split(digits, 20).hash
    fixed = partition.with_seed(5)
    assert fixed.with_seed(6) == fixed
    assert partitions.make(str(fixed)) == fixed


HASHES = {
    "iid": "1511424c94c7ace7",
    "dirichlet:0.1": "7e44f3271ae598e1",
    "dirichlet-clients:0.1": "ec6a7b30c54bbc21",
    "dirichlet-balanced:0.3": "12d6cb000974a0fb",
    "classes:2": "7c539bcbfffccfb8",
}


@pytest.mark.parametrize("text", HASHES)
def test_splits_stay_the_same_for_ever(digits: Dataset, text: str) -> None:
    """A change here means that runs of the same experiment no longer share their data."""
    assert partitions.make(text).with_seed(0).split(digits, 20).hash == HASHES[text]


def test_the_default_of_the_newcomer(digits: Dataset) -> None:
    split = partitions.make("dirichlet:0.1").with_seed(0).split(digits, 20)
    assert split.sizes.tolist() == [67] * 20
    assert min(len(part) for part in split.test) >= 45
    counts = split.label_counts(digits)
    assert counts.shape == (20, 10)
    assert counts.sum() == 20 * 67
    assert 1 <= np.median((counts > 3).sum(1)) <= 4


@pytest.mark.parametrize(
    "text", ["dirichlet(alpha=0.3, test_samples=60)", "dirichlet-balanced(alpha=0.3, test_samples=60)"]
)
def test_test_sets_follow_the_training_distribution(digits: Dataset, text: str) -> None:
    split = partitions.make(text).split(digits, 10)
    labels = digits.labels.numpy()
    for own, tested in zip(split.train, split.test, strict=True):
        trained = np.bincount(labels[own], minlength=10) / len(own)
        drawn = np.bincount(labels[tested], minlength=10) / len(tested)
        assert len(tested) == 60
        assert np.abs(trained - drawn).max() < 0.05


def test_dirichlet_over_clients_keeps_the_minimum_whatever_the_skew(digits: Dataset) -> None:
    split = partitions.make("dirichlet-clients(alpha=0.001, minimum=10)").split(digits, 100)
    assert split.sizes.min() == 10
    assert np.sort(np.concatenate(split.train)).tolist() == digits.train.tolist()


def test_dirichlet_balanced_follows_its_shares_at_first(digits: Dataset) -> None:
    skewed = partitions.make("dirichlet-balanced:0.01").split(digits, 10).label_counts(digits)
    even = partitions.make("dirichlet-balanced:1000").split(digits, 10).label_counts(digits)
    assert np.median(skewed.max(1) / skewed.sum(1)) > 0.5
    assert (even.max(1) / even.sum(1)).max() < 0.25


@pytest.mark.parametrize("per_client", [1, 5, 10, 50])
def test_classes_per_client_exactly(per_client: int) -> None:
    """The construction of the sparse fine-tuning paper: 100 clients, 45,000 images of 100 classes."""
    dataset = balanced(100, 450, 100)
    split = partitions.make(f"classes:{per_client}").with_seed(0).split(dataset, 100)
    assert split.sizes.tolist() == [450] * 100
    counts = split.label_counts(dataset)
    assert (counts > 0).sum(1).tolist() == [per_client] * 100
    assert (counts > 0).sum(0).tolist() == [per_client] * 100
    assert set(counts[counts > 0].tolist()) == {450 // per_client}
    assert np.sort(np.concatenate(split.train)).tolist() == dataset.train.tolist()
    assert all(
        (np.unique(dataset.labels[part]) == np.flatnonzero(row)).all()
        for part, row in zip(split.test, counts, strict=True)
    )


def test_classes_that_do_not_come_out_even() -> None:
    dataset = balanced(10, 30, 5)
    split = partitions.make("classes:3").split(dataset, 7)
    counts = split.label_counts(dataset)
    assert (counts > 0).sum(1).tolist() == [3] * 7
    assert sorted((counts > 0).sum(0).tolist()) == [2] * 9 + [3]
    assert len(np.unique(np.concatenate(split.train))) == 300
    few = partitions.make("classes:1").split(dataset, 4)
    assert few.sizes.tolist() == [30] * 4


def test_groups_have_the_classes_that_are_named() -> None:
    """Six clients share 60 samples of each of the classes 0 to 2, two of them also those of class 3 with the others."""
    split = partitions.make("groups(classes='0-2|1,3', clients='4|2', seed=5)").split(balanced(4, 60, 12), 6)
    counts = split.label_counts(balanced(4, 60, 12))
    assert counts.tolist() == [[15, 10, 15, 0]] * 4 + [[0, 10, 0, 30]] * 2
    assert len(np.unique(np.concatenate(split.train))) == 240
    tests = [np.unique(balanced(4, 60, 12).labels.numpy()[own]).tolist() for own in split.test]
    assert tests == [[0, 1, 2]] * 4 + [[1, 3]] * 2


def test_groups_are_about_equal_where_nothing_is_said(digits: Dataset) -> None:
    counts = partitions.make("groups:0-4|5-9|0-9").split(digits, 7).label_counts(digits)
    assert [np.flatnonzero(own).tolist() for own in counts] == (
        [[0, 1, 2, 3, 4]] * 3 + [[5, 6, 7, 8, 9]] * 2 + [list(range(10))] * 2
    )


def test_natural_clients_are_the_sites() -> None:
    sites = ["b"] * 8 + ["a"] * 12 + ["c"] * 4
    dataset = from_arrays(torch.rand(24, 1), [0] * 24, sites=sites)
    natural = partitions.make("natural")
    assert natural.clients_for(dataset) == 3
    split = natural.split(dataset, 3)
    assert split.sizes.tolist() == [6, 9, 3]
    assert [len(part) for part in split.test] == [2, 3, 1]
    assert split.train[0].max() < 8
    for own, tested, site in zip(split.train, split.test, "bac", strict=True):
        assert {sites[position] for position in (*own, *tested)} == {site}
    chosen = natural.with_seed(2).split(dataset, 2)
    assert set(chosen.sizes.tolist()) < {6, 9, 3}
    assert chosen.hash == natural.with_seed(2).split(dataset, 2).hash


def test_any_number_of_clients_fits_the_drawn_partitions(digits: Dataset) -> None:
    assert all(partitions.make(text).clients_for(digits) is None for text in DRAWN)


@pytest.mark.parametrize(
    ("text", "clients", "sentence"),
    [
        ("iid", 7, "7 clients cannot have one training sample each of the 6.*use at most 6 clients"),
        ("iid", 0, "0 clients"),
        ("dirichlet", 7, "use at most 6 clients"),
        ("dirichlet(samples=3)", 0, "0 clients"),
        ("dirichlet-balanced", 7, "use at most 6 clients"),
        ("dirichlet-clients", 2, "2 clients cannot have 10 training samples each of the 6.*use at most 0"),
        ("classes:4", 2, "4 classes per client are asked for, but the dataset 'arrays' has 3; use at most 3"),
        ("classes:3", 4, "has 2 training samples for 4 clients"),
        ("natural", 2, "has no natural partition"),
        ("groups:0-1|3", 2, "names the class 3, but the dataset 'arrays' has classes 0 to 2"),
        ("groups(classes='0|1', clients='1|2')", 2, "have 3 clients together, and the federation has 2"),
        ("groups:0-2", 4, "has 2 training samples for 4 clients"),
        ("groups:0|1|2", 2, "2 clients cannot make the 3 groups of .*; use at least 3 clients"),
    ],
)
def test_impossible_wishes_get_one_sentence(text: str, clients: int, sentence: str) -> None:
    dataset = balanced(3, 2, 2)
    with pytest.raises(FedStrataError, match=sentence):
        partitions.make(text).split(dataset, clients)


def test_too_many_natural_clients() -> None:
    dataset = from_arrays(torch.rand(8, 1), [0] * 8, sites=["a"] * 4 + ["b"] * 4)
    with pytest.raises(FedStrataError, match="3 clients are asked for, but the dataset 'arrays' has 2 sites"):
        partitions.make("natural").split(dataset, 3)


@pytest.mark.parametrize(
    "text", ["dirichlet:0", "dirichlet:-1", "dirichlet-balanced:0", "dirichlet-clients:0", "classes:0", "iid(seed=-1)"]
)
def test_bad_parameters_are_refused(text: str) -> None:
    with pytest.raises(FedStrataError, match="is outside what"):
        partitions.make(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("groups:ship|truck", "'ship|truck' of the partition 'groups' are no numbers; write them like '0-7|8-9'"),
        ("groups:0-|1", "are no numbers"),
        ("groups:3-1", "The range '3-1' in the classes '3-1' of the partition 'groups' is empty"),
        ("groups(classes='0|1', clients='4')", "classes for 2 groups .* and clients for 1"),
        ("groups(classes='0|1', clients='4|none')", "are no numbers of clients; write them like '80|20'"),
    ],
)
def test_groups_that_cannot_be_read_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence.replace("|", r"\|")):
        partitions.make(text)


def test_groups_of_given_sizes_dictate_the_number_of_clients(digits: Dataset) -> None:
    assert partitions.make("groups(classes='0-7|8-9', clients='8|2')").clients_for(digits) == 10
    assert partitions.make("groups:0-7|8-9").clients_for(digits) is None


def test_the_first_parameter_is_what_matters_most() -> None:
    assert str(partitions.make("dirichlet:0.3")) == "dirichlet(alpha=0.3)"
    assert str(partitions.make("classes:5")) == "classes(per_client=5)"
    assert all(isinstance(partitions.make(name), Partitioner) for name in partitions.names())


def test_data_without_a_test_part_gives_empty_test_sets() -> None:
    dataset = from_arrays(torch.rand(12, 1), [0, 1] * 6, test_fraction=0)
    for text in DRAWN:
        assert [len(part) for part in partitions.make(text).split(dataset, 2).test] == [0, 0]
