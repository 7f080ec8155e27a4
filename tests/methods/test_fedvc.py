from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, declared, run, server_view, watched

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Method, methods

LAYERS = LayerMap.read(nn.Linear(2, 2), (2,))


def test_fedvc_counts_all_participants_alike():
    weights = methods.make("fedvc").weigh(declared(30, 10))
    assert weights.tolist() == [1.0, 1.0]


def test_fedvc_draws_clients_by_their_sizes():
    part, sizes = methods.make("fedvc"), torch.tensor([30, 10, 1, 1])
    drawn = [part.select(server_view(LAYERS, {}, round, clients=4, sizes=sizes), 1) for round in range(2000)]
    often = [drawn.count((client,)) / 2000 for client in range(4)]
    assert often == pytest.approx([30 / 42, 10 / 42, 1 / 42, 1 / 42], abs=0.03)
    assert part.select(server_view(LAYERS, {}, clients=4, sizes=sizes), 4) == (0, 1, 2, 3)


@BOTH_ENGINES
def test_fedvc_clients_of_any_size_make_the_same_steps(engine):
    method, seen = watched("fedvc(samples=12)")
    simulation = run(method, engine, rounds=1)
    assert {len(steps) for steps in seen.steps.values()} == {2}  # twelve samples in batches of eight
    trained = torch.stack([seen.trained[1, client]["hidden.weight"] for client in range(5)])
    assert torch.allclose(simulation.engine.server.model["hidden.weight"], trained.mean(0), rtol=0, atol=1e-12)
    assert simulation.metrics.latest()["bytes.up"] == run("fedavg", rounds=1).metrics.latest()["bytes.up"]


def test_fedvc_and_fedir_go_together_and_another_weighing_does_not():
    Method.make("fedir+fedvc+lws")
    with pytest.raises(FedStrataError, match="each of them decides the shares of the clients"):
        Method.make("fedvc+feddisco")


@pytest.mark.parametrize("text", ["fedvc(samples=0)"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("(")[2].partition("=")[0]):
        methods.make(text)


@pytest.mark.parametrize("text", ["fedvc(samples=1)"])
def test_what_is_at_the_edge_of_its_range_is_taken(text):
    assert str(methods.make(text)) == text


def test_the_defaults():
    assert asdict(methods.make("fedvc")) == {"samples": 256}
