"""What every registered method, and every sensible combination, must hold."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from worlds import digits, unequal_split, with_changed_client
from worlds import prepare as prepare_world

from fedstrata.engines import forward
from fedstrata.engines.engine import pack, unpack
from fedstrata.engines.loop import LoopEngine
from fedstrata.engines.operations import CORRECTED_OPERATIONS, CPU_OPERATIONS, GPU_OPERATIONS
from fedstrata.errors import FedStrataError
from fedstrata.methods import Message, Method, methods

COMBINATIONS = [
    "fedbn+fedprox(mu=0.1)",
    "fedprox+fedavgm+lws",
    "fedbn+fedavg-ft",
    "fedbn+lips(every=1)+lws",
    "fedbn+lips(every=1, criterion=gradient, refill=init, schedule=released)",
    "transient(every=1, local_sparsity=true, criterion=random)+fedprox",
    "transient(every=2, criterion=magnitude, layers=all)",
    "fedbn+freeze-middle(after=1)",
    "fedbn+lips(every=1)+fedadam+central-dp(noise=0.5)",
    "fedprox+freeze-middle(after=1)+local-dp(noise=0.1)",
    "fedavg+lws(layers=model, clamp=true)",
    "ssfl(sparsity=0.8, balanced=true, batches=2)+fedbn+lws",
    "ssfl(scope=all, warmup=1, adapt_at=3, growth=true)+fedprox",
    "ssfl(topology=shuffled, refresh_every=1)",
    "ssfl(topology=random)+fedavgm",
    "player(threshold=1.5)+fedprox",
    "player(random=true)+lws",
    "player(up_to=body)",
    "fedavg+lws(layers=fixed, mode=opt)",
    "fedavg+lws(layers=released, clamp=true)",
    "ssfl(topology=oracle)+top-k",
    "subfedavg(accuracy=0, rate=0.2)+fedbn",
    "flash-jmwst(every=2, first_epochs=3)+lws",
    "sparsyfed(sparsity=0.9)+fedprox",
    "scaffold(learning_rate=0.5)+fedbn",
    "feddyn(alpha=0.1)+lws",
    "fedlp(probability=0.5)+l-dawa+lws",
    "feddisco+fedlama+fedbn+lws",
    "fedbn+feddrop(rate=0.5)+fednova",
    "fedcac(tau=0.3, beta=2)+fedbn+lws",
    "pfedla(heur=2)+fedprox",
    "dispfl(density=0.3, regrow=random, neighbours=2)+fedbn",
    "feddst(sparsity=0.6, every=1, until=1.0, alpha=0.3)+fedprox",
    "fedrep+transient(every=1, local_sparsity=true)",
    "ditto(epochs=1, pull=released)+fedbn+fedprox",
    "pfedsd+fedper(head_layers=2)+lws",
    "fedir+fedvc(samples=12)+moon",
    "sparse-ft(head_rounds=1, sparsity=0.5, calibration_clients=0.4, batch_size=4)+fedprox",
    "sparse-ft(head_rounds=1, rule=most, fisher=sampled-label, batch_size=4)+fedbn+lws",
]
# At their defaults, these would blow rounding differences of two engines up: long epochs of five to twenty samples, and
# a strong pull under Adam on a bias that has no gradient but rounding noise.
FITTING = {"fedvc": "fedvc(samples=20)", "pfedme": "pfedme(strength=1.0, inner_steps=2)"}
EVERY_METHOD = [*(FITTING.get(name, name) for name in methods.names()), *COMBINATIONS]
every_method = pytest.mark.parametrize("method", EVERY_METHOD)


def prepare(method, engine="loop", chunk=99, dataset=None, **changes):
    return prepare_world(method, engine, chunk, dataset, **{"evaluate_every": 3, **changes})


# Adam gets a large epsilon: a bias in front of a norm has no gradient but rounding noise, which Adam would blow up to
# full steps.
def run(simulation, rounds=3):
    for _ in range(rounds):
        simulation.step()
    return simulation


def state_of(simulation):
    return pack(simulation.engine.server, simulation.engine.clients())


def assert_close(left, right, tolerance=1e-9):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name].double(), right[name].double(), rtol=tolerance, atol=tolerance), name


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@every_method
@pytest.mark.parametrize(
    ("chunk", "operations", "changes"),
    [
        (
            2,
            GPU_OPERATIONS,
            {"optimiser": "adam(learning_rate=0.01, epsilon=0.001, keep=true, clip=1.0)", "participation": 0.6},
        ),
        (99, CPU_OPERATIONS, {"steps": 3, "schedule": "exponential:0.5", "statistics": "local"}),
    ],
    ids=["chunked-partial-adam-gpu", "whole-steps-local-statistics"],
)
def test_loop_and_stacked_agree(method, chunk, operations, changes, monkeypatch):
    monkeypatch.setattr(forward, "stacked_operations", lambda device: CORRECTED_OPERATIONS | operations)
    loop = run(prepare(method, "loop", **changes))
    stacked = run(prepare(method, "stacked", chunk, **changes))
    assert_close(state_of(loop), state_of(stacked))
    left, right = loop.metrics.latest(), stacked.metrics.latest()
    assert left.keys() == right.keys()
    assert left == pytest.approx(right, rel=1e-7, abs=1e-9)


@every_method
def test_bytes_are_those_of_real_messages(method):
    """The loop engine counts what it really encoded; the stacked one must say the same."""
    loop, stacked = (
        run(prepare(method, engine, participation=0.6), 1).metrics.latest() for engine in ("loop", "stacked")
    )
    assert (loop["bytes.up"], loop["bytes.down"]) == (stacked["bytes.up"], stacked["bytes.down"])


@every_method
def test_the_same_run_twice_is_the_same_to_the_bit(method):
    first, second = (run(prepare(method, "stacked", 2, precision="fp32"), 2) for _ in range(2))
    assert_same_bits(state_of(first), state_of(second))
    assert first.metrics.to_tables() == second.metrics.to_tables()


@every_method
def test_going_on_from_a_saved_state_changes_nothing(method):
    engine = ("loop", "stacked")[EVERY_METHOD.index(method) % 2]
    changes = {"participation": 0.6, "optimiser": "sgd(learning_rate=0.05, momentum=0.9, keep=true)"}
    unbroken = run(prepare(method, engine, 2, **changes))
    broken = run(prepare(method, engine, 2, **changes), 1)
    resumed = prepare(method, engine, 2, **changes)
    resumed.engine.restore(*unpack({name: tensor.clone() for name, tensor in state_of(broken).items()}))
    resumed.round = 1
    assert_same_bits(state_of(unbroken), state_of(run(resumed, 2)))


@every_method
def test_no_client_sees_another(method):
    """Other data at one client changes no other client's reply and no other client's state."""
    dataset = digits()
    other = with_changed_client(dataset, unequal_split(dataset), client=2)
    answers = []
    for data in (dataset, other):
        engine = prepare(method, "loop", dataset=data).engine
        assert isinstance(engine, LoopEngine)
        messages = engine.central.messages(range(5), 1)
        answers.append([engine.members[client].answer(messages[client], 1)[0] for client in range(5)])
    nothing_is_sent = Method.make(method).personal(prepare(method).setting.layers) >= set(
        prepare(method).setting.initial
    )
    for client in range(5):
        same = answers[0][client] == answers[1][client]
        assert same if client != 2 or nothing_is_sent else not same


@pytest.mark.parametrize("values", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("method", ["fedbn+lips(every=1)+lws", "ssfl(sparsity=0.8)", "scaffold", "random-k"])
def test_engines_agree_on_narrower_values_and_what_they_lose(method, values):
    changes = {"upload_values": values, "download_values": values, "precision": "fp32"}
    loop, stacked = (run(prepare(method, engine, 2, **changes)) for engine in ("loop", "stacked"))
    plain = run(prepare(method, "stacked", 2, precision="fp32"))
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


@every_method
def test_the_order_of_replies_does_not_matter(method):
    states = []
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        engine = prepare(method, "loop", precision="fp32").engine
        assert isinstance(engine, LoopEngine)
        messages = engine.central.messages(range(5), 1)
        collector = engine.central.collector(1)
        for client in order:
            reply, _ = engine.members[client].answer(messages[client], 1)
            collector.add(client, engine.central.decoded(reply, client, 1))
        engine.central.state = collector.finish()
        states.append(pack(engine.server, engine.clients()))
    assert_same_bits(*states)


@every_method
def test_what_is_said_of_replies_is_true(method):
    """Sums and secure aggregation rely on it: weights of single clients, and entries that all clients send."""
    engine = prepare(method, "loop").engine
    assert isinstance(engine, LoopEngine)
    central, composed = engine.central, engine.setting.method
    engine.exchange(1)
    weights = [composed.weigh(central.side.view(central.state, [client], 1)) for client in range(5)]
    together = composed.weigh(central.side.view(central.state, range(5), 1))
    separable = all(part.separable for part in composed.parts)
    assert not separable or torch.cat(weights).tolist() == together.tolist()
    messages = central.messages(range(5), 1)
    replies = [
        central.decoded(member.answer(message, 1)[0], client, 1)
        for client, (member, message) in enumerate(zip(engine.members, messages, strict=True))
    ]
    if composed.objection_to_secure_aggregation is None:
        known = Message(central.side.masks_known(central.state, range(5), 1, upload=True))
        assert known.common
        for reply in replies:
            assert not reply.numbers
            assert reply.tensors.keys() == replies[0].tensors.keys() <= central.state.model.keys()
            assert reply.masks.keys() <= known.tensors.keys()
            assert all(torch.equal(mask, known.tensors[name]) for name, mask in reply.masks.items())


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


@every_method
def test_clients_that_sit_out_keep_their_state(method):
    simulation = run(prepare(method, "stacked", 2, participation=0.4, optimiser="sgd(momentum=0.9, keep=true)"), 1)
    before = {name: tensor.clone() for name, tensor in state_of(simulation).items() if name.startswith("clients")}
    simulation.engine.round(2, [1, 3], evaluate=False)
    after = state_of(simulation)
    for name, tensor in before.items():
        assert torch.equal(tensor[[0, 2, 4]], after[name][[0, 2, 4]]), name


@every_method
def test_personal_names_never_travel(method):
    simulation = prepare(method)
    assert isinstance(simulation.engine, LoopEngine)
    [message] = set(simulation.engine.central.messages([0], 1))
    reply, _ = simulation.engine.members[0].answer(message, 1)
    for name in simulation.setting.personal:
        assert f'"{name}"'.encode() not in message + reply


@pytest.mark.parametrize("name", methods.names())
def test_a_method_describes_itself(name):
    facts = methods.get(name).facts
    described = methods.describe(name)
    assert facts.family
    assert facts.paper
    assert described["summary"].endswith(".")
    assert all(parameter["meaning"] for parameter in described["parameters"])


@pytest.mark.parametrize("name", methods.names())
def test_bad_parameters_are_refused_with_a_sentence(name):
    with pytest.raises(FedStrataError, match="no parameter"):
        Method.make(f"{name}(no_such_parameter=1)")
    types = {described["name"]: described["type"] for described in methods.describe(name)["parameters"]}
    for field in dataclasses.fields(methods.get(name)):
        any_word_fits = "a word" in types[field.name] and not field.metadata["choices"]
        if not any_word_fits:
            with pytest.raises(FedStrataError, match=field.name):
                Method.make(f"{name}({field.name}='a word that fits nowhere')")
        if field.metadata.get("low") is not None or field.metadata.get("above") is not None:
            with pytest.raises(FedStrataError, match=field.name):
                Method.make(f"{name}({field.name}=-1)")
