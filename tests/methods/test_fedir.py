from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, run, server_view, step_view

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods

LAYERS = LayerMap.read(nn.Linear(2, 2), (2,))
MODEL = {"weight": torch.zeros(1, 2, 2)}


def losses_of(distribution, counts):
    """Compute the loss of two samples: one of class 0 with chance 3/4, one of class 1 with chance 1/2."""
    outputs = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0]]])
    step = step_view(MODEL, labels=torch.tensor([[0, 1]]), outputs=outputs)
    clients = clients_view(
        LAYERS, 1, label_counts=torch.tensor([counts]), memory={"distribution": torch.tensor([distribution])}
    )
    plain = torch.tensor([9.0])  # another loss takes its place
    return methods.make("fedir").loss(clients, step, plain).tolist()


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
    model, memory = part.start(clients, message, MODEL)
    assert memory["distribution"].tolist() == [[0.5, 0.5]] * 3
    assert model is MODEL


@BOTH_ENGINES
def test_fedir_trains_another_loss_and_ten_numbers_more_come_down(engine):
    ours, theirs = run("fedir", engine, rounds=1), run("fedavg", engine, rounds=1)
    assert not torch.equal(ours.engine.server.model["hidden.weight"], theirs.engine.server.model["hidden.weight"])
    left, right = ours.metrics.latest(), theirs.metrics.latest()
    assert left["bytes.up"] == right["bytes.up"]
    assert 5 * 10 * 4 <= left["bytes.down"] - right["bytes.down"] < 5 * 300
