from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import clients_view, run, step_view, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.stack import Stack

LAYERS = LayerMap.read(nn.Linear(2, 2), (2,))


def view(trained, round=2):
    """Make clients of which some have a previous model."""
    previous = Stack(weight=torch.zeros(len(trained), 2, 2))
    return clients_view(LAYERS, len(trained), round=round, previous=previous, trained=torch.tensor(trained))


def test_pfedsd_distils_the_previous_model():
    """KL of (3/4, 1/4) from (1/2, 1/2); at temperature 2 that of (e, 1) / (1 + e), times four."""
    logits = torch.tensor([[[math.log(3), 0.0]], [[math.log(3), 0.0]]])
    clients, plain = view([True, False]), torch.tensor([1.0, 2.0])

    def forward(asked):
        assert asked["weight"] is clients.previous["weight"]
        assert not torch.is_grad_enabled()
        return logits

    step = step_view({"weight": torch.zeros(2, 2, 2)}, outputs=torch.zeros(2, 1, 2), forward=forward)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    part = methods.make("pfedsd")
    assert part.loss(clients, step, plain).tolist() == pytest.approx([1.0 + expected, 2.0])
    warm = math.sqrt(3) / (1 + math.sqrt(3))
    softer = 0.5 * 4 * (warm * math.log(2 * warm) + (1 - warm) * math.log(2 * (1 - warm)))
    part = methods.make("pfedsd(strength=0.5, temperature=2.0)")
    clients = view([True, True])
    assert part.loss(clients, step, plain).tolist() == pytest.approx([1.0 + softer, 2.0 + softer])
    assert part.loss(view([False, False], round=1), step, plain) is plain


def test_pfedsd_teaches_in_the_mode_of_training_or_in_that_of_evaluation():
    """In training, batch norm sees the batch: the two inputs become -1 and 1, whatever the running statistics are."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2, bias=False))
    layers = LayerMap.read(model, (1,))
    previous = Stack({name: tensor.detach()[None] for name, tensor in model.state_dict().items()})
    previous["1.weight"] = torch.tensor([[[1.0], [0.0]]])
    previous["0.running_mean"] = torch.full((1, 1), 100.0)
    clients = clients_view(layers, 1, round=2, previous=previous, trained=torch.tensor([True]))
    inputs = torch.tensor([[[3.0], [5.0]]])

    def run(weights, mean, deviation):
        return (inputs - mean) / deviation @ weights["1.weight"].transpose(1, 2)

    step = step_view(
        {name: previous[name] for name in ("0.weight", "0.bias", "1.weight")},
        outputs=torch.zeros(1, 2, 2),
        forward=lambda weights: run(weights, inputs.mean(), inputs.std(correction=0)),
        predict=lambda whole: (run(whole, whole["0.running_mean"], whole["0.running_var"].sqrt()), None),
    )
    loss = {
        mode: float(methods.make(f"pfedsd(teacher={mode})").loss(clients, step, torch.zeros(1)))
        for mode in ("training", "evaluation")
    }
    yes = math.e / (1 + math.e)
    assert loss["training"] == pytest.approx(yes * math.log(2 * yes) + (1 - yes) * math.log(2 * (1 - yes)))
    assert loss["evaluation"] == pytest.approx(math.log(2))  # of one class, as good as certainly


def test_pfedsd_clients_use_what_they_trained_last():
    method, seen = watched("pfedsd")
    simulation = run(method, rounds=2, participation=0.4)
    latest = simulation.metrics.latest()
    message = simulation.engine.central.messages([0], 3)[0]
    rounds = {client: max((r for r, c in seen.trained if c == client), default=None) for client in range(5)}
    assert None in rounds.values()
    for client, last in rounds.items():
        used = simulation.engine.members[client].model(message, 2)["hidden.weight"][0]
        expected = simulation.engine.server.model if last is None else seen.trained[last, client]
        assert torch.equal(used, expected["hidden.weight"])
    assert "global.accuracy" not in latest
