"""FedIR and FedVC: samples weighed by their classes, clients of one size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, run, server_view, step_view, watched

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods

LAYERS = LayerMap.read(nn.Linear(2, 2), (2,))
MODEL = {"weight": torch.zeros(1, 2, 2)}


def losses_of(distribution, counts):
    """Compute the loss of two samples: one of class 0 with chance 3/4, one of class 1 with chance 1/2."""
    outputs = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0]]])
    step = step_view(MODEL, labels=torch.tensor([[0, 1]]), outputs=outputs)
    clients = clients_view(
        LAYERS, 1, label_counts=torch.tensor([counts]), memory={"distribution": torch.tensor([distribution])}
    )
    return methods.make("fedir").base_loss(clients, step).tolist()


def test_fedir_weighs_samples_by_global_over_local_frequency():
    """Counts of 3 and 1 where both classes are equally frequent overall: the rare one counts three times as much."""
    expected = (-math.log(0.75) + 3 * math.log(2)) / 4
    assert losses_of([0.5, 0.5], [3, 1]) == pytest.approx([expected])


def test_fedir_is_the_mean_where_a_client_is_like_all():
    mean = (-math.log(0.75) + math.log(2)) / 2
    assert losses_of([0.75, 0.25], [30, 10]) == pytest.approx([mean])


def test_the_server_sums_what_clients_declared_and_sends_it():
    part = methods.make("fedir")
    server = server_view(LAYERS, {}, label_counts=torch.tensor([[3, 0], [1, 4]]))
    memory = part.server_memory(server)
    assert memory["distribution"].tolist() == [0.5, 0.5]
    later = server_view(LAYERS, {}, label_counts=torch.tensor([[3, 0]]), memory=memory)
    message = part.broadcast(later, Message())
    assert message.tensors["fedir/distribution"].tolist() == [[0.5, 0.5]]
    clients = clients_view(LAYERS, 3, label_counts=torch.ones(3, 2))
    assert part.begin(clients, {}, message)["distribution"].tolist() == [[0.5, 0.5]] * 3


@BOTH_ENGINES
def test_fedir_trains_another_loss_and_ten_numbers_more_come_down(engine):
    ours, theirs = run("fedir", engine, rounds=1), run("fedavg", engine, rounds=1)
    assert not torch.equal(ours.engine.server.model["hidden.weight"], theirs.engine.server.model["hidden.weight"])
    left, right = ours.metrics.latest(), theirs.metrics.latest()
    assert left["bytes.up"] == right["bytes.up"]
    assert 5 * 10 * 4 <= left["bytes.down"] - right["bytes.down"] < 5 * 300


# FedVC ----------------------------------------------------------------------------------------------------------------


def test_fedvc_counts_all_participants_alike():
    weights = methods.make("fedvc").weigh(server_view(LAYERS, {}, sizes=torch.tensor([30, 10])))
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
