from __future__ import annotations

import pytest
import torch
from watching import BOTH_ENGINES, assert_same_bits, run, watched

from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataWarning
from fedstrata.methods import Message, methods
from fedstrata.testing.world import prepare
from fedstrata.wire import decode, encode

MIDDLE = {"body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128}


@BOTH_ENGINES
def test_freezing_later_than_the_end_is_fedavg(engine):
    with pytest.warns(FedStrataWarning, match="move up to round 3, and the run has 3, so it freezes nothing"):
        left = run("freeze-middle(after=3)", engine)
    right = run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    for way in ("bytes.up", "bytes.down"):
        assert left.metrics.series(way)[1].tolist() == right.metrics.series(way)[1].tolist()


OPTIMISERS = ["sgd(momentum=0.9, weight_decay=0.1, keep=true)", "adamw(weight_decay=0.1)"]
MOVING = ("stem.weight", "head.weight", "hidden.bias", "shortcut.1.weight")


def assert_frozen(seen, frozen, rounds=(2, 3)):
    """Look at every client, before its first step, after each of them, and at the end of its round."""
    for round, client in seen.start:
        if round in rounds:
            place = round, client
            for model in [seen.start[place], *seen.steps[place], seen.trained[place]]:
                assert all(torch.equal(model[name], frozen(client)[name]) for name in MIDDLE)
            for name in MOVING:
                assert not torch.equal(seen.trained[place][name], seen.start[place][name]), name


@BOTH_ENGINES
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_each_clients_own_weights_stay_frozen_to_the_bit(engine, optimiser):
    method, seen = watched("fedbn+freeze-middle(after=1, freezes=own)")
    run(method, engine, optimiser=optimiser)
    assert_frozen(seen, lambda client: seen.trained[1, client])
    for name in MIDDLE:
        assert len({tuple(seen.trained[3, client][name].flatten().tolist()) for client in range(5)}) == 5


@BOTH_ENGINES
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_aggregate_of_the_last_moving_round_stays_frozen_to_the_bit(engine, optimiser):
    method, seen = watched("fedbn+freeze-middle(after=1)")
    simulation = run(method, engine, optimiser=optimiser)
    assert_frozen(seen, lambda client: simulation.engine.server.model)
    sizes = simulation.split.sizes
    for name in MIDDLE:
        mean = sum(seen.trained[1, client][name] * float(sizes[client]) for client in range(5)) / float(sizes.sum())
        torch.testing.assert_close(simulation.engine.server.model[name], mean, rtol=1e-9, atol=1e-12)
        assert not torch.equal(seen.trained[1, 0][name], simulation.engine.server.model[name])


def test_with_the_aggregate_everybody_has_one_model_and_with_own_weights_nobody():
    assert not prepare("freeze-middle(after=1)").setting.resident
    assert prepare("freeze-middle(after=1, freezes=own)").setting.resident == MIDDLE.keys()


def test_the_papers_round_is_the_fiftieth():
    assert methods.make("freeze-middle").after == 50
    assert methods.make("freeze-middle(after=0)").after == 0


@BOTH_ENGINES
def test_clients_that_were_absent_freeze_the_same_aggregate(engine):
    method, seen = watched("freeze-middle(after=2)")
    simulation = run(method, engine, rounds=8, participation=0.4)
    early = {client for round, client in seen.start if round == 3}
    assert {client for round, client in seen.start if round > 3} - early
    assert_frozen(seen, lambda client: simulation.engine.server.model, range(3, 9))


@BOTH_ENGINES
def test_clients_that_were_absent_freeze_what_they_have_themselves(engine):
    """Whoever never trained before has the initial weights."""
    method, seen = watched("freeze-middle(after=2, freezes=own)")
    initial = run(method, engine, rounds=8, participation=0.4).setting.initial
    moved = {client: seen.trained[round, client] for round, client in sorted(seen.trained) if round <= 2}
    assert {client for _, client in seen.start} - moved.keys()
    assert_frozen(seen, lambda client: moved.get(client, initial), range(3, 9))


@BOTH_ENGINES
@pytest.mark.parametrize(("freezes", "saving"), [("own", ("bytes.up", "bytes.down")), ("aggregate", ("bytes.up",))])
def test_frozen_weights_cost_no_bytes(engine, freezes, saving):
    simulation = run(f"freeze-middle(after=1, freezes={freezes})", engine)
    shapes = {"body.weight": [1, 4, 4, 3, 3], "shortcut.0.weight": [1, 4, 4, 1, 1], "hidden.weight": [1, 8, 16]}
    frozen = Message({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()})
    separator = len(",")
    saved = 5 * (len(encode(frozen)) - len(encode(Message())) + separator)
    for way in ("bytes.up", "bytes.down"):
        first, second, third = simulation.metrics.series(way)[1]
        assert first - second == (saved if way in saving else 0)
        assert second == third


def test_frozen_names_are_in_no_message():
    simulation = run("freeze-middle(after=1, freezes=own)", rounds=2)
    assert isinstance(simulation.engine, LoopEngine)
    [message] = set(simulation.engine.central.messages(range(5), 3))
    reply, _ = simulation.engine.members[0].answer(message, 3)
    for data in (message, reply):
        assert not MIDDLE.keys() & decode(data).tensors.keys()
