from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payloads import DTYPES, assert_equal, numbers, random_mask, small_message, unframed

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message
from fedstrata.wire import WireError, bytes_sent, bytes_to_count, codec, decode, encode, encoded_sizes, mask_hash

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.97, 1.0])
def test_masks_longer_than_a_chunk_come_back(dtype, density):
    mask = random_mask(density, 3, 50_001)
    tensor = numbers(dtype, 1, 3, 50_001)
    expected = Message({"a": tensor * mask if dtype != torch.bool else tensor & mask}, {"a": mask})
    assert_equal(decode(encode(Message({"a": tensor}, {"a": mask}))), expected)


def test_special_numbers_keep_their_bits():
    values = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 1e308]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, True, False]])
    received = decode(encode(Message({"a": values, "b": values}, {"b": mask})))
    assert torch.equal(received.tensors["a"].view(torch.int64), values.view(torch.int64))
    assert torch.equal(received.tensors["b"][mask].view(torch.int64), values[mask].view(torch.int64))


def test_an_empty_message_and_odd_names_and_strided_tensors():
    assert_equal(decode(encode(Message())), Message())
    message = Message({"": torch.ones(1, 2), "größe/层 \"'\\": torch.arange(12).reshape(1, 4, 3).transpose(1, 2)})
    assert_equal(decode(encode(message)), message)
    learned = torch.ones(1, 2, requires_grad=True)
    assert not decode(encode(Message({"a": learned}))).tensors["a"].requires_grad


def test_strided_masks_and_tensors():
    mask, tensor = random_mask(0.3, 40, 30).transpose(1, 2), torch.randn(1, 40, 30).transpose(1, 2)
    assert_equal(decode(encode(Message({"a": tensor}, {"a": mask}))), Message({"a": tensor * mask}, {"a": mask}))


def test_what_is_received_can_be_written_to():
    received = decode(encode(small_message()))
    received.tensors["count"] += 1
    received.tensors["layer.weight"] += 1
    received.masks["layer.weight"] &= False
    assert int(received.tensors["count"]) == 8


def test_only_what_the_mask_holds_costs_bytes():
    tensor, mask = torch.zeros(1, 64), torch.zeros(1, 64, dtype=torch.bool)
    full, empty = len(encode(Message({"a": tensor}))), len(encode(Message({"a": tensor}, {"a": mask})))
    mask[0, :20] = True
    some = len(encode(Message({"a": tensor}, {"a": mask})))
    assert full - empty == 64 * 4 - (1 + 64 // 8) - len(",1")
    assert some - empty == 20 * 4


def test_a_type_that_cannot_be_sent_is_refused_when_encoding():
    message = Message({"a": torch.zeros(1, 2, dtype=torch.complex64)})
    with pytest.raises(FedStrataError, match="type complex64 cannot be sent; use one of float64"):
        encode(message)
    with pytest.raises(FedStrataError, match="type complex64"):
        encoded_sizes(message, 3)


def test_the_messages_of_several_clients_are_not_one_message():
    with pytest.raises(FedStrataError, match="One message at a time"):
        encode(Message({"a": torch.zeros(3, 2)}))


def test_the_description_stays_small():
    shapes = [(64, 64, 3, 3), (64,), (64,)] * 20
    message = Message({f"layer{place}.block.conv.weight": torch.zeros(1, *s) for place, s in enumerate(shapes)})
    description, body = unframed(encode(message))
    assert len(encode(message)) - len(body) < 45 * 60
    assert description[0][0] == ["layer0.block.conv.weight", "f32", [64, 64, 3, 3]]


# Masks that both sides hold ------------------------------------------------------------------------------------------


def test_a_held_mask_travels_as_its_hash():
    mask, tensor = random_mask(0.5, 100, 100), torch.randn(1, 100, 100)
    message = Message({"a": tensor}, {"a": mask})
    data = encode(message, {"a": mask.clone()})
    assert mask_hash(mask) in data
    assert len(data) == len(encode(message)) - 10_000 // 8 + 8
    assert_equal(decode(data, held={"a": mask}), Message({"a": tensor * mask}, {"a": mask}))
    assert encoded_sizes(message, 1, {"a": mask}) == [len(data)]


def test_another_mask_than_the_held_one_is_sent():
    mask, other = random_mask(0.5, 1000), random_mask(0.5, 1000, seed=1)
    message = Message({"a": torch.randn(1, 1000)}, {"a": mask})
    assert encode(message, {"a": other}) == encode(message)
    assert encode(message, {"a": mask.reshape(1, 10, 100)}) == encode(message)
    assert encode(message, {"b": mask}) == encode(message)
    assert_equal(decode(encode(message), held={"a": other}), decode(encode(message)))


@pytest.mark.parametrize("held", [None, {}, {"b": 0}, {"a": 1}, {"a": 2}], ids=str)
def test_a_mask_that_is_not_held_is_refused(held):
    mask = random_mask(0.5, 1000)
    others = [mask, ~mask, mask.reshape(1, 10, 100)]
    data = encode(Message({"a": torch.randn(1, 1000)}, {"a": mask}), {"a": mask})
    with pytest.raises(WireError, match=f"hash {mask_hash(mask).hex()}, and that mask is not held here"):
        decode(data, held=held and {name: others[place] for name, place in held.items()})


def test_the_hash_knows_shape_and_entries():
    mask = random_mask(0.5, 12)
    hashes = {mask_hash(mask), mask_hash(~mask), mask_hash(mask.reshape(1, 3, 4)), mask_hash(mask.reshape(1, 4, 3))}
    assert len(hashes) == 4
    assert mask_hash(mask) == mask_hash(mask.clone())
    assert {len(name) for name in hashes} == {8}


def test_a_held_mask_that_broadcasts():
    mask, tensor = random_mask(0.5, 200, 1), torch.randn(1, 200, 3)
    data = encode(Message({"a": tensor}, {"a": mask}), {"a": mask})
    assert_equal(decode(data, held={"a": mask}), Message({"a": tensor * mask}, {"a": mask}))


# Rounds --------------------------------------------------------------------------------------------------------------


def test_a_message_of_another_round_is_refused():
    data = encode(small_message(), round=3)
    assert_equal(decode(data), small_message())
    assert_equal(decode(data, round=3), small_message())
    with pytest.raises(WireError, match="of round 3 came where one of round 4 is expected"):
        decode(data, round=4)
    with pytest.raises(WireError, match="of no round came where one of round 0 is expected"):
        decode(encode(small_message()), round=0)
    assert len(data) == len(encode(small_message()))


# Sizes ---------------------------------------------------------------------------------------------------------------


def each_size(message, clients, held=None, values="as-is"):
    def row(tensors, client):
        return {name: tensor[client % len(tensor)][None] for name, tensor in tensors.items()}

    return [
        len(encode(message.rows(torch.tensor([client])), row(held or {}, client), values)) for client in range(clients)
    ]


shapes = st.sampled_from([None, (30, 20), (1, 20), (30, 1), (1, 1)])
held_kinds = st.sampled_from(["none", "same", "common", "some", "other shape"])
kinds = st.tuples(st.sampled_from(DTYPES), shapes, st.booleans(), st.booleans(), held_kinds)


@given(
    st.lists(kinds, max_size=4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 1.0]),
    st.sampled_from(["as-is", "fp16", "int8"]),
    st.integers(0, 2**30),
)
def test_sizes_are_those_of_the_encoded_messages(kinds, clients, density, values, seed):
    generator = torch.Generator().manual_seed(seed)
    message = Message(numbers={"n": torch.zeros(clients, dtype=torch.float64)})
    held = {}
    for place, (dtype, shape, common, common_mask, known) in enumerate(kinds):
        name = f"t{place}"
        message.tensors[name] = numbers(dtype, 1 if common else clients, 30, 20)
        if shape is None:
            continue
        mask = torch.rand(1 if common_mask else clients, *shape, generator=generator) < density
        message.masks[name] = mask
        if known == "same":
            held[name] = mask.clone()
        elif known == "common":
            held[name] = mask[:1].clone()
        elif known == "some":
            held[name] = mask.expand(clients, *shape) ^ (torch.arange(clients) % 2 == 0)[:, None, None]
        elif known == "other shape":
            held[name] = mask.reshape(len(mask), -1)
    assert encoded_sizes(message, clients, held, values) == each_size(message, clients, held, values)


@pytest.mark.parametrize("density", [0.001, 0.05, 0.2, 0.37, 0.4, 0.63, 0.9, 0.999])
def test_sizes_of_stacks_of_large_masks_and_truth_values(density, monkeypatch):
    monkeypatch.setattr("fedstrata.wire.masks._ENTRIES_AT_ONCE", 12_000)
    masks = torch.cat([random_mask(density, 5000, seed=seed) for seed in range(7)])
    message = Message({"a": torch.zeros(7, 5000), "b": masks}, {"a": masks})
    assert encoded_sizes(message, 7) == each_size(message, 7)
    assert len(set(encoded_sizes(message, 7))) > 1


def test_bytes_may_be_counted_later_and_more_than_once():
    mask = random_mask(0.3, 40, 30)
    message = Message({"a": torch.ones(1, 40, 30), "b": torch.ones(3, 2)}, {"a": mask})
    count = bytes_to_count(message, 3, {"a": mask})
    message.masks.clear()
    expected = bytes_sent(each_size(Message(message.tensors, {"a": mask}), 3, {"a": mask}))
    assert count() == count() == expected


def test_sizes_of_single_numbers_under_masks():
    message = Message({"scale": torch.ones(3)}, {"scale": torch.tensor([True, False, True])})
    assert encoded_sizes(message, 3) == each_size(message, 3)
    assert encoded_sizes(message, 3)[0] == encoded_sizes(message, 3)[1] + 4


def test_a_common_message_costs_the_same_for_everybody():
    message = Message({"a": torch.zeros(1, 5)}, {"a": torch.tensor([[True, True, False, False, True]])})
    assert encoded_sizes(message, 4) == [len(encode(message))] * 4


def test_what_holds_nothing_counts_nothing():
    nothing, something = encode(Message(), round=3), encode(Message({"a": torch.zeros(1, 1)}))
    assert bytes_sent([len(nothing), len(something), len(nothing)]) == len(something) > len(nothing) > 0
    assert bytes_sent(encoded_sizes(Message(), 3)) == 0
    assert bytes_sent(encoded_sizes(Message({"a": torch.zeros(1, 0)}), 2)) > 0


def test_a_description_is_read_once_and_refused_every_time():
    good, many = small_message(), Message({str(number): torch.zeros(1) for number in range(5)})
    codec._parse_again.cache_clear()
    for _ in range(3):
        assert_equal(decode(encode(good)), good)
        with pytest.raises(WireError, match="describes 5 tensors"):
            decode(encode(many), most_tensors=4)
    assert codec._parse_again.cache_info().misses == 4  # the good one, and the other every time


def test_descriptions_that_are_remembered_are_few_and_short():
    codec._parse_again.cache_clear()
    for number in range(100):
        decode(encode(Message({f"tensor {number}": torch.zeros(1)})))
    long = Message({f"{number:0200}": torch.zeros(1) for number in range(400)})
    decode(encode(long))
    assert codec._parse_again.cache_info().currsize == 32
    assert codec._parse_again.cache_info().misses == 100
