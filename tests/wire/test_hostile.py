"""What cannot be trusted: every message here was damaged, or made up by somebody who knows the format."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payloads import PREFIX, framed, random_mask, sealed, small_message, unframed

from fedstrata.methods.contract.views import Message
from fedstrata.wire import WireError, decode, encode

BITS, GAPS_OF_FALSE, GAPS_OF_TRUE, HELD = (bytes([kind]) for kind in range(4))


# Damage --------------------------------------------------------------------------------------------------------------


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


def test_every_cut_is_noticed_even_if_the_checksum_fits():
    data = encode(small_message())
    for length in range(len(data) - 4):
        with pytest.raises(WireError):
            decode(sealed(data[:length]))


def test_two_swapped_messages_are_noticed():
    first, second = encode(Message({"a": torch.zeros(1, 4)})), encode(Message({"a": torch.ones(1, 4)}))
    with pytest.raises(WireError, match="checksum"):
        decode(first[:-4] + second[-4:])


def test_another_version_is_refused_as_such():
    content = encode(small_message())[:-4]
    with pytest.raises(WireError, match="does not begin like one of this version"):
        decode(sealed(b"FSM1" + content[4:]))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    for data in (noise, framed(noise), framed([[], []], noise + b"x")):
        with pytest.raises(WireError):
            decode(data)


# Descriptions that do not fit ----------------------------------------------------------------------------------------


def tensor(*entry):
    return [[list(entry)], []]


@pytest.mark.parametrize(
    ("description", "body"),
    [
        ([], b""),
        ({}, b""),
        (None, b""),
        (3, b""),
        ([[]], b""),
        ([[], [], []], b""),
        ([[], None], b""),
        ([5, []], b""),
        ([["abc"], []], b""),
        ([[{}], []], b""),
        (tensor(), b""),
        (tensor("a", "f32"), bytes(4)),
        (tensor("a", "f32", [], [], []), bytes(4)),
        (tensor("a", "f32", []), b""),
        (tensor("a", "f32", []), bytes(3)),
        (tensor("a", "f32", []), bytes(5)),
        (tensor("a", "f32", 1), bytes(4)),
        (tensor("a", "f32", None), bytes(4)),
        (tensor("a", "f32", "1"), bytes(4)),
        (tensor("a", "f32", [-1]), bytes(4)),
        (tensor("a", "f32", [1.0]), bytes(4)),
        (tensor("a", "f32", [True]), bytes(4)),
        (tensor("a", "f32", [None]), bytes(4)),
        (tensor("a", "f32", [[1]]), bytes(4)),
        (tensor("a", "f32", [1] * 40), bytes(4)),
        (tensor("a", "f128", []), bytes(16)),
        (tensor("a", ["f32"], []), bytes(4)),
        (tensor("a", "__class__", []), bytes(4)),
        (tensor("a", "", []), bytes(4)),
        (tensor("a", None, []), bytes(4)),
        (tensor("a", "f32:f32", []), bytes(4)),
        (tensor("a", "f32:f64", []), bytes(8)),
        (tensor("a", "f16:bf16", []), bytes(2)),
        (tensor("a", "f32:u8", []), bytes(1)),
        (tensor("a", "i64:i8", []), bytes(9)),
        (tensor("a", "f32:i8:i8", []), bytes(9)),
        (tensor("a", "f32:", []), bytes(4)),
        (tensor("a", "f32:i8", []), bytes(1)),
        (tensor("a", "f32:i8", []), struct.pack("<d", -1.0) + bytes(1)),
        (tensor("a", "f32:i8", []), struct.pack("<d", float("nan")) + bytes(1)),
        (tensor("a", "f32:i8", []), struct.pack("<d", float("inf")) + bytes(1)),
        (tensor(1, "f32", []), bytes(4)),
        (tensor(None, "f32", []), bytes(4)),
        (tensor(["a"], "f32", []), bytes(4)),
        ([[["a", "f32", []], ["a", "f32", []]], []], bytes(8)),
        ([[], [["a", "f32", []], ["a", "f32", []]]], bytes(8)),
        ([[], [[7, "f32", []]]], bytes(4)),
        ([[], [["a", "f32", [8], 1]]], BITS + b"\xff" + bytes(32)),
        ([[], [["a", "f32:f16", []]]], bytes(2)),
        (tensor("a", "f32", [3], [2]), BITS + bytes(13)),
        (tensor("a", "f32", [3], [3, 1]), BITS + bytes(13)),
        (tensor("a", "f32", [3], False), BITS + bytes(13)),
        (tensor("a", "f32", [3], True), BITS + bytes(13)),
        (tensor("a", "f32", [3], None), BITS + bytes(13)),
        (tensor("a", "f32", [3], 2), BITS + bytes(13)),
        (tensor("a", "f32", [8], 1), BITS + b"\xff" + bytes(31)),
        (tensor("a", "f32", [8], 1), BITS + b"\xff" + bytes(33)),
        (tensor("a", "f32", [8], 1), bytes([4]) + b"\xff" + bytes(32)),
        (tensor("a", "f32", [8], 1), HELD + bytes(8)),
        (tensor("a", "bool", [8]), HELD + bytes(8)),
        (tensor("a", "bool", [3]), BITS + b"\0\1\1"),
        (tensor("a", "bool", [3]), BITS),
        (tensor("a", "bool", [3]), b""),
        (tensor("a", "bool", [3]), BITS + b"\x10"),
        (tensor("a", "bool", [9]), BITS + b"\xff"),
        (tensor("a", "bool", [8]), BITS + b"\xff\0"),
        ([[], [["a", "bool", []]]], BITS + b"\x01"),
        (tensor("a", "i8", [3], 1), BITS + b"\x01"),
        (tensor("a", "bool", [3], 1), BITS + b"\xc0\x20"),
        (tensor("a", "f32", [0, 10**30]), b""),
        (tensor("a", "f32", [0, 2**62]), b""),
        (tensor("a", "f32", [0, 2**61, 2]), b""),
        (b"[" + b"[" * 20000 + b"]" * 20000 + b",[]]", b""),
        (b'[[["a","f32",[' + b"9" * 6000 + b"]]],[]]", b""),
        (b"\xff\xfe\x00", b""),
        (b"", b""),
        (b"NaN", b""),
    ],
)  # fmt: skip
def test_a_description_that_does_not_fit_is_refused(description, body):
    with pytest.raises(WireError) as caught:
        decode(framed(description, body))
    assert len(str(caught.value)) < 400


def test_nesting_of_any_depth_is_refused():
    for depth in range(1, 1100, 7):
        for description in (b"[[%s],[]]", b'[[["a",%s,[]]],[]]', b'[[["a","f32",%s]],[]]', b'[[["a","f32",[],%s]],[]]'):
            with pytest.raises(WireError):
                decode(framed(description % (b"[" * depth + b"7" + b"]" * depth)))


def test_a_description_longer_than_the_message_is_refused():
    with pytest.raises(WireError, match="announces a description of 4294967295 bytes"):
        decode(sealed(PREFIX.pack(b"FSM2", 0, 2**32 - 1) + b"[[],[]]"))


def gaps(rarer, unary_bytes, unary, remainders):
    """A hundred truth values by the gaps between the true ones, which have remainders of four bits if they are four."""
    return framed(
        tensor("a", "bool", [100]), GAPS_OF_TRUE + struct.pack("<II", rarer, unary_bytes) + unary + remainders
    )


def test_gaps_that_do_not_fit_are_refused():
    fits = b"\xb0\x80", b"\x01\x88"
    assert decode(gaps(4, 2, *fits)).tensors["a"].nonzero()[:, 1].tolist() == [3, 20, 21, 90]
    for data in (
        gaps(51, 2, *fits),
        gaps(2**32 - 1, 2, *fits),
        gaps(3, 2, *fits),
        gaps(5, 2, *fits),
        gaps(0, 0, *fits),
        gaps(4, 1, *fits),
        gaps(4, 3, b"\xb0\x80\x00", b"\x01\x88"),
        gaps(4, 2**32 - 1, *fits),
        gaps(4, 2, b"\xb0\x80", b"\x01"),
        gaps(4, 2, b"\xb0\x80", b"\x01\x88\0"),
        gaps(4, 2, b"\xb0\x90", b"\x01\x88"),
        gaps(4, 2, b"\xb0\x08", b"\x01\x88"),
        gaps(4, 2, b"\xb0\x40", b"\x01\x88"),
        gaps(4, 2, b"\xb0\x80", b"\xff\xff"),
    ):
        with pytest.raises(WireError):
            decode(data)


# Bombs ---------------------------------------------------------------------------------------------------------------

NOTHING = struct.pack("<II", 0, 0)


@pytest.fixture
def little_memory():
    """Let a test allocate no more than 300 MB."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * 10**6


@pytest.mark.parametrize(
    ("tensors", "body"),
    [
        ([["a", "f64", [10**12], []]], BITS + bytes(100)),
        ([["a", "i8", [10**12], [1]]], BITS + bytes(100)),
        ([["a", "f32", [10**12]]], bytes(100)),
        ([["a", "f32", [10**12], 1]], BITS + bytes(100)),
        ([["a", "f32", [10**9], 1]], GAPS_OF_TRUE + NOTHING),
        ([["a", "bool", [10**12]]], BITS + bytes(100)),
        ([["a", "bool", [10**12]]], GAPS_OF_FALSE + NOTHING),
        ([["a", "bool", [10**9]]], GAPS_OF_TRUE + NOTHING),
        ([["a", "bool", [10**8]]], GAPS_OF_TRUE + struct.pack("<II", 5 * 10**7, 2) + bytes(2)),
        ([["a", "f64", [2**20, 2**20, 2**20], [1, 1, 1]]], BITS + bytes(100)),
        ([[f"a{place}", "f32", [2**24], []] for place in range(100)], (BITS + b"\0") * 100),
        ([[f"a{place}", "bool", [2**24]] for place in range(100)], (GAPS_OF_TRUE + NOTHING) * 100),
        ([["a", "f32", [10**12], 1]], HELD + bytes(8)),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_a_small_message_cannot_ask_for_much_memory(tensors, body):
    with pytest.raises(WireError):
        decode(framed([tensors, []], body), held={"a": torch.ones(1, 10, dtype=torch.bool)})


def test_the_limit_can_be_given():
    mask = torch.zeros(1, 512, 1, dtype=torch.bool)
    data = encode(Message({"a": torch.ones(1, 512, 4000)}, {"a": mask}))
    unpacked = 512 * 4000 * (4 + 1)
    assert len(data) < 100
    assert torch.equal(decode(data, limit=unpacked).tensors["a"], torch.zeros(1, 512, 4000))
    assert torch.equal(decode(data).tensors["a"], torch.zeros(1, 512, 4000))
    with pytest.raises(WireError, match=f"would unpack to {unpacked}, and the limit is {unpacked - 1}"):
        decode(data, limit=unpacked - 1)


def test_the_default_limit_lets_very_sparse_messages_pass(monkeypatch):
    monkeypatch.setattr("fedstrata.wire.codec._UNPACKED_BYTES", 0)
    mask = random_mask(0.01, 100_000)
    message = Message({"a": torch.randn(1, 100_000)}, {"a": mask})
    decode(encode(message))
    rare = Message(message.tensors, {"a": random_mask(0.001, 100_000)})
    with pytest.raises(WireError, match="would unpack to"):
        decode(encode(rare))
    decode(encode(rare, rare.masks), held=rare.masks)


# Fuzz ----------------------------------------------------------------------------------------------------------------


def fuzzing_messages():
    """Valid messages of every kind, each with the masks that the receiver holds."""
    mask, few = random_mask(0.5, 6, 20), random_mask(0.02, 300)
    weights = {"w": torch.randn(1, 6, 20), "v": torch.randn(1, 300), "c": torch.ones(1, 2, 2)}
    masks = {"w": mask, "v": few, "c": torch.tensor([[[True], [False]]])}
    counts = {"n": torch.ones(1, dtype=torch.float64), "m": torch.ones(1, 2, dtype=torch.int16)}
    everything = Message({**weights, "b": few, "d": random_mask(0.5, 9)}, masks, counts)
    return [
        (encode(small_message()), {}),
        (encode(everything, round=5), masks),
        (encode(everything, {"w": mask}), masks),
        (encode(everything, masks, values="int8"), masks),
        (encode(everything, values="fp16"), {}),
    ]


OTHERS = [
    None, True, -1, 0, 1, 2, 3, 8, 100, 300, 10**6, 10**12, 2**63, 10**40, 0.5,
    "", "a", "f32", "bool", "f32:i8", "f64:f16", [], [1], [300], {},
]  # fmt: skip


def changed_json(value, chance):
    """Change a JSON value somewhere inside."""
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        kind = chance.random()
        if kind < 0.7:
            return [*value[:place], changed_json(value[place], chance), *value[place + 1 :]]
        if kind < 0.8:
            return [*value[:place], *value[place + 1 :]]
        return [*value[:place], chance.choice(OTHERS), *value[place:]]
    return chance.choice(OTHERS)


def flipped_bits(data, chance):
    content = bytearray(data[:-4])
    for _ in range(chance.randrange(1, 4)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return sealed(content)


def flipped_bits_of_the_body(data, chance):
    description, body = unframed(data)
    content = bytearray(body)
    for _ in range(chance.randrange(1, 4)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return framed(description, bytes(content))


def cut(data, chance):
    return sealed(data[: chance.randrange(len(data) - 4)])


def spliced(data, chance):
    content = data[:-4]
    start, end = sorted(chance.randrange(len(content)) for _ in range(2))
    middle = chance.choice([b"", content[start:end] * 2, chance.randbytes(chance.randrange(20))])
    return sealed(content[:start] + middle + content[end:])


def changed_description(data, chance):
    description, body = unframed(data)
    for _ in range(chance.randrange(1, 4)):
        description = changed_json(description, chance)
    length = chance.choice([len(body), len(body), chance.randrange(len(body) + 20)])
    return framed(description, (body * 2)[:length])


@pytest.mark.parametrize(
    "mutate", [flipped_bits, flipped_bits_of_the_body, cut, spliced, changed_description], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("kind", range(5))
def test_mutated_messages_are_read_whole_or_refused(mutate, kind):
    """Four hundred each, ten thousand in all; what is read must be a message that can be written again."""
    chance = random.Random(kind)
    data, held = fuzzing_messages()[kind]
    accepted = 0
    for _ in range(400):
        try:
            message = decode(mutate(data, chance), held=held, limit=2**20)
        except WireError:
            continue
        accepted += 1
        encode(message)
    if mutate in (flipped_bits, flipped_bits_of_the_body):
        assert 0 < accepted < 400
    elif mutate is cut:
        assert accepted == 0
