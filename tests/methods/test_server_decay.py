from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, layer_values, run, server_view

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method

TWO = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1)), (2,))
OLD = {"0.weight": torch.tensor([[1.0, 2.0]]), "1.weight": torch.tensor([[2.0]]), "1.bias": torch.tensor([4.0])}


def decayed(text: str, updates: dict[str, list[float]], memory=None, model=OLD):
    """Aggregate two clients that both sent the same update."""
    method = Method.make(text)
    memory = memory or method.server_memory(server_view(TWO, model))
    sent = {
        name: (model[name] + torch.tensor(update).view_as(model[name])).expand(2, *model[name].shape)
        for name, update in updates.items()
    }
    return method.aggregate(server_view(TWO, model, memory=memory), Message(sent))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


# By hand -------------------------------------------------------------------------------------------------------------


def test_adadecay_normalises_within_each_layer():
    """In layer 0 |g| = (1, 0) has mean and deviation .5; in layer 1, weight and bias together, (3, 3) moved evenly."""
    new, _ = decayed("adadecay(decay=0.1)", {"0.weight": [1.0, 0.0], "1.weight": [-3.0], "1.bias": [3.0]})
    assert new["0.weight"].flatten().tolist() == pytest.approx([2 - 0.2 * sigmoid(4), 2 - 0.2 * sigmoid(-4) * 2])
    assert new["1.weight"].item() == pytest.approx(2 - 3 - 0.1 * 2)
    assert new["1.bias"].item() == pytest.approx(4 + 3 - 0.1 * 4)


def test_adadecay_without_alpha_is_weight_decay():
    new, _ = decayed("adadecay(decay=0.1, alpha=0)", {"0.weight": [1.0, 0.0]})
    assert new["0.weight"].flatten().tolist() == pytest.approx([2 - 0.1, 2 - 0.2])
    assert new.keys() == {"0.weight"}


def test_awd_decays_in_proportion_to_the_update_over_the_whole_model():
    """||w|| = 5 and ||g|| = 1: lambda = .5 / 5, of which .9 count at first; then .009 and .9 * .5 * 2 / 5."""
    model = {"0.weight": torch.tensor([[3.0, 0.0]]), "1.weight": torch.tensor([[4.0]]), "1.bias": torch.tensor([0.0])}
    new, memory = decayed("awd(decay=0.5)", {"0.weight": [0.6, 0.0], "1.weight": [0.8], "1.bias": [0.0]}, model=model)
    assert float(memory["awd/rate"]) == pytest.approx(0.09)
    assert new["0.weight"].flatten().tolist() == pytest.approx([3.6 - 0.09 * 3, 0.0])
    assert new["1.weight"].item() == pytest.approx(4.8 - 0.09 * 4)
    later = {**model, "0.weight": torch.tensor([[3.0, 4.0]])}
    _, memory = decayed("awd(decay=0.5)", {"0.weight": [0.0, 2.0]}, memory, later)
    assert float(memory["awd/rate"]) == pytest.approx(0.1 * 0.09 + 0.9 * 0.5 * 2 / 5)


@pytest.mark.parametrize("name", ["adadecay", "awd"])
def test_weights_of_zero_stay_finite(name):
    zero = {name: torch.zeros_like(tensor) for name, tensor in OLD.items()}
    new, _ = decayed(name, {"0.weight": [1.0, 0.0]}, model=zero)
    assert new["0.weight"].flatten().tolist() == [1.0, 0.0]


def test_awd_has_no_rate_where_all_weights_are_zero_and_any_other_length_has_one():
    zero = {name: torch.zeros_like(tensor) for name, tensor in OLD.items()}
    _, memory = decayed("awd(decay=0.5)", {"0.weight": [1.0, 0.0]}, model=zero)
    assert float(memory["awd/rate"]) == 0.0
    _, memory = decayed(
        "awd(decay=0.5)", {"0.weight": [0.0, 0.1]}, model={**zero, "0.weight": torch.tensor([[0.2, 0]])}
    )
    assert float(memory["awd/rate"]) == pytest.approx(0.9 * 0.5 * 0.1 / 0.2)


def test_awd_computes_in_double_precision_and_leaves_types_alone():
    """Squares of 1e20 are beyond float32; a parameter may be a single number."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1, bias=False)
            self.scale = nn.Parameter(torch.tensor(0.0))

    layers, method = LayerMap.read(Scaled(), (1,)), Method.make("awd(decay=0.5)")
    model = {"weight": torch.tensor([[1e20]]), "scale": torch.tensor(0.0)}
    first = method.server_memory(server_view(layers, model))
    sent = {"weight": torch.full((2, 1, 1), 1.1e20), "scale": torch.zeros(2)}
    new, memory = method.aggregate(server_view(layers, model, memory=first), Message(sent))
    assert new["weight"].item() == pytest.approx(1.1e20 - 0.9 * 0.5 * 0.1 * 1e20)
    assert {tensor.dtype for tensor in new.values()} == {torch.float32}
    assert memory["awd/rate"].dtype == first["awd/rate"].dtype == torch.float64


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
@pytest.mark.parametrize("name", ["adadecay", "awd"])
def test_without_decay_nothing_changes_and_with_it_weights_are_shorter(name, engine):
    plain, none, some = (run(text, engine, 2) for text in ("fedavg", f"{name}(decay=0)", f"{name}(decay=0.05)"))
    assert_same_bits(plain.engine.server.model, none.engine.server.model)
    left, right = some.engine.server.model, plain.engine.server.model
    assert float(left["hidden.weight"].norm()) < 0.999 * float(right["hidden.weight"].norm())
    assert some.metrics.latest()["bytes.up"] == plain.metrics.latest()["bytes.up"]
    first = run(f"{name}(decay=0.05)", engine, 1).engine.server.model
    mean = run("fedavg", engine, 1).engine.server.model
    for buffer in plain.setting.layers.buffer_names:
        assert torch.equal(first[buffer], mean[buffer])


def test_the_decay_of_a_round_is_among_the_layer_metrics():
    simulation = run("fedbn+awd(decay=0.5)", rounds=1)
    assert 0 < layer_values(simulation, "weight_decay", 1)["(model)"] < 0.5
