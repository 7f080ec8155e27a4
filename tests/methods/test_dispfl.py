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
    memory_of,
    probing,
    run,
    training_view,
    watched,
)

from fedstrata.functional import erk_densities
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method
from fedstrata.testing.world import prepare

LAYERS = LayerMap.read(nn.Linear(4, 1, bias=False), (4,))
HUNDRED = LayerMap.read(nn.Linear(100, 1, bias=False), (100,))


def bits(text):
    return torch.tensor([[[character == "1" for character in text]]])


def memory(mask, sent):
    return {"dispfl/mask/weight": bits(mask), "dispfl/sent/weight": bits(sent)}


def test_entries_are_averaged_over_their_holders_and_cut_to_the_own_mask():
    """Own (1, 2, 0, 0), held 1100; the neighbour's (3, 0, 5, 0), held 1010; the own mask is 1011 by now."""
    clients = clients_view(LAYERS, 1, memory=memory("1011", "1100"))
    message = Message(
        {"peers/weight": torch.tensor([[[[3.0, 0.0, 5.0, 0.0]]]])}, {"peers/weight": bits("1010").unsqueeze(1)}
    )
    own = {"weight": torch.tensor([[[1.0, 2.0, 9.0, 9.0]]])}  # what lies outside its mask does not count
    model, after = Method.make("dispfl").receive(clients, message, own)
    assert model["weight"].flatten().tolist() == [2.0, 0.0, 5.0, 0.0]
    assert after.keys() == clients.memory.keys()


@pytest.mark.parametrize(("round", "mask"), [(1, "1001"), (3, "1001")])
def test_the_smallest_weight_goes_and_the_largest_gradient_comes(round, mask):
    """Half of two weights in the first round, and, by ceil, one even where the cosine has fallen to 0.067."""
    probe = GivenProbe({"weight": torch.tensor([[[9.0, 0.2, 0.1, -0.3]]])})
    clients = clients_view(LAYERS, 1, round, memory=memory("1100", "1100"), **probing(probe))
    trained = {"weight": torch.tensor([[[0.8, -0.1, 0.0, 0.0]]])}
    model, after = Method.make("dispfl(alpha=0.5)").finish(clients, training_view(trained, trained))
    assert model is trained
    assert torch.equal(after["dispfl/mask/weight"], bits(mask))
    assert torch.equal(after["dispfl/sent/weight"], bits("1100"))


def test_what_comes_at_random_in_the_first_round_is_not_what_the_first_mask_was_drawn_from():
    """Of 100 weights 50 are kept and 25 let go; the same draws once more would bring exactly these back."""
    method = Method.make("dispfl(density=0.5, alpha=0.5, regrow=random)")
    model = {"weight": torch.ones(1, 1, 100)}
    first = method.client_memory(clients_view(HUNDRED, 1), model)
    _, after = method.finish(clients_view(HUNDRED, 1, memory=first), training_view(model, model))
    gone = first["dispfl/mask/weight"] & ~after["dispfl/mask/weight"]
    assert 10 < int(gone.sum()) < 25


def test_what_is_sent_is_what_was_trained_under_its_mask():
    clients = clients_view(LAYERS, 1, memory=memory("1001", "1100"))
    trained = {"weight": torch.tensor([[[0.8, -0.1, 0.0, 0.0]]])}
    message = Method.make("dispfl").upload(clients, training_view(trained, trained), Message(trained))
    assert torch.equal(message.masks["weight"], bits("1100"))
    assert torch.equal(message.tensors["weight"], trained["weight"])


def masks_of(simulation, kind="mask"):
    return memory_of(simulation, "dispfl", kind)


def test_first_masks_are_random_and_follow_the_densities():
    simulation = prepare("dispfl(density=0.5)")
    masks = masks_of(simulation)
    initial = simulation.setting.initial
    names = list(simulation.setting.layers.parameter_names)
    densities = erk_densities([initial[name].shape for name in names], 0.5)
    for name, density in zip(names, densities, strict=True):
        count = math.floor(density * initial[name].numel() + 1e-9)
        assert masks[name].flatten(1).sum(1).tolist() == [count] * 5
    assert masks["stem.bias"].all()
    assert not torch.equal(masks["body.weight"][0], masks["body.weight"][1])
    known = simulation.engine.server.memory
    assert all(torch.equal(known[f"dispfl/mask/{name}"], mask) for name, mask in masks.items())
    assert torch.equal(known["dispfl/last/body.weight"], initial["body.weight"] * masks["body.weight"])


@BOTH_ENGINES
@pytest.mark.parametrize("regrow", ["random", "gradient"])
def test_clients_stay_inside_masks_that_move(engine, regrow):
    method, seen = watched(f"dispfl(density=0.3, regrow={regrow}, neighbours=2)")
    simulation = run(method, engine, rounds=2)
    sent, moved = masks_of(simulation, "sent"), masks_of(simulation)
    for client in range(5):
        steps = seen.steps[2, client]
        assert steps
        for model in [seen.received[2, client], *steps]:
            for name, mask in sent.items():
                assert not (model[name][~mask[client]] != 0).any(), name
    for name in sent:
        assert torch.equal(sent[name].flatten(1).sum(1), moved[name].flatten(1).sum(1))
    assert not torch.equal(sent["body.weight"], moved["body.weight"])
    assert torch.equal(simulation.engine.server.memory["dispfl/mask/body.weight"], sent["body.weight"])


def test_growth_by_gradient_is_not_growth_at_random():
    random, gradient = (masks_of(run(f"dispfl(regrow={way})", rounds=1)) for way in ("random", "gradient"))
    assert not torch.equal(random["body.weight"], gradient["body.weight"])


def test_a_round_starts_from_the_neighbours_weights_and_not_from_the_average_of_all():
    method, seen = watched("dispfl(neighbours=2)")
    simulation = run(method, rounds=2)
    sent = masks_of(simulation, "sent")
    peers = method.parts[0].choose_peers(simulation.engine.side.view(simulation.engine.server, range(5), 2)).tolist()
    masks = {client: seen.trained[1, client]["body.weight"] != 0 for client in range(5)}
    for client in range(5):
        around = (client, *peers[client])
        total = sum(seen.trained[1, other]["body.weight"] for other in around)
        holders = sum(masks[other].double() for other in around)
        expected = total / holders.clamp(min=1) * sent["body.weight"][client]
        assert torch.allclose(seen.received[2, client]["body.weight"], expected, rtol=0, atol=1e-12)


def test_the_whole_mask_is_dense_dpsgd():
    dense, plain = run("dispfl(density=1.0, neighbours=2)"), run("d-psgd(neighbours=2)")
    left, right = (simulation.engine.server.model for simulation in (dense, plain))
    assert all(torch.allclose(left[name].double(), right[name].double(), rtol=0, atol=1e-12) for name in left)


def test_only_kept_weights_travel():
    sizes = {
        text: run(text, rounds=1).metrics.latest()
        for text in ("dispfl(density=0.2, neighbours=2)", "d-psgd(neighbours=2)")
    }
    sparse, dense = sizes.values()
    simulation = run("dispfl(density=0.2, neighbours=2)", rounds=1)
    names = simulation.setting.layers.parameter_names
    masks = masks_of(simulation, "sent")
    total = sum(simulation.setting.initial[name].numel() for name in names)
    kept = sum(int(masks[name][0].sum()) for name in names)
    assert kept == pytest.approx(0.2 * total, abs=len(names))
    saved = (total - kept) * 8
    mask_bytes = -(-total // 8) + 60 * len(names)
    assert 0 <= (sparse["bytes.up"] - (dense["bytes.up"] - 5 * saved)) / 5 <= mask_bytes
    assert 0 <= (sparse["bytes.down"] - (dense["bytes.down"] - 10 * saved)) / 10 <= mask_bytes


def test_the_density_is_reported():
    simulation = run("dispfl(density=0.3)", rounds=2)
    assert layer_values(simulation, "density", 1) == layer_values(simulation, "density", 2)
    assert layer_values(simulation, "density", 1)["body"] < 0.5
