"""pFedSD and MOON: a client's previous model as a teacher, and as what to move away from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, clients_view, run, step_view, training_view, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import methods

LAYERS = LayerMap.read(nn.Linear(2, 2), (2,))
NAMES = ("pfedsd", "moon")


def view(part, trained, round=2):
    """Make clients of which some have a previous model."""
    model = {"weight": torch.zeros(len(trained), 2, 2)}
    memory = part.client_memory(clients_view(LAYERS, len(trained)), model)
    return clients_view(LAYERS, len(trained), round=round, memory={**memory, "trained": torch.tensor(trained)})


def test_pfedsd_distils_the_previous_model():
    """KL of (3/4, 1/4) from (1/2, 1/2); at temperature 2 that of (e, 1) / (1 + e), times four."""
    logits = torch.tensor([[[math.log(3), 0.0]], [[math.log(3), 0.0]]])
    step = step_view(
        {"weight": torch.zeros(2, 2, 2)}, outputs=torch.zeros(2, 1, 2), predict=lambda model: (logits, logits)
    )
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    part = methods.make("pfedsd")
    assert part.loss(view(part, [True, False]), step).tolist() == pytest.approx([expected, 0.0])
    warm = math.sqrt(3) / (1 + math.sqrt(3))
    softer = 0.5 * 4 * (warm * math.log(2 * warm) + (1 - warm) * math.log(2 * (1 - warm)))
    part = methods.make("pfedsd(strength=0.5, temperature=2.0)")
    assert part.loss(view(part, [True, True]), step).tolist() == pytest.approx([softer, softer])
    assert part.loss(view(part, [False, False], round=1), step) is None


def test_moon_contrasts_the_global_and_the_previous_model():
    """Cosines 1 and 0 at temperature 1/2: the logarithm of 1 + exp(-2); equal cosines give that of 2 and no slope."""
    received, previous = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]])
    features = torch.tensor([[[2.0, 0.0]]], requires_grad=True)
    model = {"weight": torch.zeros(1, 2, 2)}

    def predict(asked):
        known = received if asked is model else previous
        return known, known

    part = methods.make("moon(mu=2.0)")
    loss = part.loss(view(part, [True]), step_view(model, model, features=features, predict=predict))
    assert loss.tolist() == pytest.approx([2 * math.log1p(math.exp(-2))])
    # Along the second axis only the cosine with the previous features grows, by 1/2 per unit of length.
    slope = torch.autograd.grad(loss.sum(), features)[0].flatten()
    assert slope.tolist() == pytest.approx([0.0, 2 * 2 * 0.5 / (1 + math.exp(2))])
    same = part.loss(
        view(part, [True]), step_view(model, model, features=features, predict=lambda asked: (received, received))
    )
    assert same.tolist() == pytest.approx([2 * math.log(2)])
    assert not torch.autograd.grad(same.sum(), features)[0].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_model_just_trained_is_the_next_previous_one(name):
    part = methods.make(name)
    clients = view(part, [False])
    trained = {"weight": torch.ones(1, 2, 2), "running_mean": torch.ones(1, 2)}
    memory = part.remember(clients, training_view(trained, trained))
    assert memory["trained"].tolist() == [True]
    assert memory["previous/weight"].tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    assert "previous/running_mean" in memory


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


def test_pfedsd_clients_use_what_they_trained_last():
    method, seen = watched("pfedsd")
    simulation = run(method, rounds=2, participation=0.4)
    latest = simulation.metrics.latest()
    message = simulation.engine.central.messages([0], 3)[0]
    rounds = {client: max((r for r, c in seen.trained if c == client), default=None) for client in range(5)}
    assert None in rounds.values()
    for client, last in rounds.items():
        used = simulation.engine.members[client].model(message, 2)["hidden.weight"][0]
        expected = simulation.engine.server.model if last is None else seen.trained[last, client]
        assert torch.equal(used, expected["hidden.weight"])
    assert "global.accuracy" not in latest
