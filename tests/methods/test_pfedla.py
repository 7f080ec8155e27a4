from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, layer_values, run, server_view, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method
from fedstrata.methods.pfedla import HIDDEN_LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:The shares of 'pfedla' are still within")  # after a round or two

TWO = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False)), (2,))
MODEL = {"0.weight": torch.zeros(1, 2), "1.weight": torch.zeros(2, 1)}


def view(text, round=2, clients=2, participants=(0, 1)):
    """Make a server whose hypernetworks are as drawn."""
    method = Method.make(text)
    few = {"clients": clients, "participants": participants, "sizes": torch.ones(len(participants))}
    first = method.server_memory(server_view(TWO, MODEL, clients=clients, sizes=torch.ones(clients)))
    return method, server_view(TWO, MODEL, round, memory=first, **few)


def known(text, logits, first, second, **changes):
    """Make a server that knows two clients' models, with hypernetworks that give logits ``[client, layer, client]``."""
    method, server = view(text, **changes)
    memory = server.memory | {
        "pfedla/network/heads": torch.zeros_like(server.memory["pfedla/network/heads"]),
        "pfedla/network/logits": torch.tensor(logits).flatten(1),
        "pfedla/last/0.weight": torch.tensor([[first[0]], [second[0]]]),
        "pfedla/last/1.weight": torch.tensor([[[value] for value in model[1]] for model in (first, second)]),
    }
    return method, replace(server, memory=memory)


def flat(message, name):
    return message.tensors[name].flatten(1).tolist()


THREE_TO_ONE = [math.log(3.0), 0.0]
LOGITS = [[THREE_TO_ONE, [0.0, 0.0]], [[0.0, 0.0], THREE_TO_ONE]]
FIRST, SECOND = ((4.0, 0.0), (2.0, 2.0)), ((0.0, 8.0), (0.0, 6.0))


def test_every_layer_is_mixed_with_its_own_weights():
    """Client 0 takes 3/4 of its own first layer and half of its second, client 1 half of its first and 1/4."""
    method, server = known("pfedla", LOGITS, FIRST, SECOND)
    message = method.broadcast(server, Message({name: tensor[None] for name, tensor in MODEL.items()}))
    assert flat(message, "0.weight") == [pytest.approx([3.0, 2.0]), pytest.approx([2.0, 4.0])]
    assert flat(message, "1.weight") == [pytest.approx([1.0, 4.0]), pytest.approx([1.5, 3.0])]
    assert not message.masks


def test_the_hypernetwork_follows_what_training_changed():
    r"""For client 0's first layer, :math:`\alpha` = (3/4, 1/4), mixed (3, 2), reply (4, 2): change (1, 0).

    It agrees with (4, 0) by 4 and with (0, 8) by 0: mean 3, so the logits move along (3/4 * 1, 1/4 * -3) = (3/4, -3/4).
    Its second layer did not change, and neither did client 1.
    """
    method, server = known("pfedla(learning_rate=0.1, optimiser=sgd)", LOGITS, FIRST, SECOND)
    replies = method.broadcast(server, Message({name: tensor[None] for name, tensor in MODEL.items()})).tensors
    replies = {**replies, "0.weight": replies["0.weight"] + torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])}
    _, memory = method.aggregate(server, Message(replies))
    moved = memory["pfedla/network/logits"] - server.memory["pfedla/network/logits"]
    assert moved[0].tolist() == pytest.approx([0.075, -0.075, 0.0, 0.0], abs=1e-6)
    assert moved[1].tolist() == pytest.approx([0.0] * 4, abs=1e-6)
    assert torch.equal(memory["pfedla/last/0.weight"], replies["0.weight"])


def test_shares_are_those_of_linear_layers_with_relu():
    method, server = view("pfedla(embedding=3, hidden=4)", clients=2)
    network = server.memory.group("pfedla/network")
    values = network["embedding"][1]
    for place in range(HIDDEN_LAYERS):
        values = nn.functional.relu(
            nn.functional.linear(values, network[f"weight{place}"][1], network[f"bias{place}"][1])
        )
    logits = nn.functional.linear(values, network["heads"][1], network["logits"][1]).view(2, 2)
    known_models = {"pfedla/last/0.weight": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])}
    message = method.broadcast(replace(server, memory=server.memory | known_models), Message())
    assert message.tensors["0.weight"][1].flatten().tolist() == pytest.approx(logits.softmax(1)[0].tolist())


def test_all_parameters_of_a_layer_agree_or_not_and_buffers_do_not_count():
    r"""Shares are 1/2 and 1/2. Client 0's weight changed by 1 and its bias by 2; it agrees with client 0, whose models
    are 3 and 1, by 3 + 2 = 5, and with client 1, all zero, not at all: the logits move by 0.1 (1/2) (5 - 5/2).
    """
    layers = LayerMap.read(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), (1,))
    model = {
        "0.weight": torch.zeros(1, 1),
        "0.bias": torch.zeros(1),
        "1.weight": torch.zeros(1),
        "1.bias": torch.zeros(1),
    }
    model |= {
        "1.running_mean": torch.zeros(1),
        "1.running_var": torch.ones(1),
        "1.num_batches_tracked": torch.tensor(0),
    }
    method = Method.make("pfedla(learning_rate=0.1, optimiser=sgd)")
    server = server_view(layers, model)
    memory = method.server_memory(server)
    for part in ("heads", "logits"):
        memory[f"pfedla/network/{part}"].zero_()
    memory |= {
        "pfedla/last/0.weight": torch.tensor([[[3.0]], [[0.0]]]), "pfedla/last/0.bias": torch.tensor([[1.0], [0.0]]),
        "pfedla/last/1.running_mean": torch.tensor([[100.0], [0.0]]),
    }  # fmt: skip
    server = replace(server, memory=memory)
    replies = method.broadcast(server, Message()).tensors
    changes = {"0.weight": 1.0, "0.bias": 2.0, "1.running_mean": 100.0}
    for name, change in changes.items():
        replies[name][0] += change
    _, after = method.aggregate(server, Message(replies))
    assert after["pfedla/network/logits"].tolist() == [pytest.approx([0.125, -0.125]), [0.0, 0.0]]


def test_only_where_layers_stay_clients_keep_their_models():
    assert Method.make("pfedla").resident(TWO) == frozenset()
    assert Method.make("pfedla(heur=1)").resident(TWO) == {"0.weight", "1.weight"}


@pytest.mark.parametrize(
    ("clients", "moved", "remarked"), [(1, 0.0, False), (2, 0.0, True), (4, 0.0, True), (4, -0.25, False)]
)
def test_a_remark_needs_several_clients_and_shares_that_neither_rose_nor_fell(clients, moved, remarked):
    """Where one of four shares falls to four fifths, the others rise by 7 % only."""
    method, server = view("pfedla", clients=clients, participants=tuple(range(clients)))
    network = "pfedla/network/logits"
    logits = server.memory[network].view(clients, -1, clients).clone()
    logits[..., 0] += moved
    ended = replace(server, memory=server.memory | {network: logits.flatten(1)})
    assert len(method.remarks(ended)) == remarked


def test_the_whole_hypernetwork_learns_and_others_do_not():
    """The embedding is reached through all layers, so there is a link from what was sent to every number."""
    method, server = view("pfedla", clients=3, participants=(0, 2))
    generator = torch.Generator().manual_seed(1)
    last = {f"pfedla/last/{name}": torch.randn(3, *tensor.shape, generator=generator) for name, tensor in MODEL.items()}
    server = replace(server, memory=server.memory | last)
    replies = {name: torch.randn(2, *tensor.shape, generator=generator) for name, tensor in MODEL.items()}
    _, memory = method.aggregate(server, Message(replies))
    network = [name for name in memory if name.startswith("pfedla/network/")]
    assert len(network) == 9
    for name in network:
        changed = (memory[name] != server.memory[name]).flatten(1).any(1).tolist()
        assert changed == [True, False, True], name


def test_clients_with_the_same_goal_find_each_other():
    """Clients 0 and 1 are drawn to one point, 2 and 3 to the opposite one; each trains a bit from what it was sent."""
    method, server = view("pfedla", clients=4, participants=(0, 1, 2, 3))
    goal = torch.tensor([1.0, 1.0, -1.0, -1.0])
    before = method.metrics(server)["own_share"]
    for round in range(1, 60):
        server = replace(server, round=round)
        started = method.broadcast(server, Message({name: tensor[None] for name, tensor in MODEL.items()})).tensors
        replies = {name: tensor + 0.3 * (goal.view(4, 1, 1) - tensor) for name, tensor in started.items()}
        _, memory = method.aggregate(server, Message({**replies}))
        server = replace(server, memory=memory)
    mixed = method.broadcast(server, Message({name: tensor[None] for name, tensor in MODEL.items()})).tensors
    assert all(float((tensor.sign() * goal.view(4, 1, 1)).min()) == 1 for tensor in mixed.values())
    friends = {f"pfedla/last/{name}": (goal > 0).view(4, 1, 1).expand(4, *MODEL[name].shape).float() for name in MODEL}
    server = replace(server, memory=server.memory | friends)
    from_friends = method.broadcast(server, Message({name: tensor[None] for name, tensor in MODEL.items()})).tensors
    assert all(float(share[:2].min()) > 0.8 and float(share[2:].max()) < 0.2 for share in from_friends.values())
    assert before["0"] == pytest.approx(0.25, abs=0.1)
    after = method.metrics(server)["own_share"]
    assert all(after[layer] > before[layer] + 0.1 for layer in before)
    assert not list(method.remarks(server))


@pytest.mark.parametrize(("text", "moves"), [("pfedla(learning_rate=0.005, optimiser=sgd)", False), ("pfedla", True)])
def test_shares_that_do_not_move_are_remarked(text, moves):
    """The rate that goes round for SGD leaves everybody with one share of everybody."""
    method, server = view(text, clients=4, participants=(0, 1, 2, 3))
    for _ in range(30):
        started = method.broadcast(server, Message({name: tensor[None] for name, tensor in MODEL.items()})).tensors
        goals = torch.tensor([1.0, 1.0, -1.0, -1.0]).view(4, 1, 1)
        replies = {name: tensor + 0.3 * (goals - tensor) for name, tensor in started.items()}
        server = replace(server, memory=method.aggregate(server, Message(replies))[1])
    remarks = list(method.remarks(server))
    assert len(remarks) == (not moves)
    assert all("still within 10% of the first ones, about 1/4" in remark for remark in remarks)


# HeurpFedLA ----------------------------------------------------------------------------------------------------------


def test_layers_with_the_largest_own_share_stay():
    """Client 0 has most of its own in the first layer, client 1 in the first too: 1/2 against 1/4."""
    method, server = known("pfedla(heur=1)", LOGITS, FIRST, SECOND)
    message = method.broadcast(server, Message({name: tensor[None] for name, tensor in MODEL.items()}))
    assert message.masks["0.weight"].flatten().tolist() == [False, False]
    assert message.masks["1.weight"].flatten().tolist() == [True, True]
    assert flat(message, "0.weight") == [[0.0, 0.0], [0.0, 0.0]]
    assert flat(message, "1.weight") == [pytest.approx([1.0, 4.0]), pytest.approx([1.5, 3.0])]


def test_layers_that_stay_teach_nothing():
    method, server = known("pfedla(heur=1, learning_rate=0.1, optimiser=sgd)", LOGITS, FIRST, SECOND)
    replies = {"0.weight": torch.ones(2, 1, 2), "1.weight": torch.ones(2, 2, 1)}
    _, memory = method.aggregate(server, Message(replies))
    moved = (memory["pfedla/network/logits"] - server.memory["pfedla/network/logits"]).view(2, 2, 2)
    assert moved[:, 0].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert bool((moved[:, 1] != 0).all())


@BOTH_ENGINES
def test_a_client_goes_on_with_its_own_layers_where_they_stay(engine):
    method, seen = watched("pfedla(heur=2)")
    run(method, engine, rounds=2)
    for client in range(5):
        received, own = seen.received[2, client], seen.trained[1, client]
        stayed = [
            layer
            for layer in ("stem", "body", "shortcut.0", "hidden", "head")
            if torch.equal(received[f"{layer}.weight"], own[f"{layer}.weight"])
        ]
        assert len(stayed) == 2
    with_norm = {"stem": "scale.running_mean", "shortcut.0": "shortcut.1.running_mean"}
    for layer, statistic in with_norm.items():
        for client in range(5):
            received, own = seen.received[2, client], seen.trained[1, client]
            kept = torch.equal(received[f"{layer}.weight"], own[f"{layer}.weight"])
            assert torch.equal(received[statistic], own[statistic]) == kept


def test_more_layers_than_there_are_means_all_of_them():
    method, seen = watched("pfedla(heur=99)")
    run(method, rounds=2)
    assert torch.equal(seen.received[2, 1]["head.weight"], seen.trained[1, 1]["head.weight"])


# In a run ------------------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_models_differ_between_clients_and_shares_are_reported(engine):
    method, seen = watched("pfedla(learning_rate=1.0)")
    simulation = run(method, engine)
    assert not torch.equal(seen.received[3, 0]["body.weight"], seen.received[3, 1]["body.weight"])
    first, last = (layer_values(simulation, "own_share", round) for round in (1, 3))
    assert set(first) == {"stem", "body", "shortcut.0", "hidden", "head"}
    assert first != last
    for client in range(5):
        assert torch.allclose(
            seen.received[1, client]["body.weight"], simulation.setting.initial["body.weight"], rtol=0, atol=1e-12
        )


def test_one_model_travels_each_way_and_less_down_where_layers_stay():
    plain, average, heuristic = (
        run(text, rounds=1).metrics.latest() for text in ("pfedla", "fedavg", "pfedla(heur=3)")
    )
    assert plain["bytes.up"] == average["bytes.up"] == heuristic["bytes.up"]
    assert plain["bytes.down"] == average["bytes.down"]
    assert heuristic["bytes.down"] < 0.8 * plain["bytes.down"]
