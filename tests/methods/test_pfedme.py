from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    clients_view,
    memory_of,
    outlined,
    run,
    server_view,
    step_view,
    training_view,
    watched,
)

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.optimisers import SGD, Adam

pytestmark = pytest.mark.filterwarnings("ignore:'pfedme' brings its own optimiser")

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
WEIGHT = LAYERS.parameter_names[0]


def row(*values):
    return torch.tensor([[list(values)]])


COPY = f"copy/{WEIGHT}"


def test_pfedme_holds_the_personal_model_at_the_local_copy():
    part = methods.make("pfedme")
    parameters = {WEIGHT: row(1.0, 2.0).requires_grad_()}
    loss = part.loss(clients_view(LAYERS, 1, memory={COPY: row(0.0, 0.0)}), step_view(parameters), torch.tensor([2.0]))
    assert loss.tolist() == [2.0 + 37.5]
    assert torch.autograd.grad(loss.sum(), parameters[WEIGHT])[0].tolist() == [[[15.0, 30.0]]]


def test_pfedme_starts_the_copy_at_what_was_received():
    part, received = methods.make("pfedme"), {WEIGHT: row(1.0, 2.0)}
    clients = clients_view(LAYERS, 1, memory={COPY: row(0.0, 0.0), f"personal/{WEIGHT}": row(5.0, 5.0)})
    model, memory = part.start(clients, Message(received), received)
    assert model is received
    assert {name: tensor.flatten().tolist() for name, tensor in memory.items()} == {
        COPY: [1.0, 2.0], f"personal/{WEIGHT}": [5.0, 5.0],
    }  # fmt: skip


def test_pfedme_moves_the_copy_after_the_last_step_on_a_batch():
    part = methods.make("pfedme(strength=2.0, inner_steps=2)")
    clients = clients_view(LAYERS, 1, memory={COPY: row(0.0, 4.0)})
    parameters = {WEIGHT: row(1.0, 2.0)}
    phases = part.phases(clients)
    assert [phase.repeats for phase in phases] == [2]
    early = part.project(clients, step_view(parameters, phase=phases[0], repeat=0), parameters)
    assert early == (parameters, clients.memory)
    step = step_view(parameters, phase=phases[0], repeat=1, learning_rate=0.2)
    moved, memory = part.project(clients, step, parameters)
    assert memory[COPY].flatten().tolist() == pytest.approx([0.4, 3.2])
    assert moved[WEIGHT].tolist() == [[[1.0, 2.0]]]


def test_pfedme_sends_the_copy_and_uses_the_personal_model():
    part, model = methods.make("pfedme"), {WEIGHT: row(1.0, 2.0)}
    clients = clients_view(LAYERS, 1, memory={f"copy/{WEIGHT}": row(3.0, 4.0)})
    training = training_view(model, model)
    assert part.upload(clients, training, Message(model)).tensors[WEIGHT].tolist() == [[[3.0, 4.0]]]
    trained, memory = part.finish(clients, training)
    assert trained is model
    later = clients_view(LAYERS, 1, memory=memory)
    assert part.deployed(later, {WEIGHT: row(9.0, 9.0)})[WEIGHT].tolist() == [[[1.0, 2.0]]]


@pytest.mark.parametrize(("beta", "expected"), [(0.5, [2.0, 0.0]), (1.0, [3.0, -1.0]), (2.0, [5.0, -3.0])])
def test_pfedme_goes_towards_the_merged_model_by_beta(beta, expected):
    server = server_view(LAYERS, {WEIGHT: torch.tensor([[1.0, 1.0]])})
    new = {WEIGHT: torch.tensor([[3.0, -1.0]]), "counter": torch.tensor(7)}
    refined, _ = methods.make(f"pfedme(beta={beta})").refine(server, new, Message())
    assert refined[WEIGHT].tolist() == [expected]
    assert refined["counter"] == 7


@BOTH_ENGINES
def test_pfedme_in_a_run_follows_its_equations(engine):
    name, copies_at = "hidden.weight", {}

    class Noting(type(methods.make("pfedme"))):
        def loss(self, clients, step, loss):
            for place, client in enumerate(clients.ids):
                copies_at.setdefault(client, []).append(clients.memory[f"copy/{name}"][place].clone())
            return super().loss(clients, step, loss)

    method, seen = watched("pfedme")
    noting = Noting(strength=3.0, inner_steps=3)
    given = {"optimiser": "sgd(learning_rate=0.2, momentum=0.9)", "schedule": "exponential:0.5"}
    simulation = run(Method("noting", (noting, method.parts[-1])), engine, rounds=2, **given)
    copies = memory_of(simulation, "pfedme", "copy")[name]
    for client in range(5):
        for round, reach in ((1, 0.6), (2, 0.3)):
            copy = seen.received[round, client][name]
            for number, after in enumerate(seen.steps[round, client]):
                assert torch.allclose(copies_at[client].pop(0), copy, rtol=0, atol=1e-12)
                if number % 3 == 2:
                    copy = copy - reach * (copy - after[name])
        assert torch.allclose(copies[client], copy, rtol=0, atol=1e-12)
        assert not torch.equal(copy, seen.trained[2, client][name])
        before, after = (step[name] for step in seen.steps[2, client][-2:])
        slope = seen.gradients[2, client][name] + 0.001 * before
        assert torch.allclose(after, before - 0.045 * slope, rtol=0, atol=1e-12)
    shares = torch.tensor([9, 16, 16, 5, 23], dtype=torch.float64) / 69
    merged = (copies * shares[:, None, None]).sum(0)
    assert torch.allclose(simulation.engine.server.model[name], merged, rtol=0, atol=1e-12)
    fedavg = run("fedavg", engine, rounds=1).metrics.latest()
    assert simulation.metrics.latest()["bytes.up"] == fedavg["bytes.up"]


@pytest.mark.parametrize(("strength", "rate"), [(2.0, 1.0), (30.0, 0.09)])
def test_pfedme_refuses_personal_models_that_run_away(strength, rate):
    with pytest.raises(FedStrataError, match=f"personal_rate={rate:g} and strength={strength:g}.*must be below 2"):
        methods.make(f"pfedme(strength={strength}, personal_rate={rate})")


def quadratic(part, rate, batches=100):
    """Follow the equations on a loss without any slope, where the copy and the personal model should meet."""
    copy, personal = 1.0, 0.0
    for _ in range(batches):
        for _ in range(part.inner_steps):
            personal -= part.personal_rate * part.strength * (personal - copy)
        copy -= rate * part.strength * (copy - personal)
    return abs(copy - personal)


@pytest.mark.parametrize(
    ("text", "rate", "meets"),
    [
        ("pfedme", 0.1, True),
        ("pfedme", 0.2, True),
        ("pfedme(strength=1.0, personal_rate=0.1)", 2.6, True),
        ("pfedme(strength=1.0, personal_rate=0.1)", 2.8, False),
        ("pfedme(inner_steps=1)", 0.25, True),
        ("pfedme(inner_steps=1)", 0.26, False),
    ],
)
def test_pfedme_notes_where_copies_run_away(text, rate, meets):
    part = methods.make(text)
    notes = list(part.notes(outlined(LAYERS, optimiser=SGD(rate))))
    assert (quadratic(part, rate) < 1) == meets
    assert len(notes) == (not meets)
    assert all(f"a learning rate of {rate}" in note for note in notes)


def test_pfedme_says_what_of_the_optimiser_does_not_act():
    part = methods.make("pfedme")
    for silent in (
        SGD(0.1, momentum=0.9),
        SGD(0.05),
    ):  # that of an experiment which names none, and no more than a rate
        assert not list(part.notes(outlined(LAYERS, optimiser=silent)))
    for told in (Adam(0.1), SGD(0.05, momentum=0.9), SGD(0.1, clip=1.0), SGD(0.1, momentum=0.9, weight_decay=0.01)):
        [note] = part.notes(outlined(LAYERS, optimiser=told))
        assert f"own optimiser; of '{told}' only the learning rate acts" in note
