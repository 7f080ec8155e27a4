from __future__ import annotations

from collections import defaultdict
from unittest import mock

import numpy as np
import plain_batches
import pytest
import torch
from federations import CPU, samples, split_by_size
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data import Dataset
from fedstrata.engines import batches
from fedstrata.engines.batches import DeviceData, Work

SIZES = (7, 12, 1, 12, 30)


def data_of(sizes=SIZES):
    return DeviceData(samples(sum(sizes) + 1), split_by_size(sizes), (), CPU, torch.float64)


def streams(data, work, clients=None, round=1, seed=0, purpose="batches"):
    """What each client sees: a list of batches, each a list of positions."""
    clients = list(range(data.split.clients)) if clients is None else clients
    seen = defaultdict(list)
    for batch in data.batches(clients, work, seed, round, purpose):
        rows = range(len(clients)) if batch.rows is None else batch.rows.tolist()
        for row, positions in zip(rows, batch.positions.tolist(), strict=True):
            assert len(seen[clients[row]]) == batch.step
            seen[clients[row]].append(positions)
    return dict(seen)


@pytest.mark.parametrize(
    ("size", "batch_size", "last_batch", "per_epoch"),
    [
        (10, 4, "keep", 3),
        (10, 4, "drop", 2),
        (8, 4, "keep", 2),
        (8, 4, "drop", 2),
        (3, 4, "keep", 1),
        (3, 4, "drop", 1),
    ],
)
def test_how_many_batches(size, batch_size, last_batch, per_epoch):
    assert Work(5, None, batch_size, last_batch).batches_per_epoch(size) == per_epoch
    assert Work(5, None, batch_size, last_batch).steps_of(size) == 5 * per_epoch
    assert Work(5, 7, batch_size, last_batch).steps_of(size) == 7


sizes = st.lists(st.integers(1, 25), min_size=1, max_size=5)


@given(sizes, st.integers(1, 3), st.integers(1, 10))
def test_every_sample_is_seen_once_in_every_epoch(sizes, epochs, batch_size):
    data, work = data_of(sizes), Work(epochs, None, batch_size, "keep")
    for client, stream in streams(data, work).items():
        per_epoch = work.batches_per_epoch(sizes[client])
        assert len(stream) == epochs * per_epoch
        for epoch in range(epochs):
            seen = [position for batch in stream[epoch * per_epoch : (epoch + 1) * per_epoch] for position in batch]
            assert sorted(seen) == data.split.train[client].tolist()
        whole, rest = divmod(sizes[client], batch_size)
        assert [len(batch) for batch in stream] == ([batch_size] * whole + [rest] * (rest > 0)) * epochs


@given(sizes, st.integers(1, 10))
def test_a_small_last_batch_is_dropped_but_an_only_one_is_kept(sizes, batch_size):
    for client, stream in streams(data_of(sizes), Work(2, None, batch_size, "drop")).items():
        assert {len(batch) for batch in stream} == {min(batch_size, sizes[client])}
        assert len(stream) == 2 * max(1, sizes[client] // batch_size)


@given(sizes, st.integers(1, 9), st.integers(1, 10))
def test_a_number_of_steps_goes_over_the_data_as_often_as_needed(sizes, steps, batch_size):
    data, work = data_of(sizes), Work(1, steps, batch_size, "keep")
    for client, stream in streams(data, work).items():
        assert len(stream) == steps
        per_epoch = work.batches_per_epoch(sizes[client])
        for begin in range(0, steps - per_epoch + 1, per_epoch):
            seen = [position for batch in stream[begin : begin + per_epoch] for position in batch]
            assert sorted(seen) == data.split.train[client].tolist()


@pytest.mark.parametrize("work", [Work(2, None, 4, "keep"), Work(2, None, 4, "drop"), Work(1, 9, 4, "keep")], ids=str)
@pytest.mark.parametrize("company", [[0, 1, 2, 3, 4], [4, 2, 0], [3, 1], [2], [1, 3]], ids=str)
def test_a_clients_stream_does_not_depend_on_who_else_trains(work, company):
    data = data_of()
    together = streams(data, work, company)
    assert sorted(together) == sorted(company)
    for client in company:
        assert together[client] == streams(data, work, [client])[client]


def test_streams_differ_by_epoch_round_seed_purpose_and_client():
    data, work = data_of((20, 20)), Work(2, None, 20, "keep")
    first = streams(data, work)
    assert first == streams(data, work)
    assert first[0][0] != first[0][1], "epoch"
    for change in ({"round": 2}, {"seed": 1}, {"purpose": "adaptation"}):
        assert streams(data, work, **change)[0][0] != first[0][0]
    assert [position - 20 for position in first[1][0]] != first[0][0], "client"


def test_clients_with_batches_of_the_same_size_train_together():
    groups = [
        (batch.step, None if batch.rows is None else batch.rows.tolist(), tuple(batch.positions.shape))
        for batch in data_of((7, 12, 12)).batches([0, 1, 2], Work(1, None, 4, "keep"), 0, 1)
    ]
    assert groups == [(0, None, (3, 4)), (1, [1, 2], (2, 4)), (1, [0], (1, 3)), (2, [1, 2], (2, 4))]


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), batch_size=st.integers(1, 7))
def test_clients_by_size_are_the_first_ones_at_each_whole_batch(sizes, batch_size):
    data = DeviceData(samples(sum(sizes)), split_by_size(sizes), (), CPU, torch.float64)
    work = Work(1, None, batch_size, "keep")
    order = data.order_of(range(len(sizes)), work)
    assert (order is None) == (sizes == sorted(sizes, reverse=True))
    ids = np.arange(len(sizes)) if order is None else order
    assert [sizes[client] for client in ids] == sorted(sizes, reverse=True)
    for batch in data.batches(ids.tolist(), work, 0, 1):
        if batch.positions.shape[1] == batch_size and batch.rows is not None:
            assert batch.place == slice(len(batch.rows))
            assert batch.rows.tolist() == list(range(len(batch.rows)))
        elif batch.rows is not None and batch.rows[0] > 0:
            assert batch.place is batch.rows


def test_clients_with_epochs_of_the_same_size_keep_their_order():
    data = DeviceData(samples(9), split_by_size((2, 7)), (), CPU, torch.float64)
    assert data.order_of((0, 1), Work(1, None, 2, "keep", samples=4)) is None
    assert data.order_of((0, 1), Work(1, None, 2, "keep")).tolist() == [1, 0]


def test_shuffling_takes_room_for_what_is_seen_only(monkeypatch):
    """With a fixed number of steps a tiny client goes over its data often: the large ones need no room for that."""
    drawn = []
    permute = batches.permutation

    def counted(*arguments, **options):
        drawn.append(permute(*arguments, **options).numel())
        return permute(*arguments, **options)

    monkeypatch.setattr(batches, "permutation", counted)
    sizes = (3, 5, 1000, 900)
    streams(data_of(sizes), Work(1, 200, 10, "keep"))
    # The largest two see 2 and 3 epochs; all clients rectangularly would be 4 * 200 * 1000.
    assert sum(drawn) < 200 * (3 + 5) * 2 + 3 * 2000


def dataset_of(inputs):
    return Dataset(
        "made", inputs, torch.arange(len(inputs)), np.arange(len(inputs)), np.arange(0), ("a", "b", "c", "d")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_are_scaled_to_one(dtype):
    dataset = dataset_of(torch.tensor([0, 51, 102, 255], dtype=torch.uint8).reshape(4, 1, 1, 1))
    data = DeviceData(dataset, split_by_size((2, 2)), (), CPU, dtype)
    inputs, labels = data.make(torch.tensor([[3, 1], [0, 2]]), None)
    assert inputs.dtype == dtype
    assert inputs.shape == (2, 2, 1, 1, 1)
    torch.testing.assert_close(inputs.flatten(1), torch.tensor([[1, 0.2], [0, 0.4]], dtype=dtype))
    assert labels.tolist() == [[3, 1], [0, 2]]


def test_features_take_the_precision_of_the_run_and_tokens_stay():
    features = DeviceData(
        dataset_of(torch.tensor([[2.5], [300.0], [0], [0]])), split_by_size((4,)), (), CPU, torch.float64
    )
    inputs, _ = features.make(torch.tensor([[1, 0]]), None)
    assert inputs.dtype == torch.float64
    assert inputs.flatten().tolist() == [300, 2.5]
    tokens = DeviceData(dataset_of(torch.tensor([[2], [300], [0], [0]])), split_by_size((4,)), (), CPU, torch.float64)
    inputs, _ = tokens.make(torch.tensor([[1, 0]]), None)
    assert inputs.dtype == torch.int64
    assert inputs.flatten().tolist() == [300, 2]


works = st.builds(
    Work,
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 7),
    batch_size=st.integers(1, 9),
    last_batch=st.sampled_from(["keep", "drop"]),
    samples=st.none() | st.integers(1, 20),
    span=st.sampled_from([(0.0, 1.0), (0.0, 0.5), (0.5, 1.0), (0.25, 0.3)]),
)


@given(st.data(), sizes, works, st.sampled_from([2, 2**20]))
def test_batches_are_those_of_clients_taken_one_by_one(drawn, sizes, work, at_once):
    data = data_of(sizes)
    clients = drawn.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, unique=True))
    with mock.patch.object(batches, "_STEPS_AT_ONCE", at_once):
        made = list(data.batches(clients, work, 3, 2))
    rows = [None if batch.rows is None else batch.rows.tolist() for batch in made]
    assert [
        (own, batch.positions.tolist(), batch.step) for own, batch in zip(rows, made, strict=True)
    ] == list(plain_batches.plain_batches(data.split, clients, work, 3, 2))  # fmt: skip
    for own, batch in zip(rows, made, strict=True):
        assert batch.numbers.tolist() == [clients[row] for row in own or range(len(clients))]
        assert (None if batch.members is None else batch.members.tolist()) == own


def test_a_client_that_repeats_samples_repeats_its_own_beside_one_that_has_just_enough():
    data, work = data_of((1, 4)), Work(1, None, 2, "keep", samples=4)
    seen = streams(data, work)
    assert seen[0] == [[0, 0], [0, 0]]
    assert sorted(seen[1][0] + seen[1][1]) == [1, 2, 3, 4]


@given(sizes, works)
def test_steps_and_samples_are_counted_for_all_clients_at_once(sizes, work):
    for name in ("batches_per_epoch", "steps_of", "samples_of"):
        assert getattr(work, name)(np.array(sizes)).tolist() == [
            getattr(plain_batches, name)(work, size) for size in sizes
        ]
    begins, ends = work.stretch_of(np.array(sizes))
    assert list(zip(begins, ends, strict=True)) == [plain_batches.stretch_of(work, size) for size in sizes]


def test_what_many_steps_need_is_moved_at_once(monkeypatch):
    """However many clients and steps there are: the clients' numbers, their keys, and the rows and starts of all."""
    moved = []
    move = batches.to_device
    monkeypatch.setattr(batches, "to_device", lambda *arguments: moved.append(arguments) or move(*arguments))
    for clients, epochs in ((3, 2), (40, 9)):
        data = data_of([5 + client % 4 for client in range(clients)])
        moved.clear()
        assert len(list(data.batches(range(clients), Work(epochs, None, 2, "keep"), 0, 1))) > epochs
        assert len(moved) == 2


def test_a_large_client_makes_no_room_for_itself_at_the_others():
    """One client with all samples beside many with one: what lies on the device grows with the samples."""
    data = data_of((1000, *[1] * 500))
    held = [value for value in vars(data).values() if isinstance(value, torch.Tensor) and value is not data.inputs]
    assert sum(tensor.numel() for tensor in held) < 10 * 1500
