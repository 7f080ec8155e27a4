"""Methods that treat the head in another way: their equations by hand, what moves when, what travels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, clients_view, run, step_view, watched
from worlds import TinyNet, prepare

import fedstrata
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Method, methods

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))
HEAD = {"head.weight", "head.bias"}
BODY = [name for name in LAYERS.parameter_names if name not in HEAD]
BYTES_OF_THE_HEAD = 90 * 8


def moved(before, after):
    return {name for name in LAYERS.parameter_names if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (1, set()),
        (2, {"hidden.weight", "hidden.bias"}),
        (
            3,
            {"hidden.weight", "hidden.bias", "shortcut.0.weight"}
            | {f"shortcut.1.{x}" for x in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")},
        ),
    ],
)
def test_the_head_is_the_last_layers_with_their_norms(count, more):
    assert set(methods.make(f"fedper(head_layers={count})").personal(LAYERS)) == HEAD | more


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_a_head_without_a_body_is_refused(name):
    with pytest.raises(
        FedStrataError, match=rf"'{name}' was given head_layers=5, but the model has 5 layers with weights"
    ):
        prepare(f"{name}(head_layers=5)")


def test_fedper_shares_the_body_and_keeps_heads():
    simulation, fedavg = run("fedper", rounds=2), run("fedavg", rounds=2)
    assert not HEAD & simulation.engine.server.model.keys()
    heads = simulation.engine.clients().resident
    assert heads.keys() == HEAD
    assert len({tuple(head.flatten().tolist()) for head in heads["head.weight"]}) == 5
    ours, theirs = simulation.metrics.latest(), fedavg.metrics.latest()
    for direction in ("bytes.up", "bytes.down"):
        assert theirs[direction] - ours[direction] >= 5 * BYTES_OF_THE_HEAD


def test_fedper_trains_body_and_head_together():
    method, seen = watched("fedper")
    run(method, rounds=1)
    assert moved(seen.start[1, 0], seen.steps[1, 0][0]) >= HEAD | {"stem.weight", "hidden.weight"}


@BOTH_ENGINES
def test_fedrep_trains_the_head_and_then_the_body(engine):
    method, seen = watched("fedrep(head_epochs=2)")
    run(method, engine, rounds=1)
    start, steps = seen.start[1, 0], seen.steps[1, 0]
    assert len(steps) == 2 * 2 + 1 * 2  # nine samples in batches of eight: two steps an epoch
    assert all(moved(start, after) == HEAD for after in steps[:4])
    assert all(moved(steps[3], after) == set(BODY) for after in steps[4:])


def test_fedrep_trains_the_head_for_the_epochs_of_the_experiment_and_the_body_for_one():
    method, seen = watched("fedrep")
    run(method, rounds=1, epochs=3)
    assert len(seen.steps[1, 0]) == 3 * 2 + 2
    assert moved(seen.steps[1, 0][5], seen.steps[1, 0][6]) == set(BODY)


def test_fedrep_goes_with_transient_sparsity_of_the_body():
    method, seen = watched("fedrep+transient(every=1, tau0=0.5)")
    run(method, rounds=2)
    zeros = (seen.start[2, 0]["hidden.weight"] == 0).double().mean()
    assert zeros == pytest.approx(0.5 * (1 - 1 / 2), abs=0.01)
    assert not (seen.start[2, 0]["head.weight"] == 0).any()


# FedBABU --------------------------------------------------------------------------------------------------------------


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


def test_fedbabu_fine_tunes_gently():
    def distance(rate):
        simulation = run(f"fedbabu(rate={rate}, epochs=1)", rounds=1)
        adapted = simulation.engine.members[0].adapted_model(simulation.engine.central.messages([0], 2)[0], 1)
        return float((adapted["hidden.weight"][0] - simulation.engine.server.model["hidden.weight"]).norm())

    assert 0 < distance(0.01) < 0.05 * distance(1.0)


# FedRoD ---------------------------------------------------------------------------------------------------------------

LINEAR = LayerMap.read(nn.Linear(2, 2), (2,))


def test_fedrod_balances_the_classes_of_a_client():
    """Log of 3/4 for the class that has three of four samples, of 1/4 for the other; an absent class plays no part."""
    part = methods.make("fedrod")
    outputs = torch.zeros(3, 1, 2, requires_grad=True)
    clients = clients_view(LINEAR, 3, label_counts=torch.tensor([[3, 1], [3, 1], [4, 0]]))
    step = step_view({"weight": torch.zeros(3, 2, 2)}, labels=torch.tensor([[0], [1], [0]]), outputs=outputs)
    loss = part.base_loss(clients, step)
    assert loss.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25), 0.0])
    slopes = torch.autograd.grad(loss.sum(), outputs)[0]
    assert slopes.flatten(1).tolist() == [
        pytest.approx([-0.25, 0.25]), pytest.approx([0.75, -0.75]), pytest.approx([0.0, 0.0])
    ]  # fmt: skip


def test_only_the_personal_head_learns_from_the_personal_loss():
    part = methods.make("fedrod")
    personal = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], requires_grad=True)
    outputs = torch.tensor([[[0.0, 0.0]]], requires_grad=True)
    features = torch.tensor([[[2.0, 5.0]]], requires_grad=True)
    step = step_view(
        {"fedrod/head/weight": personal, "fedrod/head/bias": torch.tensor([[0.0, 1.0]])},
        labels=torch.tensor([[0]]), outputs=outputs, features=features,
    )  # fmt: skip
    loss = part.loss(clients_view(LINEAR, 1), step)
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-1))])  # 0 + 2 against 0 + 1
    slopes = torch.autograd.grad(loss.sum(), (personal, outputs, features), allow_unused=True)
    chance = 1 / (1 + math.e)
    assert slopes[0].flatten().tolist() == pytest.approx([-2 * chance, -5 * chance, 2 * chance, 5 * chance])
    assert slopes[1:] == (None, None)


def test_fedrod_uses_the_sum_of_both_heads():
    part = methods.make("fedrod")
    model = {"weight": torch.ones(1, 2, 2), "bias": torch.ones(1, 2)}
    memory = {"head/weight": torch.full((1, 2, 2), 0.5), "head/bias": torch.tensor([[1.0, -1.0]])}
    deployed = part.deployed(clients_view(LINEAR, 1, memory=memory), model)
    assert deployed["weight"].tolist() == [[[1.5, 1.5], [1.5, 1.5]]]
    assert deployed["bias"].tolist() == [[2.0, 0.0]]
    assert all(not tensor.any() for tensor in part.client_memory(clients_view(LINEAR, 1), model).values())


@BOTH_ENGINES
def test_fedrod_learns_personal_heads_that_stay(engine):
    rounds = {name: run(name, engine, rounds=2) for name in ("fedrod", "fedavg")}
    memory = rounds["fedrod"].engine.clients().memory
    assert len({tuple(head.flatten().tolist()) for head in memory["fedrod/head/head.weight"]}) == 5
    ours, theirs = (rounds[name].metrics.latest() for name in ("fedrod", "fedavg"))
    assert ours["bytes.up"] == theirs["bytes.up"]
    assert ours["bytes.down"] == theirs["bytes.down"]
    shared = [rounds[name].engine.server.model["head.weight"] for name in ("fedrod", "fedavg")]
    assert not torch.equal(*shared)  # the balanced loss is another one


@pytest.mark.parametrize("name", ["fedrod", "moon"])
def test_a_model_without_a_linear_head_is_refused(name):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 10, 6), nn.Flatten())
    with pytest.raises(FedStrataError, match=f"'{name}' .*the model does not end in a linear layer"):
        fedstrata.run(model=lambda: model, method=name, clients=3, rounds=1, engine="loop")


def test_features_are_there_also_when_the_engine_is_chosen_by_trying():
    fedstrata.run(method="fedrod", model="mlp", clients=3, rounds=1, epochs=1, engine="auto")


# What goes together ---------------------------------------------------------------------------------------------------

HEADS = "each of them decides what becomes of the head, and only one can"
USED = "each of them decides which model a client uses in the end, and only one can"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fedper+fedrep", HEADS),
        ("fedper+fedbabu", HEADS),
        ("fedrep+fedrod", HEADS),
        ("fedbabu+fedavg-ft", "each of them adds a final adaptation, and only one can"),
        ("fedbabu+player", "each of them decides which layers travel, and only one can"),
        ("fedrod+local-adaptation", USED),
        ("fedrod+fedir", "each of them decides the local loss, and only one can"),
        ("local+fedper", "'local' shares nothing, and all that 'fedper' does concerns what clients share"),
        ("ssfl+fedbabu", "'ssfl' masks weights of the head too, and under 'fedbabu' it stays as it was initialised"),
        ("fedrod+fedpm", "'fedrod' adds to the weights of the head, and 'fedpm' trains something else than weights"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(text, reason):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["fedrep+transient", "fedper+fedbn+lips", "fedper+scaffold", "fedbabu+lws", "fedrod+fedprox+fedbn", "ssfl+fedper"],
)
def test_what_fits_is_taken(text):
    Method.make(text)


def test_personal_heads_are_the_same_bits_after_a_round_without_the_client():
    simulation = run("fedper", rounds=2, participation=0.4)
    before = {name: tensor.clone() for name, tensor in simulation.engine.clients().resident.items()}
    simulation.engine.round(3, [1], evaluate=False)
    after = simulation.engine.clients().resident
    others = torch.tensor([0, 2, 3, 4])
    assert_same_bits(*({name: state[name][others] for name in HEAD} for state in (before, after)))
    assert not torch.equal(before["head.weight"][1], after["head.weight"][1])
