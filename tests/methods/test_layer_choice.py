"""Which layers a pattern means."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from watching import Attending, clients_view, server_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.methods.mechanisms.layer_choice import biases_of, choose_layers, weights_elsewhere, weights_of
from fedstrata.testing.world import TinyNet

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))
ATTENDING = LayerMap.read(Attending(), (1, 8, 8))


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


def test_a_layer_is_chosen_with_all_its_weights_and_a_weight_with_its_first_layer():
    layers = ATTENDING
    middle = ["attention.in_proj_weight", "attention.out_proj.weight", "mixing.weight"]
    assert weights_of(layers, "middle") == middle
    assert weights_of(layers, "all") == ["patches.weight", *middle, "head.weight"]
    assert weights_of(layers, "again") == []


def test_biases_are_parameters_of_that_name_not_those_of_modules_of_that_name():
    inner = nn.Sequential(OrderedDict(biased=nn.Linear(2, 2)))
    layers = LayerMap.read(nn.Sequential(OrderedDict(inner=inner, head=nn.Linear(2, 2))), (2,))
    assert biases_of(layers) == ["inner.biased.bias", "head.bias"]


def test_layers_whose_weight_is_chosen_nowhere_are_named():
    """A bias that two layers use is none of their weights."""
    assert [weights_elsewhere(ATTENDING, pattern) for pattern in ("middle", "all", "mixing")] == [[], [], []]
    assert weights_elsewhere(ATTENDING, "again") == [
        "The layer 'again' uses 'mixing.weight' of 'mixing', which is not among the chosen layers"
    ]
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].bias = network[0].bias
    assert weights_elsewhere(LayerMap.read(network, (2,)), "middle") == []


# Methods that count by layers, on layers with several weights --------------------------------------------------------


def test_fedlama_tells_of_a_layer_with_several_weights_the_longest_interval():
    part = methods.make("fedlama(factor=3)")
    waits = dict.fromkeys(weights_of(ATTENDING, "all"), False) | {"attention.in_proj_weight": True}
    server = server_view(
        ATTENDING, {name: torch.zeros(1) for name in waits}, memory={"waits": torch.tensor([*waits.values()])}
    )
    assert part.metrics(server) == {"interval": {"patches": 1, "attention": 3, "mixing": 1, "head": 1}}


def test_fedpm_counts_all_weights_of_a_layer_and_draws_its_biases_at_their_size():
    part = methods.make("fedpm")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in Attending().named_parameters()}
    certain = zeros | {"attention.in_proj_weight": torch.full((18, 6), math.inf)}
    density = part.metrics(server_view(ATTENDING, certain))["density"]
    assert density == {"patches": 0.5, "attention": (3 * 1 + 1 * 0.5) / 4, "mixing": 0.5, "head": 0.5}
    scores = {name: torch.full((1, *tensor.shape), 100.0) for name, tensor in zeros.items()}
    used = part.effective(clients_view(ATTENDING, 1), scores, 0)
    for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"):
        assert used[f"attention.{name}"].abs().unique().tolist() == pytest.approx([math.e / math.sqrt(6)])


def test_biases_are_those_of_layers_with_weights_packed_ones_too():
    assert biases_of(LAYERS) == ["stem.bias", "hidden.bias", "head.bias"]
    named = nn.Sequential(OrderedDict(bias_free=nn.Linear(2, 2, bias=False), biased=nn.Linear(2, 2)))
    assert biases_of(LayerMap.read(named, (2,))) == ["biased.bias"]
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert biases_of(LayerMap.read(attention, (3, 4))) == [
        "self_attn.in_proj_bias", "self_attn.out_proj.bias", "linear1.bias", "linear2.bias",
    ]  # fmt: skip
