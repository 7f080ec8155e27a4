from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    clients_view,
    memory_of,
    run,
    server_view,
    step_view,
    training_view,
    watched,
)

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods

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
    part = methods.make("pfedme(strength=2.0, copy_rate=0.1, inner_steps=2)")
    clients = clients_view(LAYERS, 1, memory={COPY: row(0.0, 4.0)})
    parameters = {WEIGHT: row(1.0, 2.0)}
    phases = part.phases(clients)
    assert [phase.repeats for phase in phases] == [2]
    early = part.project(clients, step_view(parameters, phase=phases[0], repeat=0), parameters)
    assert early == (parameters, clients.memory)
    moved, memory = part.project(clients, step_view(parameters, phase=phases[0], repeat=1), parameters)
    assert memory[COPY].flatten().tolist() == pytest.approx([0.2, 3.6])
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
    noting = Noting(strength=3.0, copy_rate=0.1, inner_steps=3)
    simulation = run(Method("noting", (noting, method.parts[-1])), engine, rounds=1)
    copies = memory_of(simulation, "pfedme", "copy")[name]
    for client in range(5):
        copy = seen.received[1, client][name]
        for number, after in enumerate(seen.steps[1, client]):
            assert torch.allclose(copies_at[client][number], copy, rtol=0, atol=1e-12)
            if number % 3 == 2:
                copy = copy - 0.3 * (copy - after[name])
        assert torch.allclose(copies[client], copy, rtol=0, atol=1e-12)
        assert not torch.equal(copy, seen.trained[1, client][name])
    shares = torch.tensor([9, 16, 16, 5, 23], dtype=torch.float64) / 69
    merged = (copies * shares[:, None, None]).sum(0)
    assert torch.allclose(simulation.engine.server.model[name], merged, rtol=0, atol=1e-12)
    fedavg = run("fedavg", engine, rounds=1).metrics.latest()
    assert simulation.metrics.latest()["bytes.up"] == fedavg["bytes.up"]
