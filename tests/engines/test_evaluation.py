from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from federations import federation, samples, split_by_size
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedstrata.data.split import Parts
from fedstrata.engines import evaluation
from fedstrata.engines.evaluation import Evaluator, Scores, means_of_parts
from fedstrata.engines.forward import LoopForward, StackedForward

ENGINES = pytest.mark.parametrize("engine", [LoopForward, StackedForward])
SURE, UNSURE = math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))
"""The loss of a logit of one for the right class, and for the wrong one, against zero."""

IDENTITY = torch.eye(2, dtype=torch.float64)
OPPOSITE = IDENTITY.flip(0)


def toy(test, everywhere=()):
    """Six samples: the first coordinate says class 0, the second class 1; samples 2 and 5 are labelled wrongly."""
    inputs = torch.tensor([[1, 0], [0, 1], [1, 0], [1, 0], [0, 1], [0, 1], [1, 0], [0, 1], [1, 0]], dtype=torch.float64)
    dataset = samples(9, inputs, [0, 1, 1, 0, 1, 0, 0, 1, 0], test=everywhere)
    return federation(nn.Linear(2, 2, bias=False), dataset, split_by_size([1] * len(test), test))


@ENGINES
def test_accuracy_and_loss_by_hand(engine):
    world = toy([[0, 1, 2], [3, 5], [4]])
    models = {"weight": torch.stack([IDENTITY, IDENTITY, OPPOSITE])}
    scores = Evaluator(world.setting, world.data).own_models(engine(world.model), models, [0, 1, 2])
    assert scores.clients == (0, 1, 2)
    assert scores.accuracy == pytest.approx([2 / 3, 1 / 2, 0])
    assert scores.loss == pytest.approx([(2 * SURE + UNSURE) / 3, (SURE + UNSURE) / 2, UNSURE], abs=1e-12)
    assert scores.accuracy.dtype == scores.loss.dtype == np.float64


@ENGINES
def test_clients_are_tested_as_if_alone_in_any_order(engine):
    world = toy([[0, 1, 2], [3, 5], [4]])
    evaluator = Evaluator(world.setting, world.data)
    models = {"weight": torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    order = [2, 0, 1]
    together = evaluator.own_models(engine(world.model), {"weight": models["weight"][order]}, order)
    assert together.clients == (2, 0, 1)
    for row, client in enumerate(order):
        alone = evaluator.own_models(engine(world.model), {"weight": models["weight"][client][None]}, [client])
        assert together.accuracy[row] == alone.accuracy[0]
        assert together.loss[row] == pytest.approx(alone.loss[0], abs=1e-12)


@ENGINES
@pytest.mark.filterwarnings("ignore:Clients without test samples")
def test_clients_without_test_samples_are_left_out(engine):
    world = toy([[], [3, 5], [], [4]])
    evaluator = Evaluator(world.setting, world.data)
    models = {"weight": torch.stack([OPPOSITE, IDENTITY, OPPOSITE, IDENTITY])}
    scores = evaluator.own_models(engine(world.model), models, [0, 1, 2, 3])
    assert scores.clients == (1, 3)
    assert scores.accuracy.tolist() == [0.5, 1.0]
    nobody = evaluator.own_models(engine(world.model), {"weight": IDENTITY[None]}, [2])
    assert (nobody.clients, len(nobody.accuracy), len(nobody.loss)) == ((), 0, 0)
    common, everywhere = evaluator.common_model(engine(world.model), {"weight": IDENTITY})
    assert common.clients == (1, 3)
    assert common.accuracy.tolist() == [0.5, 1.0]
    assert everywhere == {}


@ENGINES
def test_a_common_model_is_tested_everywhere(engine):
    world = toy([[0, 1, 2], [3, 5, 0], [4]], everywhere=[5, 7, 8])
    scores, everywhere = Evaluator(world.setting, world.data).common_model(engine(world.model), {"weight": IDENTITY})
    assert scores.clients == (0, 1, 2)
    assert scores.accuracy == pytest.approx([2 / 3, 2 / 3, 1])
    assert scores.loss == pytest.approx([(2 * SURE + UNSURE) / 3, (2 * SURE + UNSURE) / 3, SURE], abs=1e-12)
    expected = {"global.accuracy": 2 / 3, "global.loss": (2 * SURE + UNSURE) / 3}
    assert everywhere == pytest.approx(expected, abs=1e-12)


def test_without_any_test_samples_there_is_nothing_to_say():
    world = toy([[], []])
    scores, everywhere = Evaluator(world.setting, world.data).common_model(
        LoopForward(world.model), {"weight": IDENTITY}
    )
    assert scores.clients == ()
    assert everywhere == {}


@pytest.mark.parametrize("at_once", [1, 3, 10**6])
@ENGINES
@pytest.mark.filterwarnings("ignore:Clients without test samples")
def test_common_and_own_models_agree_however_the_samples_are_divided(engine, at_once, monkeypatch):
    monkeypatch.setattr(evaluation, "_SAMPLES_AT_ONCE", at_once)
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 3))
    test = [list(range(10, 30)), [11, 15], list(range(20, 37)), []]
    dataset = samples(40, test=range(25, 40))
    world = federation(network, dataset, split_by_size([2, 3, 2, 3], test))
    evaluator = Evaluator(world.setting, world.data)
    model = {
        name: tensor + 0.1 if tensor.is_floating_point() else tensor for name, tensor in world.setting.initial.items()
    }
    common, everywhere = evaluator.common_model(engine(world.model), model)
    stack = {name: torch.stack([tensor] * 4) for name, tensor in model.items()}
    own = evaluator.own_models(engine(world.model), stack, range(4))
    assert common.clients == own.clients == (0, 1, 2)
    assert common.accuracy == pytest.approx(own.accuracy, abs=1e-12)
    assert common.loss == pytest.approx(own.loss, abs=1e-12)
    world.model.load_state_dict(model)
    with torch.no_grad():
        outputs = world.model.eval()(dataset.inputs[dataset.test])
    loss = nn.functional.cross_entropy(outputs, dataset.labels[dataset.test])
    accuracy = (outputs.argmax(1) == dataset.labels[dataset.test]).double().mean()
    expected = {"global.accuracy": float(accuracy), "global.loss": float(loss)}
    assert everywhere == pytest.approx(expected, abs=1e-12)


def test_join():
    first = Scores((3, 1), np.array([0.5, 1.0]), np.array([2.0, 3.0]))
    second = Scores((), np.empty(0), np.empty(0))
    third = Scores((0,), np.array([0.25]), np.array([4.0]))
    joined = Scores.join([first, second, third])
    assert joined.clients == (3, 1, 0)
    assert joined.accuracy.tolist() == [0.5, 1.0, 0.25]
    assert joined.loss.tolist() == [2, 3, 4]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 9))
def test_means_over_many_clients_are_to_the_bit_those_of_each(sizes, seed):
    chance = np.random.default_rng(seed)
    values = chance.random(50) * 10.0 ** chance.integers(-6, 6, 50)
    places = [chance.integers(0, 50, size) for size in sizes]
    clients = chance.permutation(len(sizes))
    wanted = [values[places[client]].mean() for client in clients]
    assert means_of_parts(values, Parts.of(places), clients).tolist() == wanted
