"""Which layers a pattern means."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods.mechanisms.layer_choice import biases_of, choose_layers, weights_of
from fedstrata.testing.world import TinyNet

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("first", ["stem"]),
        ("middle", ["body", "shortcut.0", "hidden"]),
        ("last", ["head"]),
        ("all", ["stem", "body", "shortcut.0", "hidden", "head"]),
        ("h*", ["hidden", "head"]),
        ("head|stem", ["stem", "head"]),
        ("shortcut.?|body", ["body", "shortcut.0"]),
        ("*", ["stem", "body", "shortcut.0", "hidden", "head"]),
    ],
)
def test_layers_by_role_or_name_in_forward_order(pattern, names):
    assert [layer.name for layer in choose_layers(LAYERS, pattern)] == names
    assert weights_of(LAYERS, pattern) == [f"{name}.weight" for name in names]


@pytest.mark.parametrize("pattern", ["scale", "shortcut.1", "BODY", "body|nothing*", ""])
def test_a_pattern_that_fits_no_layer_with_weights_is_refused(pattern):
    with pytest.raises(FedStrataError, match=r"There is no layer with weights that matches .* Known: body, head"):
        choose_layers(LAYERS, pattern)


def test_a_single_layer_is_the_last():
    layers = LayerMap.read(nn.Linear(2, 2), (2,))
    assert weights_of(layers, "middle") == weights_of(layers, "first") == []
    assert weights_of(layers, "last") == ["weight"]


def test_biases_are_those_of_layers_with_weights_packed_ones_too():
    assert biases_of(LAYERS) == ["stem.bias", "hidden.bias", "head.bias"]
    named = nn.Sequential(OrderedDict(bias_free=nn.Linear(2, 2, bias=False), biased=nn.Linear(2, 2)))
    assert biases_of(LayerMap.read(named, (2,))) == ["biased.bias"]
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert biases_of(LayerMap.read(attention, (3, 4))) == [
        "self_attn.in_proj_bias", "self_attn.out_proj.bias", "linear1.bias", "linear2.bias",
    ]  # fmt: skip
