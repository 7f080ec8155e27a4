from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payloads import assert_equal, random_mask, unframed
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedstrata.methods.contract.views import Message
from fedstrata.stack import per_client
from fedstrata.wire import decode, encode, masks

FULL_PRECISION = 4


def record_of(truth):
    """Return the bytes of truth values on the wire, without all that is around them."""
    return unframed(encode(Message({"a": truth})))[1]


def entropy_bytes(mask):
    density = float(mask.double().mean())
    bits = -sum(p * math.log2(p) for p in (density, 1 - density) if p)
    return mask.numel() * bits / 8


# Records, by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (1000, 125)])
def test_truth_values_travel_as_packed_bits(count, expected):
    assert len(record_of(torch.arange(count)[None] % 3 == 0)) == 1 + expected


def test_the_first_truth_value_is_the_highest_bit():
    values = torch.tensor([[True, False, False, False, False, False, True, False, True]])
    assert record_of(values) == bytes([0, 0b10000010, 0b10000000])


def test_few_truth_values_travel_as_gaps():
    """Entries 3, 20, 21 and 90 of 100: gaps of 3, 16, 0 and 68, with remainders of four bits.

    The quotients 0, 1, 0 and 4 in unary are 1 01 1 00001; the remainders 3, 0, 0 and 4 are 0011, 0000, 0000 and 0100,
    and by planes 0000 0001 1000 1000.
    """
    values = torch.zeros(1, 100, dtype=torch.bool)
    values[0, [3, 20, 21, 90]] = True
    header = bytes([4, 0, 0, 0, 2, 0, 0, 0])
    expected = header + bytes([0b10110000, 0b10000000, 0b00000001, 0b10001000])
    assert record_of(values) == bytes([2]) + expected
    assert record_of(~values) == bytes([1]) + expected
    for truth in (values, ~values):
        assert_equal(decode(encode(Message({"a": truth}))), Message({"a": truth}))


def test_all_alike_costs_nine_bytes_whatever_the_size():
    values = torch.zeros(1, 1000, 1000, dtype=torch.bool)
    assert record_of(values) == bytes([2]) + bytes(8)
    assert record_of(~values) == bytes([1]) + bytes(8)


def test_truth_values_under_a_mask_are_packed_too():
    values, mask = torch.ones(1, 30, dtype=torch.bool), torch.arange(30)[None] < 17
    empty, full = (encode(Message({"a": values}, {"a": held})) for held in (mask & False, mask))
    assert len(full) - len(empty) == 3
    assert_equal(decode(full), Message({"a": mask}, {"a": mask}))


@given(st.integers(0, 2**30), st.integers(0, 3000), st.sampled_from([0.0, 0.003, 0.05, 0.2, 0.5, 0.7, 0.98]))
def test_truth_values_come_back_and_never_cost_more_than_bits(seed, count, density):
    values = random_mask(density, count, seed=seed)
    assert_equal(decode(encode(Message({"a": values}))), Message({"a": values}))
    assert len(record_of(values)) <= 1 + math.ceil(count / 8)


@given(st.lists(st.integers(0, 4999), max_size=60))
def test_clustered_truth_values_come_back(positions):
    values = torch.zeros(1, 5000, dtype=torch.bool)
    values[0, positions] = True
    values[0, 100:140] = True
    assert_equal(decode(encode(Message({"a": values}))), Message({"a": values}))


# What sparsity costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [100_000, 1_000_000])
@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.95, 0.99])
class TestCost:
    def message(self, entries, sparsity):
        mask = random_mask(1 - sparsity, entries)
        return Message({"layer.weight": torch.randn(1, entries)}, {"layer.weight": mask}), mask

    def test_the_first_time_is_within_two_per_cent_of_values_and_entropy(self, entries, sparsity):
        message, mask = self.message(entries, sparsity)
        ideal = FULL_PRECISION * int(mask.sum()) + entropy_bytes(mask)
        assert ideal < len(encode(message)) < 1.02 * ideal

    def test_later_it_is_within_two_per_cent_of_the_values(self, entries, sparsity):
        message, mask = self.message(entries, sparsity)
        data = encode(message, message.masks)
        assert len(data) < 1.02 * FULL_PRECISION * int(mask.sum())
        assert torch.equal(
            decode(data, held=message.masks).tensors["layer.weight"], message.tensors["layer.weight"] * mask
        )

    def test_it_beats_bitmasks_and_coordinates(self, entries, sparsity):
        message, mask = self.message(entries, sparsity)
        kept, frame = int(mask.sum()), 60
        bitmask, coordinates = FULL_PRECISION * kept + entries // 8, (4 + FULL_PRECISION) * kept
        assert len(encode(message)) <= min(bitmask, coordinates) + frame
        if sparsity > 0.5:
            assert len(encode(message)) < min(bitmask, coordinates)
        assert len(encode(message, message.masks)) < min(bitmask, coordinates)

    def test_the_mask_alone_is_near_its_entropy(self, entries, sparsity):
        mask = random_mask(1 - sparsity, entries)
        assert len(record_of(mask)) < 1.035 * entropy_bytes(mask)


def test_published_percentages():
    """SSFL, Table 5: at densities of 50 and 5 %, a bitmask costs 53.1 and 8.1 % of dense, a fixed mask 50 and 5 %."""
    tensor = torch.randn(1, 1_000_000)
    for density, first, later in ((0.5, 53.1, 50.0), (0.05, 5.9, 5.0)):
        mask = torch.zeros(1_000_000, dtype=torch.bool)
        mask[torch.randperm(1_000_000, generator=torch.Generator().manual_seed(0))[: int(density * 1e6)]] = True
        message = Message({"w": tensor}, {"w": mask[None]})
        assert round(len(encode(message)) / 40_000, 1) == first
        assert round(len(encode(message, message.masks)) / 40_000, 1) == later


@given(st.integers(1, 4), st.integers(0, 40), st.booleans(), st.integers(0, 2**31), st.sampled_from([2**24, 64]))
def test_what_is_read_from_a_gpu_at_once_is_what_is_counted_one_by_one(
    clients, entries, everybody_the_same, seed, at_once
):
    generator = torch.Generator().manual_seed(seed)
    truths = [torch.rand(size, entries, 2, generator=generator) > 0.5 for size in (clients, 1, clients, 1, 1)]
    held = [truths[0].clone(), None, truths[2][:1] if everybody_the_same else truths[2].roll(1, 0), truths[0], None]
    pairs = list(zip(truths, held, strict=True))
    with mock.patch.object(masks, "_ENTRIES_AT_ONCE", at_once), CountingReads() as reads:
        begun = masks.tallies_read_at_once(
            [(per_client(one), None if other is None else per_client(other)) for one, other in pairs]
        )
        assert reads.seen == 0, "nothing is waited for before the numbers are asked for"
        together = begun()
    assert reads.seen == 1
    assert masks.tallies_read_at_once([])() == []
    for own, other in zip(masks.tallies(pairs)(), together, strict=True):
        assert (own.ones.tolist(), own.same.tolist()) == (other.ones.tolist(), other.same.tolist())


def test_many_masks_are_counted_in_a_few_operations():
    """On a GPU every operation is a launch; views are none."""
    rows = [(torch.rand(3, size) > 0.5, torch.rand(1, size) > 0.5) for size in range(1, 61)]
    with CountingOperations() as operations:
        masks.tallies_read_at_once(rows)()
    assert len(operations.seen) < 15


class CountingOperations(TorchDispatchMode):
    """Notes what is computed, without views."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_held_mask_of_another_shape_is_not_the_same_one():
    mask = torch.ones(2, 2, 3, dtype=torch.bool)
    assert not masks.tallies([(mask, mask.reshape(2, 3, 2))])()[0].same.any()
    assert masks.tallies([(mask, mask[:1])])()[0].same.tolist() == [True, True]


class CountingReads(TorchFunctionMode):
    """Counts how often numbers are read back to the host."""

    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += getattr(func, "__name__", "") == "cpu"
        return func(*args, **(kwargs or {}))


def test_what_a_gpu_adds_up_eight_at_a_time_does_not_overflow():
    everything, half = torch.ones(2, 10_001, dtype=torch.bool), torch.ones(2, 9_000, dtype=torch.bool)
    half[1, ::2] = False
    first, second = masks.tallies_read_at_once([(everything, ~everything[:1]), (half, torch.ones_like(half[:1]))])()
    assert (first.ones.tolist(), first.same.tolist()) == ([10_001, 10_001], [False, False])
    assert (second.ones.tolist(), second.same.tolist()) == ([9_000, 4_500], [True, False])
