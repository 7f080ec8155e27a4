"""Central and local differential privacy."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pytest
import torch
from watching import BOTH_ENGINES, clients_view, declared, run, server_view, training_view

from fedstrata.engines.planning import Plan
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.functional import gaussian_epsilon
from fedstrata.layers import LayerMap
from fedstrata.methods import Facts, Message, Method, Part, Touches, methods
from fedstrata.rng import normal, unrepeatable_normal
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.testing.world import EXPERIMENT, SIZES, TinyNet, digits, prepare, unequal_split

LAYERS = LayerMap.read(torch.nn.Linear(2, 2), (2,))


def test_updates_are_scaled_down_to_the_norm_together():
    """The first client moved by (3, 4) in two tensors: a norm of 5, so a fifth of it is sent; the second by 0.5."""
    start = {"weight": torch.ones(2, 1), "bias": torch.zeros(2, 1), "counter": torch.tensor([7, 7])}
    trained = {
        "weight": torch.tensor([[4.0], [1.5]]),
        "bias": torch.tensor([[4.0], [0.0]]),
        "counter": torch.tensor([9, 9]),
    }
    part = methods.make("central-dp(clip=1)")
    sent = part.upload(clients_view(LAYERS, 2), training_view(start, trained), Message(trained)).tensors
    assert sent["weight"].flatten().tolist() == pytest.approx([1.6, 1.5])
    assert sent["bias"].flatten().tolist() == pytest.approx([0.8, 0.0])
    assert sent["counter"].tolist() == [7, 7]
    assert sent["weight"].dtype == torch.float32


def test_an_update_that_float32_cannot_square_is_clipped_too():
    start, trained = {"weight": torch.zeros(1, 2)}, {"weight": torch.tensor([[3e25, 4e25]])}
    part = methods.make("central-dp(clip=1)")
    sent = part.upload(clients_view(LAYERS, 1), training_view(start, trained), Message(trained)).tensors
    assert sent["weight"].flatten().tolist() == pytest.approx([0.6, 0.8])


def test_what_a_mask_hides_does_not_count():
    start, trained = {"weight": torch.zeros(1, 2)}, {"weight": torch.tensor([[3.0, 100.0]])}
    masks = {"weight": torch.tensor([[True, False]])}
    for text in ("central-dp(clip=6)", "local-dp(clip=6, noise=0.1)"):
        message = methods.make(text).upload(
            clients_view(LAYERS, 1), training_view(start, trained), Message(trained, masks)
        )
        assert float(message.tensors["weight"][0, 1]) == 0.0
        assert message.masks == masks
    assert methods.make("central-dp(clip=6)").upload(
        clients_view(LAYERS, 1), training_view(start, trained), Message(trained, masks)
    ).tensors["weight"].tolist() == [[3.0, 0.0]]


def test_the_noise_of_the_mean_has_the_promised_size():
    """z C / m = 3 * 2 / 4 over four participants; and at a real server it is another noise."""
    part = methods.make("central-dp(clip=2, noise=3)")
    model = {"weight": torch.full((200, 200), 5.0)}
    four = {"participants": (0, 1, 2, 3), "sizes": torch.tensor([1, 2, 3, 4]), "clients": 4}
    server = server_view(LAYERS, model, memory=part.server_memory(server_view(LAYERS, model, **four)), **four)
    noise = part.refine(server, model, Message())[0]["weight"] - 5
    assert float(noise.std()) == pytest.approx(1.5, rel=0.02)
    assert abs(float(noise.mean())) < 0.03
    other = part.refine(replace(server, secret=True), model, Message())[0]["weight"] - 5
    assert abs(float((noise * other).mean())) < 0.05
    assert part.weigh(declared(1, 2, 3, 4)).tolist() == [1.0] * 4


def test_the_noise_of_a_client_has_the_promised_size_and_is_its_own():
    """2 z C = 2 * 0.5 * 3."""
    part = methods.make("local-dp(clip=3, noise=0.5)")
    still = {"weight": torch.zeros(2, 200, 200), "bias": torch.zeros(2, 200, 200)}
    sent = part.upload(clients_view(LAYERS, 2), training_view(still, still), Message(still)).tensors
    drawn = [tensor[client].flatten() for tensor in sent.values() for client in range(2)]
    assert all(float(one.std()) == pytest.approx(3.0, rel=0.02) for one in drawn)
    assert torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max() < 0.03


def test_noise_is_normal():
    draws = normal(torch.tensor([[1, 2], [3, 4]]), (50_001,))
    assert draws.shape == (2, 50_001)
    for row in (*draws, unrepeatable_normal((50_001,))):
        quantiles = torch.quantile(row, torch.tensor([0.02275, 0.15866, 0.5, 0.84134, 0.97725], dtype=torch.float64))
        assert quantiles.tolist() == pytest.approx([-2, -1, 0, 1, 2], abs=0.05)
    assert not torch.equal(normal(torch.tensor([1, 2]), (3,)), normal(torch.tensor([1, 2]), (3,), stream=1))


@BOTH_ENGINES
def test_the_account_is_that_of_the_client_that_took_part_most_often(engine):
    simulation = run("fedbn+central-dp(noise=2)", engine, rounds=4, participation=0.4)
    rounds, spent = simulation.metrics.series("privacy.epsilon")
    counts = torch.zeros(len(SIZES), dtype=torch.int64)
    for round, epsilon in zip(rounds.tolist(), spent.tolist(), strict=True):
        counts[list(simulation.engine.side.select(0.4, round))] += 1
        assert epsilon == pytest.approx(gaussian_epsilon(2.0, int(counts.max()), 1e-5))
    assert int(counts.max()) < 4 or int(counts.min()) < 4


def test_noise_is_chosen_so_that_all_rounds_spend_epsilon():
    simulation = run("fedbn+central-dp(epsilon=3)", "stacked", rounds=3)
    assert simulation.metrics.latest()["privacy.epsilon"] == pytest.approx(3.0, abs=1e-6)


def test_without_clipping_and_hardly_any_noise_it_is_an_equal_mean():
    left = run("fedbn+local-dp(clip=1e6, noise=1e-15)", "stacked", rounds=2).engine.server.model
    right = run("fedbn+central-dp(clip=1e6, noise=1e-15)", "stacked", rounds=2).engine.server.model
    torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_a_variance_does_not_become_negative():
    simulation = run("central-dp(clip=1000, noise=10)", "loop", rounds=1)
    model = simulation.engine.server.model
    assert all(bool((tensor >= 0).all()) for name, tensor in model.items() if name.endswith("running_var"))
    assert all(bool(torch.isfinite(tensor.double()).all()) for tensor in model.values())
    assert bool((model["head.weight"] < 0).any())
    assert bool((model["scale.running_var"] == 0).any())


def test_the_noise_is_on_the_mean_before_the_server_steps():
    """The server goes a thousandth of the way to the noisy mean, so that a thousandth of the noise is left."""
    noisy, quiet = (
        run(f"central-dp(clip=1e6, noise={noise})+fedavgm(beta=0, learning_rate=0.001)", rounds=1).engine.server.model
        for noise in (1e-5, 1e-15)
    )
    left = noisy["hidden.weight"] - quiet["hidden.weight"]
    assert float(left.std()) == pytest.approx(0.001 * 1e-5 * 1e6 / 5, rel=0.3)


MORE = "lets the server see more of single clients, and "
COVERS = "covers nothing but the clients' updates"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lws+central-dp", f"'lws' {MORE}'central-dp' {COVERS}"),
        ("ssfl+local-dp", f"'ssfl' {MORE}'local-dp' {COVERS}"),
        (
            "top-k+central-dp",
            "'top-k' lets each client send entries of its own, and 'central-dp' bounds what a client can change, where",
        ),
        ("scaffold+central-dp", "each of them decides the shares of the clients"),
        ("local+central-dp", "'local' shares nothing"),
        ("d-psgd+local-dp", "'local-dp' changes what travels, and 'd-psgd' mixes clients' models as they are"),
    ],
)
def test_what_it_cannot_cover_is_refused(text, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        Method.make(text)


@pytest.mark.parametrize("values", ["fp16", "int8"])
def test_uploads_that_are_rounded_after_clipping_are_refused(values):
    """Rounded weights can be further from those received than the norm that the account relies on."""
    with pytest.raises(
        FedStrataError, match="'central-dp' bounds the length of an update, beyond which rounding could carry it"
    ):
        run("fedbn+central-dp", "stacked", rounds=1, upload_values=values)
    run("fedbn+local-dp", "stacked", rounds=1, upload_values=values)  # what is done to noisy updates costs nothing


@dataclass(frozen=True)
class Talkative(Part):
    """Sends a number beside the model."""

    facts: ClassVar[Facts] = Facts("averaging", "nobody")
    touches: ClassVar[Touches] = Touches()

    def upload(self, clients, training, message):
        return replace(message, numbers={"mood": torch.ones(len(clients.ids))})


def test_whatever_else_is_sent_stops_the_run():
    method = Method("talkative+central-dp", (Talkative(), methods.make("central-dp")))
    with pytest.raises(FedStrataError, match="a part also sends 'mood'"):
        run(method, "stacked", rounds=1)


@pytest.mark.filterwarnings("ignore:'pfedme' brings its own optimiser")
@pytest.mark.parametrize(
    "method", ["central-dp(clip=0.01, noise=1.0)+pfedme", "pfedme+central-dp(clip=0.01, noise=1.0)"]
)
def test_what_leaves_a_client_is_clipped_in_whatever_order_the_parts_are_written(method):
    """At the client: pFedMe sends another model than the trained one, and must not do so after the clipping."""
    engine = prepare(method).engine
    messages = engine.central.messages(range(5), 1)
    reply, _ = engine.members[1].answer(messages[1], 1)
    sent = engine.central.decoded(reply, 1, 1).tensors
    moved = [(tensor[0] - engine.server.model[name]).double() for name, tensor in sent.items()]
    norm = sum(float(change.square().sum()) for change in moved) ** 0.5
    assert norm == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("method", ["central-dp", "local-dp"])
def test_a_simulation_that_normalises_by_exact_statistics_says_that_they_are_not_covered(method):
    """Real sites refuse it; with other transforms, or without a promise, there is nothing to say."""

    def prepared(method: str, transforms: str) -> None:
        own = Ingredients(digits(), unequal_split(digits()), TinyNet)
        Driver.prepare(EXPERIMENT.with_changes({"method": method, "transforms": transforms}), own, Plan("loop", 1))

    with pytest.warns(FedStrataWarning, match=rf"account of '{method}' does not cover.* 'normalise:site'.*mean="):
        prepared(f"fedbn+{method}", "normalise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for transforms in ("normalise:site", "normalise(mean='0.3', deviation='0.4')", "none"):
            prepared(f"fedbn+{method}", transforms)
        prepared("fedbn", "normalise")


@pytest.mark.parametrize(
    "text",
    ["central-dp(clip=0)", "central-dp(epsilon=0)", "local-dp(delta=0)", "local-dp(delta=1)", "local-dp(noise=0)"],
)
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("(")[2].partition("=")[0]):
        methods.make(text)


@pytest.mark.parametrize("text", ["central-dp(clip=0.1, epsilon=0.1, delta=0.9, noise=0.1)"])
def test_what_is_at_the_edge_of_its_range_is_taken(text):
    assert str(methods.make(text)) == text


def test_the_defaults():
    assert asdict(methods.make("central-dp")) == {"clip": 1.0, "epsilon": 8.0, "delta": 1e-05, "noise": None}
    assert asdict(methods.make("local-dp")) == {"clip": 1.0, "epsilon": 8.0, "delta": 1e-05, "noise": None}
