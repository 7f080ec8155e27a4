from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    assert_same_bits,
    clients_view,
    declared,
    layer_values,
    outlined,
    run,
    server_view,
    training_view,
    watched,
)

import fedstrata
from fedstrata.engines.loop import LoopEngine
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.optimisers import SGD, Adam
from fedstrata.testing.world import prepare

pytestmark = pytest.mark.filterwarnings("ignore:'fedpm' brings its own optimiser")

LINEAR = LayerMap.read(nn.Linear(4, 3), (4,))
NORMED = LayerMap.read(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), (2, 8, 8))


def weights(part, layers, scores, step=0, **changes):
    return part.effective(clients_view(layers, len(next(iter(scores.values()))), **changes), scores, step)


def test_weights_are_frozen_at_plus_or_minus_c_and_drawn_by_their_scores():
    """With n_in = 4, c is e / 2; a score of 100 always uses a weight, one of -100 never."""
    part = methods.make("fedpm")
    scores = {"weight": torch.full((2, 3, 4), 100.0), "bias": torch.full((2, 3), 100.0)}
    used = weights(part, LINEAR, scores)
    for name, tensor in used.items():
        assert torch.allclose(tensor.abs(), torch.full_like(tensor, math.e / 2)), name
        assert torch.equal(tensor[0], tensor[1])
    assert len(used["weight"].unique()) == 2
    assert_same_bits(used, weights(part, LINEAR, scores, 3))
    assert not torch.equal(used["weight"], weights(part, LINEAR, scores, seed=1)["weight"])
    assert not any(tensor.any() for tensor in weights(part, LINEAR, {n: -s for n, s in scores.items()}).values())


def test_frozen_weights_are_exact_in_double_precision():
    scores = {"weight": torch.full((1, 3, 4), 100.0).double(), "bias": torch.full((1, 3), 100.0).double()}
    for tensor in weights(methods.make("fedpm"), LINEAR, scores).values():
        assert tensor.dtype == torch.float64
        assert tensor.abs().unique().tolist() == [math.e / 2]


def test_the_bias_of_a_layer_without_a_weight_of_its_own_counts_by_itself():
    """The second layer uses the first one's weight, which has two inputs: e / sqrt(2); its own bias has none: e."""
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    scores = {"0.weight": torch.full((1, 2, 2), 100.0), "0.bias": torch.full((1, 2), 100.0)}
    scores["1.bias"] = torch.full((1, 2), 100.0)
    used = weights(methods.make("fedpm"), LayerMap.read(tied, (2,)), scores)
    sizes = {name: used[name].abs().unique().tolist() for name in scores}
    assert sizes["0.weight"] == sizes["0.bias"] == pytest.approx([math.e / math.sqrt(2)])
    assert sizes["1.bias"] == pytest.approx([math.e])


def test_a_convolution_counts_its_whole_kernel():
    model = {"0.weight": torch.full((1, 3, 2, 3, 3), 100.0), "0.bias": torch.full((1, 3), 100.0)}
    norm = {"1.weight": torch.ones(1, 3), "1.bias": torch.zeros(1, 3)}
    used = weights(methods.make("fedpm"), NORMED, {**model, **norm})
    for name in model:
        assert used[name].abs().unique().tolist() == pytest.approx([math.e / math.sqrt(18)])
    assert_same_bits({name: used[name] for name in norm}, norm)


@pytest.mark.parametrize(("text", "slope"), [("fedpm", 1 / 8), ("fedpm(slope=one)", 1 / 4)])
def test_gradients_pass_through_the_draw_to_the_probability(text, slope):
    """At a score of 0 the probability is 1/2 and its slope 1/4; the released code multiplies by the probability."""
    part = methods.make(text)
    scores = {"weight": torch.zeros(1, 3, 4, requires_grad=True), "bias": torch.zeros(1, 3, requires_grad=True)}
    used = weights(part, LINEAR, scores)
    frozen = weights(part, LINEAR, {name: torch.full_like(score, 100.0) for name, score in scores.items()})
    assert used["weight"].unique().tolist() == pytest.approx([-math.e / 2, 0, math.e / 2])
    used["weight"].sum().backward()
    assert torch.allclose(scores["weight"].grad, slope * frozen["weight"])


def test_draws_differ_from_step_to_step_and_client_to_client():
    part = methods.make("fedpm")
    scores = {"weight": torch.zeros(40, 3, 4), "bias": torch.zeros(40, 3)}
    first, second = (weights(part, LINEAR, scores, step)["weight"] != 0 for step in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert 0.4 < float(first.double().mean()) < 0.6


def test_the_server_turns_the_mean_of_masks_into_scores():
    """Three of four clients use the first weight: theta = 3/4 * .99 + 1/4 * .01 = .745."""
    part = methods.make("fedpm")
    model = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    server = server_view(LINEAR, model, participants=(0, 1, 2, 3), sizes=torch.tensor([1, 1, 1, 97]), clients=4)
    masks = torch.zeros(4, 3, 4, dtype=torch.bool)
    masks[:3, 0, 0] = True
    masks[:, 0, 1] = True
    replies = Message({"weight": masks, "bias": torch.zeros(4, 3, dtype=torch.bool)})
    merged = part.merge(server, replies, part.weigh(declared(1, 1, 1, 97)) / 4)
    chances = merged["weight"].sigmoid()
    assert chances[0].tolist() == pytest.approx([0.745, 0.99, 0.01, 0.01])
    assert merged["bias"].tolist() == pytest.approx([math.log(0.01 / 0.99)] * 3)


def test_one_bit_per_weight_travels_up_and_scores_travel_down():
    simulation = prepare("fedpm", rounds=2)
    assert isinstance(simulation.engine, LoopEngine)
    [message] = set(simulation.engine.central.messages([1], 1))
    reply, outcome = simulation.engine.members[1].answer(message, 1)
    down = simulation.engine.side.broadcast(simulation.engine.server, [1], 1)
    frozen = {"scale.weight", "scale.bias", "shortcut.1.weight", "shortcut.1.bias"}
    everything = set(simulation.setting.initial)
    assert down.tensors.keys() == outcome.reply.tensors.keys() == everything - frozen
    for name, tensor in outcome.reply.tensors.items():
        scored = name.split(".")[0] in ("stem", "body", "hidden", "head") or name == "shortcut.0.weight"
        assert (tensor.dtype is torch.bool) == scored
    weights_and_biases = 36 + 4 + 144 + 16 + 128 + 8 + 80 + 10
    assert len(message) - len(reply) > 8 * weights_and_biases - weights_and_biases / 8 - 100


@BOTH_ENGINES
def test_only_scores_are_trained(engine):
    method, seen = watched("fedpm")
    simulation = run(method, engine, 2)
    initial = simulation.setting.initial
    for client in range(5):
        trained = seen.trained[2, client]
        assert torch.equal(trained["scale.weight"], initial["scale.weight"])
        assert torch.equal(trained["scale.bias"], initial["scale.bias"])
        assert not torch.equal(trained["body.weight"], seen.received[2, client]["body.weight"])
    for name in ("body.weight", "head.bias"):
        chances = simulation.engine.server.model[name].sigmoid()
        lattice = (chances - 0.01) / 0.98 * 5
        assert torch.allclose(lattice, lattice.round(), atol=1e-6)
    density = layer_values(simulation, "density", 2)
    assert density["body"] == pytest.approx(float(simulation.engine.server.model["body.weight"].sigmoid().mean()))


@BOTH_ENGINES
def test_scores_follow_an_adam_that_every_client_keeps(engine):
    """The last step of the second round is that of torch.optim.Adam after all gradients of both rounds."""
    noted = {}

    class Noting(type(methods.make("fedpm"))):
        def gradients(self, clients, step, gradients):
            for place, client in enumerate(clients.ids):
                noted.setdefault(client, []).append((clients.round, gradients["body.weight"][place].clone()))
            return gradients

    method, seen = watched("fedpm")
    run(Method("noting", (Noting(), method.parts[-1])), engine, 2, schedule="exponential:0.5")
    for client in range(5):
        score = torch.zeros_like(noted[client][0][1], requires_grad=True)
        adam = torch.optim.Adam([score], lr=0.1)
        for round, gradient in noted[client]:
            adam.param_groups[0]["lr"] = 0.1 if round == 1 else 0.05
            before, score.grad = score.detach().clone(), gradient
            adam.step()
        first, last = [seen.received[2, client], *seen.steps[2, client]][-2:]
        moved = last["body.weight"] - first["body.weight"]
        assert torch.allclose(moved, score.detach() - before, rtol=0, atol=1e-10)


def test_another_optimiser_does_not_act_and_that_is_said():
    part = methods.make("fedpm")
    assert not list(part.notes(outlined(LINEAR)))
    for told in (Adam(0.01), SGD(0.1), SGD(0.1, momentum=0.9, clip=1.0)):
        [note] = part.notes(outlined(LINEAR, optimiser=told))
        assert f"'fedpm' brings its own optimiser, and '{told}' does not act" in note


def test_the_tested_network_is_one_draw_for_all_or_the_likelier_half():
    scores = {"weight": torch.linspace(-2, 2, 12).view(1, 3, 4).repeat(3, 1, 1), "bias": torch.zeros(3, 3)}
    likely = methods.make("fedpm(tested=threshold)").effective(clients_view(LINEAR, 3), scores, None)
    assert (likely["weight"] != 0).flatten(1).int().tolist() == [[0] * 6 + [1] * 6] * 3
    assert not likely["bias"].any()
    part = methods.make("fedpm")
    drawn, later = (part.effective(clients_view(LINEAR, 3, round), scores, None)["weight"] for round in (1, 2))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn, later)
    assert drawn.abs().unique().tolist() == pytest.approx([0.0, math.e / 2])


def test_scores_begin_normal_and_norms_as_they_were():
    simulation = prepare("fedpm")
    initial, before = simulation.setting.initial, prepare("fedavg").setting.initial
    scores = torch.cat([initial[name].flatten() for name in ("body.weight", "hidden.weight", "head.weight")])
    assert abs(float(scores.mean())) < 0.15
    assert abs(float(scores.std()) - 1) < 0.15
    assert torch.equal(initial["scale.weight"], before["scale.weight"])


def test_a_sent_mask_follows_the_probabilities():
    part = methods.make("fedpm")
    scores = {"weight": torch.full((50, 3, 4), math.log(4.0)), "bias": torch.full((50, 3), -50.0)}
    sent = part.upload(clients_view(LINEAR, 50), training_view(scores, scores), Message(dict(scores)))
    assert 0.75 < float(sent.tensors["weight"].double().mean()) < 0.85
    assert not sent.tensors["bias"].any()
    assert torch.equal(scores["bias"], torch.full((50, 3), -50.0))


def test_it_learns():
    """Three rounds on digits, far above chance, which is a tenth, with nothing but bits sent up."""
    result = fedstrata.run(
        data="digits", partition="iid", clients=3, rounds=3, epochs=2, model="mlp", method="fedpm", engine="stacked",
        evaluate_every=3,
    )  # fmt: skip
    assert result.summary["final"]["global.accuracy"] > 0.6
