from __future__ import annotations

import math
import re
from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, layer_values, run, server_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.models import models
from fedstrata.testing.world import prepare

TWO = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False)), (2,))
OLD = {"0.weight": torch.tensor([[3.0, 4.0]]), "1.weight": torch.tensor([[0.0], [2.0]])}
UPDATES = {"0.weight": [[1.0, 0.0], [0.0, 1.0]], "1.weight": [[3.0, 0.0], [-3.0, 0.0]]}


seen: dict[str, dict[str, float]] = {}
"""The metrics of the golden case that was aggregated last."""


def shrunk(text, sizes=(10, 10), **changes):
    """Aggregate the golden case by a method; return the new layers as flat lists, and the factors."""
    method = Method.make(text)
    server = server_view(TWO, OLD, sizes=torch.tensor(sizes), **changes)
    server = server_view(TWO, OLD, sizes=torch.tensor(sizes), memory=method.server_memory(server), **changes)
    stacks = {name: old + torch.tensor(UPDATES[name]).view(2, *old.shape) for name, old in OLD.items()}
    new, memory = method.aggregate(server, Message(stacks))
    metrics = method.metrics(server_view(TWO, new, memory=memory))
    assert metrics.keys() == {"gamma", "tau", "r"}
    seen.update(metrics)
    return new["0.weight"].flatten().tolist(), new["1.weight"].flatten().tolist(), metrics["gamma"]


# By hand -------------------------------------------------------------------------------------------------------------


def test_each_layer_shrinks_by_how_much_clients_disagree():
    first, second, gamma = shrunk("fedavg+lws(beta=0.1)")
    assert gamma == pytest.approx({"0": 100 / 101, "1": 1.0}, abs=1e-8)
    assert first == pytest.approx([3.46534653, 4.45544554], abs=1e-6)
    assert second == [0.0, 2.0]


def test_disagreement_is_not_weighted_but_the_step_is():
    """With shares 3/4 and 1/4 tau stays .70710678; the step is (.75, .25), of length .79056942."""
    _, _, gamma = shrunk("lws(beta=0.1)", sizes=(30, 10))
    assert gamma["0"] == pytest.approx(5 / (0.1 * math.sqrt(0.5) * math.sqrt(0.625) + 5), abs=1e-8)


def test_one_factor_for_the_whole_model():
    first, second, gamma = shrunk("lws(beta=0.1, layers=model)")
    assert gamma == pytest.approx({"(model)": 0.96110286}, abs=1e-8)
    assert first == pytest.approx([3.5 * 0.96110286, 4.5 * 0.96110286], abs=1e-6)
    assert second == pytest.approx([0, 2 * 0.96110286], abs=1e-6)


def test_fixed_factors_fall_with_depth():
    first, second, gamma = shrunk("lws(layers=fixed)")
    assert gamma == {"0": 1.0, "1": 0.99}
    assert first == [3.5, 4.5]
    assert second == pytest.approx([0, 1.98])
    assert shrunk("lws(layers=fixed, fixed_step=0.4)")[2] == {"0": 1.0, "1": 0.6}
    simulation = run("lws(layers=fixed)", rounds=1)
    assert list(layer_values(simulation, "gamma", 1).values()) == pytest.approx([1.0, 0.99, 0.98, 0.97, 0.96])


def test_one_fixed_factor_for_the_whole_model():
    first, second, gamma = shrunk("lws(gamma=0.96)")
    assert gamma == {"(model)": 0.96}
    assert first == pytest.approx([3.5 * 0.96, 4.5 * 0.96])
    assert second == pytest.approx([0, 2 * 0.96])
    assert shrunk("lws(gamma=0.96, layers=model)") == (first, second, gamma)
    assert shrunk("lws(gamma=1)")[:2] == ([3.5, 4.5], [0.0, 2.0])


def test_no_fixed_factor_is_below_zero():
    assert shrunk("lws(layers=fixed, fixed_step=0.99)")[2] == pytest.approx({"0": 1.0, "1": 0.01})
    deep = LayerMap.read(nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4))), (1,))
    before = {f"{depth}.weight": [[1.0]] for depth in range(4)}
    new, gamma = aggregated("lws(layers=fixed, fixed_step=0.4)", deep, before, [before, before])
    assert gamma == pytest.approx({"0": 1.0, "1": 0.6, "2": 0.2, "3": 0.0})
    assert float(new["3.weight"]) == 0


def test_what_the_factors_come_from_is_told():
    """tau by Eq. 4: .70710678 and 3, 3.08220700 together; r by Eq. 5 is beta tau where the factor is Eq. 7's, and where
    nothing is pulled 0. The steps are (.5, .5) and none; the weights have the lengths 5 and 2.
    """
    shrunk("lws(beta=0.1)")
    assert seen["tau"] == pytest.approx({"0": 0.70710678, "1": 3.0}, abs=1e-8)
    assert seen["r"] == pytest.approx({"0": 0.070710678, "1": 0.0}, abs=1e-8)
    shrunk("lws(beta=0.1, layers=model)")
    assert seen["tau"] == pytest.approx({"(model)": 3.08220700}, abs=1e-8)
    assert seen["r"] == pytest.approx({"(model)": 0.308220700}, abs=1e-8)
    shrunk("lws(gamma=0.8)")
    assert seen["tau"] == pytest.approx({"(model)": 3.08220700}, abs=1e-8)
    assert seen["r"] == pytest.approx({"(model)": 0.2 * math.sqrt(29) / (0.8 * math.sqrt(0.5))}, abs=1e-8)
    shrunk("lws(layers=fixed, fixed_step=0.5)")
    assert seen["tau"] == pytest.approx({"0": 0.70710678, "1": 3.0}, abs=1e-8)
    assert seen["r"] == {"0": 0.0, "1": math.inf}
    shrunk("lws(beta=10, clamp=true)")
    assert seen["r"]["0"] == pytest.approx(0.2, abs=1e-8)


def test_before_the_first_round_nothing_is_shrunk():
    method = Method.make("lws")
    memory = method.server_memory(server_view(TWO, OLD))
    zeros, ones = {"0": 0.0, "1": 0.0}, {"0": 1.0, "1": 1.0}
    assert method.metrics(server_view(TWO, OLD, memory=memory)) == {"gamma": ones, "tau": zeros, "r": zeros}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lws(gamma=0.9, layers=fixed)", "gamma=0.9, one fixed factor for the whole model, and layers=fixed"),
        ("lws(gamma=0.9, layers=released)", "gamma=0.9, one fixed factor for the whole model, and layers=released"),
        ("lws(gamma=0.9, clamp=true)", "clamp=true, which bounds beta times tau, and fixed factors"),
        ("lws(layers=fixed, clamp=true)", "clamp=true, which bounds beta times tau, and fixed factors"),
        ("lws(highest=0.05)", "highest=0.05, a bound of beta times tau, which only clamp=true sets"),
        ("lws(gamma=0)", "gamma"),
        ("lws(gamma=1.1)", "gamma"),
    ],
)
def test_options_that_contradict_each_other_are_refused(text, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        Method.make(text)


def test_the_authors_defaults():
    assert asdict(methods.make("lws")) == {
        "beta": 0.1, "layers": "each", "mode": "both", "clamp": False, "highest": 0.2, "fixed_step": 0.01,
        "gamma": None,
    }  # fmt: skip


def test_the_two_terms_alone():
    gamma = 100 / 101
    regularised, _, _ = shrunk("lws(mode=reg)")
    assert regularised == pytest.approx([3.5 - (1 - gamma) * 3, 4.5 - (1 - gamma) * 4], abs=1e-6)
    shortened, _, _ = shrunk("lws(mode=opt)")
    assert shortened == pytest.approx([3 + gamma * 0.5, 4 + gamma * 0.5], abs=1e-6)


@pytest.mark.parametrize(("beta", "bounded"), [(1e-9, 0.01), (0.1, 0.1 * math.sqrt(0.5)), (10.0, 0.2)])
def test_the_released_clamp_bounds_beta_times_tau(beta, bounded):
    _, _, gamma = shrunk(f"lws(beta={beta}, clamp=true)")
    assert gamma["0"] == pytest.approx(5 / (bounded * math.sqrt(0.5) + 5), abs=1e-8)


def test_the_servers_own_step_counts():
    """With momentum 0.5 and a velocity of (1, 1) from before, the step is (1, 1) instead of (.5, .5)."""
    velocity = {"fedavgm/0.weight/velocity": torch.ones(1, 2), "fedavgm/1.weight/velocity": torch.zeros(2, 1)}
    method = Method.make("fedavgm(beta=0.5)+lws(beta=0.1)")
    server = server_view(TWO, OLD)
    server = server_view(TWO, OLD, memory={**method.server_memory(server), **velocity})
    stacks = {name: old + torch.tensor(UPDATES[name]).view(2, *old.shape) for name, old in OLD.items()}
    new, memory = method.aggregate(server, Message(stacks))
    gamma = 5 / (0.1 * math.sqrt(0.5) * math.sqrt(2) + 5)
    assert float(memory["lws/gamma/0"]) == pytest.approx(gamma, abs=1e-8)
    assert new["0.weight"].flatten().tolist() == pytest.approx([4 * gamma, 5 * gamma], abs=1e-6)
    assert memory["fedavgm/0.weight/velocity"].tolist() == [[1.0, 1.0]]


def test_entries_that_a_client_did_not_send_count_as_unchanged():
    """Client 1 sends only its first entry, unchanged: updates (1, 0) and (0, 0), so tau = .5; the step is (.5, 0)."""
    method = Method.make("lws(beta=0.1)")
    server = server_view(TWO, OLD)
    server = server_view(TWO, OLD, memory=method.server_memory(server))
    masks = torch.tensor([[[True, True]], [[True, False]]])
    replies = Message({"0.weight": torch.tensor([[[4.0, 4.0]], [[3.0, 0.0]]])}, {"0.weight": masks})
    new, memory = method.aggregate(server, replies)
    assert float(memory["lws/gamma/0"]) == pytest.approx(5 / (0.1 * 0.5 * 0.5 + 5), abs=1e-8)
    assert float(memory["lws/gamma/1"]) == 1
    assert "1.weight" not in new


# In a federation -----------------------------------------------------------------------------------------------------


def test_the_numbers_are_in_the_runs_layer_metrics():
    simulation = run("fedavg+lws(beta=0.3)", rounds=2)
    gamma, tau, r = (layer_values(simulation, metric, 2) for metric in ("gamma", "tau", "r"))
    assert gamma.keys() == tau.keys() == r.keys() == {"stem", "body", "shortcut.0", "hidden", "head"}
    assert r == pytest.approx({layer: 0.3 * value for layer, value in tau.items()}, rel=1e-6)
    assert min(tau.values()) > 0.01


@BOTH_ENGINES
def test_beta_zero_changes_nothing(engine):
    left, right = run("fedavg+lws(beta=0)", engine), run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert left.metrics.latest() == right.metrics.latest()
    assert set(layer_values(left, "gamma", 3).values()) == {1.0}


def test_beta_towards_zero_approaches_the_method_without():
    plain = run("fedavg").engine.server.model
    distances = []
    for beta in (1e-2, 1e-4, 1e-6):
        model = run(f"fedavg+lws(beta={beta})").engine.server.model
        distances.append(max(float((model[name] - plain[name]).abs().max()) for name in plain))
    assert distances[0] > 20 * distances[1] > 400 * distances[2] > 0


@BOTH_ENGINES
def test_a_convolution_shrinks_with_its_norm_and_statistics_do_not(engine):
    left, right = run("fedavg+lws(beta=5)", engine, 1), run("fedavg", engine, 1)
    gamma = layer_values(left, "gamma", 1)
    assert set(gamma) == {"stem", "body", "shortcut.0", "hidden", "head"}
    assert len(set(gamma.values())) == 5
    assert all(0 < factor < 1 for factor in gamma.values())
    for name, tensor in left.engine.server.model.items():
        layer = left.setting.layers.of(name)
        factor = gamma[layer.follows or layer.name] if name in left.setting.layers.parameter_names else 1.0
        assert torch.allclose(tensor.double(), factor * right.engine.server.model[name].double(), rtol=1e-12, atol=0)
    for name in left.setting.layers.buffer_names:
        assert torch.equal(left.engine.server.model[name], right.engine.server.model[name])


def test_with_fedbn_only_what_is_shared_counts_and_shrinks():
    left, right = run("fedbn+lws(beta=5)", rounds=1), run("fedbn", rounds=1)
    assert_same_bits(left.engine.clients().group("own"), right.engine.clients().group("own"))
    gamma = layer_values(left, "gamma", 1)
    model, before = right.engine.server.model, right.setting.initial
    assert set(gamma) == {"stem", "body", "shortcut.0", "hidden", "head"}
    sent = prepare("fedbn", epochs=1)
    message = sent.engine.central.messages(range(5), 1)[0]
    trained = torch.cat([member.answer(message, 1)[1].trained["body.weight"] for member in sent.engine.members])
    updates = (trained - before["body.weight"]).flatten(1)
    tau = float((updates - updates.mean(0)).norm(dim=1).mean())
    step, size = float((model["body.weight"] - before["body.weight"]).norm()), float(before["body.weight"].norm())
    assert gamma["body"] == pytest.approx(size / (5 * tau * step + size), rel=1e-9)


def test_layers_that_do_not_travel_keep_factor_one():
    simulation = run("player(up_to=body)+lws(beta=5)", rounds=2)
    gamma = layer_values(simulation, "gamma", 2)
    assert {name for name, factor in gamma.items() if factor == 1} == {"shortcut.0", "hidden", "head"}


# The groups of the released code -------------------------------------------------------------------------------------

NORMED = LayerMap.read(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 1)), (1,))
BEFORE = {
    "0.weight": [[3.0]], "1.weight": [4.0], "1.bias": [0.0], "1.running_mean": [0.0], "1.running_var": [3.0],
    "1.num_batches_tracked": 4, "2.weight": [[0.0]], "2.bias": [0.0],
}  # fmt: skip
AFTER = [
    {**BEFORE, "0.weight": [[4.0]], "1.num_batches_tracked": 8},
    {**BEFORE, "1.weight": [5.0], "1.num_batches_tracked": 12},
]


def aggregated(text, layers=NORMED, before=BEFORE, after=AFTER):
    method = Method.make(text)
    old = {name: torch.tensor(value) for name, value in before.items()}
    server = server_view(layers, old)
    server = server_view(layers, old, memory=method.server_memory(server))
    replies = Message({name: torch.stack([torch.tensor(one[name]) for one in after]) for name in before})
    new, memory = method.aggregate(server, replies)
    return new, method.metrics(server_view(layers, new, memory=memory))["gamma"]


def test_released_groups_put_statistics_into_the_norms_of_the_layer_after_them():
    """The first group is (3, 4, 0), moved by (1, 0, 0) and (0, 1, 0): 5 / (.1 * .5 + 5) = 100/101. The second has the
    norm 5 of the variance and the counter 4; the counter moves by 4 and 8, so tau is 2 and the step 6: 5/6.2.
    """
    new, gamma = aggregated("lws(beta=0.1, layers=released)")
    assert gamma == pytest.approx({"1": 100 / 101, "2": 5 / 6.2}, abs=1e-8)
    assert float(new["0.weight"]) == pytest.approx(3.5 * 100 / 101)
    assert float(new["1.weight"]) == pytest.approx(4.5 * 100 / 101)
    assert float(new["1.running_var"]) == pytest.approx(3 * 5 / 6.2)
    assert new["1.num_batches_tracked"].dtype is torch.int64
    assert int(new["1.num_batches_tracked"]) == 8  # 10 * 5/6.2 = 8.06


def test_by_default_statistics_are_neither_counted_nor_shrunk():
    new, gamma = aggregated("lws(beta=0.1)")
    assert gamma == pytest.approx({"0": 100 / 101, "2": 1.0}, abs=1e-8)
    assert float(new["1.running_var"]) == 3.0
    assert int(new["1.num_batches_tracked"]) == 10


def test_the_released_clamp_bounds_the_strength_of_a_group():
    _, gamma = aggregated("lws(beta=9, layers=released, clamp=true)")
    assert gamma == pytest.approx({"1": 5 / (0.2 * math.sqrt(0.5) + 5), "2": 5 / (0.2 * 6 + 5)}, abs=1e-8)
    _, gamma = aggregated("lws(beta=9, layers=released, clamp=true, highest=0.05)")
    assert gamma == pytest.approx({"1": 5 / (0.05 * math.sqrt(0.5) + 5), "2": 5 / (0.05 * 6 + 5)}, abs=1e-8)


def test_a_layer_with_its_buffers_counts_and_shrinks_those_of_its_own_norm():
    """The first layer is (3, 4, 0, 0, 3, 4), of norm 50^.5; the server's step is (.5, .5, 0, 0, 0, 6), of norm 36.5^.5,
    and clients differ from it by (.5, -.5, 0, 0, 0, -2), so that tau is 4.5^.5. The second layer does not move.
    """
    new, gamma = aggregated("lws(beta=0.1, layers=with-buffers)")
    first = math.sqrt(50) / (0.1 * math.sqrt(4.5) * math.sqrt(36.5) + math.sqrt(50))
    assert gamma == pytest.approx({"0": first, "2": 1.0}, abs=1e-8)
    assert float(new["1.running_var"]) == pytest.approx(3 * first)
    assert int(new["1.num_batches_tracked"]) == int(10 * first) == 8
    assert float(new["2.bias"]) == 0.0


@pytest.mark.parametrize("highest", [0.05, 0.2])
def test_factors_of_a_resnet20_with_its_buffers_are_those_that_the_authors_drew(highest):
    """Figure 9a: 0.85, 0.89 and 0.92 in the three stages after the first round, by 21 steps of all clients and 0.05."""
    model = models.make("resnet20").build((3, 32, 32), 10)
    layers = LayerMap.read(model, (3, 32, 32))
    old = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    method = Method.make(f"lws(beta=0.01, layers=with-buffers, clamp=true, highest={highest})")
    server = server_view(layers, old, sizes=torch.tensor([9, 1]))
    server = server_view(layers, old, sizes=torch.tensor([9, 1]), memory=method.server_memory(server))
    steps = {name: torch.tensor([23, 3]) if name.endswith("num_batches_tracked") else None for name in old}
    stacks = {name: torch.stack([old[name]] * 2) if steps[name] is None else steps[name] for name in old}
    new, memory = method.aggregate(server, Message(stacks))
    gamma = method.metrics(server_view(layers, new, memory=memory))["gamma"]
    for stage, drawn in enumerate((0.85, 0.89, 0.92)):
        factors = [value for name, value in gamma.items() if re.match(rf"stages\.{stage}\.\d\.conv", name)]
        assert len(factors) == 6
        near = all(abs(value - drawn) < 0.01 for value in factors)
        assert near if highest == 0.05 else max(factors) < drawn - 0.02


def test_what_comes_after_the_last_bias_is_left_alone():
    layers = LayerMap.read(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), (1,))
    before = {
        "0.weight": [[1.0]], "0.bias": [1.0], "1.weight": [1.0], "1.bias": [1.0], "1.running_mean": [2.0],
        "1.running_var": [2.0], "1.num_batches_tracked": 0,
    }  # fmt: skip
    after = [{**before, "1.weight": [3.0]}, {**before, "1.weight": [2.0], "1.num_batches_tracked": 50}]
    new, gamma = aggregated("lws(beta=1, layers=released)", layers, before, after)
    assert gamma.keys() == {"0", "1"}
    assert gamma["1"] < 1
    assert new["1.running_mean"].tolist() == [2.0]
    assert int(new["1.num_batches_tracked"]) == 25


def test_a_resnet20_has_the_22_groups_of_the_released_code():
    layers = LayerMap.read(models.make("resnet20").build((3, 32, 32), 10), (3, 32, 32))
    model = {name: torch.zeros(1) for name in (*layers.parameter_names, *layers.buffer_names)}
    memory = Method.make("lws(layers=released)").server_memory(server_view(layers, model))
    assert len(memory.group("lws/gamma")) == 22


@BOTH_ENGINES
def test_released_groups_shrink_far_more_in_the_first_round(engine):
    released, plain = (run(f"lws(beta=0.1{more})", engine, 1) for more in (", layers=released", ""))
    gammas = layer_values(released, "gamma", 1)
    assert min(gammas.values()) < 0.97 < 0.99 < min(layer_values(plain, "gamma", 1).values())


@pytest.mark.parametrize(
    "text", ["beta=-0.1", "layers=all", "mode=neither", "fixed_step=-0.1", "fixed_step=1", "gamma=0"]
)
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("=")[0]):
        methods.make(f"lws({text})")


def test_what_is_at_the_edge_of_its_range_is_taken():
    part = methods.make("lws(beta=0, fixed_step=0, gamma=1)")
    assert (part.beta, part.fixed_step, part.gamma) == (0, 0, 1)


def test_a_second_bias_in_a_layer_has_a_group_of_its_own():
    """An attention layer has two: the released groups are named after the layer, and after the second bias."""
    layers = LayerMap.read(Attending(), (3, 2))
    model = {name: torch.zeros(1) for name in (*layers.parameter_names, *layers.buffer_names)}
    memory = Method.make("lws(layers=released)").server_memory(server_view(layers, model))
    biases = [name for name in layers.parameter_names if "bias" in name]
    assert list(memory.group("lws/gamma")) == ["attention", *biases[1:]]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.attention(inputs, inputs, inputs, need_weights=False)[0]
