"""What methods with masks share: training in stretches, masks in memory and in messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    Attending,
    assert_same_bits,
    attending,
    clients_view,
    layer_values,
    memory_of,
    outlined,
    run,
    server_view,
    watched,
)

from fedstrata.layers import LayerMap
from fedstrata.methods import Facts, Message, Method, Part, Touches, methods
from fedstrata.methods.mechanisms.masking import (
    MovingMask,
    common_random_masks,
    divided_at,
    epoch_ends,
    keep,
    layer_densities,
    left_out,
    mean_with_zeros,
    random_masks,
    send_under,
)
from fedstrata.stack import clone
from fedstrata.testing.world import prepare

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Divided(Part):
    """Does nothing but to divide local training."""

    name: ClassVar[str] = "divided"
    facts: ClassVar[Facts] = Facts("test", "none")
    touches: ClassVar[Touches] = Touches()

    cuts: tuple[float, ...] = (0.5,)

    def phases(self, clients):
        return divided_at(self.cuts)


def method_of(part: Part) -> Method:
    return Method("fedavg+divided", (part,))


# Training in stretches -----------------------------------------------------------------------------------------------


@BOTH_ENGINES
@pytest.mark.parametrize("cuts", [(0.5,), (0.25, 0.5, 0.75), (0.01,), (0.99,)])
@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 2, "optimiser": "sgd(momentum=0.9, keep=true)", "participation": 0.6},
        {"steps": 3, "optimiser": "adam(learning_rate=0.01)"},
        {"epochs": 1, "batch_size": 64},
    ],
    ids=["epochs", "steps", "one step each"],
)
def test_training_in_stretches_is_training_to_the_bit(engine, cuts, changes):
    whole = run("fedavg", engine, 2, chunk=2, **changes)
    parts = run(method_of(Divided(cuts)), engine, 2, chunk=2, **changes)
    assert_same_bits(whole.engine.server.model, parts.engine.server.model)
    assert_same_bits(whole.engine.clients().group("optimiser"), parts.engine.clients().group("optimiser"))
    losses = [simulation.metrics.series("train.loss")[1] for simulation in (whole, parts)]
    assert torch.isfinite(torch.tensor(losses[1])).all()


@BOTH_ENGINES
def test_between_two_stretches_model_and_memory_may_change(engine):
    calls = []

    class Changing(Divided):
        def client_memory(self, clients, model):
            return {"count": torch.zeros_like(clients.sizes)}

        def phases(self, clients):
            first, *others = super().phases(clients)
            return first, *(replace(phase, before=partial(self.change, place)) for place, phase in enumerate(others))

        def change(self, number, clients, model):
            calls.append((clients.round, number))
            changed = {**model, "head.bias": torch.full_like(model["head.bias"], 7.0)}
            return changed, {"count": clients.memory["count"] + number + 1}

        def gradients(self, clients, step, gradients):
            assert int(clients.memory["count"][0]) == {0.0: 0, 0.4: 1, 0.8: 3}[step.phase.span[0]]
            return {name: gradient for name, gradient in gradients.items() if name != "head.bias"}

    simulation = prepare(method_of(Changing((0.4, 0.8))), engine, epochs=2)
    simulation.step()
    assert set(calls) == {(1, 0), (1, 1)}
    assert simulation.engine.clients().group("memory")["divided/count"].tolist() == [3] * 5
    assert simulation.engine.server.model["head.bias"].tolist() == pytest.approx([7.0] * 10)


def test_a_mask_may_change_after_each_epoch_but_the_last():
    assert epoch_ends(1) == [0.5]
    assert epoch_ends(5) == [0.2, 0.4, 0.6, 0.8]
    assert [phase.span for phase in divided_at([0.2, 0.6])] == [(0.0, 0.2), (0.2, 0.6), (0.6, 1.0)]
    assert [phase.continues for phase in divided_at([0.2, 0.6])] == [False, True, True]


# Masks ---------------------------------------------------------------------------------------------------------------


def test_what_is_not_kept_is_zero_even_where_training_diverged():
    kept = keep(
        {"a": torch.tensor([float("nan"), 2.0, float("inf")]), "b": torch.tensor([5])},
        {"a": torch.tensor([False, True, False])},
    )
    assert kept["a"].tolist() == [0.0, 2.0, 0.0]
    assert kept["b"].tolist() == [5]


def test_masks_on_a_message_meet_those_before_them():
    message = Message({"a": torch.tensor([[1.0, 2.0, 3.0]])}, {"a": torch.tensor([[True, True, False]])})
    sent = send_under(message, {"a": torch.tensor([[False, True, True]]), "other": torch.tensor([[True]])})
    assert sent.tensors["a"].tolist() == [[0.0, 2.0, 0.0]]
    assert sent.masks["a"].tolist() == [[False, True, False]]
    assert "other" not in sent.masks


def test_each_client_draws_its_own_mask_wherever_it_is_drawn():
    shapes = {"a": torch.Size((4, 5)), "b": torch.Size((10,))}
    everybody = random_masks(shapes, 0.7, 3, tuple(range(6)), CPU)
    some = random_masks(shapes, 0.7, 3, (4, 1), CPU)
    for name in shapes:
        assert torch.equal(everybody[name][[4, 1]], some[name])
    kept = sum(masks.flatten(1).sum(1) for masks in everybody.values())
    assert kept.tolist() == [9] * 6
    assert len({tuple(row.flatten().tolist()) for row in everybody["a"]}) == 6
    other = random_masks(shapes, 0.7, 4, tuple(range(6)), CPU)
    assert not torch.equal(other["a"], everybody["a"])


def test_one_random_mask_for_everybody():
    tensors = {"a": torch.zeros(4, 5), "b": torch.zeros(10)}
    first, again = common_random_masks(tensors, 0.5, 3), common_random_masks(tensors, 0.5, 3)
    assert_same_bits(first, again)
    assert sum(int(mask.sum()) for mask in first.values()) == 15
    assert first["a"].shape == (4, 5)


def test_missing_weights_count_as_zero_if_asked():
    replies = Message(
        {"w": torch.tensor([[2.0, 4.0], [0.0, 8.0]]), "part/extra": torch.ones(2)},
        {"w": torch.tensor([[True, True], [False, True]])},
    )
    server = server_view(None, {"w": torch.zeros(2)})
    merged = mean_with_zeros(server, replies, torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert merged.keys() == {"w"}
    assert merged["w"].tolist() == [0.5, 7.0]


def test_masks_of_a_broadcast_are_taken_over_by_each_client():
    memory = {"mask/w": torch.ones(3, 2, dtype=torch.bool), "else": torch.zeros(3)}
    message = Message({"w": torch.zeros(1, 2)}, {"w": torch.tensor([[True, False]]), "v": torch.tensor([[True]])})
    model, taken = MovingMask().start(clients_view(LayerMap(()), 3, memory=memory), message, {"w": torch.ones(3, 2)})
    assert model["w"].tolist() == [[1.0, 0.0]] * 3
    assert taken.keys() == memory.keys()
    assert taken["mask/w"].tolist() == [[True, False]] * 3
    taken["mask/w"][0] = False  # a copy of its own, which can be written into
    assert taken["mask/w"].tolist()[1] == [True, False]


def test_a_layers_density_is_over_all_its_masks_and_clients():
    layers = LayerMap.read(nn.Linear(3, 1), (3,))
    masks = {
        "weight": torch.tensor([[[True, False, False]], [[True, True, False]]]),
        "bias": torch.tensor([[True], [False]]),
    }
    assert layer_densities(layers, masks) == {layers.layers[0].name: 0.5}
    assert layer_densities(layers, {}) == {}


# Every method with masks ---------------------------------------------------------------------------------------------


def outside(model, masks, client):
    """Find what is not zero outside of a client's masks."""
    return [name for name, mask in masks.items() if model[name][~mask[client]].any()]


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("random-k(sparsity=0.6)", "random-k"),
        ("random-k(scope=all)+fedprox+lws", "random-k"),
        ("subfedavg(accuracy=0, rate=0.3)", "subfedavg"),
        ("flash-spdst(sparsity=0.8, first_epochs=2)+fedavgm", "flash-spdst"),
        ("flash-jmwst(sparsity=0.7, first_epochs=2, every=2)+fedbn", "flash-jmwst"),
    ],
)
def test_masked_weights_are_zero_at_every_step(engine, text, part):
    """Training begins under the mask that the server knows; one that moves meanwhile holds at the end."""
    method, seen = watched(text)
    optimiser = "sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.1, keep=true)"
    simulation = prepare(method, engine, 2, optimiser=optimiser, rounds=3, epochs=2)
    for round in (1, 2, 3):
        simulation.engine.exchange(round)
        seen.steps.clear()  # those of a survey
        known = clone(simulation.engine.server.memory.group(f"{part}/mask"))
        if "flash" in part:
            known = {name: mask.expand(5, *mask.shape) for name, mask in known.items()}
        simulation.engine.round(round, range(5), evaluate=False)
        after = clone(memory_of(simulation, part, "mask"))
        moves = part == "flash-jmwst" and round in (1, 3)
        for client in range(5):
            steps = seen.steps[round, client]
            assert not outside(seen.start[round, client], known, client)
            for model in steps[: len(steps) // 2 if moves else None]:
                assert not outside(model, known, client)
            if moves:
                assert not any(outside(model, after, client) for model in steps[len(steps) // 2 :])
                assert outside(steps[-1], known, client)
        assert any((~mask).any() for mask in after.values())


@pytest.mark.parametrize("name", ["random-k", "top-k", "subfedavg", "flash-spdst", "sparsyfed", "fedpm"])
def test_a_model_without_such_weights_is_told_about(name):
    layers = LayerMap.read(nn.Sequential(nn.BatchNorm1d(3)), (3,))
    [note] = methods.make(name).notes(outlined(layers))
    assert note.startswith("The model has no convolution or linear weights, so ")
    assert f"'{name}'" in note


# Layers with several weights -----------------------------------------------------------------------------------------

ATTENDING = LayerMap.read(Attending(), (1, 8, 8))
MATRICES = {
    "patches.weight", "attention.in_proj_weight", "attention.out_proj.weight", "mixing.weight", "head.weight"
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::fedstrata.errors.FedStrataWarning")  # of what stays dense, and of one round
@BOTH_ENGINES
@pytest.mark.parametrize("name", ["ssfl", "random-k", "feddst", "subfedavg", "flash-spdst", "sparsyfed"])
def test_all_projections_of_an_attention_are_masked_and_a_weight_of_two_layers_once(name, engine):
    text = {"feddst": "feddst(sparsity=0.5)"}.get(name, name)
    simulation = attending(text, engine, rounds=1)
    simulation.step()
    held = memory_of(simulation, name, "mask")
    assert held.keys() == MATRICES or name == "sparsyfed"
    densities = layer_values(simulation, "density", 1)
    assert densities.keys() == {"patches", "attention", "mixing", "head"}
    if name == "subfedavg":  # prunes late, or never
        return
    for matrix in ("attention.in_proj_weight", "attention.out_proj.weight"):
        assert not simulation.engine.server.model[matrix].all() or name == "random-k"
    assert densities["attention"] < 1


@pytest.mark.parametrize("name", ["ssfl", "random-k", "feddst", "subfedavg", "flash-spdst", "sparsyfed"])
def test_what_stays_dense_is_said(name):
    note = f"'{name}' leaves 'positions' dense, outside the model's layers with weights."
    assert note in methods.make(name).notes(outlined(ATTENDING))


def test_what_is_always_sent_whole_is_said():
    [note] = methods.make("top-k").notes(outlined(ATTENDING))
    assert note == "'top-k' always sends 'positions' whole, outside the model's layers with weights."


@pytest.mark.parametrize("text", ["ssfl(scope=all)", "random-k(scope=all)", "dispfl"])
def test_where_everything_is_masked_nothing_is_said(text):
    assert not list(methods.make(text).notes(outlined(ATTENDING)))


def test_many_that_stay_dense_are_counted():
    assert left_out(ATTENDING, MATRICES - {"head.weight"}) == "'positions', 'head.weight'"
    assert left_out(ATTENDING, {"mixing.weight"}) == (
        "'positions', 'patches.weight', 'attention.in_proj_weight' and 2 more"
    )
    assert left_out(ATTENDING, {*MATRICES, "positions"}) == ""
