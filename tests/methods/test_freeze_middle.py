from __future__ import annotations

import pytest
import torch
from watching import BOTH_ENGINES, assert_same_bits, run, watched

from fedstrata.engines.loop import LoopEngine
from fedstrata.methods import Message
from fedstrata.wire import decode, encode

MIDDLE = {"body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128}


@BOTH_ENGINES
def test_freezing_later_than_the_end_is_fedavg(engine):
    left, right = run("freeze-middle(after=1000)", engine), run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    for way in ("bytes.up", "bytes.down"):
        assert left.metrics.series(way)[1].tolist() == right.metrics.series(way)[1].tolist()


@BOTH_ENGINES
@pytest.mark.parametrize("optimiser", ["sgd(momentum=0.9, weight_decay=0.1, keep=true)", "adamw(weight_decay=0.1)"])
def test_frozen_weights_stay_to_the_bit_at_each_client(engine, optimiser):
    method, seen = watched("fedbn+freeze-middle(after=1)")
    run(method, engine, optimiser=optimiser)
    for client in range(5):
        frozen = seen.trained[1, client]
        for round in (2, 3):
            for step in [seen.start[round, client], *seen.steps[round, client], seen.trained[round, client]]:
                assert all(torch.equal(step[name], frozen[name]) for name in MIDDLE)
            for name in ("stem.weight", "head.weight", "hidden.bias", "shortcut.1.weight"):
                assert not torch.equal(seen.trained[round, client][name], seen.trained[round - 1, client][name]), name
    for name in MIDDLE:
        assert len({tuple(seen.trained[3, client][name].flatten().tolist()) for client in range(5)}) == 5


@BOTH_ENGINES
def test_frozen_weights_cost_no_bytes(engine):
    simulation = run("freeze-middle(after=1)", engine)
    shapes = {"body.weight": [1, 4, 4, 3, 3], "shortcut.0.weight": [1, 4, 4, 1, 1], "hidden.weight": [1, 8, 16]}
    frozen = Message({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()})
    separator = len(",")
    saved = 5 * (len(encode(frozen)) - len(encode(Message())) + separator)
    for way in ("bytes.up", "bytes.down"):
        first, second, third = simulation.metrics.series(way)[1]
        assert first - second == saved
        assert second == third


def test_frozen_names_are_in_no_message():
    simulation = run("freeze-middle(after=1)", rounds=2)
    assert isinstance(simulation.engine, LoopEngine)
    [message] = set(simulation.engine.central.messages(range(5), 3))
    reply, _ = simulation.engine.members[0].answer(message, 3)
    for data in (message, reply):
        assert not MIDDLE.keys() & decode(data).tensors.keys()
