from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

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
    size: int = 1
    asked: list[tuple[int, list[int]]] = field(default_factory=list)

    def loss(
        self, parameters: Tensors, buffers: Tensors, step: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        self.asked.append((step, rows.tolist()))
        return (parameters["0.weight"].flatten(1).sum(1) - self.wanted).square(), {n: b + 1 for n, b in buffers.items()}


def merged(text: str, wanted: float | Target, sizes=(10, 10), masks: Tensors | None = None) -> Tensors:
    return learned(text, wanted, sizes, masks)[0]


def learned(
    text: str, wanted: float | Target, sizes=(10, 10), masks: Tensors | None = None
) -> tuple[Tensors, dict[str, float]]:
    """Aggregate by a method; return the new model, and the metrics."""
    proxy = wanted if isinstance(wanted, Target) else Target(wanted)
    method, server = Method.make(text), server_view(NORMED, MODEL, sizes=torch.tensor(sizes), proxy=proxy)
    new, memory = method.aggregate(server, Message(CLIENTS, masks or {}))
    return new, method.metrics(server_view(NORMED, new, memory=memory))


# By hand -------------------------------------------------------------------------------------------------------------


def test_one_step():
    """Adam's first step has the length of the learning rate: a = (log .5 + .1, log .5 - .1) and b = -.1."""
    new = merged("fedlaw(epochs=1, learning_rate=0.1)", 0.25)
    assert new["0.weight"].item() == pytest.approx(math.exp(-0.1) / (1 + math.exp(0.2)), abs=1e-6)


def test_the_factor_or_the_shares_alone():
    """Of one step: b = -.1 beside equal shares, or a = (log .5 + .1, log .5 - .1) beside a factor of 1."""
    factor, shares = (
        merged(f"fedlaw(epochs=1, learning_rate=0.1, learns={one})", 0.25) for one in ("factor", "shares")
    )
    assert factor["0.weight"].item() == pytest.approx(0.5 * math.exp(-0.1), abs=1e-6)
    assert shares["0.weight"].item() == pytest.approx(1 / (1 + math.exp(0.2)), abs=1e-6)


@pytest.mark.parametrize(("wanted", "gamma"), [(0.4, 0.8), (0.6, 1.2)])
def test_the_factor_is_told_with_what_fedlws_compares_it_with(wanted, gamma):
    """The updates from .5 are -.5 and .5 by 10 and 30 samples: a step of .25 to .75, and tau = .5 whatever the sizes.

    r = (1 - gamma) .5 / (gamma .25), which is negative where the factor is above 1.
    """
    new, metrics = learned("fedlaw(epochs=500, learning_rate=0.05, learns=factor)", wanted * 1.5, sizes=(10, 30))
    assert new["0.weight"].item() == pytest.approx(0.75 * gamma, abs=2e-3)
    assert metrics.keys() == {"fedlaw.gamma", "fedlaw.tau", "fedlaw.r"}
    assert metrics["fedlaw.gamma"] == pytest.approx(new["0.weight"].item() / 0.75, rel=1e-6)
    assert metrics["fedlaw.tau"] == pytest.approx(0.5)
    assert metrics["fedlaw.r"] == pytest.approx((1 - metrics["fedlaw.gamma"]) * 2 / metrics["fedlaw.gamma"], rel=1e-6)


def test_entries_that_a_client_did_not_send_count_as_unchanged_in_tau():
    masks = {"0.weight": torch.tensor([[[False]], [[True]]])}
    _, metrics = learned("fedlaw(epochs=1)", 0.5, masks=masks)
    assert metrics["fedlaw.tau"] == pytest.approx(0.25)  # updates 0 and .5


def test_before_the_first_round_nothing_is_shrunk():
    method = Method.make("fedlaw")
    memory = method.server_memory(server_view(NORMED, MODEL))
    metrics = method.metrics(server_view(NORMED, MODEL, memory=memory))
    assert metrics == {"fedlaw.gamma": 1.0, "fedlaw.tau": 0.0, "fedlaw.r": 0.0}


def test_twenty_epochs_of_200_samples_in_batches_of_128_are_forty_steps():
    proxy = Target(0.5, size=200)
    new = merged("fedlaw", proxy)
    assert new["1.num_batches_tracked"].item() == 3 + 40
    assert [step for step, _ in proxy.asked] == list(range(40))
    assert [len(rows) for _, rows in proxy.asked] == [128, 72] * 20
    epochs = [proxy.asked[2 * epoch][1] + proxy.asked[2 * epoch + 1][1] for epoch in range(20)]
    assert all(sorted(rows) == list(range(200)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 20  # shuffled in every epoch
    small = Target(0.5, size=5)
    merged("fedlaw(epochs=2, batch_size=2)", small)
    assert [len(rows) for _, rows in small.asked] == [2, 2, 1] * 2


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


def test_an_epoch_may_have_several_steps_at_one_learning_rate():
    """Ten epochs of four batches are forty steps of full length."""
    new = merged("fedlaw(epochs=10, batch_size=1, learning_rate=1e-4, learns=factor)", Target(1e6, size=4))
    assert math.log(new["0.weight"].item() / 0.5) / 1e-4 == pytest.approx(40, abs=0.5)


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
        central.proxy.loss({name: model[name][None] for name in names}, {}, 0, torch.arange(100))[0].item()
        for model in (simulation.engine.server.model, mean)
    )
    assert learned < averaged - 0.01


def test_the_samples_are_taken_out_of_the_test_set_and_traffic_is_that_of_fedavg():
    simulation, plain = prepare("fedlaw(samples=50)"), prepare("fedavg")
    proxy = simulation.engine.central.side.proxy.data
    assert len(proxy.proxy) == simulation.engine.central.side.proxy.size == 50
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
    assert asdict(part) == {"samples": 200, "epochs": 20, "learning_rate": 0.01, "batch_size": 128, "learns": "both"}


@pytest.mark.parametrize("text", ["samples=0", "epochs=0", "learning_rate=0", "batch_size=0", "learns=all"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("=")[0]):
        methods.make(f"fedlaw({text})")


def test_one_sample_is_enough():
    assert methods.make("fedlaw(samples=1)").needs.proxy == 1


def test_it_merges_in_a_way_of_its_own_by_the_replies_of_single_clients():
    method = Method.make("fedlaw")
    assert method.needs.replies
    assert not method.merges_by_mean


def test_it_learns_before_the_server_steps():
    """The learned model is .5 e^-.1, and the server goes half of the way to it from .5."""
    text = "fedlaw(epochs=1, learning_rate=0.1, learns=factor)+fedavgm(beta=0, learning_rate=0.5)"
    method, server = Method.make(text), server_view(NORMED, MODEL, proxy=Target(0.25))
    memory = method.server_memory(server)
    new, _ = method.aggregate(server_view(NORMED, MODEL, proxy=Target(0.25), memory=memory), Message(CLIENTS))
    assert new["0.weight"].item() == pytest.approx(0.5 + 0.5 * (0.5 * math.exp(-0.1) - 0.5), abs=1e-6)
    assert new["0.weight"].dtype == torch.float32


def test_adam_forgets_as_released():
    """The loss (.5 e^b - 1)^2 has the slope (.5 e^b - 1) e^b in b: two steps with the betas .5 and .999, by hand."""
    mean = square = b = 0.0
    for step in (1, 2):
        slope = (0.5 * math.exp(b) - 1) * math.exp(b)
        mean, square = 0.5 * mean + 0.5 * slope, 0.999 * square + 0.001 * slope**2
        b -= 0.3 * (mean / (1 - 0.5**step)) / (math.sqrt(square / (1 - 0.999**step)) + 1e-8)
    new = merged("fedlaw(epochs=2, learning_rate=0.3, learns=factor)", 1.0)
    assert new["0.weight"].item() == pytest.approx(0.5 * math.exp(b), abs=1e-6)
