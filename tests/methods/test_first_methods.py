"""The defining equation of each first method, with numbers computed by hand, and behaviour that FedAvg does not
have.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import clients_view, step_view
from worlds import TinyNet, prepare

import fedstrata
from fedstrata.errors import FedStrataWarning
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Server, methods

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
WEIGHT = LAYERS.parameter_names[0]


def server(model, memory=None, sizes=(30, 10)):
    return Server(
        round=1, rounds=3, layers=LAYERS, seed=0, clients=2, participants=(0, 1), sizes=torch.tensor(sizes),
        label_counts=torch.zeros(2, 1), model={WEIGHT: torch.tensor(model)}, memory=memory or {},
    )  # fmt: skip


def test_fedavg_weighs_by_samples():
    part = methods.make("fedavg")
    replies = Message({WEIGHT: torch.tensor([[[1.0, 2.0]], [[5.0, 10.0]]])})
    assert part.weigh(server([[0.0, 0.0]])).tolist() == [30.0, 10.0]
    assert part.merge(server([[0.0, 0.0]]), replies, torch.tensor([0.75, 0.25]))[WEIGHT].tolist() == [[2.0, 4.0]]


def test_entries_that_few_clients_sent_are_averaged_over_those():
    replies = Message(
        {WEIGHT: torch.tensor([[[1.0, 0.0]], [[5.0, 0.0]]])},
        masks={WEIGHT: torch.tensor([[[True, False]], [[False, False]]])},
    )
    merged = methods.make("fedavg").merge(server([[7.0, 8.0]]), replies, torch.tensor([0.75, 0.25]))
    assert merged[WEIGHT].tolist() == [[1.0, 8.0]]


def test_fedprox_adds_half_mu_times_the_squared_distance():
    parameters = {WEIGHT: torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]], requires_grad=True)}
    received = {WEIGHT: torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])}
    step = step_view(parameters, received)
    clients = clients_view(LAYERS, 2, shared=frozenset({WEIGHT}))
    loss = methods.make("fedprox(mu=0.2)").loss(clients, step)
    assert loss.tolist() == pytest.approx([0.5, 2.5])
    assert torch.autograd.grad(loss.sum(), parameters[WEIGHT])[0].tolist() == [
        [pytest.approx([0.2, 0.4])],
        [pytest.approx([-0.6, -0.8])],
    ]
    personal = clients_view(LAYERS, 2, shared=frozenset())
    assert methods.make("fedprox").loss(personal, step) is None


def test_fedprox_holds_clients_nearer_and_mu_zero_is_fedavg():
    def distance(method):
        simulation = prepare(method)
        before = simulation.setting.initial
        simulation.step()
        return sum(
            float((simulation.engine.server.model[name] - before[name]).square().sum())
            for name in simulation.setting.layers.parameter_names
        )

    assert distance("fedprox(mu=5.0)") < 0.8 * distance("fedavg")
    assert distance("fedprox(mu=0.0)") == distance("fedavg")


def test_fedbn_keeps_every_norm_personal_also_in_the_shortcut():
    simulation = prepare("fedbn")
    expected = {
        f"{layer}.{name}"
        for layer in ("scale", "shortcut.1")
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert simulation.setting.personal == expected
    simulation.step()
    weights = simulation.engine.clients().resident["shortcut.1.weight"]
    assert len({tuple(row) for row in weights.tolist()}) == 5
    assert not expected & simulation.engine.server.model.keys()


def test_fedbn_without_norms_says_that_it_is_fedavg():
    with pytest.warns(FedStrataWarning, match="no normalisation layers, so 'fedbn' does exactly what 'fedavg' does"):
        fedstrata.run(model="mlp", method="fedbn", clients=3, rounds=1, epochs=1, engine="loop")


def test_local_sends_nothing_and_everybody_differs():
    simulation = prepare("local")
    simulation.step()
    assert simulation.engine.server.model == {}
    heads = simulation.engine.clients().resident["head.weight"]
    assert len({tuple(row.flatten().tolist()) for row in heads}) == 5
    latest = simulation.metrics.latest()
    assert latest["client_before.accuracy.mean"] == latest["client_after.accuracy.mean"]
    assert "global.accuracy" not in latest


def test_fine_tuning_is_reported_under_its_own_name_and_leaves_the_model_alone():
    tuned, plain = prepare("fedavg-ft"), prepare("fedavg")
    for simulation in (tuned, plain):
        for _ in range(3):
            simulation.step()
    left, right = tuned.metrics.latest(), plain.metrics.latest()
    assert left["client_adapted.loss.mean"] != left["client_after.loss.mean"]
    assert left["client_after.loss.mean"] == right["client_after.loss.mean"]
    assert "client_adapted.loss.mean" not in right
    assert tuned.summary()["headline"] == "client_adapted"


def test_the_stacked_model_has_a_norm_that_no_name_gives_away():
    assert not any("bn" in name or "norm" in name for name, _ in TinyNet().named_parameters())
