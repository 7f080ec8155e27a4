from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from federations import federation, samples, split_by_size
from torch import nn

from fedstrata._platform import CORES
from fedstrata.engines.client import ClientSide
from fedstrata.engines.forward import LoopForward
from fedstrata.engines.loop import LoopEngine
from fedstrata.engines.threads import SideBySide

SIZES = (6, 8, 10, 7, 3)


def world_of(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    return federation(model, samples(40), split_by_size(SIZES), batch_size=4, **changes)


def sides_of(count):
    world = world_of()
    return SideBySide(ClientSide(world.setting, LoopForward(world.model), world.data), count)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "scaffold"])
def test_clients_side_by_side_do_what_they_do_one_after_another_bit_for_bit(method):
    """Dropout, running statistics and what clients keep included."""
    results = []
    for at_once in (1, 2, 4):
        world = world_of(method=method, optimiser="sgd(learning_rate=0.1, momentum=0.9)")
        engine = LoopEngine(world.setting, world.model, world.data, world.declared, at_once)
        reports = [engine.round(number, [3, 0, 4, 1], evaluate=True) for number in (1, 2)]
        losses = torch.stack([report.loss for report in reports])
        results.append((losses, engine.server.model, dict(engine.clients()), [one.bytes_up for one in reports]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_answers_come_in_order_and_no_two_share_a_side():
    barrier, used = threading.Barrier(3, timeout=20), []

    def work(side, item):
        barrier.wait()  # three are at work at the same time
        used.append(side)
        return item * 10

    assert list(sides_of(3).map(work, [1, 2, 3])) == [10, 20, 30]
    assert len({id(side) for side in used}) == len({id(side.forward.model) for side in used}) == 3


def test_who_takes_the_answers_has_a_model_that_no_thread_uses():
    """Models that are trained already are tested while others still train."""
    world = world_of()
    own = ClientSide(world.setting, LoopForward(world.model), world.data)
    used = list(SideBySide(own, 3).map(lambda side, item: side.forward.model, range(6)))
    assert all(model is not own.forward.model for model in used)
    assert list(SideBySide(own, 1).map(lambda side, item: side, [0])) == [own]


def test_threads_of_pytorch_are_those_of_the_one_who_asks():
    before, sides = torch.get_num_threads(), sides_of(2)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert set(sides.map(lambda side, item: torch.get_num_threads(), range(4))) == {threads}
    finally:
        torch.set_num_threads(before)


def test_after_a_failure_nobody_begins_and_the_error_is_told():
    began = []

    def work(side, item):
        began.append(item)
        if item == 1:
            raise ArithmeticError("client 1 failed")
        time.sleep(0.003)  # or all are done before anybody has heard of it
        return item

    sides = sides_of(2)
    with pytest.raises(ArithmeticError, match="client 1 failed"):
        list(sides.map(work, range(1, 1000)))
    assert len(began) < 999
    assert list(sides.map(lambda side, item: item, range(5))) == list(range(5)), "its sides are free again"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_threads_may_use_every_core_also_where_the_one_that_asks_is_bound_to_one():
    before, sides = os.sched_getaffinity(0), sides_of(2)
    try:
        os.sched_setaffinity(0, {min(before)})
        used = list(sides.map(lambda side, item: frozenset(os.sched_getaffinity(0)), range(4)))
        assert set(used) == {CORES}
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
