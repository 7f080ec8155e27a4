"""pFedHN: the hypernetwork's step against plain autograd and torch.optim, and models of each client's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from watching import run, server_view

from fedstrata.engines.loop import LoopEngine
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods
from fedstrata.methods.mechanisms.hypernetwork import HyperNetwork
from fedstrata.stack import Stack

LAYERS = LayerMap.read(nn.Linear(3, 2), (3,))
MODEL = {"weight": torch.zeros(2, 3, dtype=torch.float64), "bias": torch.zeros(2, dtype=torch.float64)}
PART = methods.make("pfedhn(hidden=4, embedding=3)")


def at_server(memory=None, clients=3, participants=(0, 2)):
    return server_view(
        LAYERS, MODEL, clients=clients, participants=participants, sizes=torch.tensor([5] * len(participants)),
        label_counts=torch.zeros(len(participants), 2), **({} if memory is None else {"memory": Stack(memory)}),
    )  # fmt: skip


def test_an_embedding_grows_with_the_clients_unless_its_size_is_given():
    """1 + 8 / 4 and 1 + 9 / 4, rounded down."""
    for clients, size in ((8, 3), (9, 3), (12, 4)):
        first = methods.make("pfedhn").server_memory(at_server(clients=clients))
        assert first["network/embeddings.weight"].shape == (clients, size)


def test_a_hypernetwork_has_three_hidden_layers_more_after_the_first():
    network = HyperNetwork(2, 3, 4, [torch.Size((2, 3))])
    sizes = [(one.in_features, one.out_features) for one in network.body if isinstance(one, nn.Linear)]
    assert sizes == [(3, 4), (4, 4), (4, 4), (4, 4)]
    assert sum(isinstance(one, nn.ReLU) for one in network.body) == 3


@pytest.mark.parametrize("change", [0.01, 1e4])
def test_a_step_is_that_of_an_optimiser_on_the_mean_agreement(change):
    """Two steps of torch.optim.SGD on the mean of <theta, theta - trained>, with the gradient clipped at 50."""
    memory = Stack(PART.server_memory(at_server()))
    network = {name: nn.Parameter(tensor.clone()) for name, tensor in memory.group("network").items()}
    optimiser = torch.optim.SGD(network.values(), lr=0.01, momentum=0.9, weight_decay=0.001)
    with torch.device("meta"):
        empty = HyperNetwork(3, 3, 4, [torch.Size((2, 3)), torch.Size((2,))])
    for _ in range(2):
        sent = PART.broadcast(at_server(memory), Message()).tensors
        replies = Message({name: tensor + change * (place + 1) for place, (name, tensor) in enumerate(sent.items())})
        made = functional_call(empty, network, (torch.tensor([0, 2]),))
        for own, (name, tensor) in zip(made, sent.items(), strict=True):
            assert torch.allclose(own, tensor, rtol=1e-6), name
        optimiser.zero_grad()
        pairs = zip(made, replies.tensors.values(), strict=True)
        sum((own * (own.detach() - trained)).sum() / 2 for own, trained in pairs).backward()
        norm = nn.utils.clip_grad_norm_(network.values(), 50.0)
        assert (norm > 50) == (change > 1)
        optimiser.step()
        _, after = PART.refine(at_server(memory), {}, replies)
        memory = Stack(after)
        for name, tensor in memory.group("network").items():
            assert torch.allclose(tensor, network[name], rtol=1e-6, atol=1e-10), name


def test_embeddings_of_those_who_sat_out_only_decay():
    memory = Stack(PART.server_memory(at_server()))
    sent = PART.broadcast(at_server(memory), Message()).tensors
    replies = Message({name: tensor + 1 for name, tensor in sent.items()})
    _, after = PART.refine(at_server(memory), {}, replies)
    before, now = (one["network/embeddings.weight"] for one in (memory, after))
    assert torch.allclose(now[1], before[1] * (1 - 0.01 * 0.001))
    assert not torch.allclose(now[0], before[0] * (1 - 0.01 * 0.001))


def test_every_client_gets_a_model_of_its_own_and_learns():
    """Taken from what clients receive: models differ between clients, and follow what they trained."""
    driver = run("pfedhn(learning_rate=0.1)", rounds=3)
    assert isinstance(driver.engine, LoopEngine)
    message = driver.engine.side.broadcast(driver.engine.server, range(5), 4)
    weights = message.tensors["head.weight"]
    assert weights.shape[0] == 5
    assert all(not torch.equal(weights[0], other) for other in weights[1:])
    losses = driver.metrics.series("train.loss")[1]
    assert losses[2] < losses[0]
