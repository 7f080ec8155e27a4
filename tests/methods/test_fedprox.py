from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import clients_view, step_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Method, methods
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


@pytest.mark.parametrize("text", ["fedprox(mu=-0.1)"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("(")[2].partition("=")[0]):
        methods.make(text)


@pytest.mark.parametrize("text", ["fedprox(mu=0.0)"])
def test_what_is_at_the_edge_of_its_range_is_taken(text):
    assert str(methods.make(text)) == text


def test_the_defaults():
    assert asdict(methods.make("fedprox")) == {"mu": 0.01}


def test_beside_fednova_the_term_is_that_methods_own():
    with pytest.raises(FedStrataError, match="'fedprox' pulls every step back to the model received, and 'fednova'"):
        Method.make("fedprox+fednova")
