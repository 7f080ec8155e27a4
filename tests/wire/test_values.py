from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payloads import DTYPES, assert_equal, numbers, random_mask, unframed

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message
from fedstrata.wire import VALUES, decode, encode, quantisation_error, received

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def test_int8_by_hand():
    values = torch.tensor([[12.7, -6.35, 0.049, 0.0, -12.7]])
    description, body = unframed(encode(Message({"a": values}), values="int8"))
    scale = float(values.max()) / 127
    assert description == [[["a", "f32:i8", [5]]], []]
    assert body == struct.pack("<d5b", scale, 127, -64, 0, 0, -127)
    received = decode(encode(Message({"a": values}), values="int8")).tensors["a"]
    assert torch.allclose(received, torch.tensor([[12.7, -6.4, 0.0, 0.0, -12.7]]))
    assert received.dtype == torch.float32


@pytest.mark.parametrize(("values", "narrow"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_narrow_floats_come_back_rounded_in_their_own_type(values, narrow, dtype):
    mask, tensor = random_mask(0.3, 500), torch.randn(1, 500).to(dtype)
    received = decode(encode(Message({"a": tensor, "b": tensor}, {"a": mask}), values=values))
    expected = tensor.to(narrow).to(dtype) if dtype.itemsize > 2 else tensor
    assert_equal(received, Message({"a": expected * mask, "b": expected}, {"a": mask}))


@pytest.mark.parametrize("values", ["fp16", "bf16", "int8"])
def test_only_floating_tensors_are_narrowed_and_numbers_never(values):
    message = Message({str(dtype): numbers(dtype, 1, 7) for dtype in DTYPES if not dtype.is_floating_point})
    message.numbers["n"] = torch.tensor([1.0 + 2**-20])
    assert encode(message, values=values) == encode(message)


@pytest.mark.parametrize(("values", "width"), [("as-is", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)])
def test_what_narrow_values_cost(values, width):
    mask, tensor = random_mask(0.1, 100_000), torch.randn(1, 100_000)
    message = Message({"a": tensor}, {"a": mask})
    assert abs(len(encode(message, message.masks, values)) - width * int(mask.sum())) < 70


@given(st.integers(0, 2**30), st.floats(-300, 300), st.sampled_from([torch.float64, torch.float32]))
def test_int8_is_off_by_half_a_step_at_most(seed, exponent, dtype):
    tensor = torch.randn(1, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**exponent
    tensor = tensor.to(dtype).nan_to_num()
    step = float(tensor.abs().max()) / 127
    received = decode(encode(Message({"a": tensor}), values="int8")).tensors["a"]
    assert received.dtype == dtype
    assert float((received - tensor).abs().max()) <= step * 0.5001 + 127 * torch.finfo(dtype).tiny


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tensor", [torch.zeros(1, 3), torch.zeros(1, 0)], ids=["zeros", "nothing"])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_but_zeros_in_a_narrower_type(dtype, tensor, masked):
    message = Message({"a": tensor.to(dtype)}, {"a": torch.zeros_like(tensor, dtype=torch.bool)} if masked else {})
    for values in VALUES:
        assert_equal(decode(encode(message, values=values)), message)
    assert quantisation_error(message, "int8").tolist() == [0.0]


def test_values_too_small_for_a_scale_are_zeros():
    message = Message({"a": torch.tensor([[0.0, 1e-44]])})
    assert unframed(encode(message, values="int8"))[1] == bytes(8 + 2)


def test_values_outside_a_mask_do_not_set_the_scale():
    message = Message({"a": torch.tensor([[1.0, -0.5, 1000.0]])}, {"a": torch.tensor([[True, True, False]])})
    received = decode(encode(message, values="int8")).tensors["a"]
    assert torch.allclose(received, torch.tensor([[1.0, -64 / 127, 0.0]]))


def test_what_does_not_fit_is_refused_with_a_sentence():
    large = Message({"a": torch.tensor([[1.0, 1e6]])})
    with pytest.raises(FedStrataError, match=r"Values up to 1e\+06 do not fit into torch.float16"):
        encode(large, values="fp16")
    assert float(decode(encode(large, values="bf16")).tensors["a"].max()) == pytest.approx(1e6, rel=0.01)
    with pytest.raises(FedStrataError, match="not finite cannot be sent as int8"):
        encode(Message({"a": torch.tensor([[1.0, float("nan")]])}), values="int8")
    with pytest.raises(FedStrataError, match="There is no way to send values 'fp8'"):
        encode(large, values="fp8")


def test_infinite_values_pass_through_narrow_floats():
    values = torch.tensor([[float("inf"), -float("inf"), 1.0]])
    assert_equal(decode(encode(Message({"a": values}), values="fp16")), Message({"a": values}))


def test_the_error_is_the_relative_distance_of_what_was_sent():
    """Of 3 and 4 with a step of 4 / 127, 3 becomes 95 steps: an error of 1 / 127 beside a norm of 5."""
    mask = torch.tensor([[True, True, False]])
    message = Message({"a": torch.tensor([[3.0, 4.0, 99.0]]), "n": torch.tensor([[3]])}, {"a": mask})
    assert quantisation_error(message, "int8").tolist() == pytest.approx([abs(3 - 95 * 4 / 127) / 5], rel=1e-5)
    assert quantisation_error(message, "as-is").tolist() == [0.0]


@pytest.mark.parametrize(("values", "low", "high"), [("fp16", 1e-5, 5e-4), ("bf16", 1e-4, 4e-3), ("int8", 1e-3, 2e-2)])
def test_the_error_is_that_of_the_message(values, low, high):
    message = Message({"a": torch.randn(1, 10_000)})
    received = decode(encode(message, values=values)).tensors["a"]
    error = float((received - message.tensors["a"]).norm() / message.tensors["a"].norm())
    assert quantisation_error(message, values).tolist() == pytest.approx([error], rel=1e-4)
    assert low < error < high


@pytest.mark.parametrize("values", VALUES)
def test_what_receivers_get_is_what_the_bytes_say_for_each_client(values):
    """Each client's message has scales of its own."""
    sizes, kept = torch.tensor([1.0, 30.0, 0.0, 1e-3])[:, None, None], torch.rand(4, 5, 3) < 0.5
    tensors = {"a": torch.randn(4, 5, 3) * sizes * kept, "b": torch.randn(4, 2).double(), "n": torch.arange(4)[:, None]}
    message = Message(tensors, {"a": kept})
    together = received(message, values)
    for client in range(4):
        row = torch.tensor([client])
        assert_equal(decode(encode(message.rows(row), values=values)), together.rows(row))
