"""What pFedSD and MOON have in common: each client's previous model, which is a part of its state."""

from __future__ import annotations

import pytest
import torch
from watching import BOTH_ENGINES, assert_same_bits, run, watched

from fedstrata.testing.world import prepare

NAMES = ("pfedsd", "moon")


@BOTH_ENGINES
@pytest.mark.parametrize("name", NAMES)
def test_the_model_just_trained_is_the_next_previous_one(name, engine):
    """Buffers too; who has not trained yet has the initial model, and is known not to have trained."""
    method, seen = watched(name)
    state = run(method, engine, rounds=1, participation=0.4).engine.clients()
    initial, previous = prepare(name).setting.initial, state.group("previous")
    trained = [(1, client) in seen.trained for client in range(5)]
    assert 0 < sum(trained) < 5
    for client in range(5):
        expected = seen.trained[1, client] if trained[client] else initial
        assert_same_bits({key: tensor[client] for key, tensor in previous.items()}, expected)
    [flags] = (tensor for key, tensor in state.items() if tensor.dtype is torch.bool)
    assert flags.tolist() == trained


@BOTH_ENGINES
@pytest.mark.parametrize("name", NAMES)
def test_the_first_round_is_that_of_fedavg_and_the_second_is_not(name, engine):
    ours, theirs = run(name, engine, rounds=1), run("fedavg", engine, rounds=1)
    assert_same_bits(ours.engine.server.model, theirs.engine.server.model)
    for simulation in (ours, theirs):
        simulation.engine.round(2, range(5), evaluate=False)
    assert not torch.equal(ours.engine.server.model["hidden.weight"], theirs.engine.server.model["hidden.weight"])


@pytest.mark.parametrize("name", ["pfedsd(strength=0.0)", "moon(mu=0.0)"])
def test_without_weight_it_is_fedavg(name):
    ours, theirs = run(name, rounds=2), run("fedavg", rounds=2)
    for parameter in ours.setting.layers.parameter_names:
        left, right = (simulation.engine.server.model[parameter] for simulation in (ours, theirs))
        assert torch.allclose(left, right, rtol=0, atol=1e-12), parameter


@pytest.mark.parametrize("name", NAMES)
def test_as_much_travels_as_in_fedavg(name):
    ours, theirs = (run(method, rounds=2).metrics.latest() for method in (name, "fedavg"))
    assert (ours["bytes.up"], ours["bytes.down"]) == (theirs["bytes.up"], theirs["bytes.down"])
