"""Federation sensitivity, gradient variance, Hessian trace and Fisher information against slow, direct computations."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from seeing import ALL, EXPERIMENT, FORWARDS, first_round, ingredients
from torch import nn

from fedstrata.diagnostics import diagnostics
from fedstrata.diagnostics.curvature import hutchinson
from fedstrata.diagnostics.where_to_federate import cumulated_split, first_last_or_every, gradient_variance
from fedstrata.engines.probe import _signs
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.rng import client_keys, fold
from fedstrata.runs.driver import Driver


def small_model():
    """A few weights, without a kink."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.AvgPool1d(16), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def measured(round, text):
    return diagnostics.make(text).compute(round.seen, {})


def numbers(by_layer):
    return [float(value) for value in by_layer.values()]


# The split -----------------------------------------------------------------------------------------------------------


def test_the_split_is_before_the_layer_that_lifts_the_sum_most():
    assert cumulated_split([1.0, 1.0, 1.0, 9.0, 0.1], 2.0) == 3
    assert cumulated_split([1.0, 1.0, 1.0, 1.0], 2.0) == 4
    assert cumulated_split([1.0, -5.0, 0.5, 4.0], 2.0) == 3
    assert cumulated_split([-1.0, 2.0], 2.0) == 1
    assert cumulated_split([1.0, 100.0], math.inf) == 2


def test_the_first_round_and_the_last_are_due_and_others_if_asked():
    assert [round for round in range(1, 13) if first_last_or_every(round, 12, 0)] == [1, 12]
    assert [round for round in range(1, 13) if diagnostics.make("hessian(every=5)").due(round, 12)] == [1, 5, 10, 12]
    assert [round for round in range(1, 13) if diagnostics.make("fisher").due(round, 12)] == [1, 12]


# Sensitivity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", FORWARDS)
@pytest.mark.parametrize("threshold", [1.5, 30])
def test_after_one_epoch_it_is_what_player_measures_and_chooses(engine, threshold):
    """The survey of ``player`` trains one epoch from the initial model too; its curve is the sum over clients."""
    changes = {"method": f"player(threshold={threshold})", "model": "cnn", "engine": "loop"}
    driver = Driver.prepare(EXPERIMENT.with_changes(changes), ingredients())
    driver.engine.exchange(1)
    memory = driver.engine.server.memory.group("player")
    found = measured(first_round(engine, "cnn"), f"sensitivity(threshold={threshold})")
    curve = torch.tensor(numbers(found.layers["sensitivity.cumulated"]), dtype=torch.float64)
    assert torch.allclose(3 * curve, memory["curve"], rtol=1e-9)
    assert found.of_round["sensitivity.split"] == int(memory["federated"])
    marks = numbers(found.layers["sensitivity.federated"])
    assert marks == [float(place < int(memory["federated"])) for place in range(len(marks))]


def test_a_model_that_diverged_has_no_number_and_no_split_but_the_others_have():
    round = first_round("stacked")
    broken = {name: tensor.clone() for name, tensor in round.seen.trained.items()}
    broken["head.weight"][1, 0, 0] = math.inf
    seen = replace(round.seen, trained=broken)
    for text, name in (("sensitivity", "cumulated"), ("gradient-variance", "variance"), ("hessian(probes=2)", "trace")):
        diagnostic = text.split("(")[0]
        with pytest.warns(FedStrataWarning, match=f"'{diagnostic}' is not defined for every layer in round 1"):
            found = diagnostics.make(text).compute(seen, {})
        assert math.isnan(found.of_round[f"{diagnostic}.split"])
        assert all(map(math.isnan, numbers(found.layers[f"{diagnostic}.federated"])))
        values = found.clients_in_layers[f"{diagnostic}.{name}"]["head"]
        assert math.isfinite(values[0])
        assert math.isnan(values[1])


# Gradient variance ---------------------------------------------------------------------------------------------------


def test_variance_over_entries_by_hand():
    layers = [
        [torch.tensor([[[1.0, 3.0]], [[0.0, 0.0]]]), torch.tensor([[5.0], [3.0]])],
        torch.tensor([[4.0], [7.0]]),
        [],
    ]
    found = gradient_variance(layers, batched=True)
    assert torch.allclose(found, torch.tensor([[8 / 3, 0.0, 0.0], [2.0, 0.0, 0.0]]))
    with pytest.raises(FedStrataError, match="at least one tensor"):
        gradient_variance([])


@pytest.mark.parametrize("engine", FORWARDS)
def test_gradient_variance_over_parameters_is_that_of_the_loss_on_all_samples(engine):
    round = first_round(engine, small_model())
    found = measured(round, f"gradient-variance(batch_size={ALL})")
    for client in range(3):
        model, (inputs, labels) = round.module(client, training=True), round.samples(client)
        slopes = torch.autograd.grad(F.cross_entropy(model(inputs), labels), [model[2].weight, model[4].weight])
        for name, slope in zip(("2", "4"), slopes, strict=True):
            entries = slope.flatten().tolist()
            mean = sum(entries) / len(entries)
            expected = sum((entry - mean) ** 2 for entry in entries) / len(entries)
            assert float(found.clients_in_layers["gradient-variance.variance"][name][client]) == pytest.approx(
                expected, rel=1e-9
            )


@pytest.mark.parametrize("engine", FORWARDS)
def test_gradient_variance_over_samples_is_a_loop_over_samples(engine):
    """Clients of unequal size, in pieces: with a batch norm, which is used in evaluation mode."""
    torch.manual_seed(3)
    given = nn.Sequential(
        nn.Flatten(), nn.AvgPool1d(16), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)
    ).double()
    round = first_round(engine, given)
    found = measured(round, f"gradient-variance(over=samples, batch_size={ALL})")
    layers = found.layers["gradient-variance.variance"]
    means = dict.fromkeys(layers, 0.0)
    for client in range(3):
        model, (inputs, labels) = round.module(client, training=False), round.samples(client)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        for name in layers:
            weight = model[int(name)].weight
            own = torch.stack([torch.autograd.grad(loss, weight, retain_graph=True)[0].flatten() for loss in losses])
            expected = float((own - own.mean(0)).square().sum() / len(own) / weight.numel())
            told = found.clients_in_layers["gradient-variance.variance"][name][client]
            assert float(told) == pytest.approx(expected, rel=1e-9)
            means[name] += expected / 3
    assert numbers(layers) == pytest.approx(list(means.values()), rel=1e-9)


# Hessian -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-5, 5), min_size=21, max_size=21))
def test_over_all_signs_the_mean_of_the_products_is_the_trace(entries):
    """In expectation, that is, over all 64 vectors of six signs; of the diagonal alone each product is the trace."""
    matrix = torch.zeros(6, 6, dtype=torch.float64)
    matrix[tuple(torch.tril_indices(6, 6))] = torch.tensor(entries, dtype=torch.float64)
    matrix = matrix + matrix.T
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=6)), dtype=torch.float64)
    products = ((signs @ matrix) * signs).sum(1)
    trace, error = hutchinson(products)
    assert float(trace) == pytest.approx(float(matrix.trace()), abs=1e-9)
    off = float((matrix - matrix.diag().diag()).square().sum())
    assert float(error) ** 2 == pytest.approx(2 * off / 63, abs=1e-9)
    exact, none = hutchinson(((signs @ matrix.diag().diag()) * signs).sum(1)[:5])
    assert float(exact) == pytest.approx(float(matrix.trace()), abs=1e-9)
    assert float(none) == pytest.approx(0, abs=1e-9)


def test_one_probe_has_no_error():
    with pytest.raises(FedStrataError, match="at least 2"):
        hutchinson(torch.ones(3, 1))
    with pytest.raises(FedStrataError, match="probes"):
        diagnostics.make("hessian(probes=1)")


def exact_hessian(round, client, place):
    """The Hessian of the loss on all samples of a client by one layer's weights, by double differentiation."""
    model, (inputs, labels) = round.module(client, training=True), round.samples(client)
    start = model[place].weight.detach().clone()

    def loss(weight):
        names = {f"{place}.weight": weight}
        return F.cross_entropy(torch.func.functional_call(model, names, (inputs,)), labels)

    size = start.numel()
    return torch.autograd.functional.hessian(loss, start).reshape(size, size)


@pytest.mark.parametrize("engine", FORWARDS)
def test_the_hessian_times_signs_is_that_of_double_differentiation(engine):
    round = first_round(engine, small_model())
    trained = round.seen.trained
    blocks = {"2": ["2.weight"], "4": ["4.weight"]}
    found = round.seen.probe.curvature(trained, blocks, ALL, 3)
    keys = client_keys(round.ready.setting.seed, 1, range(3), "probe/signs")
    for probe in range(3):
        signs = _signs(fold(keys, probe), {name: trained[name] for [name] in blocks.values()})
        for (block, [name]), client in product(blocks.items(), range(3)):
            vector = signs[name][client].flatten()
            assert set(vector.tolist()) == {-1.0, 1.0}
            expected = vector @ exact_hessian(round, client, int(block)) @ vector
            assert float(found[block][client, probe]) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


def test_the_trace_is_the_exact_one_within_its_standard_error():
    round = first_round("stacked", small_model())
    found = measured(round, f"hessian(probes=60, batch_size={ALL})")
    means, errors = [], []
    for place, client in product((2, 4), range(3)):
        size = round.module(client, True)[place].weight.numel()
        exact = float(exact_hessian(round, client, place).trace()) / size
        trace, error = (
            float(found.clients_in_layers[f"hessian.{of}"][str(place)][client]) for of in ("trace", "error")
        )
        assert abs(trace - exact) < 3 * error
        means.append(exact / 3)
        errors.append(error)
    for place, one in (("2", slice(0, 3)), ("4", slice(3, 6))):
        error = float(found.layers["hessian.error"][place])
        assert error == pytest.approx(math.sqrt(sum(own**2 for own in errors[one])) / 3)
        assert abs(float(found.layers["hessian.trace"][place]) - sum(means[one])) < 3 * error
    fewer = measured(round, f"hessian(probes=10, batch_size={ALL})").layers["hessian.error"]
    assert all(float(fewer[name]) > float(found.layers["hessian.error"][name]) for name in fewer)


class OneWeight(nn.Module):
    """A layer of a single weight: its Hessian is a number, and diagonal."""

    def __init__(self):
        super().__init__()
        self.only = nn.Linear(1, 1, bias=False)

    def forward(self, inputs):
        output = self.only(inputs.flatten(1).mean(1, keepdim=True))
        return torch.cat([output * place for place in range(3)], 1)


def test_of_a_diagonal_hessian_every_probe_is_exact():
    round = first_round("stacked", OneWeight().double())
    found = measured(round, f"hessian(probes=2, batch_size={ALL})")
    for client in range(3):
        model, (inputs, labels) = round.module(client, True), round.samples(client)
        [slope] = torch.autograd.grad(F.cross_entropy(model(inputs), labels), model.only.weight, create_graph=True)
        [exact] = torch.autograd.grad(slope.sum(), model.only.weight)
        told = found.clients_in_layers["hessian.trace"]["only"][client]
        assert float(told) == pytest.approx(float(exact), rel=1e-9)
    assert numbers(found.layers["hessian.error"]) == [0.0]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slopes):
        return slopes


class OnceOnly(nn.Sequential):
    def forward(self, inputs):
        return Straight.apply(super().forward(inputs).tanh())


def test_an_operation_without_a_second_derivative_is_named_in_a_sentence():
    round = first_round("loop", OnceOnly(nn.Flatten(), nn.Linear(64, 3)).double(), engine="loop")
    with pytest.raises(FedStrataError, match=r"no second derivative \(.*\), so its Hessian cannot be measured; leave"):
        measured(round, "hessian(probes=2)")


# Fisher --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", FORWARDS)
def test_fisher_information_is_the_mean_square_of_single_samples_gradients(engine):
    round = first_round(engine, small_model())
    found = measured(round, f"fisher(batch_size={ALL})")
    means = {"2": 0.0, "4": 0.0}
    for client, name in product(range(3), means):
        model, (inputs, labels) = round.module(client, False), round.samples(client)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        layer = list(model[int(name)].parameters())
        slopes = [
            torch.cat([one.flatten() for one in torch.autograd.grad(loss, layer, retain_graph=True)]) for loss in losses
        ]
        expected = float(torch.stack(slopes).square().mean())
        assert float(found.clients_in_layers["fisher.mean"][name][client]) == pytest.approx(expected, rel=1e-9)
        means[name] += expected / 3
    assert numbers(found.layers["fisher.mean"]) == pytest.approx(list(means.values()))
