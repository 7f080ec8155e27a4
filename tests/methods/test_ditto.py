from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    assert_same_bits,
    clients_view,
    memory_of,
    run,
    step_view,
    watched,
)

from fedstrata.layers import LayerMap
from fedstrata.methods import Method, Phase, methods

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
WEIGHT = LAYERS.parameter_names[0]
PERSONAL = Phase(model="personal")


def row(*values):
    return torch.tensor([[list(values)]])


def test_ditto_adds_lambda_times_the_distance_to_the_gradient_of_the_personal_model():
    part, clients = methods.make("ditto(strength=0.5)"), clients_view(LAYERS, 1)
    parameters = {WEIGHT: row(1.0, 2.0).requires_grad_()}
    step = step_view(parameters, {WEIGHT: row(0.0, -2.0)}, phase=PERSONAL)
    plain = torch.tensor([1.0])
    loss = part.loss(clients, step, plain)
    assert loss.tolist() == [1.0 + 0.25 * (1 + 16)]
    assert torch.autograd.grad(loss.sum(), parameters[WEIGHT])[0].tolist() == [[[0.5, 2.0]]]
    assert part.project(clients, step, parameters) == (parameters, clients.memory)
    assert part.loss(clients, step_view(parameters, {WEIGHT: row(0.0, -2.0)}), plain) is plain


def test_ditto_as_released_pulls_after_the_step():
    part, clients = methods.make("ditto(strength=0.5, pull=released)"), clients_view(LAYERS, 1)
    parameters, received = {WEIGHT: row(1.0, 2.0)}, {WEIGHT: row(0.0, -2.0)}
    step = step_view(parameters, received, phase=PERSONAL, learning_rate=0.1)
    plain = torch.tensor([1.0])
    assert part.loss(clients, step, plain) is plain
    pulled, memory = part.project(clients, step, parameters)
    assert pulled[WEIGHT].flatten().tolist() == pytest.approx([0.95, 1.8])
    assert memory is clients.memory
    assert part.project(clients, step_view(parameters, received), parameters)[0] is parameters


@BOTH_ENGINES
def test_ditto_leaves_the_global_model_to_fedavg_and_uses_the_personal_ones(engine):
    ditto, fedavg = run("ditto", engine, rounds=2), run("fedavg", engine, rounds=2)
    assert_same_bits(ditto.engine.server.model, fedavg.engine.server.model)
    weights = memory_of(ditto, "ditto", "personal")["hidden.weight"]
    assert len({tuple(own.flatten().tolist()) for own in weights}) == 5
    ours, theirs = ditto.metrics.latest(), fedavg.metrics.latest()
    assert ours["client_after.loss.mean"] != theirs["client_after.loss.mean"]
    assert (ours["bytes.up"], ours["bytes.down"]) == (theirs["bytes.up"], theirs["bytes.down"])


@pytest.mark.parametrize("pull", ["gradient", "released"])
def test_ditto_holds_personal_models_near_the_global_one(pull):
    def distance(strength):
        method, seen = watched(f"ditto(strength={strength}, pull={pull}, personal_epochs=6)")
        simulation = run(method, rounds=1)
        personal = memory_of(simulation, "ditto", "personal")
        return float((personal["hidden.weight"][2] - seen.received[1, 2]["hidden.weight"]).norm())

    assert 0 < distance(5.0) < 0.5 * distance(0.0)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("ditto", (4, 4)),
        ("ditto(personal_epochs=3)", (4, 3)),
        ("ditto(global_epochs=2)", (2, 4)),
        ("ditto(global_epochs=2, personal_epochs=3)", (2, 3)),
    ],
)
def test_ditto_trains_each_model_for_its_own_epochs(text, passes):
    """Client 0 has nine samples: two steps of up to eight in an epoch."""
    phases = []

    class Noting(type(methods.make("ditto"))):
        def loss(self, clients, step, loss):
            phases.extend([step.phase.name] * (0 in clients.ids))
            return super().loss(clients, step, loss)

    part = methods.make(text)
    noting = Noting(**{name: getattr(part, name) for name in ("global_epochs", "personal_epochs")})
    run(Method("noting", (noting,)), rounds=1, epochs=4)
    assert (phases.count("global"), phases.count("personal")) == tuple(2 * count for count in passes)


def test_other_parts_leave_a_second_model_alone():
    """What holds the shared model, or weighs its loss, is not meant for the personal one."""
    alone = memory_of(run("ditto", rounds=1), "ditto", "personal")
    beside, plain = run("ditto+fedprox(mu=5.0)+fedir", rounds=1), run("ditto", rounds=1)
    assert_same_bits(alone, memory_of(beside, "ditto", "personal"))
    assert not torch.equal(beside.engine.server.model["hidden.weight"], plain.engine.server.model["hidden.weight"])


def test_a_static_mask_holds_for_the_personal_model_too():
    simulation = run("ditto+ssfl(sparsity=0.6)", rounds=1)
    memory = simulation.engine.clients().group("memory")
    mask = memory["ssfl/mask/hidden.weight"]
    assert 0.1 < mask.double().mean() < 0.9
    assert not memory["ditto/personal/hidden.weight"][~mask].any()


def test_a_personal_model_is_turned_into_weights_in_any_order():
    """SparsyFed trains roots of weights; what Ditto keeps beside is tested as weights too."""
    left, right = (run(text, rounds=1).metrics.latest() for text in ("ditto+sparsyfed", "sparsyfed+ditto"))
    assert left == right
