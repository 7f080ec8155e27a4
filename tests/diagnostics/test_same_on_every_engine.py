"""Diagnostics that ask clients' data give the same numbers on both engines, for models of all kinds."""

from __future__ import annotations

import math

import pytest
import torch
from seeing import first_round
from torch import nn

from fedstrata.diagnostics import diagnostics
from fedstrata.engines.client import ClientSide
from fedstrata.engines.forward import StackedForward
from fedstrata.engines.operations import GPU_OPERATIONS
from fedstrata.layers import LayerMap
from fedstrata.methods import Method

ASKED = (
    "sensitivity",
    "gradient-variance",
    "gradient-variance(over=samples, batch_size=5)",
    "hessian(probes=2, batch_size=5)",
    "cka(samples=10)",
    "fisher(batch_size=5)",
)


class Attention(nn.Module):
    """PyTorch's own attention, with the batch as its second axis, a norm and dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 6)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.25)
        self.norm = nn.LayerNorm(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, images):
        rows = self.embed(images.squeeze(1)).transpose(0, 1)
        mixed = self.norm(rows + self.attention(rows, rows, rows, need_weights=False)[0])
        return self.head(self.drop(mixed).mean(0))


class Recurrent(nn.Module):
    """A recurrent layer gives its outputs and its state."""

    def __init__(self):
        super().__init__()
        self.reader, self.head = nn.RNN(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, images):
        return self.head(self.reader(images.squeeze(1))[0][:, -1])


def batch_norm_and_dropout():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(27, 3),
    ).double()


def attention():
    torch.manual_seed(0)
    return Attention().double()


MODELS = {
    "cnn": "cnn(norm=group)",
    "vit": "vit(patch=4, width=8, depth=1, heads=2)",
    "batch norm and dropout": batch_norm_and_dropout,
    "attention": attention,
}


@pytest.mark.parametrize("model", MODELS)
def test_both_engines_measure_the_same(model):
    given = MODELS[model]
    loop, stacked = (
        first_round(engine, given if isinstance(given, str) else given()) for engine in ("loop", "stacked")
    )
    for text in ASKED:
        diagnostic = diagnostics.make(text)
        ours, theirs = (diagnostic.compute(round.seen, {}) for round in (loop, stacked))
        assert ours.of_round == theirs.of_round
        for one, other in ((ours.layers, theirs.layers), (ours.clients_in_layers, theirs.clients_in_layers)):
            assert one.keys() == other.keys()
            assert set(one) | set(ours.of_round) <= set(diagnostic.quantities)
            for quantity, layers in one.items():
                assert layers.keys() == other[quantity].keys()
                for layer, value in layers.items():
                    value, same = (torch.as_tensor(of, dtype=torch.float64) for of in (value, other[quantity][layer]))
                    assert torch.isfinite(value).all(), (text, quantity, layer)
                    assert torch.allclose(value, same, rtol=1e-9, atol=1e-13), (text, quantity, layer)


def test_a_recurrent_layer_is_measured_by_the_engine_that_can_run_it():
    round = first_round("loop", Recurrent().double(), engine="loop")
    for text in ASKED:
        found = diagnostics.make(text).compute(round.seen, {})
        for layers in found.layers.values():
            assert list(layers) == ["reader", "head"]
            assert not any(math.isnan(value) for value in layers.values())


def test_what_was_measured_changed_nothing():
    round = first_round("stacked", batch_norm_and_dropout())
    before = {name: tensor.clone() for name, tensor in round.seen.trained.items()}
    state = torch.random.get_rng_state()
    for text in ASKED:
        diagnostics.make(text).compute(round.seen, {})
    assert torch.equal(state, torch.random.get_rng_state())
    for name, tensor in round.seen.trained.items():
        assert torch.equal(tensor, before[name])
        assert not tensor.requires_grad
    again = first_round("stacked", batch_norm_and_dropout()).seen.trained
    assert all(torch.equal(tensor, again[name]) for name, tensor in round.seen.trained.items())


def test_operations_without_second_derivatives_give_way_to_those_that_have_some():
    """What replaces convolutions and norms on a GPU can be differentiated once."""
    round = first_round("stacked", batch_norm_and_dropout())
    setting, blocks = round.ready.setting, {"0": ["0.weight"], "6": ["6.weight"]}
    forward = StackedForward(round.ready.model, GPU_OPERATIONS, setting.head)
    replaced = ClientSide(setting, forward, round.ready.data).probe(range(3), 1)
    for block, expected in round.seen.probe.curvature(round.seen.trained, blocks, 5, 2).items():
        found = replaced.curvature(round.seen.trained, blocks, 5, 2)[block]
        assert torch.allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("method", ["fedpm", "feddrop", "sparsyfed"])
@pytest.mark.parametrize("diagnostic", ["sensitivity", "gradient-variance", "hessian", "cka", "fisher"])
def test_methods_that_compute_the_models_weights_from_others_are_refused(diagnostic, method):
    made = Method.make(method)
    reason = diagnostics.make(diagnostic).unfit(made, first_layers())
    assert reason == f"with '{method}' the model does not run with the weights that are trained"
    assert diagnostics.make(diagnostic).unfit(Method.make("fedbn+fedprox"), first_layers()) is None


def first_layers():
    return LayerMap.read(nn.Linear(3, 2), (3,))
