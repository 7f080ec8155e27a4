from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, clients_view, layer_values, run, server_view, training_view
from worlds import prepare

from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods

WEIGHTS = {"stem.weight": 36, "body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128, "head.weight": 80}
ONE = LayerMap.read(nn.Linear(4, 1, bias=False), (4,))


def own_masks(simulation):
    memory = simulation.engine.clients().memory
    return {name.removeprefix("random-k/mask/"): masks for name, masks in memory.items() if "/mask/" in name}


# Random masks --------------------------------------------------------------------------------------------------------


def test_an_entry_is_the_mean_over_those_who_hold_it():
    """Shares 3/4 and 1/4: (1*.75 + 5*.25), 2 alone, 7 alone, nobody keeps the old 9."""
    part = methods.make("random-k")
    server = server_view(ONE, {"weight": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, sizes=torch.tensor([30, 10]))
    replies = Message(
        {"weight": torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[5.0, 0.0, 7.0, 0.0]]])},
        {"weight": torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])},
    )
    merged = part.merge(server, replies, part.weigh(server) / 40)
    assert merged["weight"].tolist() == [[2.0, 2.0, 7.0, 9.0]]


@BOTH_ENGINES
def test_every_client_keeps_its_own_mask_of_the_exact_size(engine):
    simulation = prepare("random-k(sparsity=0.7)", engine, rounds=3, epochs=1)
    first = {name: masks.clone() for name, masks in own_masks(simulation).items()}
    assert first.keys() == WEIGHTS.keys()
    for _ in range(2):
        simulation.step()
    masks = own_masks(simulation)
    assert_same_bits(first, masks)
    kept = sum(mask.flatten(1).sum(1) for mask in masks.values())
    assert kept.tolist() == [int(0.3 * sum(WEIGHTS.values()) + 1e-9)] * 5
    assert len({tuple(row.flatten().tolist()) for row in masks["body.weight"]}) == 5
    server = simulation.engine.server.memory
    assert_same_bits({f"random-k/mask/{name}": mask for name, mask in masks.items()}, server)
    density = layer_values(simulation, "density", 1)
    assert density["body"] == pytest.approx(float(masks["body.weight"].double().mean()))


@BOTH_ENGINES
def test_what_travels_and_is_tested_lies_under_the_clients_mask(engine):
    simulation = run("random-k(sparsity=0.8)", engine, 2, participation=0.6)
    masks = own_masks(simulation)
    message = simulation.engine.side.broadcast(simulation.engine.server, [4, 1], 3)
    for name, mask in masks.items():
        assert torch.equal(message.masks[name], mask[[4, 1]])
        assert not message.tensors[name][~mask[[4, 1]]].any()
        assert simulation.engine.server.model[name].count_nonzero() > mask[0].sum()
    fedavg = run("fedavg", engine, 2, participation=0.6)
    for way in ("bytes.up", "bytes.down"):
        sparse, dense = (one.metrics.series(way)[1] for one in (simulation, fedavg))
        assert (sparse < 0.75 * dense).all()


def test_without_sparsity_it_is_fedavg_also_in_bytes():
    left, right = run("random-k(sparsity=0)"), run("fedavg")
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    for way in ("bytes.up", "bytes.down"):
        assert left.metrics.series(way)[1].tolist() == right.metrics.series(way)[1].tolist()


def test_what_is_personal_is_not_masked():
    simulation = run("fedbn+random-k(scope=all, sparsity=0.9)", rounds=1)
    assert not any(name.startswith(("scale", "shortcut.1")) for name in own_masks(simulation))
    assert simulation.engine.clients().resident["scale.weight"].all()


def test_ssfl_with_random_masks_per_client_is_random_k():
    assert Method.make("ssfl(topology=random-per-client, sparsity=0.3, scope=all)").parts == (
        methods.make("random-k(sparsity=0.3, scope=all)"),
    )
    left, right = run("ssfl(topology=random-per-client)", rounds=1), run("random-k", rounds=1)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    with pytest.raises(FedStrataError, match="keeps its masks from the first round on; leave out warmup"):
        methods.make("ssfl(topology=random-per-client, refresh_every=2)")


# The largest weights -------------------------------------------------------------------------------------------------


def test_the_largest_weights_of_the_whole_model_are_sent():
    layers = LayerMap.read(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), (2,))
    model = {
        "0.weight": torch.tensor([[[0.1, -5.0], [0.2, 4.0]], [[1.0, 1.0], [1.0, 1.0]]]),
        "0.bias": torch.tensor([[9.0, 9.0], [9.0, 9.0]]),
        "1.weight": torch.tensor([[[0.3, -3.0]], [[2.0, 0.0]]]),
        "1.bias": torch.tensor([[9.0], [9.0]]),
    }
    part = methods.make("top-k(sparsity=0.5)")
    sent = part.upload(clients_view(layers, 2), training_view(model, model), Message(dict(model)))
    assert sent.tensors["0.weight"].tolist() == [[[0, -5], [0, 4]], [[0, 0], [1, 1]]]
    assert sent.tensors["1.weight"].tolist() == [[[0, -3]], [[2, 0]]]
    assert sent.masks.keys() == {"0.weight", "1.weight"}
    assert model["0.weight"][0, 0, 0] == pytest.approx(0.1)  # the client's own model stays whole


@BOTH_ENGINES
def test_uploads_are_sparse_and_downloads_dense(engine):
    simulation, fedavg = run("top-k(sparsity=0.9)", engine, 2), run("fedavg", engine, 2)
    up, dense = (one.metrics.series("bytes.up")[1] for one in (simulation, fedavg))
    assert (up < 0.6 * dense).all()
    down = [one.metrics.series("bytes.down")[1].tolist() for one in (simulation, fedavg)]
    assert down[0] == down[1]
    assert all(simulation.engine.server.model[name].all() for name in WEIGHTS)
    initial = simulation.setting.initial
    moved = sum(int((simulation.engine.server.model[name] != initial[name]).sum()) for name in WEIGHTS)
    assert 40 < moved < 200  # what nobody sent stays as it was


def test_top_k_without_sparsity_is_fedavg():
    left, right = run("top-k(sparsity=0)", rounds=2), run("fedavg", rounds=2)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert left.metrics.series("bytes.up")[1].tolist() == right.metrics.series("bytes.up")[1].tolist()


def test_messages_decode_to_what_was_sent():
    simulation = prepare("top-k(sparsity=0.9)")
    assert isinstance(simulation.engine, LoopEngine)
    [message] = set(simulation.engine.central.messages([2], 1))
    reply, _ = simulation.engine.members[2].answer(message, 1)
    decoded = simulation.engine.central.decoded(reply, 2, 1)
    kept = sum(int(mask.sum()) for mask in decoded.masks.values())
    assert kept == int(0.1 * sum(WEIGHTS.values()) + 1e-9)


# Sentences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random-k", "top-k", "subfedavg", "flash-spdst", "sparsyfed", "fedpm"])
def test_a_model_without_such_weights_is_told_about(name):
    layers = LayerMap.read(nn.Sequential(nn.BatchNorm1d(3)), (3,))
    [note] = methods.make(name).notes(layers)
    assert note.startswith("The model has no convolution or linear weights, so ")
    assert f"'{name}'" in note


GAPS = "each of them decides why a weight was not sent, and only one can"
SET = "each of them puts weights to values of its own, and only one can"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("random-k+ssfl", SET),
        ("random-k+transient", SET),
        ("subfedavg+random-k", SET),
        ("sparsyfed+fedpm", "each of them decides how replies are merged, and only one can"),
        ("top-k+fedlp", GAPS),
        ("subfedavg+top-k", GAPS),
        ("flash-spdst+fedlp", GAPS),
        ("sparsyfed+top-k", GAPS),
        ("fedpm+fedlp", GAPS),
        ("local+top-k", "'local' shares nothing, and all that 'top-k' does concerns what clients share"),
        ("random-k+local", "'local' shares nothing, and all that 'random-k' does concerns what clients share"),
        ("subfedavg+player", "tells the server its masks with the weights, and 'player' does not send all of them"),
        ("fedlama+flash-jmwst", "tells the server its masks with the weights, and 'fedlama' does not send all of them"),
        ("fedpm+lws", "'fedpm' shares masks, and 'lws' works on weights that clients share"),
        ("fedavgm+fedpm", "'fedpm' shares masks, and 'fedavgm' works on weights that clients share"),
        ("sparsyfed+fedrod", "'sparsyfed' does not train weights, and 'fedrod' learns weights beside the model's"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(text, reason):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "random-k+fedbn+lws", "top-k+fedprox+fedavgm", "ssfl+top-k", "subfedavg+fedbn", "flash-spdst+player",
        "flash-jmwst+fedper", "sparsyfed+ditto", "sparsyfed+scaffold", "fedpm+fedbn",
    ],
)  # fmt: skip
def test_combinations_that_make_sense_are_taken(text):
    Method.make(text)
