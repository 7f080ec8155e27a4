"""Splits: positions in one array that look like one array for each client."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedstrata
from fedstrata.data import Split, datasets, from_arrays, from_clients, partitions
from fedstrata.data.channels import ChannelSums, _sums_of_all, client_sums
from fedstrata.data.split import Parts
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.runs.preparing import divide

positions = arrays(np.int64, st.integers(0, 6), elements=st.integers(0, 19))
several = st.lists(positions, min_size=1, max_size=6)


@given(several)
def test_parts_are_the_arrays_they_were_made_of(given_parts: list[np.ndarray]) -> None:
    parts = Parts.of(given_parts)
    wanted = [own.tolist() for own in given_parts]
    assert [own.tolist() for own in parts] == wanted
    assert [parts[client].tolist() for client in range(len(parts))] == wanted
    assert [own.tolist() for own in parts[1:]] == wanted[1:]
    assert parts.sizes.tolist() == list(map(len, wanted))
    assert parts.joined().tolist() == [one for own in wanted for one in own]
    assert parts.owners().tolist() == [client for client, own in enumerate(wanted) for _ in own]
    order = np.arange(len(parts))[::-1]
    assert parts.take(order).tolist() == [one for own in wanted[::-1] for one in own]
    assert parts == Parts.of([own.copy() for own in given_parts])
    assert hash(parts) == hash(Parts.of([own.copy() for own in given_parts]))
    assert parts != Parts.of([*given_parts, np.array([3])])
    assert Parts.of(parts) is parts


def test_a_part_is_looked_at_without_a_copy() -> None:
    parts = Parts.of([np.array([4, 1]), np.array([7])])
    assert np.shares_memory(parts[0], parts.flat)
    with pytest.raises(IndexError):
        parts[2]
    assert parts[-1].tolist() == [7]


def test_what_all_clients_share_is_kept_once() -> None:
    """At a real site every client of the split is the site itself."""
    own = np.arange(1000)
    split = Split((own,) * 50, (own[:0],) * 50)
    assert len(split.train_parts.flat) == 1000
    assert split.train_parts.joined().tolist() == list(range(1000)) * 50
    assert split.sizes.tolist() == [1000] * 50
    assert split == Split(tuple(own.copy() for _ in range(50)), (own[:0],) * 50)


@given(several)
def test_a_hash_is_that_of_every_length_and_every_position(given_parts: list[np.ndarray]) -> None:
    train = [np.append(own, 1) for own in given_parts]
    digest = sha256()
    for own in (*train, *given_parts):
        digest.update(len(own).to_bytes(8, "little"))
        digest.update(own.astype("<i8").tobytes())
    assert Split(tuple(train), tuple(given_parts)).hash == digest.hexdigest()[:16]


@given(several)
def test_labels_are_counted_client_by_client(given_parts: list[np.ndarray]) -> None:
    labels = [position % 3 for position in range(20)]
    dataset = from_arrays(np.zeros((20, 1)), labels, class_names=("a", "b", "c", "d"), test_fraction=0.0)
    train = [np.append(own, 1) for own in given_parts]
    counted = Split(tuple(train), tuple(given_parts)).label_counts(dataset)
    assert counted.tolist() == [[sum(labels[one] == label for one in own) for label in range(4)] for own in train]


@pytest.mark.parametrize("sites", [["b", "a", "a", "c"] * 3, [20, 3, 3, 1] * 3])
def test_clients_that_are_sites_have_their_names(sites: list[object]) -> None:
    data = from_arrays(np.zeros((12, 1)), [0] * 12, sites=sites, test_fraction=0.25)
    assert partitions.make("natural").split(data, 3).client_names(data) == tuple(
        map(str, (sites[0], sites[1], sites[3]))
    )
    some = partitions.make("natural:1").split(data, 2)
    assert some.client_names(data) == tuple(str(sites[own[0]]) for own in some.train)


def test_the_clients_of_a_dict_have_its_names_in_its_order() -> None:
    data, split = from_clients({one: (np.zeros((8, 1)), [0, 1] * 4) for one in ("south", "north", 7)})
    assert split.client_names(data) == ("south", "north", "7")


def test_clients_that_are_no_sites_have_no_names() -> None:
    plain = from_arrays(np.zeros((12, 1)), [0] * 12)
    assert partitions.make("iid").split(plain, 3).client_names(plain) == ()
    data = from_arrays(np.zeros((12, 1)), [0] * 12, sites=["a"] * 6 + ["b"] * 6, test_fraction=0.0)
    mixed, shared = [np.arange(7), np.arange(7, 12)], [np.arange(3), np.arange(3, 6), np.arange(6, 12)]
    for parts in (mixed, shared):
        assert Split(parts, [np.arange(0)] * len(parts)).client_names(data) == ()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (np.array([0.5]), r"shape \[1\] and type float64; give each client the places .* whole numbers from 0\.$"),
        (np.array([True, False, True]), r"type bool; .*; np\.flatnonzero\(mask\) has those of a mask"),
        (torch.tensor([False, True]), "type bool"),
        (np.array([[0, 1], [2, 3]]), r"shape \[2, 2\]"),
        ([[0, 1], [2]], "lists of unequal lengths"),
        (3, r"shape \[\]"),
        (["a"], "type <U1"),
        (np.array([4, -1]), "position -1; positions in a dataset count from 0"),
    ],
)
def test_what_are_no_positions_is_refused_with_a_sentence(own: object, said: str) -> None:
    """Masks would be the positions 0 and 1, and what is below 0 would count from the end."""
    others = np.array([7])
    with pytest.raises(FedStrataError, match=said):
        Split((others, own), (others[:0],) * 2)  # type: ignore[arg-type]
    with pytest.raises(FedStrataError, match=said):
        Split((others,) * 2, (own, others))  # type: ignore[arg-type]


def test_whole_numbers_of_any_width_are_positions() -> None:
    split = Split((np.array([5], dtype=np.uint64), [3], torch.tensor([4])), (np.array([]),) * 3)  # type: ignore[arg-type]
    assert split.train_parts.flat.tolist() == [5, 3, 4]
    assert Split((np.array([5], dtype=np.int32),), (np.array([]),)).train[0].dtype == np.int64


PICTURES = from_arrays(np.random.default_rng(0).normal(size=(60, 4)), [0, 1] * 30, sites=["a", "b"] * 30)
QUICK: dict[str, Any] = {"model": "mlp(hidden=8)", "rounds": 1, "epochs": 1, "transforms": "none", "engine": "loop"}


def test_positions_that_a_dataset_lacks_are_refused() -> None:
    nobody = np.arange(0)
    for split in (Split((np.array([0, 60]),), (nobody,)), Split((np.array([0]),), (np.array([60]),))):
        with pytest.raises(FedStrataError, match=r"position 60, but the dataset .* has 60 samples, at 0 to 59; divide"):
            fedstrata.run(data=PICTURES, split=split, **QUICK)
    far = Split((np.array([1797]),), (nobody,))
    with pytest.raises(FedStrataError, match="position 1797, but the dataset 'digits' has 1797 samples"):
        fedstrata.run(data="digits", split=far, **QUICK)


def test_whoever_tests_on_samples_that_train_is_told() -> None:
    """Of the samples 10 to 15 that test at two clients, 10 and 11 train, at one and at the other."""
    train, test = (np.arange(11), np.array([11, 20])), (np.arange(10, 14), np.arange(12, 16))
    with pytest.warns(FedStrataWarning, match="2 of the 6 samples on which clients are tested are trained on too"):
        fedstrata.run(data=PICTURES, split=Split(train, test), **QUICK)


def test_samples_that_a_client_is_given_several_times_are_counted_where_a_number_is_asked_for() -> None:
    """Of 1,347 training samples in ten classes, a client cannot have 2,000; by default it has its part of what is."""
    digits = datasets.make("digits").load()
    experiment = fedstrata.Experiment(clients=2, partition="dirichlet(alpha=5.0, samples=2000, test_samples=40)")
    with pytest.warns(
        FedStrataWarning, match=r"of the 4,000 training samples at clients are .* fewer \(samples\)"
    ) as told:
        _, split = divide(experiment, digits)
    repeats = sum(len(own) - len(set(own.tolist())) for own in split.train)
    assert str(told[0].message).startswith(f"{repeats:,} of the 4,000 training samples")
    assert split.test_parts.repeats() <= 8, "a tenth of the test samples"
    both = experiment.with_changes({"partition": "dirichlet(alpha=5.0, samples=2000, test_samples=900)"})
    with pytest.warns(
        FedStrataWarning, match=r"and .* of the 1,800 test samples .* \(samples and test_samples\)"
    ) as told:
        divide(both, digits)
    assert len(told) == 1
    _, usual = divide(experiment.with_changes({"partition": "dirichlet"}), digits)
    assert usual.train_parts.repeats() > 0


@given(several)
def test_repeats_are_those_within_a_client(given_parts: list[np.ndarray]) -> None:
    assert Parts.of(given_parts).repeats() == sum(len(own) - len(set(own.tolist())) for own in given_parts)


def test_a_client_without_samples_is_named() -> None:
    with pytest.raises(FedStrataError, match="Client 1 of 3 holds no training samples"):
        Split((np.array([0]), np.array([], dtype=int), np.array([], dtype=int)), (np.array([]),) * 3)


@pytest.mark.parametrize(
    ("text", "clients", "wanted"),
    [
        ("iid", 7, "abc28764ce152754"),
        ("iid", 1300, "5a30fb4d6654f816"),
        ("iid(test_samples=3)", 50, "fe3e5269791ec846"),
        ("dirichlet", 9, "dacb4d01238138ad"),
        ("dirichlet(alpha=0.5, samples=30)", 20, "7aef57bb66015c33"),
        ("dirichlet-clients", 20, "d635b827d784456e"),
        ("dirichlet-clients(alpha=0.05, minimum=20)", 60, "3dd57dc7e064e0a7"),
        ("dirichlet-clients(minimum=1)", 300, "b79f85b6a461309b"),
        ("dirichlet-balanced", 20, "d02aca8e08d2f92a"),
        ("dirichlet-balanced(alpha=0.05)", 300, "c373f4340a128947"),
        ("classes", 20, "ac00c062b95be2d1"),
        ("classes:3", 33, "469e8511f29a55c5"),
    ],
)
def test_splits_are_those_of_the_first_release_that_made_them(text: str, clients: int, wanted: str) -> None:
    """The hashes were computed when partitions still went from client to client."""
    assert partitions.make(text).with_seed(3).split(datasets.make("digits").load(), clients).hash == wanted


def test_a_hundred_thousand_clients_are_no_lists() -> None:
    """Dividing evenly looks at no single client where there is nothing to test on."""
    dataset = from_arrays(np.zeros((300_000, 1)), np.arange(300_000) % 3, class_names=(0, 1, 2), test_fraction=0.0)
    split = partitions.make("iid").split(dataset, 100_000)
    assert split.sizes.tolist() == [3] * 100_000
    assert np.sort(split.train_parts.flat).tolist() == dataset.train.tolist()
    assert (np.diff(split.train_parts.flat.reshape(-1, 3)) > 0).all()
    assert split.label_counts(dataset).sum(1).tolist() == [3] * 100_000


@given(
    st.lists(st.sampled_from([1, 2, 9, 40]), min_size=1, max_size=7),
    st.sampled_from([(2,), (3,), (1,), (1, 3, 2), (2, 2, 2)]),
    st.booleans(),
    st.integers(0, 5),
)
def test_sums_of_all_clients_are_those_of_each(sizes: list[int], shape: tuple[int, ...], raw: bool, seed: int) -> None:
    """To the last bit: sites that add their sums up get the same mean and deviation."""
    chance, total = np.random.default_rng(seed), sum(sizes)
    if raw:
        inputs = chance.integers(0, 256, (total, *shape)).astype(np.uint8)
    else:
        inputs = chance.normal(size=(total, *shape)) * 10.0 ** chance.integers(-60, 5, (total, *shape))
    dataset = from_arrays(inputs, [0] * total, class_names=("a",), test_fraction=0.0)
    split = Split(np.split(chance.permutation(total), np.cumsum(sizes)[:-1]), (np.arange(0),) * len(sizes))
    each = [client_sums(dataset, split, client) for client in range(len(sizes))]
    assert _sums_of_all(dataset, split) == ChannelSums.total(each)
