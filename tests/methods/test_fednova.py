from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from watching import BOTH_ENGINES, clients_view, run, server_view, step_view, training_view, watched

from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Facts, Message, Method, Needs, Part, Stretch, Touches, methods
from fedstrata.optimisers import Optimiser, optimisers
from fedstrata.testing.world import prepare
from fedstrata.wire import decode

LINE = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
NAME = "0.weight"


def aggregate(text, tensors, steps, masks=None, memory=None, more=None):
    model = {NAME: torch.tensor([[1.0, 1.0]])}
    server = server_view(LINE, model, sizes=torch.tensor([30, 10]), memory=memory or {})
    counts = {"fednova/effective steps": steps, **(more or {})}
    return Method.make(text).aggregate(server, Message({NAME: tensors}, masks or {}, counts))


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


def test_with_a_proximal_term_the_mean_number_of_steps_is_what_counts_back():
    """tau = .75 * 3 + .25 * 7 = 4 over the plain steps: 4 * (.75 * (1, 0) / 2 + .25 * (2, 4) / 4)."""
    tensors, steps = torch.tensor([[[2.0, 1.0]], [[3.0, 5.0]]]), torch.tensor([2.0, 4.0])
    new, _ = aggregate("fednova(mu=0.5)", tensors, steps, more={"fednova/steps": torch.tensor([3.0, 7.0])})
    assert new[NAME].flatten().tolist() == pytest.approx([3.0, 2.0])


def test_the_proximal_term():
    """At (2, 0) from (1, 1): .25 * 2; without mu the loss is as it was."""
    parameters, received = {NAME: torch.tensor([[[2.0, 0.0]]])}, {NAME: torch.tensor([[[1.0, 1.0]]])}
    step, plain, clients = step_view(parameters, received), torch.tensor([3.0]), clients_view(LINE, 1)
    assert methods.make("fednova(mu=0.5)").loss(clients, step, plain).tolist() == [3.5]
    assert methods.make("fednova").loss(clients, step, plain) is plain


def test_what_clients_send():
    """Three steps at a rate of .1 under mu = 2: 1 + .8 + .64; twice as many in two phases that start afresh."""
    three, sgd = torch.tensor([3.0, 3.0]), optimisers.make("sgd")
    stretch = Stretch(three, torch.zeros(2), sgd, 0.1)
    training = training_view(*[{NAME: torch.zeros(2, 1, 2)}] * 2, steps=three, stretches=(stretch,))
    clients = clients_view(LINE, 2)
    numbers = methods.make("fednova(mu=2)").upload(clients, training, Message()).numbers
    assert numbers["fednova/effective steps"].tolist() == pytest.approx([2.44, 2.44])
    assert numbers["fednova/steps"].tolist() == [3.0, 3.0]
    assert numbers["fednova/steps"].dtype == torch.float64
    twice = replace(training, stretches=(stretch, stretch))
    assert twice.effective_steps(2).tolist() == pytest.approx([4.88, 4.88])
    numbers = methods.make("fednova").upload(clients, twice, Message()).numbers
    assert {name: count.tolist() for name, count in numbers.items()} == {"fednova/effective steps": [6.0, 6.0]}


@pytest.mark.parametrize("other", ["fedprox", "feddyn"])
def test_another_parts_proximal_term_is_refused(other):
    sentence = (
        f"'{other}' pulls every step back to the model received, and 'fednova' counts the gradients in a client's way, "
        "which only its own 'mu' may pull back"
    )
    for text in (f"fednova+{other}", f"{other}+fednova"):
        with pytest.raises(FedStrataError, match=sentence):
            Method.make(text)


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


def way(optimiser: Optimiser, steps: int, mu: float, before: int = 0) -> float:
    """Follow gradients of 1 and a pull back to the start, after some steps without one: how far it is, in rates."""
    weight = {"w": torch.zeros(1, 1, dtype=torch.float64)}
    state = optimiser.state(weight)
    for step in range(before + steps):
        if step == before:
            weight["w"].zero_()
        slope = 1 + (mu * weight["w"] if step >= before else 0 * weight["w"])
        optimiser.update_(weight, {"w": slope}, state, 0.1)
    return -weight["w"].item() / 0.1


@given(
    st.integers(1, 8), st.integers(0, 5), st.sampled_from([0.0, 0.5, 0.9]), st.booleans(), st.sampled_from([0.0, 1.5])
)
def test_a_pull_and_a_kept_velocity_count(steps: int, before: int, momentum: float, nesterov: bool, mu: float) -> None:
    optimiser = optimisers.make(f"sgd(momentum={momentum}, nesterov={str(nesterov and momentum > 0).lower()})")
    counted = optimiser.effective_steps(torch.tensor([steps, 1]), torch.tensor([before, 0]), 0.1 * mu)
    assert counted[0].item() == pytest.approx(way(optimiser, steps, mu, before), rel=1e-9)
    assert counted[1].item() == pytest.approx(way(optimiser, 1, mu), rel=1e-9)


def test_no_client_makes_no_steps():
    assert optimisers.make("sgd").effective_steps(torch.zeros(0)).tolist() == []


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
    assert message.numbers.keys() == {"fednova/effective steps"}
    momentum, steps = 0.9, 6  # two epochs of three batches
    expected = sum((1 - momentum**count) / (1 - momentum) for count in range(1, steps + 1))
    assert message.numbers["fednova/effective steps"].item() == pytest.approx(expected)
    assert message.tensors.keys() == set(prepare("fedavg").setting.initial)


def told(text: str, optimiser: str, rounds: int = 1, **changes) -> list[list[float]]:
    """Read off how many effective steps each of five clients sent in each round."""
    sent: list[list[float]] = []

    class Reading(Part):
        name: ClassVar[str] = "reading"
        facts: ClassVar[Facts] = Facts("test", "none")
        touches: ClassVar[Touches] = Touches()

        @property
        def needs(self) -> Needs:
            return Needs(replies=True)

        def refine(self, server, model, replies):
            sent.append(replies.numbers["fednova/effective steps"].tolist())
            return model, server.memory

    run(Method("reading", (*Method.make(text).parts, Reading())), rounds=rounds, optimiser=optimiser, **changes)
    return sent


@pytest.mark.parametrize("keep", [False, True])
def test_kept_momentum_does_not_start_at_zero(keep):
    """Three steps with m = .5: 1 + 1.5 + 1.75; kept, three more from a velocity of 1.75: 1.875, 1.9375, 1.96875."""
    first, second = told("fednova", f"sgd(momentum=0.5, keep={str(keep).lower()})", rounds=2, steps=3)
    assert first == pytest.approx([4.25] * 5)
    assert second == pytest.approx([5.78125 if keep else 4.25] * 5)


def test_who_sits_out_keeps_its_count():
    """Of two rounds with two of five, only who was there before begins with a velocity."""
    simulation = prepare("fednova", optimiser="sgd(momentum=0.5, keep=true)", steps=3)
    for round, chosen in ((1, [0, 1]), (2, [1, 2])):
        simulation.engine.round(round, chosen, evaluate=False)
    assert simulation.engine.clients()["optimiser/model/taken"].tolist() == [3, 6, 3, 0, 0]


def test_the_rate_of_the_round_pulls():
    """At half the rate in the second round, two steps count 1 + (1 - .5 * .1 * 4)."""
    first, second = told("fednova(mu=4)", "sgd(learning_rate=0.1)", rounds=2, steps=2, schedule="exponential:0.5")
    assert first == pytest.approx([1.6] * 5)
    assert second == pytest.approx([1.8] * 5)


def test_of_several_phases_those_count_that_move_what_is_shared():
    """FedRep: two epochs for the head, which stays, and one for the body, with fresh momentum."""
    sizes = (9, 16, 16, 5, 23)
    [sent] = told("fedrep(head_epochs=2, body_epochs=1)+fednova", "sgd(momentum=0.5)", epochs=3)
    steps = [-(-size // 8) for size in sizes]
    assert sent == pytest.approx([sum((1 - 0.5**step) / 0.5 for step in range(1, count + 1)) for count in steps])


@pytest.mark.parametrize("text", ["mu=-0.1"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("=")[0]):
        methods.make(f"fednova({text})")
