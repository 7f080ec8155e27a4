"""Sparse fine-tuning: two stages, the Fisher information by hand, and frozen entries that stay bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from watching import BOTH_ENGINES, clients_view, layer_values, run, server_view

from fedstrata.engines.client import ClientSide
from fedstrata.engines.probe import DataProbe
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.functional import scaled_rounds, select
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods
from fedstrata.stack import repeat
from fedstrata.testing.world import TinyNet, digits, prepare

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))
HEAD = sorted(LAYERS.head_names)
BACKBONE = [name for name in LAYERS.parameter_names if name not in LAYERS.head_names]
QUICK = "sparse-ft(head_rounds=1, sparsity=0.3, calibration_rounds=2, calibration_clients=0.4, batch_size=4)"


def probe_of(simulation, ids):
    engine = simulation.engine
    side = engine.members[0].side if hasattr(engine, "members") else engine.client_side
    assert isinstance(side, ClientSide)
    return side.probe(ids, 2)


@BOTH_ENGINES
@pytest.mark.parametrize("kind", ["sample", "batch"])
def test_the_fisher_information_is_that_of_plain_autograd(engine, kind):
    simulation = prepare("sparse-ft", engine)
    setting, data = simulation.setting, digits()
    probe = probe_of(simulation, [0, 3])
    estimates = probe.fisher(repeat(setting.initial, 2), BACKBONE, batch_size=4, batches=2, kind=kind)
    model = TinyNet().double().eval()
    for row, client in enumerate([0, 3]):
        batches = [batch.positions[0] for batch in data_batches(probe, client)]
        expected = {name: torch.zeros_like(setting.initial[name]) for name in BACKBONE}
        for positions in batches:
            groups = [positions] if kind == "batch" else list(positions[:, None])
            for group in groups:
                leaves = {name: setting.initial[name].clone().requires_grad_() for name in BACKBONE}
                inputs = probe.trainer.data.make(group[None], None)[0][0]
                outputs = functional_call(model, {**setting.initial, **leaves}, (inputs,))
                loss = torch.nn.functional.cross_entropy(outputs, data.labels[group])
                for name, gradient in zip(BACKBONE, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    expected[name] += gradient.square() / len(groups) / len(batches)
        for name in BACKBONE:
            assert torch.allclose(estimates[name][row], expected[name], rtol=1e-9, atol=1e-15), name


def data_batches(probe, client):
    alone = DataProbe(probe.trainer, type(probe.clients)(**{**vars(probe.clients), **one(probe.clients, client)}))
    return list(alone._plain(4, 2))


def one(clients, client):
    row = clients.ids.index(client)
    return {
        "ids": (client,), "sizes": clients.sizes[row : row + 1], "label_counts": clients.label_counts[row : row + 1],
    }  # fmt: skip


def test_labels_drawn_from_the_model_follow_its_predictions():
    """A model that is sure of one class draws that class, whatever the true label is."""
    simulation = prepare("sparse-ft", "stacked")
    sure = {name: torch.zeros_like(tensor) for name, tensor in simulation.setting.initial.items()}
    sure["head.bias"][4] = 50.0
    probe = probe_of(simulation, [1])
    sampled = probe.fisher(repeat(sure, 1), ["head.bias"], batch_size=8, batches=1, kind="sampled-label")
    true = probe.fisher(repeat(sure, 1), ["head.bias"], batch_size=8, batches=1, kind="sample")
    assert sampled["head.bias"].abs().max() < 1e-12  # p(y) = 1 for the label drawn: no gradient
    assert true["head.bias"].max() > 0.5


def test_estimates_are_averaged_over_clients_and_summed_over_rounds():
    part = methods.make("sparse-ft(head_rounds=0, sparsity=0.5, calibration_rounds=2)")
    layers = LayerMap.read(torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2)), (2,))
    model = {"0.weight": torch.tensor([[1.0, 2.0]]), "1.weight": torch.zeros(2, 1), "1.bias": torch.zeros(2)}
    [exchange] = part.exchanges()
    view = server_view(layers, model, memory=part.server_memory(server_view(layers, model)))
    first = Message({"0.weight": torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])})
    new, memory = exchange.conclude(view, first)
    assert new == {}
    assert memory["fisher/0.weight"].tolist() == [[2.0, 0.0]]
    assert exchange.announce(server_view(layers, model, memory=memory)) == Message()
    _, memory = exchange.conclude(
        server_view(layers, model, memory=memory), Message({"0.weight": torch.tensor([[[0.0, 5.0]], [[0.0, 7.0]]])})
    )
    assert memory["mask/0.weight"].tolist() == [[True, False]]  # the least sensitive: 2 against 6
    assert not any(name.startswith("fisher/") for name in memory)


@pytest.mark.parametrize("rule", ["lowest-magnitude", "highest-magnitude", "random"])
def test_other_rules_need_no_estimates(rule):
    [exchange] = methods.make(f"sparse-ft(head_rounds=0, sparsity=0.3, rule={rule})").exchanges()
    assert [exchange.due(round, 10, joining=False) for round in (1, 2)] == [1, 0]
    assert exchange.survey(clients_view(LAYERS, 1), {}) == Message()
    simulation = run(f"sparse-ft(head_rounds=1, sparsity=0.3, rule={rule})", rounds=2)
    initial = {name: simulation.setting.initial[name] for name in BACKBONE}
    expected = select(initial, 0.3, rule, seed=7)
    for name in BACKBONE:
        assert torch.equal(simulation.engine.server.memory[f"sparse-ft/mask/{name}"], expected[name])


@BOTH_ENGINES
def test_frozen_entries_stay_bit_for_bit_and_the_rest_moves(engine):
    simulation = run(QUICK, engine, rounds=3, precision="fp32")  # weight decay and momentum are on
    server, initial = simulation.engine.server, simulation.setting.initial
    trained = total = 0
    for name in BACKBONE:
        mask = server.memory[f"sparse-ft/mask/{name}"]
        assert torch.equal(server.model[name][~mask], initial[name][~mask])
        trained, total = trained + int(mask.sum()), total + mask.numel()
    assert trained == total - int(0.3 * total)
    moved = torch.cat(
        [(server.model[name] != initial[name])[server.memory[f"sparse-ft/mask/{name}"]] for name in BACKBONE]
    )
    assert moved.double().mean() > 0.9
    assert sum(layer_values(simulation, "density", 3).values()) > 0


def test_the_head_moves_in_stage_one_only_and_the_backbone_in_stage_two_only():
    simulation = prepare(QUICK, rounds=3)
    models = [simulation.engine.server.model]
    for _ in range(3):
        simulation.step()
        models.append(simulation.engine.server.model)
    for before, after, moving in ((0, 1, HEAD), (1, 2, BACKBONE), (2, 3, BACKBONE)):
        for name in LAYERS.parameter_names:
            assert torch.equal(models[before][name], models[after][name]) == (name not in moving), name


def test_only_what_moves_travels():
    simulation = run(QUICK, rounds=3)
    up = simulation.metrics.series("bytes.up")[1]
    head = 4 * (simulation.setting.initial["head.weight"].numel() + simulation.setting.initial["head.bias"].numel())
    whole = sum(4 * simulation.setting.initial[name].numel() for name in BACKBONE)
    dense = run("fedavg", rounds=1).metrics.series("bytes.up")[1][0]
    assert up[0] < dense - 5 * whole  # five clients, float64: stage one saves the backbone
    assert up[0] > 5 * 2 * head
    assert up[2] < dense


def test_clients_that_missed_the_last_head_get_it_with_the_mask():
    simulation = run(QUICK, rounds=2, participation=0.4)
    head = simulation.engine.server.model["head.weight"]
    for member in simulation.engine.members:
        assert torch.equal(member.state["memory/sparse-ft/head/head.weight"][0], head)


def test_the_global_model_is_tested_although_most_of_it_never_travels():
    assert "global.accuracy" in run(QUICK, rounds=3).metrics.latest()


def test_a_model_without_rounds_for_its_head_is_pointed_out():
    with pytest.warns(FedStrataWarning, match="head_rounds=0"):
        prepare("sparse-ft(head_rounds=0)")


def test_scaled_rounds_keep_the_budget():
    assert [scaled_rounds(steps) for steps in (4, 8, 16, 1000)] == [200, 100, 50, 1]
    with pytest.raises(FedStrataError, match="steps"):
        scaled_rounds(0)


def test_parts_that_would_undo_it_are_refused():
    for other in ("ssfl", "player", "lips"):
        with pytest.raises(FedStrataError, match="cannot be combined"):
            prepare(f"sparse-ft+{other}")
