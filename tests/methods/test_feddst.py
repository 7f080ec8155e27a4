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
    outlined,
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


def test_the_mask_moves_from_the_second_round_on():
    """The authors count from 0, (t - 1) % R == 0 and t < T // 2: rounds 2 and 17 of 40, and 2 of 30 or of 4."""
    part = methods.make("feddst(alpha=0.4)")

    def events(rounds):
        fractions = {round: part.moved_fraction(round, rounds) for round in range(1, rounds + 1)}
        assert {fraction for fraction in fractions.values() if fraction} <= {0.4}
        return [round for round, fraction in fractions.items() if fraction]

    assert events(40) == [2, 17]
    assert events(34) == [2, 17]
    assert events(33) == events(30) == events(4) == [2]
    assert events(3) == []
    assert [methods.make("feddst(every=1)").moved_fraction(round, 6) for round in (1, 3, 4)] == [0.01, 0.01, 0.0]


def test_in_the_paper_the_mask_moves_ever_less():
    part = methods.make("feddst(alpha=0.4, every=2, until=0.5, schedule=paper)")
    fractions = [part.moved_fraction(round, 16) for round in range(1, 17)]
    expected = {round: 0.2 * (1 + math.cos(math.pi * (round - 1) / 8)) for round in (2, 4, 6)}
    assert fractions == pytest.approx([expected.get(round, 0.0) for round in range(1, 17)])


@pytest.mark.parametrize(
    ("text", "rounds", "moves"),
    [
        ("feddst", 30, True), ("feddst", 3, False), ("feddst(until=1.0)", 3, True),
        ("feddst(schedule=paper)", 30, False), ("feddst(schedule=paper)", 32, True), ("feddst(alpha=0)", 3, True),
        ("feddst(every=1, until=1.0)", 1, True), ("feddst(sparsity=0)", 3, True),
    ],
)  # fmt: skip
def test_a_mask_that_will_never_move_is_announced(text, rounds, moves):
    notes = list(methods.make(text).notes(outlined(LAYERS, rounds)))
    assert moves == (not notes)
    assert all(f"never moves in {rounds} rounds" in note for note in notes)


FOUR_AND_EIGHT = LayerMap.read(
    nn.Sequential(nn.Linear(4, 4, bias=False), nn.ConstantPad1d((0, 4), 0.0), nn.Linear(8, 8, bias=False)), (4,)
)


@pytest.mark.parametrize(("densities", "begin", "gone"), [("feddst", [10, 29], [2, 13]), ("erk", [13, 26], [3, 10])])
def test_tensors_are_pruned_and_grown_to_the_densities_of_the_chosen_rule(densities, begin, gone):
    """Of 80 weights 40 are kept, and 24 between pruning and growth: c is 40/56 and then 56/56, so that the sparsities
    go from 5/14 and 15/28 to 1/2 and 3/4, of 16 and 64; RigL's densities go from 5/6 and 5/12 to 1/2 and 1/4. Of the
    five that then leave the first tensor two come back, since it has only three others.
    """
    part = methods.make(f"feddst(sparsity=0.5, alpha=0.4, every=1, until=1.0, densities={densities})")
    weights = {"0.weight": torch.arange(1.0, 17.0).view(4, 4), "2.weight": torch.arange(1.0, 65.0).view(8, 8)}
    masks = part.first_masks(weights, 0)
    assert [int(mask.sum()) for mask in masks.values()] == begin
    stacked = {name: weight[None] for name, weight in weights.items()}
    probe = GivenProbe({name: -1 / weight for name, weight in stacked.items()})  # what is small grows first
    memory = {f"mask/{name}": mask[None] for name, mask in masks.items()}
    clients = clients_view(FOUR_AND_EIGHT, 1, 2, rounds=9, memory=memory, **probing(probe))
    _, moved = part.finish(clients, training_view(stacked, stacked))
    assert [int(mask.sum()) for mask in moved.values()] == begin
    exchanged = [int((memory[name] & ~mask).sum()) for name, mask in moved.items()]
    assert exchanged == gone


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


def settled(weights, masks, sizes=(10, 30), round=1, text=HALF):
    method = Method.make(text)
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


def test_weights_count_by_their_magnitude():
    weights, mask = settled([[-4.0, 0.5, 2.0, 0.0], [-4.0, 0.5, 2.0, 0.0]], ["1110", "1110"])
    assert weights == [-4.0, 0.0, 2.0, 0.0]
    assert torch.equal(mask, bits("1010"))


def test_where_nothing_moves_nobody_asks_for_gradients_and_the_server_settles_nothing():
    """In round 3 of every second; a mask with one entry too few stays as it is."""
    method = Method.make("feddst(sparsity=0.5, every=2, until=1.0, alpha=0.5)")
    trained, memory = {"weight": torch.ones(1, 1, 4)}, {"feddst/mask/weight": bits("1000")[None]}
    clients = clients_view(LAYERS, 1, 3, rounds=9, memory=memory)
    assert clients.probing is None
    assert method.finish(clients, training_view(trained, trained))[1] == memory
    server = server_view(LAYERS, MODEL, 3, memory={"feddst/mask/weight": bits("1000")})
    sent = Message({"weight": torch.ones(2, 1, 4)}, {"weight": bits("1000").expand(2, 1, 4)})
    assert torch.equal(method.aggregate(server, sent)[1]["feddst/mask/weight"], bits("1000"))


def test_a_tensor_that_nobody_sent_keeps_its_mask():
    """In a round in which masks move; its weights are those of the server."""
    method, model = Method.make(HALF), {"0.weight": torch.ones(4, 4), "2.weight": torch.ones(8, 8)}
    memory = method.server_memory(server_view(FOUR_AND_EIGHT, model))
    sent = {"2.weight": torch.ones(2, 8, 8)}
    masks = {"2.weight": memory["feddst/mask/2.weight"].expand(2, 8, 8)}
    server = server_view(FOUR_AND_EIGHT, model, memory=memory)
    _, settled_memory = method.aggregate(server, Message(sent, masks))
    assert torch.equal(settled_memory["feddst/mask/0.weight"], memory["feddst/mask/0.weight"])


def test_what_all_let_go_makes_room_for_what_was_grown():
    """Nobody holds the second and third entry any more, so the fourth stays, though it starts from zero."""
    weights, mask = settled([[4.0, 0.0, 0.0, 0.0], [8.0, 0.0, 0.0, 0.0]], ["1001", "1001"])
    assert weights == [7.0, 0.0, 0.0, 0.0]
    assert torch.equal(mask, bits("1001"))


def test_a_round_without_exchange_keeps_the_mask():
    """One round after a move nothing moves: the initial mask stays, and what lies outside it is zero."""
    text = HALF.replace("every=1", "every=2")
    weights, mask = settled([[0.0, 2.0, 1.0, 0.0], [0.0, 4.0, 0.0, 0.0]], ["0110", "0110"], round=3, text=text)
    assert weights == [0.0, 3.5, 0.25, 0.0]
    assert torch.equal(mask, bits("0110"))


@BOTH_ENGINES
def test_all_clients_train_inside_the_servers_mask_which_moves(engine):
    method, seen = watched("feddst(sparsity=0.7, every=1, until=0.7, alpha=0.4)")
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
    simulation = run("feddst(sparsity=0.5, alpha=0)")
    initial = Method.make("feddst(sparsity=0.5, alpha=0)").server_memory(
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
    sparse, dense = (run(text, rounds=1).metrics.latest() for text in ("feddst(sparsity=0.8, alpha=0)", "fedavg"))
    setting = prepare("fedavg").setting
    total = sum(setting.initial[layer.weight].numel() for layer in setting.layers.weighted)
    saved = 0.8 * total * 8
    for way in ("bytes.up", "bytes.down"):
        extra = (sparse[way] - (dense[way] - 5 * saved)) / 5
        assert -8 <= extra <= total / 8 + 5 * 60
