from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap
from watching import BOTH_ENGINES, clients_view, declared, layer_values, run, server_view, training_view, watched

from fedstrata.engines.forward import LoopForward, StackedForward
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods
from fedstrata.methods.sparsyfed import sparse_backward
from fedstrata.testing.world import prepare

LINEAR = LayerMap.read(nn.Linear(4, 1), (4,))
WEIGHTS = ["stem.weight", "body.weight", "shortcut.0.weight", "hidden.weight", "head.weight"]


def kept(model):
    return sum(int(model[name].count_nonzero()) for name in WEIGHTS)


# The power -----------------------------------------------------------------------------------------------------------


def test_the_power_keeps_the_sign_and_biases_are_left_alone():
    part = methods.make("sparsyfed(alpha=2)")
    roots = {"weight": torch.tensor([[[1.0, -2.0, 0.0, 3.0]]]), "bias": torch.tensor([[-3.0]])}
    for used in (part.effective(clients_view(LINEAR, 1), roots, step) for step in (0, None)):
        assert used["weight"].tolist() == [[[1.0, -4.0, 0.0, 9.0]]]
        assert used["bias"].tolist() == [[-3.0]]
    model = {"weight": torch.tensor([[1.0, -4.0, 0.0, 9.0]]), "bias": torch.tensor([-3.0])}
    assert part.initial(LINEAR, model, 0)["weight"].tolist() == [[1.0, -2.0, 0.0, 3.0]]


def test_a_weight_at_zero_has_no_gradient_and_a_large_one_a_large_one():
    part = methods.make("sparsyfed(alpha=2)")
    roots = {"weight": torch.tensor([[[1.0, -2.0, 0.0, 3.0]]], requires_grad=True), "bias": torch.zeros(1, 1)}
    part.effective(clients_view(LINEAR, 1), roots, 0)["weight"].sum().backward()
    assert roots["weight"].grad.tolist() == [[[2.0, 4.0, 0.0, 6.0]]]


@BOTH_ENGINES
def test_without_power_and_pruning_it_is_fedavg(engine):
    left = run("sparsyfed(alpha=1, sparsity=0, activations=false)", engine, 2)
    right = run("fedavg", engine, 2)
    torch.testing.assert_close(left.engine.server.model, right.engine.server.model, rtol=0, atol=1e-12)
    assert left.metrics.latest() == pytest.approx(right.metrics.latest())


@BOTH_ENGINES
def test_training_begins_at_the_common_initial_model(engine):
    """With a tiny learning rate the tested model is the initial one."""
    tiny = {"optimiser": "sgd(learning_rate=1e-12)", "rounds": 1}
    left, right = (run(method, engine, **tiny) for method in ("sparsyfed(sparsity=0)", "fedavg"))
    name = "client_after.loss.mean"
    assert left.metrics.latest()[name] == pytest.approx(right.metrics.latest()[name], rel=1e-9)
    moved = run("sparsyfed(sparsity=0)", engine, 1, optimiser="sgd(learning_rate=0.05)")
    other = run("fedavg", engine, 1, optimiser="sgd(learning_rate=0.05)")
    assert moved.metrics.latest()[name] != pytest.approx(other.metrics.latest()[name], rel=1e-6)


# Pruning -------------------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_clients_prune_to_the_largest_weights_of_the_whole_model(engine):
    method, seen = watched("sparsyfed(sparsity=0.8)")
    simulation = run(method, engine, 2)
    total = sum(simulation.setting.initial[name].numel() for name in WEIGHTS)
    for client in range(5):
        trained, last = seen.trained[2, client], seen.steps[2, client][-1]
        assert kept(trained) == int(0.2 * total + 1e-9)
        sizes = torch.cat([last[name].abs().flatten() for name in WEIGHTS])
        chosen = torch.cat([trained[name].flatten() != 0 for name in WEIGHTS])
        assert sizes[chosen].min() >= sizes[~chosen].max()
    received = seen.received[2, 0]
    for client in range(5):
        for name in WEIGHTS:  # what is zero when it comes stays zero: there is no regrowth at clients
            assert not seen.trained[2, client][name][received[name] == 0].any()


@pytest.mark.parametrize(("sparsity", "left"), [(0.5, [-5.0, 0.0, 0.0, 4.0]), (0.0, [-5.0, 1.0, -2.0, 4.0])])
def test_weights_of_either_sign_count_by_their_magnitude(sparsity, left):
    trained = {"weight": torch.tensor([[[-5.0, 1.0, -2.0, 4.0]]]), "bias": torch.ones(1, 1)}
    part = methods.make(f"sparsyfed(sparsity={sparsity})")
    model, _ = part.finish(clients_view(LINEAR, 1), training_view(trained, trained))
    assert model["weight"].flatten().tolist() == left
    assert model["bias"].item() == 1.0


def test_missing_weights_count_as_zero():
    part = methods.make("sparsyfed")
    server = server_view(LINEAR, {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}, sizes=torch.tensor([30, 10]))
    replies = Message(
        {"weight": torch.tensor([[[4.0, 4.0, 0.0, 0.0]], [[4.0, 0.0, 8.0, 0.0]]]), "bias": torch.ones(2, 1)},
        {"weight": torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])},
    )
    merged = part.merge(server, replies, part.weigh(declared(30, 10)) / 40)
    assert merged["weight"].tolist() == [[4.0, 3.0, 2.0, 0.0]]


@BOTH_ENGINES
def test_what_is_zero_does_not_travel(engine):
    simulation = run("sparsyfed(sparsity=0.9)", engine, 3)
    up, down = (simulation.metrics.series(way)[1] for way in ("bytes.up", "bytes.down"))
    dense = run("fedavg", engine, 1).metrics.series("bytes.up")[1][0]
    assert (up < 0.7 * dense).all()
    assert down[0] > 0.95 * dense
    assert (down[1:] < 0.85 * dense).all()
    message = simulation.engine.side.broadcast(simulation.engine.server, range(5), 4)
    for name in WEIGHTS:
        assert torch.equal(message.masks[name][0], simulation.engine.server.model[name] != 0)
    density = layer_values(simulation, "density", 3)
    body = simulation.engine.server.model["body.weight"]
    assert density["body"] == pytest.approx(int(body.count_nonzero()) / body.numel())


# Sparse activations --------------------------------------------------------------------------------------------------


def test_the_gradient_of_a_weight_sees_only_the_largest_inputs():
    """The weight is half zero, so of the four inputs 1, 2, -3, 4 the two largest count; the output is exact."""
    inputs = torch.tensor([[1.0, 2.0], [-3.0, 4.0]], requires_grad=True)
    weight = torch.tensor([[5.0, 0.0]], requires_grad=True)
    bias = torch.tensor([1.0], requires_grad=True)
    outputs = sparse_backward(F.linear, inputs, weight, bias)
    assert outputs.tolist() == [[6.0], [-14.0]]
    (outputs * torch.tensor([[1.0], [10.0]])).sum().backward()
    assert weight.grad.tolist() == [[-30.0, 40.0]]
    assert inputs.grad.tolist() == [[5.0, 0.0], [50.0, 0.0]]
    assert bias.grad.tolist() == [11.0]


def test_a_weight_of_zeros_sees_the_largest_input_alone():
    weight = torch.zeros(1, 3, requires_grad=True)
    sparse_backward(F.linear, torch.tensor([[1.0, 2.0, -3.0]]), weight).sum().backward()
    assert weight.grad.tolist() == [[0.0, 0.0, -3.0]]


def test_a_dense_weight_sees_everything_and_equal_inputs_stay_together():
    inputs, weight = torch.tensor([[1.0, 1.0, 1.0, 5.0]]), torch.ones(1, 4, requires_grad=True)
    sparse_backward(F.linear, inputs, weight).sum().backward()
    assert weight.grad.tolist() == [[1.0, 1.0, 1.0, 5.0]]
    half = torch.tensor([[1.0, 1.0, 0.0, 0.0]], requires_grad=True)
    sparse_backward(F.linear, inputs, half).sum().backward()
    assert half.grad.tolist() == [[1.0, 1.0, 1.0, 5.0]]


def test_each_client_of_a_stack_has_its_own_threshold():
    torch.manual_seed(0)
    images, kernels = torch.randn(3, 2, 4, 6, 6, dtype=torch.float64), torch.randn(3, 5, 4, 3, 3, dtype=torch.float64)
    for client, fraction in enumerate((0.0, 0.5, 0.9)):
        kernels[client][torch.rand(5, 4, 3, 3) < fraction] = 0

    def run_one(kernel, batch):
        return sparse_backward(F.conv2d, batch, kernel, None, 1, 1)

    stacked = kernels.clone().requires_grad_()
    vmap(run_one)(stacked, images).square().sum().backward()
    for client in range(3):
        alone = kernels[client].clone().requires_grad_()
        run_one(alone, images[client]).square().sum().backward()
        assert torch.allclose(stacked.grad[client], alone.grad, atol=1e-12)
        exact = kernels[client].clone().requires_grad_()
        F.conv2d(images[client], exact, None, 1, 1).square().sum().backward()
        assert torch.allclose(alone.grad, exact.grad) == (client == 0)


@pytest.mark.parametrize("forward", [LoopForward, StackedForward])
@pytest.mark.parametrize("training", [True, False])
def test_layers_of_a_model_are_computed_in_the_methods_way(forward, training):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
    called = []

    def note(operation, *arguments, **keywords):
        called.append(operation)
        return operation(*arguments, **keywords) + 1

    parameters = {
        name: tensor.detach()[None].repeat(2, *[1] * tensor.dim()) for name, tensor in model.named_parameters()
    }
    inputs, keys = torch.randn(2, 5, 1, 4, 4, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.int64)
    runs = forward(model)
    plain, _ = runs(parameters, {}, inputs, keys, training=training)
    changed, _ = runs(parameters, {}, inputs, keys, training=training, around={F.linear: note})
    assert torch.allclose(changed, plain + 1)
    assert len(called) == (2 if forward is LoopForward else 1)


@BOTH_ENGINES
def test_sparse_activations_matter_once_weights_are_sparse(engine):
    with_them, without = (run(f"sparsyfed(activations={word})", engine, 2) for word in ("true", "false"))
    first, second = (
        [simulation.metrics.series("train.loss")[1][round] for simulation in (with_them, without)] for round in (0, 1)
    )
    assert first[0] == pytest.approx(first[1], rel=1e-9)  # dense weights: nothing is left out
    assert second[0] != pytest.approx(second[1], rel=1e-6)


def test_personal_weights_are_pruned_and_powered_too():
    simulation = prepare("sparsyfed(sparsity=0.9)+fedper", rounds=1, epochs=1)
    simulation.step()
    assert (simulation.engine.clients().group("own")["head.weight"] == 0).any()
