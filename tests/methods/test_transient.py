from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, memory_of, outlined, run, training_view, watched

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.testing.world import prepare

MIDDLE = {"body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128}
THREE = LayerMap.read(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), (2,))


def events(text, rounds=300):
    part = Method.make(text).parts[-1]
    drops = {round: part.drop_after(round, rounds) for round in range(rounds + 1)}
    return {round: drop for round, drop in drops.items() if drop > 0}


def test_the_papers_schedule_counts_from_one():
    drops = events("lips")
    assert list(drops) == list(range(5, 300, 5))
    assert drops[5] == pytest.approx(0.68833333, abs=1e-8)
    assert drops[150] == pytest.approx(0.35)
    assert drops[295] == pytest.approx(0.7 / 60)


def test_the_released_schedule_counts_from_zero():
    drops = events("lips(schedule=released)")
    assert list(drops) == list(range(1, 300, 5))
    assert drops[1] == 0.7
    assert drops[296] == pytest.approx(0.7 / 60)
    assert list(events("lips(every=7, schedule=released)", 20)) == [1, 8, 15]


@BOTH_ENGINES
def test_rounds_after_an_event_start_with_exactly_the_least_sensitive_zeroed(engine):
    method, seen = watched("lips(tau0=0.6, every=2)")
    initial = run(method, engine, rounds=5).setting.initial
    zeroed = {}
    for (round, client), start in seen.start.items():
        received = seen.received[round, client]
        drop = {3: 0.6 * 3 / 5, 5: 0.6 * 1 / 5}.get(round, 0.0)
        for name, tensor in start.items():
            if name not in MIDDLE or drop == 0:
                assert torch.equal(tensor, received[name]), (round, name)
                continue
            before, after = seen.start[round - 1, client][name], seen.trained[round - 1, client][name]
            scores = ((after - before) * after).abs().flatten().numpy()
            lowest = np.argsort(scores, kind="stable")[: int(drop * MIDDLE[name] + 1e-9)]
            expected = received[name].flatten().clone()
            expected[lowest] = 0
            assert torch.equal(tensor.flatten(), expected), (round, name)
            zeroed[round, client, name] = tuple(sorted(lowest))
    assert {round for round, _, _ in zeroed} == {3, 5}
    for name in MIDDLE:
        assert len({zeroed[3, client, name] for client in range(5)}) > 1
        assert initial[name].count_nonzero() == MIDDLE[name]


def expected_masks(seen, drops, local):
    """Draw up each client's masks again, from what it saw: lowest scores go, and held weights keep their scores."""
    scores, drawn, masks = {}, {}, {}
    for round, client in sorted(seen.start):
        event = max((one for one in drops if one < round), default=0) if local == "until-next" else round - 1
        for name, count in MIDDLE.items():
            own = client, name
            if own not in drawn or drawn[own][0] != event:
                mask = np.ones(count, dtype=bool)
                order = np.argsort(scores.get(own, []), kind="stable")
                mask[order[: int(drops.get(event, 0.0) * count + 1e-9)]] = False
                drawn[own] = event, mask
            mask = drawn[own][1]
            start, trained = (model[round, client][name].flatten().numpy() for model in (seen.start, seen.trained))
            moved = abs((trained - start) * trained)
            scores[own] = moved if local == "off" else np.where(mask, moved, scores.get(own, 0.0))
            masks[round, client, name] = torch.from_numpy(mask)
    return masks


def assert_masks(seen, drops, local, held_rounds):
    """Look at the weights of each client at the start of each round and after each step."""
    masks, moved, grown = expected_masks(seen, drops, local), [], []
    for (round, client, name), mask in masks.items():
        place = round, client
        start, received, *models = (
            model[name].flatten()
            for model in (seen.start[place], seen.received[place], *seen.steps[place], seen.trained[place])
        )
        assert torch.equal(start, received.where(mask, torch.zeros(()))), (round, client, name)
        assert len(models) > 1
        for model in models:
            if round in held_rounds:
                assert not model[~mask].any(), (round, client, name)
        moved.append((models[-1] != start)[mask])
        if round not in held_rounds:
            grown.append(models[0][~mask] != 0)
    assert torch.cat(moved).double().mean() > 0.7, "what masks keep is trained, unless a neuron is dead"
    if local == "off":
        assert torch.cat(grown).double().mean() > 0.7, "what was zeroed grows back at the first step"
    return masks


@BOTH_ENGINES
@pytest.mark.parametrize(("local", "held_rounds"), [("off", ()), ("round", (3, 5)), ("until-next", (3, 4, 5, 6))])
def test_masked_weights_are_held_as_long_as_local_sparsity_says(engine, local, held_rounds):
    """Events come after the rounds 2 and 4."""
    method, seen = watched(f"transient(tau0=0.9, every=2, local_sparsity={local})")
    run(method, engine, rounds=6)
    masks = assert_masks(seen, {2: 0.9 * 4 / 6, 4: 0.9 * 2 / 6}, local, held_rounds)
    masked = {round for (round, _, _), mask in masks.items() if not mask.all()}
    assert masked == {"off": {3, 5}, "round": {3, 5}, "until-next": {3, 4, 5, 6}}[local]
    for name in MIDDLE:
        assert len({tuple(masks[3, client, name].tolist()) for client in range(5)}) > 1


@BOTH_ENGINES
@pytest.mark.parametrize("schedule", ["paper", "released"])
def test_with_partial_participation_a_mask_lasts_until_the_next_event_at_each_client(engine, schedule):
    """A client that was absent right after an event draws its mask up when it trains next, and keeps it from then."""
    text = f"transient(tau0=0.9, every=3, local_sparsity=until-next, schedule={schedule})"
    method, seen = watched(text)
    run(method, engine, rounds=12, participation=0.4)
    drops = events(text, 12)
    assert list(drops) == [3, 6, 9] if schedule == "paper" else [1, 4, 7, 10]
    masks = assert_masks(seen, drops, "until-next", range(1, 13))
    after = [
        max((round - one for one in drops if one < round), default=0) for round, _, name in masks if "body" in name
    ]
    assert {1, 2, 3} <= set(after), "clients train right after an event, and later"
    assert sum(not mask.all() for mask in masks.values()) > 20


def test_a_held_weight_keeps_the_sensitivity_that_it_had_when_it_last_moved():
    part = methods.make("transient(tau0=0.5, every=1, local_sparsity=until-next)")
    mask = torch.tensor([[[True, False], [False, True]]])
    memory = part.client_memory(clients_view(THREE, 1, 0), {f"{layer}.weight": torch.zeros(1, 2, 2) for layer in "012"})
    memory |= {"mask/1.weight": mask, "score/1.weight": torch.tensor([[[7.0, 5.0], [3.0, 1.0]]])}
    start = {"1.weight": torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])}
    training = training_view(start=start, trained={"1.weight": torch.tensor([[[3.0, 0.0], [0.0, 2.0]]])})
    _, memory = part.finish(clients_view(THREE, 1, 1, memory=memory), training)
    assert memory["score/1.weight"].tolist() == [[[6, 5], [3, 2]]]
    assert torch.equal(memory["mask/1.weight"], mask)


@BOTH_ENGINES
def test_weights_held_at_their_initial_values_stay_there(engine):
    method, seen = watched("transient(tau0=0.8, every=1, refill=init, local_sparsity=until-next)")
    initial = run(method, engine, rounds=2).setting.initial
    for client in range(5):
        for name, count in MIDDLE.items():
            held = seen.start[2, client][name] == initial[name]
            assert int(held.sum()) == int(0.4 * count)
            for step in [*seen.steps[2, client], seen.trained[2, client]]:
                assert torch.equal(step[name] == initial[name], held)


def test_with_local_sparsity_masked_weights_keep_out_of_the_gradients_norm():
    part = methods.make("transient(local_sparsity=round)")
    memory = {"mask/1.weight": torch.tensor([[[True, False], [False, True]]])}
    view = clients_view(THREE, 1, memory=memory)
    slopes = {name: torch.full((1, 2, 2), 2.0) for name in ("0.weight", "1.weight")}
    changed = part.gradients(view, None, slopes)
    assert changed["0.weight"].tolist() == [[[2, 2], [2, 2]]]
    assert changed["1.weight"].tolist() == [[[2, 0], [0, 2]]]


def test_without_local_sparsity_clients_remember_no_masks_and_gradients_stay():
    simulation = run("transient(every=1)", rounds=2)
    assert not memory_of(simulation, "transient", "mask")
    slopes = {"1.weight": torch.full((1, 2, 2), 2.0)}
    assert torch.equal(
        methods.make("transient").gradients(clients_view(THREE, 1), None, slopes)["1.weight"], slopes["1.weight"]
    )


@pytest.mark.parametrize(("local", "kept"), [("round", 1.0), ("until-next", 1 - 0.35)])
def test_a_mask_ends_with_its_round_or_is_remembered(local, kept):
    masks = memory_of(run(f"transient(every=1, local_sparsity={local})", rounds=2), "transient", "mask")
    assert set(masks) == set(MIDDLE)
    for name, mask in masks.items():
        assert mask.sum() == 5 * (MIDDLE[name] - int((1 - kept) * MIDDLE[name] + 1e-9))


@BOTH_ENGINES
def test_masked_weights_may_restart_at_their_initial_values(engine):
    method, seen = watched("lips(tau0=0.8, every=1, refill=init)")
    initial = run(method, engine, rounds=2).setting.initial
    for client in range(5):
        for name, count in MIDDLE.items():
            start, received = seen.start[2, client][name], seen.received[2, client][name]
            changed = start != received
            assert int(changed.sum()) == int(0.4 * count)
            assert torch.equal(start[changed], initial[name][changed])


@BOTH_ENGINES
def test_masked_weights_may_restart_at_a_draw_of_each_clients_own(engine):
    method, seen = watched("lips(tau0=0.8, every=1, refill=own-init)")
    simulation = run(method, engine, rounds=3)
    own = memory_of(simulation, "transient", "init")
    for name, count in MIDDLE.items():
        initial = set(simulation.setting.initial[name].flatten().tolist())
        assert own[name].shape == (5, *simulation.setting.initial[name].shape)
        assert len({tuple(client.flatten().tolist()) for client in own[name]}) == 5
        assert set(own[name].flatten().tolist()) <= initial
        for client in range(5):
            assert len(set(own[name][client].flatten().tolist())) > len(initial) / 3
            for round, drop in ((2, 0.8 * 2 / 3), (3, 0.8 * 1 / 3)):
                start, received = seen.start[round, client][name], seen.received[round, client][name]
                changed = start != received
                assert int(changed.sum()) == int(drop * count + 1e-9)
                assert torch.equal(start[changed], own[name][client][changed])


def test_all_layers_or_named_ones_may_be_masked():
    for pattern, expected in (
        ("all", {*MIDDLE, "stem.weight", "head.weight"}),
        ("h*|body", {"hidden.weight", "head.weight", "body.weight"}),
    ):
        method, seen = watched(f"transient(every=1, layers='{pattern}')")
        run(method, rounds=2)
        assert {name for name, tensor in seen.start[2, 0].items() if (tensor == 0).sum() > 3} - {
            "shortcut.1.bias", "scale.bias", "body.bias", "hidden.bias", "head.bias", "stem.bias",
        } == expected  # fmt: skip


BEFORE, AFTER = torch.tensor([[0.5, -0.2], [0.1, 0.4]]), torch.tensor([[0.6, -0.1], [0.1, -0.3]])
GRADIENT, AGGREGATED = torch.tensor([[1.0, -0.1], [0.5, 0.2]]), torch.tensor([[0.1, 0.9], [0.3, -0.2]])


def mask_after_training(text, seed=0):
    """Let two clients train round 1 of 3, and return the masks of round 2: tau = 0.75 * 2 / 3 = 0.5."""
    part = methods.make(text)
    model = {name: torch.zeros(2, 2, 2) for name in ("0.weight", "1.weight", "2.weight")}
    memory = part.client_memory(clients_view(THREE, 2, 0), model)
    training = training_view(
        start={"1.weight": torch.stack([BEFORE, BEFORE])},
        trained={"1.weight": torch.stack([AFTER, BEFORE * 2])},
        gradients={"1.weight": torch.stack([GRADIENT, -GRADIENT])},
    )
    model, memory = part.finish(clients_view(THREE, 2, 1, memory=memory), training)
    assert model is training.trained
    view = clients_view(THREE, 2, 2, memory=memory, seed=seed)
    aggregated = torch.stack([AGGREGATED, AGGREGATED])
    start, memory = part.start(view, Message(), {"1.weight": aggregated})
    mask = start["1.weight"] != 0
    assert torch.equal(start["1.weight"], aggregated * mask)
    return mask.int().tolist()


@pytest.mark.parametrize(
    ("criterion", "masks"),
    [
        ("update", [[[1, 0], [0, 1]], [[1, 0], [0, 1]]]),  # .06 .01 0 .21; 2 x (.25 .04 .01 .16)
        ("gradient", [[[1, 0], [1, 0]], [[1, 0], [1, 0]]]),  # .1 .09 .15 .04
        ("magnitude", [[[0, 1], [1, 0]], [[0, 1], [1, 0]]]),  # .1 .9 .3 .2
    ],
)
def test_each_criterion_by_hand(criterion, masks):
    assert mask_after_training(f"transient(tau0=0.75, every=1, criterion={criterion})") == masks


def test_magnitudes_have_no_sign():
    part = methods.make("transient(tau0=0.75, every=1, criterion=magnitude)")
    aggregated = {"1.weight": torch.tensor([[[-0.9, 0.1], [0.3, -0.2]]])}
    start, _ = part.start(clients_view(THREE, 1, 2), Message(), aggregated)
    torch.testing.assert_close(start["1.weight"], torch.tensor([[[-0.9, 0.0], [0.3, 0.0]]]))


def test_the_random_criterion_counts_exactly_and_depends_on_client_and_seed_only():
    text = "transient(tau0=0.75, every=1, criterion=random)"
    drawn = [mask_after_training(text, seed) for seed in range(20)]
    assert all(sum(map(sum, mask)) == 2 for masks in drawn for mask in masks)
    assert any(first != second for first, second in drawn)
    assert len({str(masks) for masks in drawn}) > 5
    assert mask_after_training(text, 3) == drawn[3]


def test_a_client_that_never_trained_has_no_sensitivity_and_is_not_masked():
    part = methods.make("transient(tau0=0.75, every=1)")
    model = {name: torch.zeros(2, 2, 2) for name in ("0.weight", "1.weight", "2.weight")}
    memory = part.client_memory(clients_view(THREE, 2, 0), model)
    memory |= {"trained": torch.tensor([False, True]), "score/1.weight": torch.arange(8.0).view(2, 2, 2)}
    view = clients_view(THREE, 2, 2, memory=memory)
    start, memory = part.start(view, Message(), {"1.weight": torch.ones(2, 2, 2)})
    assert start["1.weight"].tolist() == [[[1, 1], [1, 1]], [[0, 0], [1, 1]]]


@BOTH_ENGINES
def test_with_partial_participation_clients_rank_by_their_own_last_round(engine):
    method, seen = watched("transient(tau0=0.8, every=1)")
    run(method, engine, rounds=6, participation=0.4)
    late = 0
    for (round, client), start in seen.start.items():
        earlier = [one for one, other in seen.start if other == client and one < round]
        expected = seen.received[round, client]["hidden.weight"].clone()
        if earlier:
            last = max(earlier), client
            before, after = seen.start[last]["hidden.weight"], seen.trained[last]["hidden.weight"]
            order = np.argsort(((after - before) * after).abs().flatten().numpy(), kind="stable")
            expected.view(-1)[order[: int(0.8 * (7 - round) / 6 * 128)]] = 0
            late += max(earlier) < round - 1
        assert torch.equal(start["hidden.weight"], expected)
    assert late > 0


@pytest.mark.parametrize("name", ["transient", "freeze-middle"])
def test_a_model_without_middle_layers_is_told_about(name):
    layers = LayerMap.read(nn.Linear(2, 2), (2,))
    [note] = methods.make(name).notes(outlined(layers))
    assert note.startswith(f"The model has no weights in 'middle' layers, so '{name}'")
    assert not list(methods.make(name).notes(outlined(THREE, rounds=51)))


@pytest.mark.parametrize(("name", "verb"), [("transient", "mask"), ("freeze-middle", "freeze")])
def test_a_layer_with_the_weight_of_one_that_is_not_chosen_is_told_about(name, verb):
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    network[1].weight = network[0].weight
    layers = LayerMap.read(network, (2,))
    [note] = methods.make(name).notes(outlined(layers, rounds=51))
    uses = "The layer '1' uses '0.weight' of '0', which is not among the chosen layers"
    assert note == f"{uses}, so '{name}' does not {verb} it."
    assert not list(methods.make(f"{name}(layers=all)").notes(outlined(layers, rounds=51)))


@pytest.mark.parametrize(
    ("text", "rounds", "told"),
    [
        ("transient(every=5)", 5, True),  # the only event comes after the last round
        ("transient(every=5)", 6, False),
        ("transient(every=500)", 30, True),
        ("transient(every=5, schedule=released)", 1, True),
        ("transient(every=500, schedule=released)", 2, False),
        ("transient(every=500, tau0=0)", 30, False),  # nobody expects it to mask
    ],
)
def test_a_run_that_ends_before_the_first_event_is_told_about(text, rounds, told):
    notes = list(methods.make(text).notes(outlined(THREE, rounds=rounds)))
    assert len(notes) == told
    for note in notes:
        assert f"a run of {rounds} ends before a first time, so it masks nothing; give a smaller 'every'" in note


@BOTH_ENGINES
def test_the_gradient_criterion_ranks_by_the_last_minibatchs_gradient(engine):
    """Nothing else in this run asks for gradients."""
    text = "transient(tau0=0.8, every=1, criterion=gradient)"
    scores = memory_of(run(text, engine, rounds=2), "transient", "score")
    method, seen = watched(text)
    run(method, engine, rounds=2)
    for client in range(5):
        for name, count in MIDDLE.items():
            gradient, received = seen.gradients[1, client][name], seen.received[2, client][name]
            last = seen.gradients[2, client][name]
            assert last.any()
            torch.testing.assert_close(scores[name][client], last, rtol=1e-9, atol=1e-15)
            lowest = np.argsort((gradient * received).abs().flatten().numpy(), kind="stable")[: int(0.4 * count)]
            expected = received.flatten().clone()
            expected[lowest] = 0
            assert torch.equal(seen.start[2, client][name].flatten(), expected)


@pytest.mark.parametrize("name", ["lips", "freeze-middle"])
def test_layers_that_do_not_exist_are_refused_before_anything_runs(name):
    with pytest.raises(
        FedStrataError, match=r"There is no layer with weights that matches 'bdoy'. Did you mean 'body'"
    ):
        prepare(f"{name}(layers=bdoy)")
