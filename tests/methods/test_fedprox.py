from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import clients_view, step_view

from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.testing.world import prepare

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
WEIGHT = LAYERS.parameter_names[0]


def test_fedprox_adds_half_mu_times_the_squared_distance():
    parameters = {WEIGHT: torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]], requires_grad=True)}
    received = {WEIGHT: torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])}
    step = step_view(parameters, received)
    clients = clients_view(LAYERS, 2, shared=frozenset({WEIGHT}))
    plain = torch.tensor([1.0, 2.0])
    loss = methods.make("fedprox(mu=0.2)").loss(clients, step, plain)
    assert loss.tolist() == pytest.approx([1.0 + 0.5, 2.0 + 2.5])
    assert torch.autograd.grad(loss.sum(), parameters[WEIGHT])[0].tolist() == [
        [pytest.approx([0.2, 0.4])],
        [pytest.approx([-0.6, -0.8])],
    ]
    personal = clients_view(LAYERS, 2, shared=frozenset())
    assert methods.make("fedprox").loss(personal, step, plain).tolist() == [1.0, 2.0]


def test_fedprox_holds_clients_nearer_and_mu_zero_is_fedavg():
    def distance(method):
        simulation = prepare(method)
        before = simulation.setting.initial
        simulation.step()
        return sum(
            float((simulation.engine.server.model[name] - before[name]).square().sum())
            for name in simulation.setting.layers.parameter_names
        )

    assert distance("fedprox(mu=5.0)") < 0.8 * distance("fedavg")
    assert distance("fedprox(mu=0.0)") == distance("fedavg")
