from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    GivenProbe,
    assert_same_bits,
    clients_view,
    layer_values,
    memory_of,
    outlined,
    probing,
    run,
    server_view,
    watched,
)

from fedstrata.engines.loop import LoopEngine
from fedstrata.engines.planning import Plan
from fedstrata.errors import FedStrataError
from fedstrata.functional import top_mask
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.methods.ssfl import Saliency
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.testing.world import EXPERIMENT, digits, prepare, unequal_split
from fedstrata.wire import decode, encode

WEIGHTS = {"stem.weight": 36, "body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128, "head.weight": 80}
ONE = LayerMap.read(nn.Linear(4, 1, bias=False), (4,))


def masks_of(simulation):
    return simulation.engine.server.memory.group("ssfl/mask")


def kept(masks):
    return sum(int(mask.sum()) for mask in masks.values())


# By hand -------------------------------------------------------------------------------------------------------------


def test_scores_are_averaged_by_data_and_the_largest_kept():
    part = methods.make("ssfl(sparsity=0.5)")
    model = {"weight": torch.tensor([[1.0, 2.0, 3.0, -4.0]])}
    server = server_view(ONE, model, sizes=torch.tensor([30, 10]))
    server = server_view(ONE, model, sizes=torch.tensor([30, 10]), memory=part.server_memory(server))
    replies = Message({"weight": torch.tensor([[[0.40, 0.10, 0.02, 0.32]], [[0.0, 0.60, 0.20, 0.10]]])})
    [exchange] = part.exchanges()
    new, memory = exchange.conclude(server, replies)
    assert memory["mask/weight"].int().tolist() == [[1, 0, 0, 1]]
    assert new["weight"].tolist() == [[1.0, 0.0, 0.0, -4.0]]
    announcement = exchange.announce(server_view(ONE, new, memory=memory))
    assert announcement.tensors["weight"].int().tolist() == [[[1, 0, 0, 1]]]
    clients = clients_view(ONE, 3, memory={"mask/weight": torch.ones(3, 1, 4, dtype=torch.bool)})
    assert exchange.adopt(clients, announcement)["mask/weight"].int().tolist() == [[[1, 0, 0, 1]]] * 3


def concluded(text, replies, sizes=(30, 10), seed=0, layers=ONE):
    """Let the server conclude a mask from scores."""
    part = methods.make(text)
    model = {name: torch.ones_like(scores[0]) for name, scores in replies.items()}
    view = {"sizes": torch.tensor(sizes), "seed": seed}
    memory = part.server_memory(server_view(layers, model, **view))
    [exchange] = part.exchanges()
    return exchange.conclude(server_view(layers, model, memory=memory, **view), Message(replies))[1].group("mask")


def test_all_clients_count_alike_where_asked_as_in_the_authors_code():
    scores = {"weight": torch.tensor([[[0.40, 0.10, 0.02, 0.32]], [[0.0, 0.60, 0.20, 0.10]]])}
    assert concluded("ssfl", scores)["weight"].int().tolist() == [[1, 0, 0, 1]]
    assert concluded("ssfl(weighted=false)", scores)["weight"].int().tolist() == [[0, 1, 0, 1]]


def test_the_absolute_value_is_taken_of_each_minibatch():
    """Gradients (3, 1) and (-1, 1) on two minibatches at w = (2, -1): scores (6, 1) and (2, 1), mean (4, 1)."""
    layers = LayerMap.read(nn.Linear(2, 1, bias=False), (2,))
    asked = []

    class Probe(GivenProbe):
        def gradients(self, model, batch_size, all_samples=False, balanced=False, draw=0):
            asked.append((batch_size, all_samples, balanced, draw))
            return {"weight": torch.tensor([[[3.0, 1.0]], [[-1.0, 1.0]]])[draw][None]}

    [exchange] = methods.make("ssfl(batches=2, batch_size=7, balanced=true)").exchanges()
    model = {"weight": torch.tensor([[[2.0, -1.0]]])}
    reply = exchange.survey(clients_view(layers, 1, **probing(Probe())), model)
    assert reply.tensors["weight"].tolist() == [[[4, 1]]]
    assert asked == [(7, False, True, 0), (7, False, True, 1)]


def test_the_absolute_value_is_taken_at_each_client():
    """Loss .5 (w.x - y)^2 at w = (1, -2): gradients (2, .5) and (-2, -2), scores (2, 1) and (2, 4), mean (2, 2.5)."""
    layers = LayerMap.read(nn.Linear(2, 1, bias=False), (2,))
    part = methods.make("ssfl(sparsity=0.5)")
    probe = GivenProbe({"weight": torch.tensor([[[2.0, 0.5]], [[-2.0, -2.0]]])})
    model = {"weight": torch.tensor([[[1.0, -2.0]], [[1.0, -2.0]]])}
    [exchange] = part.exchanges()
    reply = exchange.survey(clients_view(layers, 2, **probing(probe)), model)
    assert reply.tensors["weight"].tolist() == [[[2, 1]], [[2, 4]]]
    server = server_view(layers, {"weight": torch.tensor([[1.0, -2.0]])})
    server = server_view(layers, server.model, memory=part.server_memory(server))
    assert exchange.conclude(server, reply)[1]["mask/weight"].int().tolist() == [[0, 1]]


def test_masked_weights_are_scored_at_their_initial_values():
    [exchange] = methods.make("ssfl(adapt_at=3)").exchanges()
    seen = []

    class Probe(GivenProbe):
        def gradients(self, model, batch_size, all_samples=False, balanced=False, draw=0):
            seen.append((model["weight"], batch_size, all_samples, balanced))
            return self.slopes

    memory = {
        "mask/weight": torch.tensor([[[True, False, True, False]]]),
        "init/weight": torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]),
    }
    model = {"weight": torch.tensor([[[7.0, 0.0, 8.0, 0.0]]])}
    probe = Probe({"weight": torch.ones(1, 1, 4)})
    reply = exchange.survey(clients_view(ONE, 1, 3, memory=memory, **probing(probe)), model)
    assert reply.tensors["weight"].tolist() == [[[7, 2, 8, 4]]]
    assert seen[0][0].tolist() == [[[7, 2, 8, 4]]]
    assert seen[0][1:] == (16, False, False)


# Inside the mask -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("text", "optimiser"),
    [
        ("ssfl(sparsity=0.7)", "sgd(momentum=0.9, weight_decay=0.1, keep=true)"),
        ("ssfl(scope=all, batches=2)+fedprox(mu=0.5)+lws", "adamw(learning_rate=0.05, weight_decay=0.1)"),
        ("fedavgm(beta=0.9)+ssfl(warmup=1, sparsity=0.9)", "sgd(momentum=0.9, nesterov=true)"),
        ("ssfl(refresh_every=1, topology=random)+fedbn+fedavgm+lws(mode=reg)", "adam(keep=true)"),
    ],
)
def test_masked_weights_are_zero_at_every_step_everywhere(engine, text, optimiser):
    method, seen = watched(text)
    simulation = prepare(method, engine, 2, optimiser=optimiser, rounds=3, epochs=1)
    [part] = (part for part in method.parts if part.name == "ssfl")
    for round in (1, 2, 3):
        simulation.step()
        masks = masks_of(simulation)
        total = sum(mask.numel() for mask in masks.values())
        expected = total if round <= part.warmup else int((1 - part.sparsity) * total + 1e-9)
        assert kept(masks) == expected
        for client in range(5):
            place = round, client
            for model in [seen.start[place], *seen.steps[place], seen.trained[place]]:
                assert not any(model[name][~mask].any() for name, mask in masks.items())
        model = simulation.engine.server.model
        assert not any(model[name][~mask].any() for name, mask in masks.items())
        assert any(seen.steps[3, 0][-1][name].any() for name in masks) if round == 3 else True


@pytest.mark.parametrize("scope", ["weights", "all"])
def test_the_count_is_exact_over_the_whole_model(scope):
    simulation = prepare(f"ssfl(sparsity=0.37, scope={scope})")
    simulation.engine.exchange(1)
    masks = masks_of(simulation)
    total = sum(WEIGHTS.values()) if scope == "weights" else 442
    assert sum(mask.numel() for mask in masks.values()) == total
    assert kept(masks) == int(0.63 * total)
    if scope == "weights":
        assert masks.keys() == WEIGHTS.keys()
    densities = {round(float(mask.double().mean()), 3) for name, mask in masks.items() if name in WEIGHTS}
    assert len(densities) > 1


def test_density_is_that_of_all_tensors_of_a_layer():
    simulation = run("ssfl(scope=all)", rounds=1)
    masks = masks_of(simulation)
    head = torch.cat([masks["head.weight"].flatten(), masks["head.bias"]]).double().mean()
    density = layer_values(simulation, "density", 1)
    assert density["head"] == pytest.approx(float(head))
    assert set(density) == {"stem", "scale", "body", "shortcut.0", "shortcut.1", "hidden", "head"}


@BOTH_ENGINES
def test_the_survey_leaves_everything_but_masked_weights_alone(engine):
    simulation = prepare("ssfl+fedbn", engine, 2)
    simulation.engine.exchange(1)
    masks, initial = masks_of(simulation), simulation.setting.initial
    for name, tensor in simulation.engine.server.model.items():
        assert torch.equal(tensor, initial[name] * masks[name] if name in masks else initial[name]), name
    for name, stack in simulation.engine.clients().group("own").items():
        assert torch.equal(stack, initial[name].expand_as(stack)), name


# What travels --------------------------------------------------------------------------------------------------------


def test_messages_hold_the_active_values_and_name_the_mask():
    simulation = prepare("ssfl(sparsity=0.8)+fedbn", rounds=2)
    simulation.step()
    assert isinstance(simulation.engine, LoopEngine)
    [message] = set(simulation.engine.central.messages(range(5), 2))
    reply, _ = simulation.engine.members[3].answer(message, 2)
    masks = masks_of(simulation)
    biases = 4 + 8 + 10  # stem, hidden, head
    held = {name: mask[None] for name, mask in masks.items()}
    for data in (message, reply):
        decoded = decode(data, held=held)
        unmasked = {name: tensor[:, :0] for name, tensor in decoded.tensors.items()}
        described = len(encode(Message(unmasked)))
        assert 0 < len(data) - described - 8 * (kept(masks) + biases) < 20 * len(WEIGHTS)
        assert decoded.tensors.keys() == {*WEIGHTS, "stem.bias", "hidden.bias", "head.bias"}
        assert_same_bits({name: mask[0] for name, mask in decoded.masks.items()}, masks)
    assert kept(masks) == int(0.2 * sum(WEIGHTS.values()))


@BOTH_ENGINES
def test_the_exchange_costs_the_model_the_scores_and_the_bits(engine):
    simulation = prepare("ssfl", engine)
    initial = simulation.setting.initial
    scores = len(encode(Message({name: initial[name][None] for name in WEIGHTS})))
    loop = prepare("fedavg").engine
    dense = len(loop.central.messages([0], 1)[0])
    up, down = simulation.engine.exchange(1)
    announcement = len(encode(Message({name: mask[None] for name, mask in masks_of(simulation).items()})))
    assert (up, down) == (5 * scores, 5 * (dense + announcement))


@BOTH_ENGINES
def test_sparsity_zero_is_fedavg_also_in_bytes(engine):
    left, right = run("ssfl(sparsity=0, warmup=1, adapt_at=3)", engine), run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert left.metrics.latest() == right.metrics.latest()
    for way in ("bytes.up", "bytes.down"):
        assert left.metrics.series(way)[1].tolist() == right.metrics.series(way)[1].tolist()


# When masks are found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("ssfl", [1]),
        ("ssfl(sparsity=0)", []),
        ("ssfl(warmup=3)", [4]),
        ("ssfl(adapt_at=6)", [1, 6]),
        ("ssfl(warmup=2, refresh_every=3)", [3, 6, 9]),
        ("ssfl(warmup=2, refresh_every=4, adapt_at=5)", [3, 5, 7]),
        ("ssfl(refresh_every=5, adapt_at=6)", [1, 6]),
        ("ssfl(warmup=7, refresh_every=1)", [8, 9, 10]),
        ("ssfl(adapt_at=2)", [1, 2]),
    ],
)
def test_rounds_before_which_a_mask_is_found(text, rounds):
    exchanges = methods.make(text).exchanges()
    assert [round for round in range(1, 11) for exchange in exchanges if exchange.due(round, 10, False)] == rounds


def test_who_joins_brings_a_new_mask_only_where_there_is_one():
    """Newcomers in the warm-up do not end it."""
    [exchange] = methods.make("ssfl(warmup=2, adapt_on_joining=true)").exchanges()
    assert [bool(exchange.due(round, 10, True)) for round in (1, 2, 3, 4)] == [False, False, True, True]
    [exchange] = methods.make("ssfl(warmup=2)").exchanges()
    assert [bool(exchange.due(round, 10, True)) for round in (1, 2, 3, 4)] == [False, False, True, False]


@pytest.mark.parametrize("text", ["ssfl", "ssfl(adapt_at=3)", "ssfl(adapt_on_joining=true)", "ssfl(refresh_every=2)"])
def test_initial_values_are_kept_where_they_may_come_back(text):
    part, model = methods.make(text), {"weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]])}
    server = part.server_memory(server_view(ONE, model))
    client = part.client_memory(clients_view(ONE, 2), {"weight": model["weight"].expand(2, 1, 4)})
    for memory in (server, client):
        kept = {"init/weight"} if text != "ssfl" else set()
        assert memory.keys() == {"mask/weight"} | kept
        assert memory["mask/weight"].all()
    assert all(torch.equal(server[name], model["weight"]) for name in server.keys() & {"init/weight"})


def test_without_sparsity_there_is_no_mask_to_tell_about():
    for sparsity, told in ((0, {}), (0.25, {"density": {"(model)": 1.0}})):
        part = methods.make(f"ssfl(sparsity={sparsity})")
        view = server_view(ONE, {"weight": torch.ones(1, 4)})
        assert part.metrics(server_view(ONE, view.model, memory=part.server_memory(view))) == told


@BOTH_ENGINES
def test_the_warm_up_is_dense(engine):
    left, right = run("ssfl(warmup=2)", engine, 2), run("fedavg", engine, 2)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    for way in ("bytes.up", "bytes.down"):
        assert left.metrics.series(way)[1].tolist() == right.metrics.series(way)[1].tolist()
    assert set(layer_values(left, "density", 2).values()) == {1.0}
    dense = {name: tensor.clone() for name, tensor in left.engine.server.model.items()}
    left.engine.exchange(3)
    masks = masks_of(left)
    assert kept(masks) == sum(WEIGHTS.values()) // 2
    for name, mask in masks.items():
        assert torch.equal(left.engine.server.model[name], dense[name] * mask)


@BOTH_ENGINES
def test_weights_that_come_back_start_at_their_initial_values(engine):
    simulation = prepare("ssfl(sparsity=0.6, adapt_at=3)", engine, rounds=4, epochs=1)
    simulation.step()
    simulation.step()
    old = masks_of(simulation)
    trained = {name: tensor.clone() for name, tensor in simulation.engine.server.model.items()}
    simulation.engine.exchange(3)
    new, model, initial = masks_of(simulation), simulation.engine.server.model, simulation.setting.initial
    assert kept(new) == kept(old)
    back = {name: new[name] & ~old[name] for name in new}
    assert kept(back) > 10
    for name in new:
        assert torch.equal(model[name][back[name]], initial[name][back[name]])
        stayed = new[name] & old[name]
        assert torch.equal(model[name][stayed], trained[name][stayed])
        assert not model[name][~new[name]].any()
    held = memory_of(simulation, "ssfl", "mask")
    assert held.keys() == new.keys()
    for name, masks in held.items():
        assert torch.equal(masks, new[name].expand_as(masks))


def test_growth_only_adds():
    simulation = prepare("ssfl(sparsity=0.8, refresh_every=1, growth=true)", rounds=4, epochs=1)
    history = []
    for _ in range(4):
        simulation.step()
        history.append(masks_of(simulation))
    assert kept(history[0]) == int(0.2 * sum(WEIGHTS.values()))
    assert kept(history[3]) > kept(history[0])
    for old, new in pairwise(history):
        assert all((new[name] | ~old[name]).all() for name in old)


# Other topologies ----------------------------------------------------------------------------------------------------


def first_masks(text, **changes):
    simulation = prepare(text, **changes)
    up, _ = simulation.engine.exchange(1)
    return masks_of(simulation), up


def test_shuffling_is_a_new_draw_for_each_tensor_and_seed():
    """Of two equal tensors with the same scores, each entry is kept in about half of the draws."""
    layers = LayerMap.read(nn.Sequential(nn.Linear(8, 1, bias=False), nn.Flatten(), nn.Linear(1, 8, bias=False)), (8,))
    scores = torch.arange(8.0)
    replies = {"0.weight": scores.reshape(1, 1, 8), "2.weight": scores.reshape(1, 8, 1)}
    plain = concluded("ssfl", replies, [1], layers=layers)
    assert {name: mask.flatten().int().tolist() for name, mask in plain.items()} == {
        name: [0, 0, 0, 0, 1, 1, 1, 1] for name in replies
    }
    drawn = [concluded("ssfl(topology=shuffled)", replies, [1], seed, layers) for seed in range(100)]
    for name in replies:
        kept = torch.stack([masks[name].flatten() for masks in drawn])
        assert (kept.sum(1) == 4).all()
        assert kept.double().mean(0).min() > 0.3
        assert kept.double().mean(0).max() < 0.7
        assert len({tuple(mask.tolist()) for mask in kept}) > 40  # of 70
    assert not all(torch.equal(masks["0.weight"].flatten(), masks["2.weight"].flatten()) for masks in drawn)


def test_shuffling_keeps_each_tensors_density_and_nothing_else():
    found, _ = first_masks("ssfl(sparsity=0.7)")
    shuffled, _ = first_masks("ssfl(sparsity=0.7, topology=shuffled)")
    assert found.keys() == shuffled.keys()
    for name in found:
        assert found[name].sum() == shuffled[name].sum()
    assert sum(int((found[name] != shuffled[name]).sum()) for name in found) > 50
    again, _ = first_masks("ssfl(sparsity=0.7, topology=shuffled)")
    assert_same_bits(shuffled, again)


def test_a_random_mask_at_each_client_is_random_k():
    [part] = Method.make("ssfl(topology=random-per-client, sparsity=0.3, scope=all)").parts
    assert part == methods.make("random-k(sparsity=0.3, scope=all)")
    [part] = Method.make("ssfl(topology=shuffled, weighted=false)").parts
    assert part == methods.make("ssfl(topology=shuffled, weighted=false)")


def test_a_random_mask_is_exact_depends_on_the_seed_only_and_asks_clients_for_nothing():
    drawn, up = first_masks("ssfl(sparsity=0.7, topology=random)")
    assert kept(drawn) == int(0.3 * sum(WEIGHTS.values()) + 1e-9)
    assert up == 0
    again, _ = first_masks("ssfl(sparsity=0.7, topology=random, batch_size=3)")
    assert_same_bits(drawn, again)
    other, _ = first_masks("ssfl(sparsity=0.7, topology=random)", seed=8)
    assert sum(int((drawn[name] != other[name]).sum()) for name in drawn) > 50


def test_balanced_and_more_batches_give_other_masks():
    plain, _ = first_masks("ssfl(batch_size=4)")
    for text in ("ssfl(batch_size=4, balanced=true)", "ssfl(batch_size=4, batches=3)"):
        other, _ = first_masks(text)
        assert kept(other) == kept(plain)
        assert any(not torch.equal(other[name], plain[name]) for name in plain)


# The oracle ----------------------------------------------------------------------------------------------------------


def test_the_oracle_takes_the_absolute_value_of_the_mean():
    """Signed products (2, -1, 3, 0) and (-6, -1, 1, 8) with shares 3/4 and 1/4: (0, -1, 2.5, 2), not (3, 1, 2.5, 2)."""
    part = methods.make("ssfl(topology=oracle, sparsity=0.5)")
    asked = []

    class Probe(GivenProbe):
        def gradients(self, model, batch_size, all_samples=False, balanced=False, draw=0):
            asked.append(all_samples)
            return self.slopes

    probe = Probe({"weight": torch.tensor([[[2.0, 1.0, 1.0, 0.0]], [[-6.0, 1.0, 1 / 3, -2.0]]])})
    model = {"weight": torch.tensor([[[1.0, -1.0, 3.0, -4.0]]] * 2)}
    [exchange] = part.exchanges()
    reply = exchange.survey(clients_view(ONE, 2, **probing(probe)), model)
    assert asked == [True]
    assert reply.tensors["weight"].flatten(1).tolist() == [[2, -1, 3, 0], [-6, -1, 1, 8]]
    server = server_view(ONE, {"weight": model["weight"][0]}, sizes=torch.tensor([30, 10]))
    memory = part.server_memory(server)
    server = server_view(ONE, server.model, sizes=torch.tensor([30, 10]), memory=memory)
    assert exchange.conclude(server, reply)[1]["mask/weight"].int().tolist() == [[0, 0, 1, 1]]


def plain_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


def plain_world(method, engine, **changes):
    """A federation whose model has neither dropout nor norms, so that the batch does not matter."""
    dataset = digits()
    ingredients = Ingredients(dataset, unequal_split(dataset), plain_net, Method.make(method))
    plan = Plan(engine, 1 if engine == "loop" else 2)
    return Driver.prepare(EXPERIMENT.with_changes({"engine": engine, **changes}), ingredients, plan)


@BOTH_ENGINES
def test_the_oracles_mask_is_that_of_all_data_in_one_place(engine):
    simulation = plain_world("ssfl(topology=oracle, sparsity=0.7, batch_size=7)", engine)
    simulation.engine.exchange(1)
    model = plain_net().double()
    model.load_state_dict(simulation.setting.initial)
    everything = torch.from_numpy(np.concatenate(simulation.split.train))
    inputs, labels = simulation.engine.evaluator.data.make(everything[None], None)
    nn.functional.cross_entropy(model(inputs[0]), labels[0]).backward()
    scores = {name: (tensor.grad * tensor).abs() for name, tensor in model.named_parameters() if "weight" in name}
    assert_same_bits(masks_of(simulation), top_mask(scores, 0.7))


# Sentences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "ssfl(warmup=3, adapt_at=4)",
            "finds its first mask before round 4, so it cannot find a new one before round 4",
        ),
        (
            "ssfl(growth=true)",
            "grows its mask only when it finds a new one; give adapt_at, adapt_on_joining or refresh_every",
        ),
        ("ssfl(topology=random-per-client, warmup=1)", "keeps its masks from the first round on; leave out warmup"),
        ("ssfl(topology=random-per-client, adapt_at=2)", "keeps its masks from the first round on; leave out warmup"),
        ("ssfl(topology=oracle, weighted=false)", "topology=oracle has no mean of scores in which clients could count"),
        ("ssfl(topology=random, weighted=false)", "topology=random has no mean of scores in which clients could count"),
    ],
)
def test_options_that_contradict_each_other_are_refused(text, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        methods.make(text)


def test_a_model_without_such_weights_is_told_about():
    layers = LayerMap.read(nn.Sequential(nn.BatchNorm1d(3)), (3,))
    [note] = methods.make("ssfl").notes(outlined(layers))
    assert note == "The model has no convolution or linear weights, so 'ssfl' masks nothing."
    assert not list(methods.make("ssfl(scope=all)").notes(outlined(layers)))


@BOTH_ENGINES
def test_clients_that_join_bring_a_new_mask(engine):
    """The last two of five clients join in round 3, with a mask found by all of them."""
    changes = {"late_clients": 2, "join_round": 3}
    simulation = prepare("ssfl(adapt_on_joining=true)", engine, rounds=3, evaluate_every=9, **changes)
    masks = []
    for round in (1, 2, 3):
        assert simulation.engine.side.select(1.0, round) == tuple(range(3 if round < 3 else 5))
        simulation.step()
        memory = simulation.engine.server.memory
        masks.append(torch.cat([mask.flatten() for name, mask in sorted(memory.items()) if "mask/" in name]))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    up = simulation.metrics.series("bytes.up")[1]
    assert up[0] > 1.5 * up[1]  # three clients' scores
    assert up[2] > 2.5 * up[1]  # five clients' scores, and five uploads instead of three
    same = prepare("ssfl", engine, rounds=3, evaluate_every=9, **changes)
    for _ in range(3):
        same.step()
    assert same.metrics.series("bytes.up")[1][2] < 1.8 * same.metrics.series("bytes.up")[1][1]


@BOTH_ENGINES
def test_who_joins_is_asked_and_counts(engine, monkeypatch):
    """Before round 3 all five clients score, from initial values where masked; the mask is that of all their scores."""
    asked, seen = [], []
    survey, conclude = Saliency.survey, Saliency.conclude

    def watched_survey(self, clients, model):
        asked.extend((clients.round, client) for client in clients.ids)
        return survey(self, clients, model)

    def watched_conclude(self, server, replies):
        seen.append((server.sizes.tolist(), replies))
        return conclude(self, server, replies)

    monkeypatch.setattr(Saliency, "survey", watched_survey)
    monkeypatch.setattr(Saliency, "conclude", watched_conclude)
    changes = {"late_clients": 2, "join_round": 3, "epochs": 1, "rounds": 4, "evaluate_every": 9}
    simulation = prepare("ssfl(adapt_on_joining=true)", engine, **changes)
    for _ in range(4):
        simulation.step()
    assert sorted(asked) == [(1, 0), (1, 1), (1, 2), *((3, client) for client in range(5))]
    assert [sizes for sizes, _ in seen] == [[9, 16, 16], [9, 16, 16, 5, 23]]
    shares = torch.tensor([9, 16, 16, 5, 23], dtype=torch.float64) / 69
    scores = {name: torch.einsum("k,k...->...", shares, own) for name, own in seen[1][1].tensors.items()}
    assert_same_bits(masks_of(simulation), top_mask(scores, 0.5))
    asked.clear()
    simulation = prepare("ssfl", engine, **changes)
    for _ in range(3):
        simulation.step()
    assert sorted(asked) == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"late_clients": 2}, "both or neither"),
        ({"join_round": 2}, "both or neither"),
        ({"late_clients": 5, "join_round": 2}, "nobody could begin"),
    ],
)
def test_odd_joining_is_refused(changes, words):
    with pytest.raises(FedStrataError, match=words):
        prepare("fedavg", **changes)


@pytest.mark.parametrize("method", ["d-psgd", "dispfl", "fedfomo", "pfedla"])
def test_nobody_joins_later_where_the_models_of_all_count_from_the_beginning(method):
    with pytest.raises(
        FedStrataError, match=f"Nobody can join later: '{method}' counts the models of all clients from the"
    ):
        prepare(method, late_clients=2, join_round=2)
