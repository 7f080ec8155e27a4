from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    GivenProbe,
    clients_view,
    declared,
    layer_values,
    probing,
    run,
    server_view,
    training_view,
)

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods
from fedstrata.stack import Stack
from fedstrata.testing.world import prepare

TWO = LayerMap.read(nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 2, bias=False)), (5,))
FIRST = [[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]]
SECOND = [[1.0, -2.0], [3.0, 4.0]]


def model(first, second, clients=1):
    return {"0.weight": torch.tensor([first] * clients), "1.weight": torch.tensor([second] * clients)}


def after_training(text, early, late, accuracy, masks=None):
    """Let one client decide on its mask; return it as flat lists of zeros and ones."""
    part = methods.make(text)
    memory = part.client_memory(clients_view(TWO, 1), late) if masks is None else masks
    probe = GivenProbe(scores=(torch.tensor([accuracy]), torch.zeros(1)))
    training = training_view(late, late, after_phase=(early, late))
    _, new = part.finish(clients_view(TWO, 1, memory=memory, **probing(probe)), training)
    return [new[f"mask/{name}.weight"].flatten().int().tolist() for name in "01"]


DENSE = [[1] * 10, [1] * 4]
PRUNED = [[0, 0, 0] + [1] * 7, [0, 1, 1, 1]]
OTHER = model([[10.0, 9.0, 8.0, 7.0, 6.0], [5.0, 4.0, 3.0, 2.0, 1.0]], SECOND)


def test_the_smallest_of_each_tensor_go_if_the_mask_still_moves():
    """Below the 30 % quantile of ten and of four weights are ceil(.3 * 9) and ceil(.3 * 3), three and one; the
    candidates differ in six of ten and in none of four.
    """
    late = model(FIRST, SECOND)
    assert after_training("subfedavg(rate=0.3, distance=0.29)", OTHER, late, 0.9) == PRUNED
    assert after_training("subfedavg(rate=0.3, distance=0.3)", OTHER, late, 0.9) == DENSE
    assert after_training("subfedavg(rate=0.3)", late, late, 0.9) == DENSE


def test_the_pruned_model_must_be_right_often_enough():
    late = model(FIRST, SECOND)
    assert after_training("subfedavg(rate=0.3)", OTHER, late, 0.51) == PRUNED
    assert after_training("subfedavg(rate=0.3)", OTHER, late, 0.5) == DENSE


def test_even_a_small_tensor_loses_a_weight_but_never_its_last_one():
    """The default rate of .1 takes ceil(.1 * 9) = 1 of ten and ceil(.1 * 3) = 1 of four, as numpy's percentile does."""
    late = model(FIRST, SECOND)
    assert after_training("subfedavg", OTHER, late, 0.9) == [[0] + [1] * 9, [0, 1, 1, 1]]
    alone = {
        "mask/0.weight": torch.ones(1, 2, 5, dtype=torch.bool),
        "mask/1.weight": torch.tensor([[[False, True], [False, False]]]),
    }
    assert after_training("subfedavg", OTHER, late, 0.9, alone) == [[0] + [1] * 9, [0, 1, 0, 0]]


def test_close_to_the_target_only_what_is_missing_goes_and_a_twentieth_at_most():
    """Of 1400 weights 60 % are pruned. Missing to a target of .8 are 280, more than 10 % of 1400: the full rate takes
    10 % of the 560 left. Missing to .65 are 70, an eighth of 560: at most 5 % go. Missing to .61 are 14, to .6 none.
    """
    layers = LayerMap.read(nn.Linear(1400, 1, bias=False), (1400,))
    weight = {"weight": torch.arange(1.0, 1401.0).view(1, 1, 1400)}
    mask = {"mask/weight": torch.arange(1400).view(1, 1, 1400) >= 840}
    probe = GivenProbe(scores=(torch.ones(1), torch.zeros(1)))
    early = {"weight": weight["weight"].flip(2)}
    for target, gone in ((0.8, 56), (0.65, 28), (0.61, 14), (0.6, 0)):
        part = methods.make(f"subfedavg(sparsity={target})")
        clients = clients_view(layers, 1, memory=mask, **probing(probe))
        _, memory = part.finish(clients, training_view(weight, weight, after_phase=(early, weight)))
        assert 560 - int(memory["mask/weight"].sum()) == gone


def test_only_what_is_left_is_pruned_and_not_beyond_the_target():
    """Of 14 weights 4 are gone and the target is 7: less than 90 % is missing, so that 5 % of the 7 and 3 left go, one
    each; nothing where the target is reached.
    """
    masks = {
        "mask/0.weight": torch.tensor([[[False, False, False, True, True], [True] * 5]]),
        "mask/1.weight": torch.tensor([[[False, True], [True, True]]]),
    }
    late = model(FIRST, SECOND)
    assert after_training("subfedavg(rate=0.9)", OTHER, late, 0.9, masks) == [[0] * 4 + [1] * 6, [0, 0, 1, 1]]
    done = {name: mask & (torch.arange(mask.numel()).view(mask.shape) % 2 == 0) for name, mask in masks.items()}
    kept = [done[f"mask/{name}.weight"].flatten().int().tolist() for name in "01"]
    assert after_training("subfedavg(rate=0.9)", OTHER, late, 0.9, done) == kept


def test_clients_count_alike_and_what_nobody_kept_stays():
    part = methods.make("subfedavg")
    old = {"0.weight": torch.full((2, 5), 9.0), "1.weight": torch.zeros(2, 2)}
    server = server_view(TWO, old, sizes=torch.tensor([30, 10]), clients=3, participants=(0, 2))
    server = server_view(
        TWO, old, sizes=torch.tensor([30, 10]), clients=3, participants=(0, 2), memory=part.server_memory(server)
    )
    sent = {
        "0.weight": torch.tensor([FIRST, FIRST]) * torch.tensor([1.0, 3.0]).view(2, 1, 1),
        "1.weight": torch.zeros(2, 2, 2),
    }
    masks = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in sent.items()}
    masks["0.weight"][:, 0, 0] = False
    masks["0.weight"][1, 0, 1] = False
    replies = Message({name: tensor * masks[name] for name, tensor in sent.items()}, masks)
    shares = part.weigh(declared(30, 10)) / 2
    merged = part.merge(server, replies, shares)
    assert merged["0.weight"][0].tolist() == [9.0, 2.0, 6.0, 8.0, 10.0]
    _, memory = part.refine(server, merged, replies)
    assert memory["mask/0.weight"][:, 0, :2].tolist() == [[False, True], [True, True], [False, False]]


@BOTH_ENGINES
def test_messages_shrink_as_clients_prune(engine):
    simulation = prepare("subfedavg(accuracy=0, distance=0, rate=0.2, sparsity=0.7)", engine, rounds=6, epochs=2)
    for _ in range(6):
        simulation.step()
    up, down = (simulation.metrics.series(way)[1] for way in ("bytes.up", "bytes.down"))
    assert (up[1:] < up[:-1]).all()
    assert (down[1:] <= down[:-1]).all()
    dense = run("fedavg", engine, 1).metrics.series("bytes.up")[1][0]
    assert up[-1] < 0.7 * dense
    density = [layer_values(simulation, "density", round) for round in (1, 6)]
    assert all(density[1][layer] < density[0][layer] for layer in density[0])
    memory = simulation.engine.clients().group("memory")
    total = sum(masks[0].numel() for masks in memory.values())
    kept = sum(masks.flatten(1).sum(1) for masks in memory.values())
    assert (kept >= 0.3 * total).all()
    assert len({tuple(row.flatten().tolist()) for row in memory["subfedavg/mask/body.weight"]}) == 5


def test_the_server_knows_every_clients_mask():
    simulation = run("subfedavg(accuracy=0, distance=0, rate=0.2)", rounds=2, participation=0.6)
    clients, server = simulation.engine.clients().group("memory"), simulation.engine.server.memory
    assert clients.keys() == server.keys()
    for name, masks in clients.items():
        assert torch.equal(masks, server[name])


def test_of_the_global_model_a_client_uses_what_its_mask_keeps():
    part = methods.make("subfedavg(use=global)")
    memory = {"mask/0.weight": torch.tensor([[[True, False, True, False, True], [True] * 5]])}
    used = part.deployed(clients_view(TWO, 1, memory=memory), model(FIRST, SECOND))
    assert used["0.weight"][0, 0].tolist() == [1.0, 0.0, 3.0, 0.0, 5.0]
    assert not part.needs.previous


def test_a_pruned_weight_is_zero_at_the_client_too():
    part, late = methods.make("subfedavg(rate=0.3)"), model(FIRST, SECOND)
    probe = GivenProbe(scores=(torch.tensor([0.9]), torch.zeros(1)))
    clients = clients_view(TWO, 1, memory=part.client_memory(clients_view(TWO, 1), late), **probing(probe))
    trained, _ = part.finish(clients, training_view(late, late, after_phase=(OTHER, late)))
    assert trained["0.weight"].flatten().tolist() == [0, 0, 0, 4, 5, 6, 7, 8, 9, 10]
    assert trained["1.weight"].flatten().tolist() == [0, -2, 3, 4]


@BOTH_ENGINES
@pytest.mark.parametrize("use", ["own", "global"])
def test_a_client_is_tested_with_its_own_pruned_model(engine, use):
    """Aggregation changes nothing about the model that a client uses, unless it uses the global one under its mask."""
    simulation = run(f"subfedavg(accuracy=0, distance=0, use={use})", engine, rounds=2, evaluate_every=1)
    scores = {}
    for row in simulation.metrics.to_tables()["clients"].to_pylist():
        if row["round"] == 2 and row["metric"].endswith(".loss"):
            scores.setdefault(row["metric"], {})[row["client"]] = row["value"]
    same = scores["client_before.loss"] == scores["client_after.loss"]
    assert len(scores["client_before.loss"]) > 2
    assert same == (use == "own")


def test_who_never_took_part_uses_the_initial_model():
    simulation = run("subfedavg(accuracy=0, distance=0)", "stacked", rounds=1, participation=0.6)
    engine, initial = simulation.engine, simulation.setting.initial["body.weight"]
    message = engine.side.broadcast(engine.server, range(5), 2)
    used = engine.client_side.deployed_model(range(5), engine.clients(), message, 2)["body.weight"]
    assert sum(torch.equal(used[client], initial) for client in range(5)) == 2


def test_it_says_afterwards_when_nobody_pruned():
    server = server_view(TWO, {name: tensor[0] for name, tensor in model(FIRST, SECOND).items()})
    part = methods.make("subfedavg")
    dense = part.server_memory(server)
    [remark] = part.remarks(replace(server, memory=Stack(dense)))
    assert "No client pruned anything" in remark
    pruned = {**dense, "mask/0.weight": dense["mask/0.weight"].clone()}
    pruned["mask/0.weight"][1, 0, 0] = False
    assert list(part.remarks(replace(server, memory=Stack(pruned)))) == []


@pytest.mark.parametrize(("epochs", "spans"), [(1, [(0, 0.5), (0.5, 1)]), (4, [(0, 0.25), (0.25, 1)])])
def test_the_first_candidate_comes_after_the_first_epoch(epochs, spans):
    phases = methods.make("subfedavg").phases(clients_view(TWO, 1, epochs=epochs))
    assert [phase.span for phase in phases] == spans
