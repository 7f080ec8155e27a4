from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata import rng
from fedstrata.rng import (
    client_keys,
    fold,
    key,
    numpy_generator,
    permutation,
    philox,
    philox_at_once,
    torch_seed,
    uniform,
)

WORD = 0xFFFFFFFF


def reference_philox(counter, keys):
    """Philox4x32-10 on Python integers, as the paper writes it."""
    a, b, c, d = counter
    first, second = keys
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ first, right & WORD, (left >> 32) ^ d ^ second, left & WORD
        first, second = (first + 0x9E3779B9) & WORD, (second + 0xBB67AE85) & WORD
    return a, b, c, d


def as_keys(*pairs):
    return torch.tensor(pairs, dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "keys", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_reference_gives_the_published_vectors(counter, keys, expected):
    assert reference_philox(counter, keys) == expected


def test_the_published_vector_of_zeros():
    assert philox(as_keys((0, 0)), 4).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]


words = st.integers(0, WORD)


@given(words, words, words, st.integers(1, 9))
def test_philox_equals_the_reference(first, second, stream, count):
    drawn = philox(as_keys((first, second)), count, stream)[0].tolist()
    blocks = -(-count // 4)
    expected = [word for block in range(blocks) for word in reference_philox((block, 0, stream, 0), (first, second))]
    assert drawn == expected


def test_draws_do_not_depend_on_who_else_draws():
    keys = client_keys(3, 1, [4, 7, 9, 11], "noise")
    together = uniform(keys, (5, 3))
    for row in range(4):
        assert torch.equal(together[row], uniform(keys[row], (5, 3)))
    chunks = torch.cat([uniform(keys[:3], (5, 3)), uniform(keys[3:], (5, 3))])
    assert torch.equal(together, chunks)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(together[order], uniform(keys[order], (5, 3)))
    assert torch.equal(client_keys(3, 1, [9, 4], "noise"), keys[[2, 0]])


def test_a_longer_draw_begins_like_a_shorter_one():
    keys = client_keys(0, 1, [1, 2], "noise")
    assert torch.equal(uniform(keys, (100,))[:, :7], uniform(keys, (7,)))


def test_keys_differ_by_seed_round_client_and_purpose():
    keys = [
        key(seed, round, client, purpose)
        for seed in range(3)
        for round in range(3)
        for client in range(3)
        for purpose in ("batches", "dropout")
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= word <= WORD for pair in keys for word in pair)
    assert key(1, 23) != key(12, 3)


def test_a_key_is_the_same_on_every_machine():
    # The hash of "7/2/5/batches": changing it would silently change every recorded run.
    assert key(7, 2, 5, "batches") == (870599832, 1178255001)


def test_folded_keys_and_streams_draw_other_numbers():
    keys = client_keys(0, 1, range(4), "dropout")
    draws = [uniform(fold(keys, step), (8,)) for step in range(50)]
    draws += [uniform(keys, (8,), stream) for stream in range(1, 50)]
    rows = torch.cat(draws)
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert torch.equal(fold(keys, 0), keys)
    assert bool(((fold(keys, 2**32 - 1) >= 0) & (fold(keys, 2**32 - 1) <= WORD)).all())


def test_a_tensor_of_streams_gives_each_stream():
    keys = client_keys(0, 1, range(3), "batches")
    many = uniform(keys[:, None, :], (6,), torch.arange(4)[:, None])
    assert many.shape == (3, 4, 6)
    for stream in range(4):
        assert torch.equal(many[:, stream], uniform(keys, (6,), stream))


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 9), st.integers(0, WORD))
def test_the_quick_way_on_a_cpu_draws_the_same_words(count, clients, streams, stream):
    keys = client_keys(1, 2, range(clients), "quick")
    torch.testing.assert_close(philox_at_once(keys, count, stream), philox(keys, count, stream), rtol=0, atol=0)
    many = torch.arange(streams)[:, None] + stream // 2
    apart = keys[:, None, :]
    torch.testing.assert_close(philox_at_once(apart, count, many), philox(apart, count, many), rtol=0, atol=0)


def test_many_words_and_words_of_all_clients_at_once_are_drawn_as_ever(monkeypatch):
    keys, called = client_keys(1, 2, range(3), "quick"), []

    def noted(keys, count, stream=0):
        called.append(count)
        return philox(keys, count, stream)

    monkeypatch.setattr(rng, "philox", noted)
    philox_at_once(keys, 2**12)
    stacked = torch.func.vmap(lambda own: philox_at_once(own, 8))(keys)
    philox_at_once(keys, 8)
    assert called == [2**12, 8]
    assert torch.equal(stacked, philox(keys, 8))


def test_uniform_numbers_are_uniform():
    drawn = uniform(client_keys(1, 1, range(50), "noise"), (2000,))
    assert drawn.dtype == torch.float32
    assert 0 <= float(drawn.min()) < float(drawn.max()) < 1
    # 19 degrees of freedom: the 99.9 % quantile is 43.8. The draws are fixed, so this never fails by chance.
    assert chi_square(torch.histc(drawn.double(), 20, 0, 1)) < 43.8
    pairs = (drawn[:, 0::2] * 4).long() * 4 + (drawn[:, 1::2] * 4).long()
    # 15 degrees of freedom: 37.7.
    assert chi_square(torch.bincount(pairs.flatten(), minlength=16).double()) < 37.7
    across_clients = (drawn[0::2] * 4).long() * 4 + (drawn[1::2] * 4).long()
    assert chi_square(torch.bincount(across_clients.flatten(), minlength=16).double()) < 37.7


@given(st.integers(1, 40), st.integers(0, 1000))
def test_permutation_holds_everything_once(count, seed):
    orders = permutation(client_keys(seed, 1, range(3), "batches"), count)
    assert torch.equal(orders.sort(-1).values, torch.arange(count).expand(3, count))


def test_permutations_of_three_are_equally_likely():
    orders = permutation(client_keys(0, 1, range(6000), "batches"), 3)
    codes = orders[:, 0] * 9 + orders[:, 1] * 3 + orders[:, 2]
    counts = torch.unique(codes, return_counts=True)[1].double()
    assert len(counts) == 6
    assert chi_square(counts) < 20.5


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 3))
def test_shorter_rows_are_shuffled_as_if_alone(sizes, stream):
    keys = client_keys(5, 2, range(len(sizes)), "batches")
    longest = max(sizes) + 3
    orders = permutation(keys, longest, stream, valid=torch.tensor(sizes)[:, None])
    for row, size in enumerate(sizes):
        assert torch.equal(orders[row, :size], permutation(keys[row], size, stream))


def test_generators_for_the_host_depend_on_their_place():
    first, again = (numpy_generator(0, 1, "select").integers(0, 10**9, 5) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, numpy_generator(0, 2, "select").integers(0, 10**9, 5))
    assert torch_seed(0, "model") == torch_seed(0, "model") != torch_seed(1, "model")
    assert 0 <= torch_seed(0, "model") < 2**63


def test_no_clients_no_keys():
    assert client_keys(0, 1, [], "noise").shape == (0, 2)


def test_the_keys_of_many_clients_are_those_of_each():
    clients = (0, 7, 10**6, 3)
    wanted = [key(5, 2, client, "phase 0/transforms") for client in clients]
    assert client_keys(5, 2, clients, "phase 0/transforms").tolist() == [list(words) for words in wanted]
    assert client_keys(5, 2, range(3), "x").tolist() == [list(key(5, 2, client, "x")) for client in range(3)]
    assert client_keys(5, 2, (), "x").shape == (0, 2)
