from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, run, server_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods

LINE = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
NAME = "0.weight"
FAMILY = ["fedadam", "fedyogi", "fedadagrad"]


def steps(text: str, *merged: list[float]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Let a server optimiser take in some merged models, one after the other, from a model of zeros."""
    part = methods.make(text)
    model, visited = {NAME: torch.zeros(1, 2, dtype=torch.float64)}, []
    memory = part.server_memory(server_view(LINE, model))
    for target in merged:
        update = {NAME: model[NAME] + torch.tensor([target], dtype=torch.float64)}
        model, memory = part.server_step(server_view(LINE, model, memory=memory), update)
        visited.append(model[NAME].flatten().tolist())
    return visited, memory


# By hand: updates (1, 0) and then (1, 2); beta1 = .5, beta2 = .75, tau = 1, so that v starts at 1 -------------------


def test_adam():
    """v = 1, then 1 and .75 * .75 + .25 * 4; m = (.5, 0), then (.75, 1)."""
    (first, second), memory = steps("fedadam(learning_rate=2.0, beta1=0.5, beta2=0.75, tau=1.0)", [1, 0], [1, 2])
    assert first == pytest.approx([2 * 0.5 / 2, 0])
    assert memory[f"{NAME}/square"].flatten().tolist() == pytest.approx([1.0, 0.75 * 0.75 + 1])
    assert memory[f"{NAME}/mean"].flatten().tolist() == pytest.approx([0.75, 1.0])
    assert second == pytest.approx([0.5 + 2 * 0.75 / 2, 2 * 1 / (1.5625**0.5 + 1)])


def test_yogi():
    """v - .25 * 1 * sign(1 - 1) = 1, and of the entry that does not move 1 - 0; then 1, and 1 - .25 * 4 * sign(-3)."""
    (first, second), memory = steps("fedyogi(learning_rate=2.0, beta1=0.5, beta2=0.75, tau=1.0)", [1, 0], [1, 2])
    assert first == pytest.approx([0.5, 0])
    assert memory[f"{NAME}/square"].flatten().tolist() == pytest.approx([1.0, 2.0])
    assert second == pytest.approx([0.5 + 0.75, 2 / (2**0.5 + 1)])


def test_adagrad():
    (first, second), memory = steps("fedadagrad(learning_rate=2.0, tau=1.0)", [1, 0], [1, 2])
    assert first == pytest.approx([2 / (2**0.5 + 1), 0])
    assert memory[f"{NAME}/square"].flatten().tolist() == pytest.approx([3.0, 5.0])
    assert second == pytest.approx([first[0] + 2 / (3**0.5 + 1), 4 / (5**0.5 + 1)])


def test_momentum():
    (first, second), memory = steps("fedavgm(beta=0.5, learning_rate=2.0)", [1, -1], [1, 0])
    assert first == [2.0, -2.0]
    assert memory[f"{NAME}/velocity"].flatten().tolist() == [1.5, -0.5]
    assert second == [5.0, -3.0]


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("fedadam", {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
        ("fedyogi", {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}),
        ("fedadagrad", {"learning_rate": 0.1, "beta1": 0.0, "tau": 1e-2}),
        ("fedavgm", {"learning_rate": 1.0, "beta": 0.9}),
    ],
)
def test_defaults_are_the_authors(name, defaults):
    assert asdict(methods.make(name)) == defaults


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
@pytest.mark.parametrize("name", FAMILY)
def test_parameters_take_steps_of_bounded_length_and_statistics_are_averaged(name, engine):
    left, right = run(f"{name}(learning_rate=0.01, tau=1e-3)", engine, 1), run("fedavg", engine, 1)
    model, average, initial = left.engine.server.model, right.engine.server.model, right.setting.initial
    assert left.metrics.latest()["bytes.up"] == right.metrics.latest()["bytes.up"]
    part = methods.make(name)
    for parameter in left.setting.layers.parameter_names:
        update = average[parameter] - initial[parameter]
        square = part.squares(torch.full_like(update, 1e-6), update.square())
        expected = initial[parameter] + 0.01 * (1 - part.beta1) * update / (square.sqrt() + 1e-3)
        assert torch.allclose(model[parameter], expected, rtol=0, atol=1e-12)
        assert not torch.equal(model[parameter], average[parameter])
    for buffer in left.setting.layers.buffer_names:
        assert torch.equal(model[buffer], average[buffer])


@pytest.mark.parametrize("name", [*FAMILY, "fedavgm"])
def test_what_does_not_travel_neither_moves_nor_changes_its_state(name):
    method = Method.make(name)
    layers = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)), (2,))
    model = {"0.weight": torch.ones(1, 2), "1.weight": torch.ones(1, 1)}
    memory = method.server_memory(server_view(layers, model))
    both = Message({"0.weight": torch.zeros(2, 1, 2), "1.weight": torch.zeros(2, 1, 1)})
    model, memory = method.aggregate(server_view(layers, model, memory=memory), both)
    new, after = method.aggregate(server_view(layers, model, memory=memory), both.without(["1.weight"]))
    assert new.keys() == {"0.weight"}
    for key, tensor in memory.items():
        assert torch.equal(tensor, after[key]) == ("/1.weight/" in key)


@pytest.mark.parametrize(
    "text",
    [
        "fedavgm(beta=-0.1)",
        "fedavgm(beta=1)",
        "fedavgm(learning_rate=0)",
        "fedadam(learning_rate=0)",
        "fedadam(beta1=-0.1)",
        "fedadam(beta1=1)",
        "fedadam(beta2=-0.1)",
        "fedadam(beta2=1)",
        "fedadam(tau=0)",
        "fedyogi(beta2=-0.1)",
        "fedyogi(beta2=1)",
        "fedadagrad(learning_rate=0)",
        "fedadagrad(beta1=-0.1)",
        "fedadagrad(beta1=1)",
        "fedadagrad(tau=0)",
    ],
)
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("(")[2].partition("=")[0]):
        methods.make(text)


@pytest.mark.parametrize(
    "text",
    ["fedavgm(beta=0.0)", "fedadam(beta1=0.0, beta2=0.0)", "fedyogi(beta2=0.0)", "fedadagrad(learning_rate=0.2)"],
)
def test_what_is_at_the_edge_of_its_range_is_taken(text):
    assert str(methods.make(text)) == text
