"""Supports that are kept from message to message: found by content alone, few enough, and never wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payloads import assert_equal, random_mask

from fedstrata.methods.contract.views import Message
from fedstrata.wire import WireError, decode, encode
from fedstrata.wire.support import SUPPORTS, Support, Supports, support_of


def mask_of(*shape, density=0.5, seed=0):
    return random_mask(density, *shape, seed=seed).numpy()


def made(mask, positions=None):
    return Support(mask, np.packbits(mask), positions)


@given(st.integers(0, 2**30), st.integers(0, 200_000), st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]))
def test_a_support_knows_where_the_true_entries_are(seed, size, density):
    mask = mask_of(size, density=density, seed=seed)
    expected = np.flatnonzero(mask)
    for support in (made(mask), made(mask, expected)):
        assert np.array_equal(support.positions(), expected)
        assert support.count == len(expected)
        assert np.array_equal(support.mask(), mask)
        found = [stretch.start + inside for stretch, _, inside in support.stretches()]
        assert np.array_equal(np.concatenate([[], *found]), expected)
        places = [number for _, place, _ in support.stretches() for number in range(place.start, place.stop)]
        assert places == list(range(len(expected)))


def test_the_same_content_is_found_again_in_any_tensor():
    mask = random_mask(0.5, 30, 40)
    assert support_of(mask) is support_of(mask.clone())
    assert support_of(mask.transpose(1, 2).contiguous().transpose(1, 2)) is support_of(mask)
    assert support_of(mask) is not support_of(mask.reshape(1, 40, 30))
    assert support_of(mask[:, :3]).expanded((1, 3, 40)) is support_of(mask[:, :3])


def change_with_torch(mask):
    mask[0, 7] = ~mask[0, 7]


def change_with_numpy(mask):
    mask.numpy()[0, 7] ^= True


@pytest.mark.parametrize("change", [change_with_torch, change_with_numpy])
def test_a_mask_that_was_changed_in_place_is_another_mask(change):
    mask, tensor = random_mask(0.5, 1000), torch.randn(1, 1000)
    message, held = Message({"a": tensor}, {"a": mask}), {"a": mask.clone()}
    before = encode(message, held)
    change(mask)
    after = encode(message, held)
    assert len(after) > len(before), "the mask is sent, because the held one is another"
    assert_equal(decode(after, held=held), Message({"a": tensor * mask}, {"a": mask}))
    change(held["a"])
    with pytest.raises(WireError, match="not held here"):
        decode(before, held=held)
    assert_equal(decode(encode(message, held), held=held), Message({"a": tensor * mask}, {"a": mask}))


def test_a_received_mask_may_be_changed_without_harm():
    mask, tensor = random_mask(0.1, 1000), torch.randn(1, 1000)
    data = encode(Message({"a": tensor}, {"a": mask}))
    decode(data).masks["a"].logical_not_()
    assert_equal(decode(data), Message({"a": tensor * mask}, {"a": mask}))


def test_masks_with_the_same_checksum_are_told_apart(monkeypatch):
    monkeypatch.setattr("fedstrata.wire.support.zlib.crc32", lambda content: 0)
    kept = Supports(2**20)
    for seed in (0, 1, 0, 0, 1):
        mask = mask_of(500, seed=seed)
        assert np.array_equal(kept.find(mask).mask(), mask)
    assert len(kept) == 1


def test_those_asked_for_last_are_kept_and_no_more_than_fit():
    masks = [mask_of(10_000, seed=seed) for seed in range(5)]
    one = made(masks[0]).nbytes
    kept = Supports(int(3.2 * one))
    first = kept.find(masks[0])
    for mask in masks[1:]:
        kept.find(mask)
        assert kept.find(masks[0]) is first, "it is asked for again and again"
        assert kept.nbytes <= kept.most_bytes
    assert len(kept) == 3
    large = mask_of(200_000)
    assert np.array_equal(kept.find(large).mask(), large), "what never fits is found anew each time"
    assert (len(kept), kept.nbytes) == (0, 0)


def test_memory_does_not_grow_with_the_number_of_masks():
    SUPPORTS.clear()
    for seed in range(50):
        mask = random_mask(0.5, 10_000, seed=seed)
        decode(encode(Message({"a": torch.randn(1, 10_000)}, {"a": mask})))
    assert len(SUPPORTS) == 50
    assert SUPPORTS.nbytes < 50 * 14_000
    SUPPORTS.clear()
    assert SUPPORTS.nbytes == 0


def test_threads_do_not_disturb_each_other():
    kept = Supports(30_000)
    masks = [mask_of(5000, seed=seed) for seed in range(6)]

    def look(number):
        mask = masks[number % len(masks)]
        return np.array_equal(kept.find(mask).mask(), mask)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(look, range(400)))
    assert 0 < kept.nbytes <= kept.most_bytes


@pytest.mark.parametrize("values", ["as-is", "int8"])
def test_nothing_at_all_under_a_mask(values):
    nothing = torch.zeros(1, 0)
    message = Message({"a": nothing}, {"a": nothing > 0})
    assert_equal(decode(encode(message, message.masks, values), held=message.masks), message)
