from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, outlined, run, step_view

import fedstrata
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Method, methods

LINEAR = LayerMap.read(nn.Linear(2, 2), (2,))


def personal_heads(weight, bias):
    """Make the memory of clients with personal heads."""
    return {"head/weight": weight, "head/bias": bias}


def test_fedrod_balances_the_classes_of_a_client():
    """Log of 3/4 for the class that has three of four samples, of 1/4 for the other; an absent class plays no part.

    The personal heads are at zero, so that their own loss, which moves no outputs, is that of two equal outputs.
    """
    part = methods.make("fedrod")
    outputs = torch.zeros(3, 1, 2, requires_grad=True)
    clients = clients_view(
        LINEAR, 3, label_counts=torch.tensor([[3, 1], [3, 1], [4, 0]]),
        memory=personal_heads(torch.zeros(3, 2, 2), torch.zeros(3, 2)),
    )  # fmt: skip
    step = step_view(
        {"weight": torch.zeros(3, 2, 2)}, labels=torch.tensor([[0], [1], [0]]), outputs=outputs,
        features=torch.ones(3, 1, 2),
    )  # fmt: skip
    loss = part.loss(clients, step, torch.full((3,), 9.0))  # another loss takes its place
    assert loss.tolist() == pytest.approx([math.log(2) - math.log(chance) for chance in (0.75, 0.25, 1.0)])
    slopes = torch.autograd.grad(loss.sum(), outputs)[0]
    assert slopes.flatten(1).tolist() == [
        pytest.approx([-0.25, 0.25]), pytest.approx([0.75, -0.75]), pytest.approx([0.0, 0.0])
    ]  # fmt: skip


def test_losses_are_means_over_each_clients_samples_in_the_type_of_the_outputs():
    """One client has samples of both classes, the other two of one; class counts 3 : 1 and 1 : 1, without biases."""
    layers = LayerMap.read(nn.Linear(2, 2, bias=False), (2,))
    clients = clients_view(
        layers, 2, label_counts=torch.tensor([[3, 1], [1, 1]]),
        memory={"head/weight": torch.tensor([[[0.0, 0.0], [1.0, 0.0]]] * 2, dtype=torch.float64)},
    )  # fmt: skip
    step = step_view(
        {"weight": torch.zeros(2, 2, 2)}, labels=torch.tensor([[0, 1], [0, 0]]),
        outputs=torch.zeros(2, 2, 2, dtype=torch.float64), features=torch.ones(2, 2, 2, dtype=torch.float64),
    )  # fmt: skip
    generic = [(math.log(4 / 3) + math.log(4)) / 2, math.log(2)]
    personal = [math.log1p(math.e) - 0.5, math.log1p(math.e)]  # of outputs 0 and 1
    loss = methods.make("fedrod").loss(clients, step, torch.zeros(2))
    assert loss.tolist() == pytest.approx([sum(both) for both in zip(generic, personal, strict=True)], rel=1e-14)


def test_a_head_whose_weight_is_that_of_another_layer_is_refused():
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(FedStrataError, match="does not end in a linear layer with a weight of its own"):
        Method.make("fedrod").notes(outlined(LayerMap.read(tied, (4,))))


def test_only_the_personal_head_learns_from_the_personal_loss():
    part = methods.make("fedrod")
    personal = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], requires_grad=True)
    outputs = torch.tensor([[[0.0, 0.0]]], requires_grad=True)
    features = torch.tensor([[[2.0, 5.0]]], requires_grad=True)
    step = step_view({"weight": torch.zeros(1, 2, 2)}, labels=torch.tensor([[0]]), outputs=outputs, features=features)
    memory = personal_heads(personal, torch.tensor([[0.0, 1.0]]))
    clients = clients_view(LINEAR, 1, memory=memory, label_counts=torch.tensor([[4, 0]]))
    loss = part.loss(clients, step, torch.zeros(1))
    # 0 + 2 against 0 + 1; the balanced loss of a client with one class is nothing
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-1))])
    slopes = torch.autograd.grad(loss.sum(), (personal, outputs, features), allow_unused=True)
    chance = 1 / (1 + math.e)
    assert slopes[0].flatten().tolist() == pytest.approx([-2 * chance, -5 * chance, 2 * chance, 5 * chance])
    assert not slopes[1].any()
    assert slopes[2] is None


def test_fedrod_uses_the_sum_of_both_heads():
    part = methods.make("fedrod")
    model = {"weight": torch.ones(1, 2, 2), "bias": torch.ones(1, 2)}
    memory = {"head/weight": torch.full((1, 2, 2), 0.5), "head/bias": torch.tensor([[1.0, -1.0]])}
    deployed = part.deployed(clients_view(LINEAR, 1, memory=memory), model)
    assert deployed["weight"].tolist() == [[[1.5, 1.5], [1.5, 1.5]]]
    assert deployed["bias"].tolist() == [[2.0, 0.0]]
    assert all(not tensor.any() for tensor in part.client_memory(clients_view(LINEAR, 1), model).values())


@BOTH_ENGINES
def test_fedrod_learns_personal_heads_that_stay(engine):
    rounds = {name: run(name, engine, rounds=2) for name in ("fedrod", "fedavg")}
    memory = rounds["fedrod"].engine.clients().group("memory")
    assert len({tuple(head.flatten().tolist()) for head in memory["fedrod/head/head.weight"]}) == 5
    ours, theirs = (rounds[name].metrics.latest() for name in ("fedrod", "fedavg"))
    assert ours["bytes.up"] == theirs["bytes.up"]
    assert ours["bytes.down"] == theirs["bytes.down"]
    shared = [rounds[name].engine.server.model["head.weight"] for name in ("fedrod", "fedavg")]
    assert not torch.equal(*shared)  # the balanced loss is another one


@pytest.mark.parametrize("name", ["fedrod", "moon"])
def test_a_model_without_a_linear_head_is_refused(name):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 10, 6), nn.Flatten())
    with pytest.raises(FedStrataError, match=f"'{name}' .*the model does not end in a linear layer"):
        fedstrata.run(model=lambda: model, method=name, clients=3, rounds=1, engine="loop")


def test_features_are_there_also_when_the_engine_is_chosen_by_trying():
    fedstrata.run(method="fedrod", model="mlp", clients=3, rounds=1, epochs=1, engine="auto")
