from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    GivenProbe,
    clients_view,
    layer_values,
    probing,
    run,
    server_view,
    training_view,
    watched,
)

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.testing.world import prepare

LAYERS = LayerMap.read(nn.Linear(4, 1, bias=False), (4,))
MODEL = {"weight": torch.tensor([[0.1, -0.9, 0.5, 0.2]])}
HALF = "feddst(sparsity=0.5, every=1, until=1.0, alpha=0.5)"


def bits(text):
    return torch.tensor([[character == "1" for character in text]])


def test_the_first_mask_keeps_the_largest_initial_weights():
    method = Method.make(HALF)
    server = method.server_memory(server_view(LAYERS, MODEL))
    clients = method.client_memory(clients_view(LAYERS, 2), {"weight": MODEL["weight"].expand(2, 1, 4)})
    assert torch.equal(server["feddst/mask/weight"], bits("0110"))
    assert torch.equal(clients["feddst/mask/weight"], bits("0110").expand(2, 1, 4))


def test_the_mask_moves_only_in_some_rounds_and_ever_less():
    part = methods.make("feddst(alpha=0.4, every=2, until=0.5)")
    fractions = [part.moved_fraction(round, 16) for round in range(1, 17)]
    expected = {round: 0.2 * (1 + math.cos(math.pi * (round - 1) / 8)) for round in (2, 4, 6)}
    assert fractions == pytest.approx([expected.get(round, 0.0) for round in range(1, 17)])


@pytest.mark.parametrize(("round", "mask"), [(1, "1100"), (2, "0110")])
def test_a_client_exchanges_its_smallest_weight_for_the_largest_gradient(round, mask):
    """With ``every=2`` nothing moves in round 1; in round 2 the weight 0.3 gives way to the gradient -0.7."""
    probe = GivenProbe({"weight": torch.tensor([[[0.1, 5.0, -0.7, 0.6]]])})
    memory = {"feddst/mask/weight": bits("1100")[None]}
    clients = clients_view(LAYERS, 1, round, rounds=9, memory=memory, **probing(probe))
    trained = {"weight": torch.tensor([[[0.3, -0.9, 0.0, 0.0]]])}
    method = Method.make("feddst(sparsity=0.5, every=2, until=1.0, alpha=0.5)")
    model, memory = method.finish(clients, training_view(trained, trained))
    assert torch.equal(memory["feddst/mask/weight"][0], bits(mask))
    assert torch.equal(model["weight"], trained["weight"])
    message = method.upload(clients_view(LAYERS, 1, memory=memory), training_view(trained, trained), Message(trained))
    assert torch.equal(message.masks["weight"][0], bits(mask))


def settled(weights, masks, sizes=(10, 30), round=1):
    method = Method.make(HALF)
    few = {"sizes": torch.tensor(sizes)}
    memory = method.server_memory(server_view(LAYERS, MODEL, **few))
    server = server_view(LAYERS, MODEL, round, memory=memory, **few)
    held = torch.stack([bits(mask) for mask in masks])
    replies = Message({"weight": torch.tensor(weights)[:, None]}, {"weight": held})
    new, memory = method.aggregate(server, replies)
    return new["weight"].flatten().tolist(), memory["feddst/mask/weight"]


def test_the_server_averages_over_holders_and_keeps_the_largest():
    """The first entry is (10 * 4 + 30 * 8) / 40 = 7, the second 2 from client 0; the third, 1 from client 1, goes."""
    weights, mask = settled([[4.0, 2.0, 0.0, 0.0], [8.0, 0.0, 1.0, 0.0]], ["1100", "1010"])
    assert weights == [7.0, 2.0, 0.0, 0.0]
    assert torch.equal(mask, bits("1100"))


def test_what_all_let_go_makes_room_for_what_was_grown():
    """Nobody holds the second and third entry any more, so the fourth stays, though it starts from zero."""
    weights, mask = settled([[4.0, 0.0, 0.0, 0.0], [8.0, 0.0, 0.0, 0.0]], ["1001", "1001"])
    assert weights == [7.0, 0.0, 0.0, 0.0]
    assert torch.equal(mask, bits("1001"))


def test_a_round_without_exchange_keeps_the_mask():
    """In the last of three rounds nothing moves: the initial mask stays, and what lies outside it is zero."""
    weights, mask = settled([[0.0, 2.0, 1.0, 0.0], [0.0, 4.0, 0.0, 0.0]], ["0110", "0110"], round=3)
    assert weights == [0.0, 3.5, 0.25, 0.0]
    assert torch.equal(mask, bits("0110"))


@BOTH_ENGINES
def test_all_clients_train_inside_the_servers_mask_which_moves(engine):
    method, seen = watched("feddst(sparsity=0.7, every=1, until=1.0, alpha=0.4)")
    simulation = run(method, engine)
    server, clients = simulation.engine.server, simulation.engine.clients()
    first = prepare(method).engine.server.memory
    moved = 0
    for layer in simulation.setting.layers.weighted:
        mask = server.memory[f"feddst/mask/{layer.weight}"]
        assert torch.equal(clients[f"memory/feddst/mask/{layer.weight}"], mask.expand(5, *mask.shape))
        for client in range(5):
            for model in [seen.received[3, client], *seen.steps[3, client]]:
                assert not model[layer.weight][~mask].any()
        assert not server.model[layer.weight][~mask].any()
        assert mask.sum() == first[f"feddst/mask/{layer.weight}"].sum()
        moved += int((mask ^ first[f"feddst/mask/{layer.weight}"]).sum())
    assert moved > 0


def test_without_readjustment_the_first_mask_stays():
    simulation = run("feddst(sparsity=0.5)")
    initial = Method.make("feddst(sparsity=0.5)").server_memory(
        server_view(simulation.setting.layers, simulation.setting.initial)
    )
    memory = simulation.engine.server.memory
    assert all(torch.equal(memory[name], mask) for name, mask in initial.items())
    density = layer_values(simulation, "density", 3)
    sizes = {layer: simulation.setting.initial[f"{layer}.weight"].numel() for layer in density}
    kept = sum(value * sizes[layer] for layer, value in density.items())
    assert kept == pytest.approx(0.5 * sum(sizes.values()), abs=len(sizes))


def test_no_sparsity_is_fedavg():
    sparse, dense = (run(text).engine.server.model for text in ("feddst(sparsity=0.0, every=1)", "fedavg"))
    assert all(torch.equal(sparse[name], dense[name]) for name in dense)


def test_only_kept_weights_travel():
    sparse, dense = (run(text, rounds=1).metrics.latest() for text in ("feddst(sparsity=0.8)", "fedavg"))
    setting = prepare("fedavg").setting
    total = sum(setting.initial[layer.weight].numel() for layer in setting.layers.weighted)
    saved = 0.8 * total * 8
    for way in ("bytes.up", "bytes.down"):
        extra = (sparse[way] - (dense[way] - 5 * saved)) / 5
        assert -8 <= extra <= total / 8 + 5 * 60
