from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, run, server_view, watched

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.stack import Tensors
from fedstrata.testing.world import prepare

NORMED = LayerMap.read(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False)), (1,))
MODEL = {
    "0.weight": torch.tensor([[0.5]]), "1.running_mean": torch.zeros(1), "1.running_var": torch.ones(1),
    "1.num_batches_tracked": torch.tensor(3),
}  # fmt: skip
CLIENTS = {
    "0.weight": torch.tensor([[[0.0]], [[1.0]]]), "1.running_mean": torch.full((2, 1), 9.0),
    "1.running_var": torch.full((2, 1), 9.0), "1.num_batches_tracked": torch.tensor([9, 9]),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Wants the weight to be a number; every pass adds one to all buffers."""

    wanted: float

    def loss(self, parameters: Tensors, buffers: Tensors, step: int) -> tuple[torch.Tensor, Tensors]:
        return (parameters["0.weight"].flatten(1).sum(1) - self.wanted).square(), {n: b + 1 for n, b in buffers.items()}


def merged(text: str, wanted: float, sizes=(10, 10), masks: Tensors | None = None) -> Tensors:
    server = server_view(NORMED, MODEL, sizes=torch.tensor(sizes), proxy=Target(wanted))
    return Method.make(text).aggregate(server, Message(CLIENTS, masks or {}))[0]


# By hand -------------------------------------------------------------------------------------------------------------


def test_one_step():
    """Adam's first step has the length of the learning rate: a = (log .5 + .1, log .5 - .1) and b = -.1."""
    new = merged("fedlaw(epochs=1, learning_rate=0.1)", 0.25)
    assert new["0.weight"].item() == pytest.approx(math.exp(-0.1) / (1 + math.exp(0.2)), abs=1e-6)


def test_shares_start_at_the_sizes():
    new = merged("fedlaw(epochs=1, learning_rate=1e-9)", 0.0, sizes=(30, 10))
    assert new["0.weight"].item() == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("wanted", [0.1, 0.9, 1.2])
def test_it_finds_what_the_servers_samples_want(wanted):
    new = merged("fedlaw(epochs=300, learning_rate=0.05)", wanted)
    assert new["0.weight"].item() == pytest.approx(wanted, abs=0.02)


def test_the_learning_rate_is_halved_every_twenty_epochs():
    """With a target that is far away every step has about the length of the learning rate."""
    lengths = [math.log(merged(f"fedlaw(epochs={epochs}, learning_rate=1e-4)", 1e6)["0.weight"]) for epochs in (20, 40)]
    steps = [(length - math.log(0.5)) / 1e-4 for length in lengths]
    assert steps[1] / steps[0] == pytest.approx(1.5, abs=0.02)


def test_statistics_are_those_of_the_servers_samples():
    new = merged("fedlaw(epochs=5)", 0.5)
    assert {name: new[name].item() for name in NORMED.buffer_names} == {
        "1.running_mean": 5.0, "1.running_var": 6.0, "1.num_batches_tracked": 8,
    }  # fmt: skip


def test_layers_that_a_client_did_not_send_are_averaged_over_the_others():
    masks = {"0.weight": torch.tensor([[[False]], [[True]]])}
    assert merged("fedlaw(epochs=1, learning_rate=1e-9)", 0.0, masks=masks)["0.weight"].item() == pytest.approx(1.0)


def test_without_samples_it_says_so():
    with pytest.raises(
        FedStrataError, match="'fedlaw' learns from labelled samples at the server, and this server has"
    ):
        Method.make("fedlaw").aggregate(server_view(NORMED, MODEL), Message(CLIENTS))


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
@pytest.mark.parametrize("statistics", ["averaged", "local"])
def test_the_learned_model_is_better_on_the_servers_samples_than_the_mean(engine, statistics):
    method, seen = watched("fedlaw(samples=100, epochs=30, learning_rate=0.05)")
    simulation = run(method, engine, rounds=1, statistics=statistics)
    central = simulation.engine.central.side if engine == "loop" else simulation.engine.side
    names = simulation.setting.layers.parameter_names
    sizes = torch.from_numpy(simulation.split.sizes).double()
    mean = {
        name: torch.stack([seen.trained[1, client][name] * sizes[client] / sizes.sum() for client in range(5)]).sum(0)
        for name in names
    }
    learned, averaged = (
        central.proxy.loss({name: model[name][None] for name in names}, {}, 0)[0].item()
        for model in (simulation.engine.server.model, mean)
    )
    assert learned < averaged - 0.01


def test_the_samples_are_taken_out_of_the_test_set_and_traffic_is_that_of_fedavg():
    simulation, plain = prepare("fedlaw(samples=50)"), prepare("fedavg")
    proxy = simulation.engine.central.side.proxy.data
    assert len(proxy.proxy) == 50
    labels = torch.bincount(proxy.dataset.labels[proxy.proxy], minlength=10)
    assert labels.tolist() == [5] * 10
    assert not set(proxy.proxy) & set(proxy.dataset.test)
    for one in (simulation, plain):
        one.step()
    assert simulation.metrics.latest()["bytes.up"] == plain.metrics.latest()["bytes.up"]
    assert simulation.metrics.latest()["bytes.down"] == plain.metrics.latest()["bytes.down"]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("fedbn", "'fedbn' leaves the server no whole model to run, and 'fedlaw' runs the whole model at the server"),
        ("player", "'player' leaves the server no whole model to run, and 'fedlaw' runs the whole model at the server"),
        (
            "feddrop",
            "'feddrop' leaves the server no whole model to run, and 'fedlaw' runs the whole model at the server",
        ),
        ("fednova", "each of them decides how replies are merged"),
        ("l-dawa", "each of them decides"),
    ],
)
def test_what_makes_no_sense_is_refused(other, sentence):
    for text in (f"fedlaw+{other}", f"{other}+fedlaw"):
        with pytest.raises(FedStrataError, match=sentence):
            Method.make(text)


def test_the_papers_defaults():
    part = methods.make("fedlaw")
    assert (part.samples, part.epochs, part.learning_rate) == (200, 20, 0.01)
