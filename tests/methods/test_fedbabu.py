from __future__ import annotations

import pytest
import torch
from watching import BOTH_ENGINES, run, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import Phase, methods
from fedstrata.testing.world import TinyNet, prepare

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))
HEAD = {"head.weight", "head.bias"}
BODY = [name for name in LAYERS.parameter_names if name not in HEAD]
BYTES_OF_THE_HEAD = 90 * 8


def moved(before, after):
    return {name for name in LAYERS.parameter_names if not torch.equal(before[name], after[name])}


@BOTH_ENGINES
def test_fedbabu_trains_the_body_under_the_initial_head(engine):
    method, seen = watched("fedbabu")
    simulation = prepare(method, engine, epochs=1)
    for _ in range(2):  # of three rounds, after which clients fine-tune
        simulation.step()
    initial = simulation.setting.initial
    for steps in seen.steps.values():
        assert all(torch.equal(after[name], initial[name]) for after in steps for name in HEAD)
    assert moved(initial, simulation.engine.server.model) == set(BODY)


def test_fedbabu_sends_no_head_but_has_a_global_model():
    simulation, fedavg = run("fedbabu", rounds=1), run("fedavg", rounds=1)
    ours, theirs = simulation.metrics.latest(), fedavg.metrics.latest()
    for direction in ("bytes.up", "bytes.down"):
        assert theirs[direction] - ours[direction] >= 5 * BYTES_OF_THE_HEAD
    assert "global.accuracy" in ours
    message = simulation.engine.central.messages([0], 2)[0]
    assert b'"head.weight"' not in message
    assert b'"hidden.weight"' in message


@pytest.mark.parametrize(("tune", "expected"), [("full", {*BODY, *HEAD}), ("body", {*BODY}), ("head", HEAD)])
def test_fedbabu_fine_tunes_what_it_is_told_to(tune, expected):
    simulation = run(f"fedbabu(tune={tune}, epochs=1)", rounds=1)
    message = simulation.engine.central.messages([0], 2)[0]
    adapted = simulation.engine.members[0].adapted_model(message, 1)
    assert moved(simulation.engine.server.model, {name: tensor[0] for name, tensor in adapted.items()}) == expected


def test_fedbabu_fine_tunes_for_as_many_epochs_as_asked():
    assert methods.make("fedbabu").adaptation() == Phase(epochs=5, rate=0.01)
    assert methods.make("fedbabu(epochs=2, rate=0.5)").adaptation() == Phase(epochs=2, rate=0.5)


def test_fedbabu_fine_tunes_gently():
    def distance(rate):
        simulation = run(f"fedbabu(rate={rate}, epochs=1)", rounds=1)
        adapted = simulation.engine.members[0].adapted_model(simulation.engine.central.messages([0], 2)[0], 1)
        return float((adapted["hidden.weight"][0] - simulation.engine.server.model["hidden.weight"]).norm())

    assert 0 < distance(0.01) < 0.05 * distance(1.0)
