from __future__ import annotations

import json
import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.methods.base import Message
from fedstrata.wire import WireError, decode, encode, encoded_sizes
from fedstrata.wire.codec import _checksum

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
FRAME = struct.Struct("<4sIQ")


def numbers(dtype, *shape):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) * 37 % 251
    return (values % 2 == 0) if dtype == torch.bool else (values - 100 if dtype.is_signed else values).to(dtype)


def assert_equal(left, right):
    for kind in ("tensors", "masks", "numbers"):
        ours, theirs = getattr(left, kind), getattr(right, kind)
        assert list(ours) == list(theirs)
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype, name
            assert ours[name].shape == theirs[name].shape, name
            assert torch.equal(ours[name], theirs[name]), name


def packed(header, body=b""):
    """Frame any header and body, with a checksum that fits."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = FRAME.pack(b"FSM1", len(raw), len(body)) + raw + body
    return content + _checksum(content)


def small_message():
    mask = torch.tensor([[True, False, True], [False, False, True]])[None]
    return Message(
        {"layer.weight": torch.tensor([[1.5, 0.0, -2.0], [0.0, 0.0, 3.25]])[None] * mask, "count": torch.tensor([7])},
        {"layer.weight": mask},
        {"samples": torch.tensor([12.0])},
    )


# There and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (1, 5), (1, 2, 3, 4), (1, 0), (1, 3, 0, 2)], ids=str)
def test_every_type_and_shape_comes_back(dtype, shape):
    message = Message({"a": numbers(dtype, *shape)}, {}, {"n": numbers(dtype, *shape)})
    assert_equal(decode(encode(message)), message)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_shape", [(1, 4, 3, 2), (1, 4, 1, 1), (1, 1, 3, 1), (1, 1, 1, 1), (1,)], ids=str)
def test_masked_values_come_back_and_the_others_are_zero(dtype, mask_shape):
    tensor = numbers(dtype, 1, 4, 3, 2)
    for mask in (numbers(torch.bool, *mask_shape), ~numbers(torch.bool, *mask_shape)):
        received = decode(encode(Message({"a": tensor}, {"a": mask})))
        assert_equal(received, Message({"a": tensor * mask if dtype != torch.bool else tensor & mask}, {"a": mask}))


def test_special_numbers_keep_their_bits():
    values = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1e308]], dtype=torch.float64)
    received = decode(encode(Message({"a": values}))).tensors["a"]
    assert torch.equal(received.view(torch.int64), values.view(torch.int64))


def test_an_empty_message_and_odd_names_and_strided_tensors():
    assert_equal(decode(encode(Message())), Message())
    message = Message({"": torch.ones(1, 2), "größe/层 \"'\\": torch.arange(12).reshape(1, 4, 3).transpose(1, 2)})
    assert_equal(decode(encode(message)), message)
    learned = torch.ones(1, 2, requires_grad=True)
    assert not decode(encode(Message({"a": learned}))).tensors["a"].requires_grad


def test_what_is_received_can_be_written_to():
    received = decode(encode(small_message()))
    received.tensors["count"] += 1
    received.tensors["layer.weight"] += 1
    received.masks["layer.weight"] &= False
    assert int(received.tensors["count"]) == 8


def test_only_what_the_mask_holds_costs_bytes():
    tensor, mask = torch.zeros(1, 80), torch.zeros(1, 80, dtype=torch.bool)
    full, empty = len(encode(Message({"a": tensor}))), len(encode(Message({"a": tensor}, {"a": mask})))
    mask[0, :20] = True
    quarter = len(encode(Message({"a": tensor}, {"a": mask})))
    header_of_mask = len("[1,80]") - len("null")
    assert full - empty == 80 * 4 - 80 // 8 - header_of_mask
    assert quarter - empty == 20 * 4


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (1000, 125)])
def test_truth_values_travel_as_packed_bits(count, expected):
    values = torch.arange(count)[None] % 3 == 0
    message = Message({"a": values})
    data = encode(message)
    assert len(data) == len(encode(Message({"a": values[:, :0]}))) + expected + len(str(count)) - len("0")
    assert encoded_sizes(message, 3) == [len(data)] * 3
    assert_equal(decode(data), message)


def test_the_first_truth_value_is_the_highest_bit():
    values = torch.tensor([[True, False, False, False, False, False, True, False, True]])
    data = encode(Message({"a": values}))
    assert data[-10:-8] == bytes([0b10000010, 0b10000000])


def test_truth_values_under_a_mask_are_packed_too():
    values, mask = torch.ones(1, 30, dtype=torch.bool), torch.arange(30)[None] < 17
    empty, full = (encode(Message({"a": values}, {"a": held})) for held in (mask & False, mask))
    assert len(full) - len(empty) == 3
    assert_equal(decode(full), Message({"a": mask}, {"a": mask}))


def test_a_type_that_cannot_be_sent_is_refused_when_encoding():
    message = Message({"a": torch.zeros(1, 2, dtype=torch.complex64)})
    with pytest.raises(FedStrataError, match="type complex64 cannot be sent; use one of float64"):
        encode(message)
    with pytest.raises(FedStrataError, match="type complex64"):
        encoded_sizes(message, 3)


masks = st.sampled_from([None, (3, 2), (1, 2), (3, 1), (1, 1)])


@given(st.lists(st.tuples(st.sampled_from(DTYPES), masks, st.booleans()), max_size=4), st.integers(1, 4), st.randoms())
def test_sizes_are_those_of_the_encoded_messages(kinds, clients, chance):
    message = Message(numbers={"n": torch.zeros(clients, dtype=torch.float64)})
    for place, (dtype, mask, common) in enumerate(kinds):
        message.tensors[f"t{place}"] = numbers(dtype, 1 if common else clients, 3, 2)
        if mask is not None:
            bits = [chance.random() < 0.5 for _ in range(clients * mask[0] * mask[1])]
            message.masks[f"t{place}"] = torch.tensor(bits).reshape(clients, *mask)
    each = [len(encode(message.rows(torch.tensor([client])))) for client in range(clients)]
    assert encoded_sizes(message, clients) == each


def test_sizes_of_single_numbers_under_masks():
    message = Message({"scale": torch.ones(3)}, {"scale": torch.tensor([True, False, True])})
    each = [len(encode(message.rows(torch.tensor([client])))) for client in range(3)]
    assert encoded_sizes(message, 3) == each
    assert each[0] == each[1] + 4


def test_a_common_message_costs_the_same_for_everybody():
    message = Message({"a": torch.zeros(1, 5)}, {"a": torch.tensor([[True, True, False, False, True]])})
    assert encoded_sizes(message, 4) == [len(encode(message))] * 4


# What cannot be trusted ----------------------------------------------------------------------------------------------


def test_every_changed_byte_is_noticed():
    data = encode(small_message())
    for place in range(len(data)):
        for change in (1, 128, 255, 37):
            altered = bytearray(data)
            altered[place] ^= change
            with pytest.raises(WireError):
                decode(bytes(altered))


def test_every_cut_and_every_addition_is_noticed():
    data = encode(small_message())
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])
        with pytest.raises(WireError):
            decode(data[length:] + data[:length] if length else data + b"\0")


def test_two_swapped_messages_are_noticed():
    first, second = encode(Message({"a": torch.zeros(1, 4)})), encode(Message({"a": torch.ones(1, 4)}))
    with pytest.raises(WireError, match="checksum"):
        decode(first[:-8] + second[-8:])


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(WireError):
        decode(noise)
    with pytest.raises(WireError):
        decode(packed(noise))


T = {"tensors": [], "numbers": []}


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ([], b""),
        ({}, b""),
        (None, b""),
        (3, b""),
        ({"tensors": []}, b""),
        ({"numbers": []}, b""),
        ({**T, "tensors": None}, b""),
        ({**T, "tensors": 5}, b""),
        ({**T, "tensors": ["abcd"]}, b""),
        ({**T, "tensors": [["a", "float32", [1]]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [1], None, None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [1], None]]}, b""),
        ({**T, "tensors": [["a", "float32", [1], None]]}, bytes(3)),
        ({**T, "tensors": [["a", "float32", [1], None]]}, bytes(5)),
        ({**T, "tensors": [["a", "float32", [2], None]]}, bytes(8)),
        ({**T, "tensors": [["a", "float32", [], None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", 1, None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [1, -1], None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [1, 1.0], None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [True], None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [1, None], None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", "1", None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float128", [1], None]]}, bytes(16)),
        ({**T, "tensors": [["a", ["float32"], [1], None]]}, bytes(4)),
        ({**T, "tensors": [["a", "__class__", [1], None]]}, bytes(4)),
        ({**T, "tensors": [[1, "float32", [1], None]]}, bytes(4)),
        ({**T, "tensors": [[None, "float32", [1], None]]}, bytes(4)),
        ({**T, "tensors": [[["a"], "float32", [1], None]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [1], None], ["a", "float32", [1], None]]}, bytes(8)),
        ({**T, "numbers": [["a", "float32", [1]], ["a", "float32", [1]]]}, bytes(8)),
        ({**T, "numbers": [[7, "float32", [1]]]}, bytes(4)),
        ({**T, "tensors": [["a", "float32", [1, 3], [1, 2]]]}, bytes(13)),
        ({**T, "tensors": [["a", "float32", [1, 3], [1, 3, 1]]]}, bytes(13)),
        ({**T, "tensors": [["a", "float32", [1, 3], False]]}, bytes(13)),
        ({**T, "tensors": [["a", "float32", [1, 8], [1, 8]]]}, b"\xff" + bytes(31)),
        ({**T, "tensors": [["a", "bool", [1, 3], None]]}, b"\0\1\1"),
        ({**T, "tensors": [["a", "bool", [1, 3], None]]}, b""),
        ({**T, "tensors": [["a", "bool", [1, 3], None]]}, b"\x10"),
        ({**T, "tensors": [["a", "bool", [1, 9], None]]}, b"\xff"),
        ({**T, "tensors": [["a", "bool", [1, 8], None]]}, b"\xff\0"),
        ({**T, "numbers": [["a", "bool", [1]]]}, b"\x01"),
        ({**T, "tensors": [["a", "int8", [1, 3], [1, 3]]]}, b"\x01"),
        ({**T, "tensors": [["a", "bool", [1, 3], [1, 3]]]}, b"\xc0\x20"),
        ({**T, "tensors": [["a", "float32", [1, 0, 10**30], None]]}, b""),
        ({**T, "tensors": [["a", "float32", [1, 0, 2**62], None]]}, b""),
        (b'{"tensors":' + b"[" * 20000 + b"]" * 20000 + b',"numbers":[]}', b""),
        (b'{"tensors":[["a","float32",[1,' + b"9" * 6000 + b'],null]],"numbers":[]}', b""),
        (b"\xff\xfe\x00", b""),
        (b"", b""),
        (b"NaN", b""),
    ],
)  # fmt: skip
def test_a_description_that_does_not_fit_is_refused(header, body):
    with pytest.raises(WireError) as caught:
        decode(packed(header, body))
    assert len(str(caught.value)) < 400


@pytest.fixture
def little_memory(monkeypatch):
    """Let no more than 300 MB be allocated in the test for what masks hide; the rest is bounded by the message."""
    allocate, left = torch.zeros, [300 * 10**6]

    def zeros(shape, dtype, device):
        left[0] -= torch.Size(shape).numel() * dtype.itemsize
        assert left[0] > 0
        return allocate(shape, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "zeros", zeros)


@pytest.mark.parametrize(
    "tensors",
    [
        [["a", "float64", [1, 10**12], [1, 1]]],
        [["a", "int8", [1, 10**12], [1, 1]]],
        [["a", "float32", [1, 10**12], None]],
        [["a", "float32", [1, 10**12], [1, 10**12]]],
        [["a", "bool", [1, 10**12], None]],
        [["a", "float64", [1, 2**20, 2**20, 2**20], [1, 1, 1, 1]]],
        [[f"a{place}", "float32", [1, 2**24], [1, 1]] for place in range(100)],
    ],
    ids=["mask", "mask of bytes", "dense", "dense mask", "truth values", "cube", "many"],
)
@pytest.mark.usefixtures("little_memory")
def test_a_small_message_cannot_ask_for_much_memory(tensors):
    with pytest.raises(WireError):
        decode(packed({"tensors": tensors, "numbers": []}, bytes(100)))


def test_a_mask_that_broadcasts_may_hide_a_large_tensor():
    tensor = torch.zeros(1, 512, 4000)
    mask = torch.zeros(1, 512, 1, dtype=torch.bool)
    data = encode(Message({"a": tensor}, {"a": mask}))
    assert len(data) < 300
    assert torch.equal(decode(data).tensors["a"], tensor)


def mutate(value, chance):
    """Change a JSON value somewhere inside."""
    others = [None, True, -1, 0, 1, 2, 3, 8, 10**6, 10**12, 2**63, 10**40, 0.5, "", "a", "float32", "bool", [], [1], {}]
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        kind = chance.random()
        if kind < 0.7:
            return [*value[:place], mutate(value[place], chance), *value[place + 1 :]]
        if kind < 0.8:
            return [*value[:place], *value[place + 1 :]]
        return [*value[:place], chance.choice(others), *value[place:]]
    if isinstance(value, dict) and value and chance.random() < 0.95:
        name = chance.choice(list(value))
        return {**value, name: mutate(value[name], chance)}
    return chance.choice(others)


def test_thousands_of_mutated_messages_are_read_or_refused():
    chance = random.Random(0)
    mask = torch.tensor([[True, False, True], [True, False, True]])[None]
    original = Message(
        {"w": torch.ones(1, 2, 3) * mask, "b": torch.tensor([[True, False, True]]), "c": torch.ones(1, 2, 2)},
        {"w": mask, "c": torch.tensor([[[True], [False]]])},
        {"n": torch.ones(1, dtype=torch.float64), "m": torch.ones(1, 2, dtype=torch.int16)},
    )
    data = encode(original)
    begin = FRAME.size + FRAME.unpack_from(data)[1]
    header, body = json.loads(data[FRAME.size : begin]), data[begin:-8]
    accepted = 0
    for _ in range(4000):
        changed = header
        for _ in range(chance.randrange(4)):
            changed = mutate(changed, chance)
        content = bytearray(body)
        for _ in range(chance.randrange(3)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        length = chance.choice([len(body), len(body), chance.randrange(len(body) + 20)])
        try:
            message = decode(packed(changed, bytes(content * 2)[:length]))
        except WireError:
            continue
        accepted += 1
        encode(message)
    assert 100 < accepted < 3000
