"""What every method, and every sensible combination of methods, must hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fedstrata.engines import forward
from fedstrata.engines.client import ClientSide
from fedstrata.engines.engine import pack, unpack
from fedstrata.engines.loop import LoopEngine
from fedstrata.engines.operations import CORRECTED_OPERATIONS, CPU_OPERATIONS, GPU_OPERATIONS, Operations
from fedstrata.engines.stacked import StackedEngine
from fedstrata.errors import FedStrataError
from fedstrata.methods import Matter, Message, Method, Part, methods
from fedstrata.runs.driver import Driver
from fedstrata.stack import Stack, clone
from fedstrata.testing.requiring import require
from fedstrata.testing.world import SIZES, digits, prepare, unequal_split, with_changed_client

Check = Callable[[Method], None]
_TOLERANCE = 1e-9
_CLIENTS = range(len(SIZES))


def check_method(method: str | Part | type[Part] | Method) -> None:
    """Check that a method keeps the contract: on every engine, after a restart, for clients that sit out, and so on.

    Give a part or its class, or a text such as ``"my-method(strength=0.5)+fedbn"`` whose parts are registered. It
    takes some seconds. What does not hold is an :class:`AssertionError` that begins with the name of the check.

    >>> check_method("fedprox(mu=0.1)")
    """
    made = Method.make(method() if isinstance(method, type) else method)
    for name, check in METHOD_CHECKS.items():
        try:
            check(made)
        except FedStrataError as error:
            raise AssertionError(f"{name}: {error}") from error
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# The checks -----------------------------------------------------------------------------------------------------------


def engines_agree_on_some_clients(method: Method) -> None:
    """Some clients at a time, not all of them in a round, one epoch, a kept Adam: one by one or stacked is the same.

    The stacked engine runs the operations that it has for GPUs. Adam gets a large epsilon: a bias in front of a norm
    has no gradient but rounding noise, which Adam would blow up to full steps.
    """
    optimiser = "adam(learning_rate=0.01, epsilon=0.001, keep=true, clip=1.0)"
    _engines_agree(method, 2, GPU_OPERATIONS, {"optimiser": optimiser, "participation": 0.6, "epochs": 1})


def engines_agree_on_all_clients(method: Method) -> None:
    """All clients at once, a fixed number of steps, running statistics that stay local: the same again."""
    changes = {"steps": 3, "schedule": "exponential:0.5", "statistics": "local"}
    _engines_agree(method, 99, CPU_OPERATIONS, changes)


def _engines_agree(method: Method, chunk: int, operations: Operations, changes: Mapping[str, Any]) -> None:
    with patch.object(forward, "stacked_operations", lambda device: CORRECTED_OPERATIONS | operations):
        loop, stacked = (_run(method, engine, size, **changes) for engine, size in (("loop", 1), ("stacked", chunk)))
    _assert_equal("loop and stacked engine", _state(loop), _state(stacked), exactly=False)
    left, right = loop.metrics.latest(), stacked.metrics.latest()
    require(left.keys() == right.keys(), f"the engines report other metrics: {sorted(left.keys() ^ right.keys())}")
    for name, value in left.items():
        close = math.isclose(value, right[name], rel_tol=1e-7, abs_tol=_TOLERANCE)
        require(close or (math.isnan(value) and math.isnan(right[name])), f"'{name}' is {value} and {right[name]}")


def the_same_run_twice_is_the_same(method: Method) -> None:
    """To the bit, in single precision, also where steps are recorded and replayed in one, and run in Python in the
    other, and where the next round begins before the numbers of the one before are read.
    """
    engine = ("stacked", "loop")[len(str(method)) % 2]
    changes: dict[str, Any] = {"precision": "fp32", "schedule": "exponential:0.5", "steps": 2}
    changes["deterministic"] = torch.cuda.is_available()
    replayed = _prepared(method, engine, 2, replay=True, **changes)
    replayed.runs_ahead = True
    replayed.run()
    in_python = _run(method, engine, 2, replayed.experiment.rounds, replay=False, **changes)
    trainer = _client_side(replayed).trainer
    require(trainer.replayed > 0 or bool(trainer.obstacles), "no step of it was replayed, and nothing stood against it")
    _assert_equal("two equal runs", _state(replayed), _state(in_python))
    require(replayed.metrics.to_tables() == in_python.metrics.to_tables(), "the metrics of two equal runs differ")


def bytes_are_those_of_real_messages(method: Method) -> None:
    """The loop engine counts what it really encoded; the stacked one says the same."""
    loop, stacked = (
        _run(method, engine, rounds=1, participation=0.6, steps=1).metrics.latest() for engine in ("loop", "stacked")
    )
    for way in ("bytes.up", "bytes.down"):
        require(loop[way] == stacked[way], f"{way} are {loop[way]} in real messages and {stacked[way]} as counted")


def going_on_from_a_saved_state_changes_nothing(method: Method) -> None:
    """A run that was interrupted ends as if it had not been, to the bit."""
    changes = {"participation": 0.6, "optimiser": "sgd(learning_rate=0.05, momentum=0.9, keep=true)", "steps": 2}
    engine = ("loop", "stacked")[len(str(method)) % 2]
    unbroken = _run(method, engine, 2, 1, **changes)
    saved = clone(_state(unbroken))
    resumed = _prepared(method, engine, 2, **changes)
    resumed.engine.restore(*unpack(saved))
    resumed.round = 1
    _assert_equal("an unbroken and a resumed run", _state(_go_on(unbroken, 2)), _state(_go_on(resumed, 2)))


def no_client_sees_another(method: Method) -> None:
    """Other data at one client changes no other client's reply, but its own, if it sends anything."""
    dataset, changed = digits(), 2
    other = with_changed_client(dataset, unequal_split(dataset), changed)
    engine, with_other = (_loop(method, dataset=data) for data in (dataset, other))
    before, after = ([reply for _, reply in _first_replies(one)] for one in (engine, with_other))
    for client in _CLIENTS:
        if client != changed:
            require(before[client] == after[client], f"client {client} answers by the data of client {changed}")
    sends = engine.central.decoded(before[0], 0, 1).tensors
    require(not sends or before[changed] != after[changed], f"client {changed} answers whatever its data is")


def the_order_of_replies_does_not_matter(method: Method) -> None:
    """Replies may come in any order."""
    states = []
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        engine = _loop(method, precision="fp32")
        messages, collector = engine.central.messages(_CLIENTS, 1), engine.central.collector(1)
        for client in order:
            reply, _ = engine.members[client].answer(messages[client], 1)
            collector.add(client, engine.central.decoded(reply, client, 1))
        engine.central.state = collector.finish()
        states.append(pack(engine.server, engine.clients()))
    _assert_equal("two orders of replies", states[0], states[1])


def what_is_said_of_replies_is_true(method: Method) -> None:
    """Sums and secure aggregation rely on it: weights of single clients, and entries that all clients send."""
    engine = _loop(method)
    central = engine.central
    engine.exchange(1)
    if method.taking(Matter.OWN_WEIGHT) is None:
        alone = torch.cat([central.side.weights([client]) for client in _CLIENTS])
        together = central.side.weights(_CLIENTS)
        require(
            alone.tolist() == together.tolist(),
            "the weight of a client depends on who else takes part, and no part says so (Matter.OWN_WEIGHT)",
        )
    if method.objection_to_secure_aggregation is not None:
        return
    known = Message(central.side.masks_known(central.state, _CLIENTS, 1, upload=True))
    require(known.common, "the server holds other masks for each client, and no part says so (Matter.SAME_ENTRIES)")
    replies = [central.decoded(reply, client, 1) for client, reply in _first_replies(engine)]
    for reply in replies:
        require(not reply.numbers, f"clients send numbers {list(reply.numbers)} that a sum would lose")
        names = reply.tensors.keys()
        require(
            names == replies[0].tensors.keys() <= central.state.model.keys(),
            (
                "clients send other tensors than the model's, or not all the same, so that a sum cannot stand for "
                "them: define merge, or ask for replies (Needs.replies)"
            ),
        )
        same = all(
            torch.equal(mask, known.tensors[name]) for name, mask in reply.masks.items() if name in known.tensors
        )
        require(
            same and reply.masks.keys() <= known.tensors.keys(),
            "clients send entries of their own, and no part says so (Matter.SAME_ENTRIES)",
        )


def one_model_is_the_same_for_everybody(method: Method) -> None:
    """Where no part takes it away (Matter.ONE_MODEL) and nothing is kept, all clients use the same model."""
    engine = _loop(method)
    engine.exchange(1)
    engine.round(1, _CLIENTS, evaluate=False)
    messages = engine.central.messages(_CLIENTS, 2, testing=True)
    if not engine.setting.everybody_alike or len(set(messages)) > 1:
        return
    models = [member.model(message, 1) for member, message in zip(engine.members, messages, strict=True)]
    for client, model in enumerate(models):
        _assert_equal(f"the models of clients 0 and {client}", Stack(models[0]), Stack(model))


def clients_that_sit_out_keep_their_state(method: Method) -> None:
    """Who does not take part in a round does not change."""
    driver = _run(method, "stacked", 2, 1, participation=0.4, optimiser="sgd(momentum=0.9, keep=true)", steps=1)
    rest = torch.tensor([client for client in _CLIENTS if client not in (1, 3)])
    before = {name: tensor[rest].clone() for name, tensor in driver.engine.clients().items()}
    driver.engine.round(2, [1, 3], evaluate=False)
    after = {name: tensor[rest] for name, tensor in driver.engine.clients().items()}
    _assert_equal("the state of clients before and after a round without them", Stack(before), Stack(after))


def personal_tensors_never_travel(method: Method) -> None:
    """What a part keeps as personal is in no message."""
    engine = _loop(method)
    [message] = set(engine.central.messages([0], 1))
    reply, _ = engine.members[0].answer(message, 1)
    for name in engine.setting.personal:
        require(f'"{name}"'.encode() not in message + reply, f"'{name}' is personal, and travels")


def parts_describe_themselves(method: Method) -> None:
    """Facts, a summary, a declaration of what is touched, and words for every parameter."""
    for part in method.parts:
        kind = type(part)
        require(part.name, f"{kind.__name__} has no name; register it with @methods.register('its-name')")
        require(part.facts.family and part.facts.paper, f"the facts of '{part.name}' name no family or no paper")
        require(
            part.touches is not None, f"'{part.name}' does not declare what it touches; touches = Touches() is enough"
        )
        require(
            (kind.__doc__ or "").strip().splitlines()[0].endswith("."),
            f"the docstring of '{part.name}' does not begin with a sentence",
        )
        for field in dataclasses.fields(part):
            require(field.metadata.get("doc"), f"'{field.name}' of '{part.name}' is not declared with parameter(...)")


def bad_parameters_are_refused(method: Method) -> None:
    """With a sentence that names them."""
    for part in method.parts:
        if part.name not in methods.names():
            continue
        _refuses(f"{part.name}(no_such_parameter=1)", "no parameter")
        described = {one["name"]: one["type"] for one in methods.describe(part.name)["parameters"]}
        for field in dataclasses.fields(part):
            if "a word" not in described[field.name] or field.metadata["choices"]:
                _refuses(f"{part.name}({field.name}='a word that fits nowhere')", field.name)
            if field.metadata.get("low") is not None or field.metadata.get("above") is not None:
                _refuses(f"{part.name}({field.name}=-1)", field.name)


METHOD_CHECKS: dict[str, Check] = {
    check.__name__.replace("_", " "): check
    for check in (
        parts_describe_themselves,
        bad_parameters_are_refused,
        engines_agree_on_some_clients,
        engines_agree_on_all_clients,
        the_same_run_twice_is_the_same,
        bytes_are_those_of_real_messages,
        going_on_from_a_saved_state_changes_nothing,
        no_client_sees_another,
        the_order_of_replies_does_not_matter,
        what_is_said_of_replies_is_true,
        one_model_is_the_same_for_everybody,
        clients_that_sit_out_keep_their_state,
        personal_tensors_never_travel,
    )
}
"""The checks of :func:`check_method`, by what they check; each takes a method."""


# Running small federations --------------------------------------------------------------------------------------------


def _prepared(method: Method, engine: str = "loop", chunk: int = 99, **changes: Any) -> Driver:
    return prepare(method, engine, chunk, **{"evaluate_every": 3, **changes})


def _go_on(driver: Driver, rounds: int) -> Driver:
    for _ in range(rounds):
        driver.step()
    return driver


def _run(method: Method, engine: str, chunk: int = 99, rounds: int = 3, **changes: Any) -> Driver:
    return _go_on(_prepared(method, engine, chunk, **changes), rounds)


def _loop(method: Method, **changes: Any) -> LoopEngine:
    """Make an engine for checks of what is sent and to whom, for which one step of training does."""
    engine = _prepared(method, "loop", **{"steps": 1, **changes}).engine
    assert isinstance(engine, LoopEngine)
    return engine


def _first_replies(engine: LoopEngine) -> list[tuple[int, bytes]]:
    messages = engine.central.messages(_CLIENTS, 1)
    return [(client, engine.members[client].answer(messages[client], 1)[0]) for client in _CLIENTS]


def _client_side(driver: Driver) -> ClientSide:
    engine = driver.engine
    assert isinstance(engine, LoopEngine | StackedEngine)
    return engine.members[0].side if isinstance(engine, LoopEngine) else engine.client_side


def _state(driver: Driver) -> Stack:
    return pack(driver.engine.server, driver.engine.clients())


def _assert_equal(what: str, left: Stack, right: Stack, exactly: bool = True) -> None:
    require(left.keys() == right.keys(), f"{what} have other tensors: {sorted(left.keys() ^ right.keys())[:3]}")
    for name, tensor in left.items():
        other = right[name]
        same = torch.equal(tensor, other) if exactly else _close(tensor, other)
        require(
            same, f"{what} differ in '{name}', by up to {float((tensor.double() - other.double()).abs().max()):.3g}"
        )


def _close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left.double(), right.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _refuses(text: str, word: str) -> None:
    try:
        Method.make(text)
    except FedStrataError as error:
        refusal = str(error)
    else:
        raise AssertionError(f"'{text}' is not refused")
    require(word in refusal, f"'{text}' is refused without naming '{word}': {refusal}")
