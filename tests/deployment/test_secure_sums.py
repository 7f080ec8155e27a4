"""Uploads as whole numbers that are added up, and the mean that comes out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.secure.primitives import add_mask
from fedstrata.deployment.secure.sums import (
    Entry,
    Scale,
    count_numbers,
    entries_of,
    ranges_of,
    read_entries,
    read_ranges,
    read_sum,
    refuse_infinite,
    to_numbers,
)
from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message

RULES = Rules(secure=True)


def upload(seed: int = 0, spread: float = 1.0) -> Message:
    drawn = torch.Generator().manual_seed(seed)
    return Message(
        {
            "weight": spread * torch.randn(1, 3, 4, generator=drawn),
            "masked": torch.randn(1, 6, generator=drawn) * torch.tensor([1.0, 0, 1, 1, 0, 0]),
            "counter": torch.randint(0, 1000, (1,), generator=drawn),
        },
        {"masked": torch.tensor([[True, False, True, True, False, False]])},
    )


MODEL = {"weight": torch.zeros(3, 4), "masked": torch.zeros(6), "counter": torch.zeros((), dtype=torch.int64)}
MASKS = upload().masks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 1), min_size=2, max_size=12),
    st.floats(0.01, 20),
    st.sampled_from([16, 32, 64]),
    st.integers(0, 1000),
)
def test_the_mean_of_whole_numbers_is_the_mean_within_half_a_step_for_each_site(weights, clip, bits, seed):
    weights = [weight / max(weights) for weight in weights]
    rules = Rules(secure=True, secure_clip=clip, secure_bits=bits)
    scale = Scale.of(rules, len(weights), ranges_of(MODEL, clip))
    uploads = [upload(seed + number, clip / 4) for number in range(len(weights))]
    total = np.zeros(12 + 3 + 1 + 1, dtype=scale.dtype)
    for one, weight in zip(uploads, weights, strict=True):
        total += to_numbers(one, weight, scale)
    mean, clipped = read_sum(total, entries_of(uploads[0]), MASKS, scale, len(weights), sum(weights))
    assert clipped == sum(int((one.tensors[name].abs() > scale.range(name)).sum()) for one in uploads for name in MODEL)
    for name, found in mean.items():
        tensors = [one.tensors[name].double().clamp(-scale.range(name), scale.range(name)) for one in uploads]
        exact = sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True)) / sum(weights)
        bound = scale.step(name) * len(weights) / (2 * sum(weights)) + 1e-12 * scale.range(name)
        assert float((found - exact).abs().max()) <= bound
        assert found.shape == tensors[0].shape


def test_a_sum_by_hand():
    """Clip 8 and two sites in 16 bits: the largest number is 2 ** 14 / 2 = 8192, so that a step is 1 / 1024."""
    scale = Scale.of(Rules(secure=True, secure_bits=16), 2, {})
    first, second = Message({"w": torch.tensor([[1.0, -9.0]])}), Message({"w": torch.tensor([[0.5, 0.0]])})
    one, other = to_numbers(first, 1.0, scale), to_numbers(second, 0.5, scale)
    assert one.view(np.int16).tolist() == [1024, -8192, 1]
    assert other.view(np.int16).tolist() == [256, 0, 0]
    mean, clipped = read_sum(one + other, entries_of(first), {}, scale, 2, 1.5)
    assert mean["w"][0].tolist() == pytest.approx([1280 / 1024 / 1.5, -8 / 1.5])
    assert clipped == 1


def test_ranges_follow_the_model_and_make_room_for_counters_and_statistics():
    model = {
        "small": torch.tensor([0.1]),
        "large": torch.tensor([-3.0, 2.0]),
        "variance": torch.tensor([1.0]),
        "counter": torch.tensor(10),
        "high counter": torch.tensor(2**20),
        "empty": torch.zeros(0),
    }
    assert ranges_of(model, 8.0, ["variance"]) == {
        "large": 24.0,
        "variance": 1024.0,
        "counter": 2.0**20,
        "high counter": 8 * 2.0**20,
    }


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.5, float("nan")])
def test_a_weight_is_a_part_of_the_largest(weight):
    with pytest.raises(FedStrataError, match="weight"):
        to_numbers(upload(), weight, Scale.of(RULES, 4, {}))


def test_a_sum_with_something_else_in_it_is_noticed():
    scale = Scale.of(RULES, 4, ranges_of(MODEL, 8.0))
    total = to_numbers(upload(), 1.0, scale)
    read_sum(total, entries_of(upload()), MASKS, scale, 4, 1.0)
    add_mask(total, bytes(32))
    with pytest.raises(RefusedReply, match="outside"):
        read_sum(total, entries_of(upload()), MASKS, scale, 4, 1.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_site_does_not_send_what_is_not_finite(value):
    message = upload()
    refuse_infinite(message)
    message.tensors["weight"][0, 1, 1] = value
    with pytest.raises(FedStrataError, match="'weight'"):
        refuse_infinite(message)


def test_what_is_sent_is_told_in_clear_and_must_be_of_the_model():
    entries = entries_of(upload())
    assert entries[0] == Entry("weight", "float32", (3, 4))
    assert count_numbers(entries, MASKS) == 12 + 3 + 1 + 1
    assert read_entries([entry.to_facts() for entry in entries], MODEL, MASKS) == entries


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "none"),
        ([["weight"]], "none"),
        ([5], "none"),
        ([["other", "float32", [3], None]], "'other'"),
        ([["weight", "float32", [4, 3], None]], "shape"),
        ([["weight", "float64", [3, 4], None]], "type"),
        ([["weight", "float32", [3, 4], "00" * 8]], "mask"),
        ([["masked", "float32", [6], None]], "mask"),
        ([["masked", "float32", [6], "00" * 8]], "mask"),
        ([["weight", "float32", [3, 4], None]] * 2, "twice"),
        ([["weight", "float32", [3, 4], None]] * 20_000, "none"),
    ],
)
def test_another_upload_than_expected_is_refused(value, words):
    with pytest.raises(RefusedReply, match=words):
        read_entries(value, MODEL, MASKS)


@pytest.mark.parametrize("value", [None, [], {"w": 0.0}, {"w": -1.0}, {"w": float("inf")}, {"w": "1"}, {"w": True}])
def test_impossible_ranges_are_refused(value):
    with pytest.raises(FedStrataError, match="ranges"):
        read_ranges(value)
