"""Ditto, pFedMe and local adaptation: clients that use whole models of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, clients_view, run, server_view, step_view, training_view, watched

from fedstrata.engines.client import _of
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, Phase, methods

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
WEIGHT = LAYERS.parameter_names[0]
PERSONAL = Phase(model="personal")


def row(*values):
    return torch.tensor([[list(values)]])


def memory_of(simulation, prefix):
    return _of(prefix, simulation.engine.clients().memory)


# Ditto ----------------------------------------------------------------------------------------------------------------


def test_ditto_adds_lambda_times_the_distance_to_the_gradient_of_the_personal_model():
    part, clients = methods.make("ditto(strength=0.5)"), clients_view(LAYERS, 1)
    parameters = {WEIGHT: row(1.0, 2.0).requires_grad_()}
    step = step_view(parameters, {WEIGHT: row(0.0, -2.0)}, phase=PERSONAL)
    slope = torch.autograd.grad(part.loss(clients, step).sum(), parameters[WEIGHT])[0]
    assert slope.tolist() == [[[0.5, 2.0]]]
    assert part.project(clients, step, parameters) is parameters
    assert part.loss(clients, step_view(parameters, {WEIGHT: row(0.0, -2.0)})) is None


def test_ditto_as_released_pulls_after_the_step():
    part, clients = methods.make("ditto(strength=0.5, pull=released)"), clients_view(LAYERS, 1)
    parameters, received = {WEIGHT: row(1.0, 2.0)}, {WEIGHT: row(0.0, -2.0)}
    step = step_view(parameters, received, phase=PERSONAL, learning_rate=0.1)
    assert part.loss(clients, step) is None
    assert part.project(clients, step, parameters)[WEIGHT].flatten().tolist() == pytest.approx([0.95, 1.8])
    assert part.project(clients, step_view(parameters, received), parameters) is parameters


@BOTH_ENGINES
def test_ditto_leaves_the_global_model_to_fedavg_and_uses_the_personal_ones(engine):
    ditto, fedavg = run("ditto", engine, rounds=2), run("fedavg", engine, rounds=2)
    assert_same_bits(ditto.engine.server.model, fedavg.engine.server.model)
    weights = memory_of(ditto, "ditto/personal")["hidden.weight"]
    assert len({tuple(own.flatten().tolist()) for own in weights}) == 5
    ours, theirs = ditto.metrics.latest(), fedavg.metrics.latest()
    assert ours["client_after.loss.mean"] != theirs["client_after.loss.mean"]
    assert (ours["bytes.up"], ours["bytes.down"]) == (theirs["bytes.up"], theirs["bytes.down"])


@pytest.mark.parametrize("pull", ["gradient", "released"])
def test_ditto_holds_personal_models_near_the_global_one(pull):
    def distance(strength):
        method, seen = watched(f"ditto(strength={strength}, pull={pull}, epochs=6)")
        simulation = run(method, rounds=1)
        personal = memory_of(simulation, "ditto/personal")
        return float((personal["hidden.weight"][2] - seen.received[1, 2]["hidden.weight"]).norm())

    assert 0 < distance(5.0) < 0.5 * distance(0.0)


def test_ditto_trains_the_personal_model_for_its_own_epochs():
    method, seen = watched("ditto(epochs=3)")
    run(method, rounds=1)
    assert len(seen.steps[1, 0]) == 2 + 3 * 2


def test_other_parts_leave_a_second_model_alone():
    """What holds the shared model, or weighs its loss, is not meant for the personal one."""
    alone = memory_of(run("ditto", rounds=1), "ditto/personal")
    beside, plain = run("ditto+fedprox(mu=5.0)+fedir", rounds=1), run("ditto", rounds=1)
    assert_same_bits(alone, memory_of(beside, "ditto/personal"))
    assert not torch.equal(beside.engine.server.model["hidden.weight"], plain.engine.server.model["hidden.weight"])


# pFedMe ---------------------------------------------------------------------------------------------------------------

COPY = f"pfedme/copy/{WEIGHT}"


def test_pfedme_holds_the_personal_model_at_the_local_copy():
    part = methods.make("pfedme")
    parameters = {WEIGHT: row(1.0, 2.0).requires_grad_(), COPY: row(0.0, 0.0).requires_grad_()}
    loss = part.loss(clients_view(LAYERS, 1), step_view(parameters))
    assert loss.tolist() == [37.5]
    slopes = torch.autograd.grad(loss.sum(), (parameters[WEIGHT], parameters[COPY]), allow_unused=True)
    assert slopes[0].tolist() == [[[15.0, 30.0]]]
    assert slopes[1] is None


def test_pfedme_moves_the_copy_after_the_last_step_on_a_batch():
    part, clients = methods.make("pfedme(strength=2.0, copy_rate=0.1, inner_steps=2)"), clients_view(LAYERS, 1)
    parameters = {WEIGHT: row(1.0, 2.0), COPY: row(0.0, 4.0)}
    phases = part.phases(clients)
    assert [phase.repeats for phase in phases] == [2]
    assert part.project(clients, step_view(parameters, phase=phases[0], repeat=0), parameters) is parameters
    moved = part.project(clients, step_view(parameters, phase=phases[0], repeat=1), parameters)
    assert moved[COPY].flatten().tolist() == pytest.approx([0.2, 3.6])
    assert moved[WEIGHT].tolist() == [[[1.0, 2.0]]]


def test_pfedme_sends_the_copy_and_uses_the_personal_model():
    part, model = methods.make("pfedme"), {WEIGHT: row(1.0, 2.0)}
    clients = clients_view(LAYERS, 1, memory={f"copy/{WEIGHT}": row(3.0, 4.0)})
    training = training_view(model, model)
    assert part.upload(clients, training, Message(model)).tensors[WEIGHT].tolist() == [[[3.0, 4.0]]]
    later = clients_view(LAYERS, 1, memory=part.remember(clients, training))
    assert part.deployed(later, {WEIGHT: row(9.0, 9.0)})[WEIGHT].tolist() == [[[1.0, 2.0]]]


@pytest.mark.parametrize(("beta", "expected"), [(0.5, [2.0, 0.0]), (1.0, [3.0, -1.0]), (2.0, [5.0, -3.0])])
def test_pfedme_goes_towards_the_merged_model_by_beta(beta, expected):
    server = server_view(LAYERS, {WEIGHT: torch.tensor([[1.0, 1.0]])})
    new = {WEIGHT: torch.tensor([[3.0, -1.0]]), "counter": torch.tensor(7)}
    refined, _ = methods.make(f"pfedme(beta={beta})").refine(server, new)
    assert refined[WEIGHT].tolist() == [expected]
    assert refined["counter"] == 7


@BOTH_ENGINES
def test_pfedme_in_a_run_follows_its_equations(engine):
    method, seen = watched("pfedme(strength=3.0, copy_rate=0.1, inner_steps=3)")
    simulation = run(method, engine, rounds=1)
    name = "hidden.weight"
    for client in range(5):
        copy = seen.received[1, client][name]
        for number, after in enumerate(seen.steps[1, client]):
            if number % 3 == 2:
                copy = copy - 0.3 * (copy - after[name])
            assert torch.allclose(after[f"pfedme/copy/{name}"], copy, rtol=0, atol=1e-12)
        assert not torch.equal(copy, seen.trained[1, client][name])
    copies = memory_of(simulation, "pfedme/copy")[name]
    shares = torch.tensor([9, 16, 16, 5, 23], dtype=torch.float64) / 69
    merged = (copies * shares[:, None, None]).sum(0)
    assert torch.allclose(simulation.engine.server.model[name], merged, rtol=0, atol=1e-12)
    fedavg = run("fedavg", engine, rounds=1).metrics.latest()
    assert simulation.metrics.latest()["bytes.up"] == fedavg["bytes.up"]


# Local adaptation -----------------------------------------------------------------------------------------------------


def test_local_adaptation_is_fine_tuning_for_one_epoch():
    ours, theirs, longer = (
        run(method, epochs=2, rounds=1).metrics.latest()
        for method in ("local-adaptation", "fedavg-ft(epochs=1)", "fedavg-ft")
    )
    assert ours == theirs
    assert ours["client_adapted.loss.mean"] not in (ours["client_after.loss.mean"], longer["client_adapted.loss.mean"])


# What goes together ---------------------------------------------------------------------------------------------------

USED = "each of them decides which model a client uses in the end, and only one can"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ditto+fedavg-ft", USED),
        ("ditto+pfedsd", USED),
        ("pfedme+local-adaptation", USED),
        ("ditto+fedrep", "each of them divides local training into phases, and only one can"),
        ("local+ditto", "'local' shares nothing, and 'ditto' works on what clients share"),
        ("local+moon", "'local' shares nothing, and all that 'moon' does concerns what clients share"),
        ("local-adaptation+fedavg-ft", "each of them adds a final adaptation, and only one can"),
        (
            "pfedme+scaffold",
            "'scaffold' corrects the drift of the model in training, and 'pfedme' sends another one",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(text, reason):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "text", ["ditto+fedbn+lips", "ditto+scaffold", "ditto+ssfl", "pfedme+fedbn+lws", "pfedme+transient", "pfedsd+fedbn"]
)
def test_what_fits_is_taken(text):
    Method.make(text)


def test_a_static_mask_holds_for_the_personal_model_too():
    simulation = run("ditto+ssfl(sparsity=0.6)", rounds=1)
    memory = simulation.engine.clients().memory
    mask = memory["ssfl/mask/hidden.weight"]
    assert 0.1 < mask.double().mean() < 0.9
    assert not memory["ditto/personal/hidden.weight"][~mask].any()


def test_a_personal_model_is_turned_into_weights_in_any_order():
    """SparsyFed trains roots of weights; what Ditto keeps beside is tested as weights too."""
    left, right = (run(text, rounds=1).metrics.latest() for text in ("ditto+sparsyfed", "sparsyfed+ditto"))
    assert left == right
