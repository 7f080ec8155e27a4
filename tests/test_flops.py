"""How many operations a model takes, and what local training costs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedstrata.engines.engine import pack, unpack
from fedstrata.flops import Cost, Flops, zero_in_both
from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.methods.mechanisms.layer_choice import weights_of
from fedstrata.models import models
from fedstrata.stack import clone
from fedstrata.testing.world import SIZES, TinyNet, prepare

TINY = {
    "stem.weight": 36 * 64, "body.weight": 144 * 64, "shortcut.0.weight": 16 * 64, "hidden.weight": 128,
    "head.weight": 80,
}  # fmt: skip
"""The multiplications of the small model by hand: its kernels at 8 x 8 places, and its linear layers."""
FORWARD = 2 * sum(TINY.values())


# The forward pass -----------------------------------------------------------------------------------------------------


def test_the_small_model_by_hand():
    flops = Flops.read(TinyNet(), (1, 8, 8))
    assert flops.weights == {name: 2 * count for name, count in TINY.items()}
    assert flops.others == 0
    assert flops.forward == FORWARD


@pytest.mark.parametrize(
    ("module", "shape", "multiplications"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, groups=2), (4, 11), {"weight": 6 * 2 * 3 * 5}),
        (nn.Conv3d(1, 2, 2, bias=False), (1, 3, 3, 3), {"weight": 2 * 8 * 8}),
        (nn.Conv2d(2, 3, 3, padding=1, dilation=2), (2, 6, 6), {"weight": 3 * 2 * 9 * 16}),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 5), {"weight": 4 * 3 * 9 * 25}),
        (nn.Linear(3, 5), (7, 3), {"weight": 7 * 15}),
        (nn.Linear(3, 5, bias=False), (3,), {"weight": 15}),
        (nn.LayerNorm(3), (7, 3), {}),
        (nn.Sequential(nn.ReLU(), nn.Flatten()), (7, 3), {}),
    ],
)
def test_layers_by_hand(module, shape, multiplications):
    flops = Flops.read(module, shape)
    assert flops.weights == {name: 2 * count for name, count in multiplications.items()}
    assert flops.others == 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_multiply_in_every_step(kind):
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    flops = Flops.read(kind(4, 8, batch_first=True), (5, 4))
    assert flops.weights == {"weight_ih_l0": 2 * 5 * gates * 32, "weight_hh_l0": 2 * 5 * gates * 64}


@pytest.mark.parametrize("frozen", [False, True])
def test_attention_has_products_without_weights(frozen):
    """Five tokens of eight numbers: scores and sums are 5 x 5 x 8 multiplications each, however many the heads."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(not frozen)
    flops = Flops.read(layer, (5, 8))
    assert flops.weights == {
        "self_attn.in_proj_weight": 2 * 5 * 24 * 8, "self_attn.out_proj.weight": 2 * 5 * 64,
        "linear1.weight": 2 * 5 * 128, "linear2.weight": 2 * 5 * 128,
    }  # fmt: skip
    assert flops.others == 2 * 2 * 5 * 5 * 8
    assert flops.forward == sum(flops.weights.values()) + flops.others
    assert all(parameter.requires_grad is not frozen for parameter in layer.parameters())


class Own(nn.Module):
    """Uses one weight twice, another without a module, and a bilinear form."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.matrix = nn.Parameter(torch.ones(4, 6))
        self.vector = nn.Parameter(torch.ones(6))
        self.form = nn.Bilinear(4, 4, 5)

    def forward(self, x):
        twice = self.outer(self.inner(x))
        return self.form(x, twice), (x @ self.matrix) @ self.vector


def test_tied_weights_and_products_of_the_models_own_are_counted():
    flops = Flops.read(Own(), (4,))
    assert flops.weights == {"inner.weight": 2 * 2 * 16, "matrix": 2 * 24, "vector": 2 * 6, "form.weight": 2 * 80}


class OnePiece(nn.Module):
    """Two weights that lie in one piece of memory, as those of a recurrent layer do on a GPU; one is used in parts."""

    def __init__(self):
        super().__init__()
        memory = torch.ones(24)
        self.first = nn.Parameter(memory[:8].view(4, 2))
        self.second = nn.Parameter(memory[8:].view(4, 4))

    def forward(self, x):
        upper, lower = self.second.chunk(2)
        return x @ self.first, torch.einsum("bi,oi->bo", x, lower), x @ upper.t()


def test_weights_in_one_piece_of_memory_are_told_apart():
    assert Flops.read(OnePiece(), (4,)).weights == {"first": 2 * 8, "second": 2 * 16}


@pytest.mark.parametrize(
    ("name", "shape"), [("resnet8", (3, 32, 32)), ("vgg6", (3, 32, 32)), ("cnn", (1, 28, 28)), ("mlp", (1, 8, 8))]
)
def test_the_count_is_pytorchs_own(name, shape):
    model = models.make(name).build(shape, 10)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *shape))
    flops = Flops.read(model, shape)
    assert flops.forward == counter.get_total_flops()
    assert flops.weights.keys() == set(weights_of(LayerMap.read(model, shape), "all"))


# Local training -------------------------------------------------------------------------------------------------------


def test_what_stays_zero_costs_nothing_in_all_three_passes():
    """Client 0: of two entries one is zero at both ends. Client 1: one is zero at the beginning, one at the end."""
    flops = Flops({"a": 20.0}, others=5.0)
    begin, end = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    cost = flops.training(torch.tensor([4, 1]), {"a": begin}, {"a": end})
    assert cost.dense.tolist() == [3 * 4 * 25, 3 * 25]
    assert cost.sparse.tolist() == [3 * 4 * 15, 3 * 25]
    both = Cost.total([cost, cost])
    assert both.dense.tolist() == [600, 150]
    assert both.sparse.tolist() == [360, 150]
    assert Cost.join([cost, both]).sparse.tolist() == [180, 75, 360, 150]


def series(driver, kind="flops"):
    return driver.metrics.series(f"train.{kind}")[1].tolist()


def run(method, engine="loop", rounds=2, **changes):
    driver = prepare(method, engine, **{"rounds": rounds, "evaluate_every": 99, **changes})
    for _ in range(rounds):
        driver.step()
    return driver


def whole(size, batch=8):
    """A client that drops small last batches trains on these samples; one with fewer than a batch on all it has."""
    return size if size < batch else size // batch * batch


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("method", "changes", "samples"),
    [
        ("fedavg", {}, 2 * sum(SIZES)),
        ("fedavg", {"epochs": 3}, 3 * sum(SIZES)),
        ("fedavg", {"last_batch": "drop"}, 2 * sum(map(whole, SIZES))),
        ("fedavg", {"steps": 3}, (8 + 1 + 8) + 3 * 8 + 3 * 8 + 3 * 5 + (8 + 8 + 7)),
        ("fedvc(samples=20)", {}, 2 * 5 * 20),
        ("ditto(personal_epochs=3)", {}, (2 + 3) * sum(SIZES)),
        ("pfedme(strength=1.0, inner_steps=3)", {}, 2 * 3 * sum(SIZES)),
        ("fedprox+lws", {"precision": "fp32"}, 2 * sum(SIZES)),
    ],
)
@pytest.mark.filterwarnings("ignore:'pfedme' brings its own optimiser")
def test_every_sample_counts_for_three_forward_passes_each_time_it_comes(engine, method, changes, samples):
    driver = run(method, engine, **changes)
    assert series(driver) == [3 * FORWARD * samples] * 2


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_only_participants_cost_something(engine):
    driver = prepare("fedavg", engine, participation=0.4, rounds=3)
    for round in range(1, 4):
        chosen = driver.engine.side.select(0.4, round)
        driver.step()
        assert series(driver)[-1] == 3 * FORWARD * 2 * sum(SIZES[client] for client in chosen)


@pytest.mark.parametrize("method", ["fedavg", "fedbn+scaffold", "top-k"])
def test_dense_training_costs_what_it_costs(method):
    driver = run(method)
    assert series(driver, "sparse_flops") == series(driver)


def test_under_a_shared_mask_only_what_it_keeps_costs_something():
    driver = run("ssfl(sparsity=0.8)")
    masks = driver.engine.server.memory.group("ssfl/mask")
    kept = sum(2 * count * float(masks[name].double().mean()) for name, count in TINY.items())
    assert series(driver, "sparse_flops") == pytest.approx([3 * kept * 2 * sum(SIZES)] * 2, rel=1e-12)
    assert kept < 0.3 * FORWARD


@pytest.mark.parametrize(("local", "masked"), [("off", ()), ("round", (3, 5)), ("until-next", (3, 4, 5, 6))])
def test_lips_saves_work_as_long_as_its_masks_hold(local, masked):
    driver = run(f"lips(tau0=0.6, every=2, local_sparsity={local})", rounds=6)
    ratios = [sparse / dense for sparse, dense in zip(series(driver, "sparse_flops"), series(driver), strict=True)]
    entries = {"body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128}
    for round, ratio in enumerate(ratios, 1):
        tau = {3: 0.4, 4: 0.4, 5: 0.2, 6: 0.2}[round] if round in masked else 0.0
        dropped = sum(2 * TINY[name] * int(tau * count + 1e-9) / count for name, count in entries.items())
        assert ratio == pytest.approx(1 - dropped / FORWARD, abs=0.02), "but for dead neurons"


def test_a_resumed_run_tells_the_same():
    text = "lips(every=1, local_sparsity=until-next)"
    unbroken, broken, resumed = run(text, rounds=3), prepare(text, rounds=3), prepare(text, rounds=3)
    broken.step()
    resumed.engine.restore(*unpack(clone(pack(broken.engine.server, broken.engine.clients()))))
    resumed.round = 1
    for _ in range(2):
        resumed.step()
    for kind in ("flops", "sparse_flops"):
        assert series(resumed, kind) == series(unbroken, kind)[1:]
    assert series(resumed, "sparse_flops")[0] < 0.8 * series(resumed)[0]


# The paper ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "classes", "samples", "ours", "published", "left"),
    [
        ("resnet8", (3, 32, 32), 100, 100, 13.04e12, 14.9e12, {"until-next": 0.71, "round": 0.94}),
        ("resnet10", (3, 64, 64), 200, 300, 196.2e12, 219.4e12, {"until-next": 0.70, "round": 0.94}),
    ],
)
def test_the_work_of_one_client_in_all_rounds_comes_near_table_7(name, shape, classes, samples, ours, published, left):
    """Of several readings (all clients, one round, without backward passes) this one alone is near."""
    model = models.make(name).build(shape, classes)
    flops, layers = Flops.read(model, shape), LayerMap.read(model, shape)
    rounds, epochs = 300, 5
    each = 3 * flops.forward * samples * epochs
    assert rounds * each == pytest.approx(ours, rel=1e-3)
    assert 0.87 < ours / published < 0.9
    middle = sum(flops.weights[weight] for weight in weights_of(layers, "middle")) / flops.forward
    part = methods.make("transient")
    drops = [part.drop_after(round, rounds) for round in range(rounds)]
    held = {"until-next": [max(drops[max(0, t - 4) : t + 1]) for t in range(rounds)], "round": drops}
    for local, taus in held.items():
        assert 1 - middle * sum(taus) / rounds == pytest.approx(left[local], abs=0.005)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_what_was_zero_all_the_time_is_counted_for_each_client(device):
    """Also from a model that all begin with; what is not a number is not zero."""
    begin = torch.tensor([[[0.0, -0.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]], device=device)
    end = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.0, 5.0], [-0.0, math.nan]]], device=device)
    assert zero_in_both(begin, end).tolist() == [3, 2]
    assert zero_in_both(begin[:1].expand(2, 2, 2), end).tolist() == [3, 1]
    assert zero_in_both(begin[1:].expand(2, 2, 2), end).tolist() == [3, 2]
    assert zero_in_both(torch.ones(1, 1).expand(3, 1).to(device), torch.zeros(3, 1, device=device)).tolist() == [
        0,
        0,
        0,
    ]
