from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    assert_same_bits,
    clients_view,
    run,
    training_view,
)

from fedstrata.engines.loop import LoopEngine
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods
from fedstrata.testing.world import prepare

WEIGHTS = {"stem.weight": 36, "body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128, "head.weight": 80}


def test_the_largest_weights_of_the_whole_model_are_sent():
    layers = LayerMap.read(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), (2,))
    model = {
        "0.weight": torch.tensor([[[0.1, -5.0], [0.2, 4.0]], [[1.0, 1.0], [1.0, 1.0]]]),
        "0.bias": torch.tensor([[9.0, 9.0], [9.0, 9.0]]),
        "1.weight": torch.tensor([[[0.3, -3.0]], [[2.0, 0.5]]]),
        "1.bias": torch.tensor([[9.0], [9.0]]),
    }
    part = methods.make("top-k(sparsity=0.5)")
    sent = part.upload(clients_view(layers, 2), training_view(model, model), Message(dict(model)))
    assert sent.tensors["0.weight"].tolist() == [[[0, -5], [0, 4]], [[0, 0], [1, 1]]]
    assert sent.tensors["1.weight"].tolist() == [[[0, -3]], [[2, 0]]]
    assert sent.masks.keys() == {"0.weight", "1.weight"}
    assert model["0.weight"][0, 0, 0] == pytest.approx(0.1)  # the client's own model stays whole


def test_beside_a_mask_of_the_same_sparsity_it_sends_half_of_what_is_left():
    """Of 404 weights the mask keeps 202, and of those a client sends 101, whichever part comes first."""
    for text in ("ssfl(sparsity=0.5)+top-k(sparsity=0.5)", "top-k(sparsity=0.5)+ssfl(sparsity=0.5)"):
        simulation = prepare(text)
        assert isinstance(simulation.engine, LoopEngine)
        simulation.engine.exchange(1)
        reply, _ = simulation.engine.members[2].answer(simulation.engine.central.messages([2], 1)[0], 1)
        decoded = simulation.engine.central.decoded(reply, 2, 1)
        assert sum(int(mask.sum()) for mask in decoded.masks.values()) == 101


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
