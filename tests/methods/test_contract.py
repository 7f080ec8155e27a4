"""What every registered method, and every sensible combination, must hold: the checks of :mod:`fedstrata.testing`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedstrata.engines.loop import LoopEngine
from fedstrata.methods import (
    Clients,
    Declared,
    Facts,
    Kept,
    LocalStep,
    Matter,
    Message,
    Method,
    Part,
    Server,
    Touches,
    Training,
    methods,
)
from fedstrata.runs.driver import Driver
from fedstrata.stack import Tensors
from fedstrata.testing import METHOD_CHECKS, check_method
from fedstrata.testing.world import prepare

COMBINATIONS = [
    "fedbn+fedprox(mu=0.1)",
    "fedprox+fedavgm+lws",
    "fedbn+fedavg-ft",
    "fedbn+lips(every=1)+lws",
    "fedbn+lips(every=1, criterion=gradient, refill=init, schedule=released)",
    "transient(every=1, local_sparsity=round, criterion=random)+fedprox",
    "fedbn+lips(every=1, refill=own-init, local_sparsity=until-next)",
    "transient(every=2, criterion=magnitude, layers=all)",
    "fedbn+freeze-middle(after=1, freezes=own)",
    "fedbn+lips(every=1)+fedadam+central-dp(noise=0.5)",
    "fedprox+freeze-middle(after=1)+local-dp(noise=0.1)",
    "fedavg+lws(layers=model, clamp=true)",
    "ssfl(sparsity=0.8, balanced=true, batches=2)+fedbn+lws",
    "ssfl(scope=all, warmup=1, adapt_at=3, growth=true)+fedprox",
    "ssfl(topology=shuffled, refresh_every=1)",
    "ssfl(topology=random)+fedavgm",
    "player(threshold=1.5)+fedprox",
    "player(random=true)+lws",
    "player(up_to=body)+fedir",
    "fedavg+lws(layers=fixed, mode=opt)",
    "fedavg+lws(gamma=0.98)",
    "fedlaw(samples=30, epochs=2, batch_size=20, learns=factor)+fedprox",
    "fedavg+lws(layers=released, clamp=true)",
    "fedbn+lws(layers=with-buffers, clamp=true, highest=0.05)",
    "ssfl(topology=oracle)+top-k",
    "subfedavg(accuracy=0, rate=0.2)+fedbn",
    "flash-jmwst(every=2, first_epochs=3)+lws",
    "sparsyfed(sparsity=0.9)+fedprox",
    "scaffold(learning_rate=0.5)+fedbn",
    "feddyn(alpha=0.1)+lws",
    "fedlp(probability=0.5)+l-dawa(warmup=0)+lws",
    "feddisco+fedlama(warmup=0)+fedbn+lws",
    "fedbn+feddrop(rate=0.5)+fednova(mu=0.1)",
    "fedcac(tau=0.3, beta=2)+fedbn+lws",
    "pfedla(heur=2)+fedprox",
    "dispfl(density=0.3, regrow=random, neighbours=2)+fedbn",
    "feddst(sparsity=0.6, every=1, until=1.0, alpha=0.3)+fedprox",
    "fedrep+transient(every=2, local_sparsity=until-next, schedule=released)",
    "ditto(global_epochs=1, personal_epochs=3, pull=released)+fedbn+fedprox",
    "pfedsd+fedper(head_layers=2)+lws",
    "fedir+fedvc(samples=12)+moon",
    "fedala(layers=2, first_passes=2)+fedbn+moon",
    "sparse-ft(head_rounds=1, sparsity=0.5, calibration_clients=0.4, batch_size=4)+fedprox",
    "median+fedbn+ssfl(sparsity=0.5)",
    "attack(kind=alie)+rfa+lips(every=1)+fedadam",
    "sparse-ft(head_rounds=1, rule=most, fisher=sampled-label, batch_size=4)+fedbn+lws",
]
# At its defaults, this one would blow rounding differences of two engines up: long epochs of five to twenty samples.
FITTING = {"fedvc": "fedvc(samples=20)"}
# And these would only take longer.
FITTING |= {"fedala": "fedala(first_passes=2)", "pfedme": "pfedme(inner_steps=2)", "fltrust": "fltrust(epochs=1)"}
FITTING |= {"fedlaw": "fedlaw(samples=30, epochs=2, batch_size=20)"}
# These would do nothing of their own in three rounds.
FITTING |= {"feddst": "feddst(every=1, until=1.0, alpha=0.3)", "subfedavg": "subfedavg(accuracy=0)"}
FITTING |= {"l-dawa": "l-dawa(warmup=1)", "freeze-middle": "freeze-middle(after=1)"}
FITTING |= {"lips": "lips(every=1)", "transient": "transient(every=1)", "trimmed-mean": "trimmed-mean(trim=0.2)"}
EVERY_METHOD = [*(FITTING.get(name, name) for name in methods.names()), *COMBINATIONS]


LONG = {"the same run twice is the same", "engines agree on all clients"}
# What holds for each part holds for a composition, which hands every part its own memory and messages.
LONG |= {"no client sees another", "the order of replies does not matter", "one model is the same for everybody"}
LONG |= {"clients that sit out keep their state", "going on from a saved state changes nothing"}
EVERY_CHECK = [
    pytest.param(check, method, marks=[pytest.mark.slow] if check in LONG and method in COMBINATIONS else [])
    for check in METHOD_CHECKS
    for method in EVERY_METHOD
]


@pytest.mark.parametrize(("check", "method"), EVERY_CHECK)
def test_the_contract(check, method):
    with warnings.catch_warnings(record=True) as told:  # for some, three rounds are too few
        warnings.simplefilter("always")
        METHOD_CHECKS[check](Method.make(method))
    assert not [one for one in told if "not recorded and replayed" in str(one.message)]


@pytest.mark.parametrize("name", methods.names())
def test_a_method_lies_in_the_file_of_its_name(name):
    assert methods.get(name).__module__ == f"fedstrata.methods.{name.replace('-', '_')}"


# The checks notice what does not hold ---------------------------------------------------------------------------------

FACTS = Facts("test", "none")


@dataclass(frozen=True)
class Proper(Part):
    """Do nothing, and say so."""

    name: ClassVar[str] = "proper"
    facts: ClassVar[Facts] = FACTS
    touches: ClassVar[Touches] = Touches()


@dataclass(frozen=True)
class Undeclared(Part):
    """Say nothing."""

    name: ClassVar[str] = "undeclared"
    facts: ClassVar[Facts] = FACTS


@dataclass(frozen=True)
class OneScale(Proper):
    """Scale the loss by all clients that happen to be computed together."""

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        return loss * len(clients.ids)


@dataclass(frozen=True)
class Forgetful(Proper):
    """Keep something outside of the memory."""

    rounds: ClassVar[list[int]] = []

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        self.rounds.append(clients.round)
        return loss * (1 + len(self.rounds) % 7)


@dataclass(frozen=True)
class Whisper(Proper):
    """Send a number with each reply, which no sum could keep."""

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        return Message(message.tensors, message.masks, {"whisper/steps": training.steps})


@dataclass(frozen=True)
class Relative(Proper):
    """Weigh clients by who else takes part, and do not say so."""

    def weigh(self, declared: Declared) -> Tensor:
        return declared.sizes / declared.sizes.sum(dtype=torch.float64)


@dataclass(frozen=True)
class Spilt(Proper):
    """Keep the head, and send it all the same."""

    def keeps(self, layers: Any) -> Kept:
        return Kept(personal=layers.head_names)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        return message.plus({name: training.trained[name] for name in clients.layers.head_names})


@dataclass(frozen=True)
class Secretly(Proper):
    """Give each client another model, and do not say so."""

    def receive(self, clients: Clients, message: Message, model: Tensors) -> tuple[Tensors, Tensors]:
        biases = model["head.bias"] + torch.tensor(clients.ids)[:, None]
        return {**model, "head.bias": biases}, clients.memory


@dataclass(frozen=True)
class Unbounded(Proper):
    """Have a parameter without words."""

    strength: float = 1.0


@dataclass(frozen=True)
class Arriving(Proper):
    """Let the last reply count."""

    touches: ClassVar[Touches] = Touches(takes_away=(Matter.OWN_WEIGHT,))
    seen: ClassVar[list[int]] = []

    def server_step(self, server: Server, merged: Tensors) -> tuple[Tensors, Tensors]:
        self.seen.append(1)
        return {name: tensor + len(self.seen) for name, tensor in merged.items()}, server.memory


def test_a_proper_part_passes():
    check_method(Proper)


@pytest.mark.filterwarnings("ignore:Training steps are not recorded")
@pytest.mark.parametrize(
    ("part", "check", "complaint"),
    [
        (Undeclared, "parts describe themselves", "does not declare what it touches"),
        (Unbounded, "parts describe themselves", "'strength' of 'proper' is not declared"),
        (OneScale, "engines agree on some clients", "loop and stacked engine differ"),
        (Forgetful, "the same run twice is the same", "two equal runs differ"),
        (Arriving, "the order of replies does not matter", "two orders of replies differ"),
        (Whisper, "what is said of replies is true", "numbers .* that a sum would lose"),
        (Relative, "what is said of replies is true", "no part says so .Matter.OWN_WEIGHT"),
        (Spilt, "personal tensors never travel", "is personal, and travels"),
        (Secretly, "one model is the same for everybody", "the models of clients 0 and 1"),
    ],
)
def test_the_checks_notice(part, check, complaint):
    with pytest.raises(AssertionError, match=complaint):
        METHOD_CHECKS[check](Method.make(part()))


def test_what_does_not_hold_is_told_with_the_name_of_the_check():
    with pytest.raises(AssertionError, match="parts describe themselves: 'undeclared' does not declare"):
        check_method(Undeclared())


# What is not the same for every method --------------------------------------------------------------------------------


def run(method: str, engine: str, chunk: int = 99, **changes: Any) -> Driver:
    driver = prepare(method, engine, chunk, **{"evaluate_every": 3, **changes})
    for _ in range(3):
        driver.step()
    return driver


NARROW = {
    "fedbn+lips(every=1)+lws": "fp16", "ssfl(sparsity=0.8)": "int8", "scaffold": "bf16", "random-k": "int8",
}  # fmt: skip
"""Each with one way to send its values; the others go through the same lines, and are left to the slow tests."""


@pytest.mark.parametrize(
    ("method", "values"),
    [
        pytest.param(method, values, marks=[] if values == usual else [pytest.mark.slow])
        for method, usual in NARROW.items()
        for values in ("fp16", "bf16", "int8")
    ],
)
def test_engines_agree_on_narrower_values_and_what_they_lose(method, values):
    changes = {"upload_values": values, "download_values": values, "precision": "fp32"}
    loop, stacked = (run(method, engine, 2, **changes) for engine in ("loop", "stacked"))
    plain = run(method, "stacked", 2, precision="fp32")
    for way in ("up", "down"):
        lost = loop.metrics.series(f"wire_error.{way}")[1]
        assert lost == pytest.approx(stacked.metrics.series(f"wire_error.{way}")[1], rel=0.05)
        assert 0 < lost.max() < 0.03
        sent = [one.metrics.series(f"bytes.{way}")[1] for one in (loop, stacked, plain)]
        assert sent[0].tolist() == sent[1].tolist()
        assert (sent[0][1:] < 0.9 * sent[2][1:]).all()
        assert f"wire_error.{way}" not in plain.metrics.latest()
    first = (one.metrics.series("train.loss")[1][0] for one in (loop, stacked))
    assert next(first) == pytest.approx(next(first), rel=1e-5)


@pytest.mark.parametrize(("method", "kept"), [("fedprox+fedadam", 0), ("fedavg+lws", 5)])
def test_only_methods_that_look_at_single_replies_keep_them(method, kept):
    engine = prepare(method, "loop").engine
    assert isinstance(engine, LoopEngine)
    collector, replies = engine.central.collector(1), []
    for client, message in enumerate(engine.central.messages(range(5), 1)):
        reply, _ = engine.members[client].answer(message, 1)
        decoded = engine.central.decoded(reply, client, 1)
        collector.add(client, decoded)
        replies.append(weakref.ref(decoded))
        del decoded
    assert sum(reply() is not None for reply in replies) == kept


def test_a_message_to_others_is_left_alone_by_parts_that_choose_layers():
    """What one part sends beside the model, another that leaves layers out does not take away."""
    for method in ("player(up_to=body)+fedir", "sparse-ft(head_rounds=1, batch_size=4)+fedir"):
        engine = prepare(method, "loop").engine
        sent: Iterable[str] = engine.side.broadcast(engine.server, range(5), 1).tensors
        assert "fedir/distribution" in sent, method
