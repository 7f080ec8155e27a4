from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, outlined, run, training_view, watched

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


@BOTH_ENGINES
def test_training_grows_masked_weights_back_and_local_sparsity_does_not(engine):
    shares = {}
    for local in ("false", "true"):
        method, seen = watched(f"transient(tau0=0.9, every=2, local_sparsity={local})")
        run(method, engine, rounds=4)
        zero = {name: seen.start[3, 1][name] == 0 for name in MIDDLE}
        steps = seen.steps[3, 1]
        assert len(steps) == 2
        for name, mask in zero.items():
            assert int(mask.sum()) == int(0.45 * MIDDLE[name])
            held = [bool((step[name][mask] == 0).all()) for step in [*steps, seen.trained[3, 1]]]
            assert all(held) if local == "true" else not any(held)
        assert all(torch.equal(seen.start[4, 1][name], seen.received[4, 1][name]) for name in MIDDLE)
        moved = [seen.steps[4, 1][-1][name] != seen.start[4, 1][name] for name in MIDDLE]
        shares[local] = torch.cat([one.flatten() for one in moved]).double().mean()
    assert min(shares.values()) > 0.8


def test_with_local_sparsity_masked_weights_keep_out_of_the_gradients_norm():
    part = methods.make("transient(local_sparsity=true)")
    memory = {"mask/1.weight": torch.tensor([[[True, False], [False, True]]])}
    view = clients_view(THREE, 1, memory=memory)
    slopes = {name: torch.full((1, 2, 2), 2.0) for name in ("0.weight", "1.weight")}
    changed = part.gradients(view, None, slopes)
    assert changed["0.weight"].tolist() == [[[2, 2], [2, 2]]]
    assert changed["1.weight"].tolist() == [[[2, 0], [0, 2]]]
    assert methods.make("transient").gradients(view, None, slopes) is slopes


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


def test_a_mask_ends_with_its_round():
    simulation = run("transient(every=1, local_sparsity=true)", rounds=2)
    masks = {name: mask for name, mask in simulation.engine.clients().group("memory").items() if "/mask/" in name}
    assert len(masks) == 3
    assert all(mask.all() for mask in masks.values())


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
    assert torch.equal(start["1.weight"], aggregated * memory["mask/1.weight"])
    return memory["mask/1.weight"].int().tolist()


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
    assert memory["mask/1.weight"].int().tolist() == start["1.weight"].int().tolist()
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
    assert not list(methods.make(name).notes(outlined(THREE)))


@pytest.mark.parametrize("name", ["lips", "freeze-middle"])
def test_layers_that_do_not_exist_are_refused_before_anything_runs(name):
    with pytest.raises(
        FedStrataError, match=r"There is no layer with weights that matches 'bdoy'. Did you mean 'body'"
    ):
        prepare(f"{name}(layers=bdoy)")
