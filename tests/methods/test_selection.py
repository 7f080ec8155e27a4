"""Which layers a pattern means, and which parts cannot stand in one method."""

from __future__ import annotations

import pytest
from torch import nn
from worlds import TinyNet

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Method
from fedstrata.methods.mechanisms.layer_choice import choose_layers, weights_of

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


# Combinations that make no sense -------------------------------------------------------------------------------------

SET = "each of them puts weights to values of its own, and only one can"
TRAVEL = "each of them decides which layers travel, and only one can"
NOTHING_LEFT = "'local' shares nothing, and all that '{}' does concerns what clients share"


@pytest.mark.parametrize(
    ("text", "first", "second", "reason"),
    [
        ("local+lws", "local", "lws", "'local' shares nothing, and 'lws' works on what clients share"),
        ("lws+local", "lws", "local", "'local' shares nothing, and 'lws' works on what clients share"),
        ("local+ssfl", "local", "ssfl", "'local' shares nothing, and 'ssfl' works on what clients share"),
        ("local+fedavgm", "local", "fedavgm", "'local' shares nothing, and 'fedavgm' works on what clients share"),
        ("local+fedprox", "local", "fedprox", NOTHING_LEFT.format("fedprox")),
        ("fedprox+local", "fedprox", "local", NOTHING_LEFT.format("fedprox")),
        ("local+top-k", "local", "top-k", NOTHING_LEFT.format("top-k")),
        ("local+player", "local", "player", TRAVEL),
        ("local+freeze-middle", "local", "freeze-middle", TRAVEL),
        ("player+freeze-middle", "player", "freeze-middle", TRAVEL),
        ("ssfl+transient", "ssfl", "transient", SET),
        ("ssfl+lips", "ssfl", "transient", SET),
        ("ssfl+freeze-middle", "ssfl", "freeze-middle", SET),
        ("lips+freeze-middle", "transient", "freeze-middle", SET),
    ],
)
def test_parts_that_would_undo_each_other_are_refused_by_name(text, first, second, reason):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert str(caught.value) == f"'{first}' and '{second}' cannot be combined: {reason}. Leave one of them out."


@pytest.mark.parametrize(
    "text",
    [
        "local+fedbn", "local+transient", "local+fedavg-ft", "fedbn+player+transient", "ssfl+player", "ssfl+fedbn+lws",
        "freeze-middle+fedbn+lws", "fedbn+lips+lws", "fedprox+fedavgm+lws",
    ],
)  # fmt: skip
def test_parts_that_fit_are_taken(text):
    Method.make(text)
