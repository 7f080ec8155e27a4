from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from watching import BOTH_ENGINES, run, server_view, watched

from fedstrata.engines.loop import LoopEngine
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method
from fedstrata.optimisers import optimisers
from fedstrata.testing.world import prepare
from fedstrata.wire import decode

LINE = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
NAME = "0.weight"


def aggregate(text, tensors, steps, masks=None, memory=None):
    model = {NAME: torch.tensor([[1.0, 1.0]])}
    server = server_view(LINE, model, sizes=torch.tensor([30, 10]), memory=memory or {})
    return Method.make(text).aggregate(server, Message({NAME: tensors}, masks or {}, {"fednova/steps": steps}))


# By hand -------------------------------------------------------------------------------------------------------------


def test_updates_are_divided_by_steps_and_scaled_back():
    """tau = .75 * 2 + .25 * 4 = 2.5; 2.5 * (.75 * (1, 0) / 2 + .25 * (2, 4) / 4) = (1.25, .625)."""
    new, _ = aggregate("fednova", torch.tensor([[[2.0, 1.0]], [[3.0, 5.0]]]), torch.tensor([2.0, 4.0]))
    assert new[NAME].flatten().tolist() == pytest.approx([2.25, 1.625])


def test_entries_are_averaged_over_the_clients_that_sent_them():
    mask = torch.tensor([[[True, False]], [[True, False]]])
    new, _ = aggregate("fednova", torch.tensor([[[2.0, 0.0]], [[3.0, 0.0]]]), torch.tensor([2.0, 4.0]), {NAME: mask})
    assert new[NAME].flatten().tolist() == pytest.approx([2.25, 1.0])


def test_server_momentum_adds_to_it():
    velocity = {f"fedavgm/{NAME}/velocity": torch.tensor([[1.0, 0.0]])}
    tensors, steps = torch.tensor([[[2.0, 1.0]], [[3.0, 5.0]]]), torch.tensor([2.0, 4.0])
    new, _ = aggregate("fednova+fedavgm(beta=0.5)", tensors, steps, memory=velocity)
    assert new[NAME].flatten().tolist() == pytest.approx([2.75, 1.625])


# How many steps' worth of gradients ----------------------------------------------------------------------------------


@given(st.integers(1, 12), st.floats(0.1, 0.95), st.booleans())
def test_momentum_uses_gradients_again(steps: int, momentum: float, nesterov: bool) -> None:
    """With a gradient of 1 in every step, the way is the learning rate times the effective steps."""
    optimiser = optimisers.make(f"sgd(momentum={momentum}, nesterov={str(nesterov).lower()})")
    weight = {"w": torch.zeros(1, 1, dtype=torch.float64)}
    state = optimiser.state(weight)
    for _ in range(steps):
        optimiser.update_(weight, {"w": torch.ones(1, 1, dtype=torch.float64)}, state, 0.1)
    effective = optimiser.effective_steps(torch.tensor([float(steps)]))
    assert -weight["w"].item() == pytest.approx(0.1 * effective.item(), rel=1e-9)


@pytest.mark.parametrize("text", ["sgd", "adam", "adamw"])
def test_without_momentum_steps_are_steps(text):
    assert optimisers.make(text).effective_steps(torch.tensor([1, 7])).tolist() == [1.0, 7.0]


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_clients_that_make_more_steps_do_not_count_more(engine):
    method, seen = watched("fednova")
    simulation = run(method, engine, rounds=1, optimiser="sgd(learning_rate=0.05)")
    steps, sizes = torch.tensor([2.0, 2, 2, 1, 3]).double(), torch.tensor([9.0, 16, 16, 5, 23]).double()
    shares = sizes / sizes.sum()
    scale = (shares * steps).sum() * shares / steps
    for name in ("stem.weight", "head.bias"):
        ways = torch.stack([seen.trained[1, client][name] - seen.received[1, client][name] for client in range(5)])
        expected = seen.received[1, 0][name] + torch.tensordot(scale, ways, dims=1)
        assert torch.allclose(simulation.engine.server.model[name], expected, rtol=0, atol=1e-14)
    plain = run("fedavg", engine, rounds=1, optimiser="sgd(learning_rate=0.05)").engine.server.model
    assert float((plain["head.bias"] - simulation.engine.server.model["head.bias"]).abs().max()) > 1e-4
    means = (model["scale.running_mean"] for model in (plain, simulation.engine.server.model))
    torch.testing.assert_close(*means, rtol=0, atol=1e-14)


@BOTH_ENGINES
def test_with_equal_steps_it_is_fedavg(engine):
    left, right = (run(name, engine, rounds=2, steps=3).engine.server.model for name in ("fednova", "fedavg"))
    for name in right:
        assert torch.allclose(left[name].double(), right[name].double(), rtol=0, atol=1e-12)


def test_one_number_more_is_sent():
    engine = prepare("fednova").engine
    assert isinstance(engine, LoopEngine)
    reply, _ = engine.members[4].answer(engine.central.messages([4], 1)[0], 1)
    message = decode(reply)
    assert message.numbers.keys() == {"fednova/steps"}
    momentum, steps = 0.9, 6  # two epochs of three batches
    expected = sum((1 - momentum**count) / (1 - momentum) for count in range(1, steps + 1))
    assert message.numbers["fednova/steps"].item() == pytest.approx(expected)
    assert message.tensors.keys() == set(prepare("fedavg").setting.initial)
