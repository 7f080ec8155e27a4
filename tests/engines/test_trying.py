from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data import Dataset, Split
from fedstrata.engines import trying
from fedstrata.engines.batches import DeviceData, Work
from fedstrata.engines.trying import Candidate, Extent, Trial, estimate, fastest, spread

WORK = Work(epochs=5, steps=None, batch_size=10, last_batch="keep")


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trying, "time", clock)
    return clock


def candidate(clock, name, at_once, group, step):
    """A way to run rounds that takes so long for each group and each client's step; to prepare one takes twice that."""

    def prepare(ids, steps):
        extent = Extent(len(ids) * steps, steps)

        def one_round(times=1):
            clock.now += times * (group * extent.groups + step * extent.client_steps)

        one_round(2)
        return one_round

    return Candidate(name, at_once, prepare)


def data_of(sizes):
    total = sum(sizes)
    positions = np.arange(total)
    train = tuple(np.split(positions, np.cumsum(sizes)[:-1]))
    nobody = np.empty(0, dtype=np.int64)
    dataset = Dataset("some", torch.zeros(total, 1), torch.zeros(total, dtype=torch.int64), positions, nobody, ("0",))
    split = Split(train, tuple(nobody for _ in sizes))
    return DeviceData(dataset, split, (), torch.device("cpu"), torch.float32)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(["keep", "drop"]),
    st.sampled_from([None, 4]),
)
def test_steps_and_groups_are_those_of_the_batches(sizes, batch_size, epochs, last_batch, steps):
    work = Work(epochs, steps, batch_size, last_batch)
    batches = list(data_of(sizes).batches(range(len(sizes)), work, seed=0, round=1))
    client_steps = sum(len(sizes) if batch.rows is None else len(batch.rows) for batch in batches)
    assert Extent.of(work, sizes) == Extent(client_steps, len(batches))


@given(st.floats(0.001, 1), st.floats(0.001, 1), st.integers(1, 9), st.integers(1, 9), st.integers(11, 99))
def test_two_trials_tell_what_groups_and_clients_cost(group, step, steps, few, many):
    def taken(extent):
        return group * extent.groups + step * extent.client_steps

    trials = [Trial(extent, taken(extent)) for extent in (Extent(few * steps, steps), Extent(many * steps, steps))]
    whole = Extent(1000, 70)
    assert estimate(whole, trials) == pytest.approx(taken(whole))
    assert estimate(Extent(4 * many * steps, 4 * steps), trials[1:]) == pytest.approx(4 * trials[1].seconds)


def test_nothing_costs_less_than_nothing():
    few = Trial(Extent(4, 2), 1.0)
    assert estimate(Extent(80, 4), [few, Trial(Extent(40, 2), 0.9)]) == pytest.approx(1.8), "the groups alone"
    assert estimate(Extent(80, 4), [few, Trial(Extent(40, 2), 20.0)]) == pytest.approx(40.0), "the clients alone"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.data())
def test_clients_are_spread_over_all_sizes(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    chosen = spread(np.array(sizes), count)
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    if count == len(sizes):
        assert chosen == list(range(count))


SIZES = np.full(100, 40)


@pytest.mark.parametrize(
    ("group", "step", "expected"),
    [(0.002, 0.00002, "stacked"), (0.0, 0.0012, "loop"), (0.004, 0.0005, "stacked"), (0.0004, 0.0013, "loop")],
    ids=["all is overhead", "all is work", "together it pays", "it never pays"],
)
def test_what_many_clients_cost_decides_not_what_few_do(group, step, expected, clock):
    """For two clients alone, stacks are slower than the loop of a millisecond a step in all but the first case."""
    stacked, loop = candidate(clock, "stacked", 100, group, step), candidate(clock, "loop", 1, 0.0, 0.001)
    assert fastest([stacked, loop], WORK, SIZES, 100, 1000) == expected


def test_unequal_clients_are_counted_in_groups_of_their_own(clock):
    """A hundred clients of as many sizes: a few long ones step alone most of the time, and stacking does not pay."""
    long_tail = np.array([10] * 90 + [400 * number for number in range(1, 11)])
    stacked, loop = candidate(clock, "stacked", 100, 0.004, 0.0005), candidate(clock, "loop", 1, 0.0, 0.001)
    assert Extent.of(WORK, long_tail).groups == 2000
    assert fastest([stacked, loop], WORK, long_tail, 100, 1000) == "loop"


def test_a_few_large_clients_count_as_much_as_they_have(clock):
    """Most clients make one step an epoch, ten make forty: the loop takes 2.45 s, and by its middle client only 0.5."""
    sizes = np.array([10] * 90 + [400] * 10)
    stacked, loop = candidate(clock, "stacked", 100, 0.004, 0.0001), candidate(clock, "loop", 1, 0.0, 0.001)
    assert loop.whole(WORK, sizes, 100) == Extent(2450, 2450)
    assert stacked.whole(WORK, sizes, 100) == Extent(2450, 200)
    assert fastest([stacked, loop], WORK, sizes, 100, 1000) == "stacked"


@pytest.mark.parametrize(("at_once", "groups"), [(1, 60), (2, 55), (3, 50), (9, 50)])
def test_a_round_is_counted_in_those_that_train_at_once(at_once, groups):
    sizes = np.array([10, 10, 100])
    assert Candidate("some", at_once, lambda ids, steps: lambda: None).whole(WORK, sizes, 3) == Extent(60, groups)


@pytest.mark.parametrize(("at_once", "groups"), [(1, 5e6), (3, 5e6 / 3), (1000, 5e3)])
def test_of_very_many_some_stand_for_all(at_once, groups):
    whole = Candidate("some", at_once, lambda ids, steps: lambda: None).whole(WORK, np.full(10**6, 10), 10**6)
    assert whole.client_steps == pytest.approx(5e6)
    assert whole.groups == pytest.approx(groups)


def test_fewer_participants_make_smaller_stacks(clock):
    def ways():
        return [candidate(clock, "stacked", 100, 0.004, 0.0005), candidate(clock, "loop", 1, 0.0, 0.001)]

    assert fastest(ways(), WORK, SIZES, 100, 1000) == "stacked"
    assert fastest([Candidate("stacked", 4, ways()[0].prepare), ways()[1]], WORK, SIZES, 4, 1000) == "loop"


@pytest.mark.parametrize(
    ("step", "rounds", "most", "tried"), [(0.001, 100, 1.2, 5), (0.05, 1, 1.6, 2), (0.05, 1000, 6.0, 5)]
)
def test_trials_take_a_bounded_time(step, rounds, most, tried, clock):
    """A second, and more only where a step takes long and the run much longer."""
    ways = [candidate(clock, str(place), at_once, 0.0, step) for place, at_once in enumerate((9, 1, 2, 9, 1))]
    fastest(ways, WORK, SIZES, 100, rounds)
    assert most / 5 < clock.now < most
    assert sum(bool(way.trials) for way in ways) == tried


def test_a_short_run_is_not_held_up(clock):
    """A round of 0.1 s, five of them: trying takes a fifth of that at most, for what comes first alone."""
    ways = [candidate(clock, str(place), at_once, 0.001, 0.00004) for place, at_once in enumerate((100, 1, 2, 100))]
    fastest(ways, WORK, SIZES, 100, 5)
    assert clock.now < 0.1
    assert [bool(way.trials) for way in ways] == [True, True, False, False]


def test_what_a_round_costs_each_client_is_spread_over_its_steps(clock):
    """A loop with 10 ms of its own for each client and 10 ms a step is faster than a stack of 12 ms for each client's
    step, over a round of 20 steps; in a trial of few steps it takes longer.
    """

    def prepare(ids, steps):
        def one_round():
            clock.now += len(ids) * (0.01 + 0.01 * steps)

        return one_round

    loop, stacked = Candidate("loop", 1, prepare), candidate(clock, "stacked", 100, 0.0, 0.012)
    assert fastest([stacked, loop], WORK, SIZES, 100, 1000) == "loop"
    assert loop.trials[-1].extent.client_steps > loop.trials[0].extent.client_steps
    assert loop.round_seconds(WORK, SIZES, 100) == pytest.approx(100 * (0.01 + 0.01 * 20), rel=0.05)


def test_no_time_goes_into_what_cannot_be_the_fastest(clock):
    """Two loops that are far behind, and slow to prepare, leave time for a stack that needs a closer look: for two
    clients it is no faster than the first one.
    """

    def slow_to_prepare(name, at_once, group, step):
        way = candidate(clock, name, at_once, group, step)

        def prepare(ids, steps):
            clock.now += 0.04
            return way.prepare(ids, steps)

        return Candidate(name, at_once, prepare)

    first, second = slow_to_prepare("one thread", 20, 0.002, 0.0005), slow_to_prepare("two threads", 20, 0.0025, 0.0002)
    loops = [slow_to_prepare(f"loop {number}", number, 0.0, 0.003) for number in (2, 1)]
    assert fastest([first, *loops, second], WORK, SIZES[:20], 20, 1000) == "two threads"
    assert [len(way.trials) for way in loops] == [1, 1]
    assert len(second.trials) > 1


def test_what_is_like_the_fastest_is_tried_as_often_when_time_is_up(clock):
    """To look closer at the first way took all of the time; the third has the same rounds, prepared already, and is
    faster.
    """
    slow, quick = candidate(clock, "one thread", 20, 0.002, 0.0005), candidate(clock, "two threads", 20, 0.002, 0.0003)

    def prepare(ids, steps):
        clock.now += 1.0 if len(ids) > 2 else 0.0
        return slow.prepare(ids, steps)

    first, loop = Candidate("one thread", 20, prepare), candidate(clock, "loop", 1, 0.0, 0.005)
    third = Candidate("two threads", 20, quick.prepare, like=first)
    other = candidate(clock, "other", 20, 0.0, 0.0001)
    assert fastest([first, loop, third, other], WORK, SIZES[:20], 20, 1000) == "two threads"
    assert [trial.extent for trial in third.trials] == [trial.extent for trial in first.trials]
    assert len(third.trials) == 2
    assert not other.trials, "there was no time for what nobody prepared"
