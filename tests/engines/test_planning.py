from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from federations import federation, samples, split_by_size
from torch import nn

from fedstrata.engines import planning, trying
from fedstrata.engines.client import ClientSide
from fedstrata.engines.loop import LoopEngine
from fedstrata.engines.planning import (
    Plan,
    build_engine,
    clients_that_fit,
    make_plan,
    stacking_obstacle,
)
from fedstrata.engines.replaying import Replayer
from fedstrata.engines.stacked import StackedEngine
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.private_torch import differs_between_clients

SIZES = (5, 8, 6, 9)


class Item(nn.Module):
    def forward(self, x):
        return x * x.detach().mean().item()


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Silent(nn.Module):
    """Fails without a word."""

    def forward(self, x):
        if differs_between_clients(x):
            raise NotImplementedError
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unflatten(1, (2, 3)))[0][:, -1]


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Custom(nn.Module):
    """A function of its own, which vmap has no rule for."""

    def forward(self, x):
        return OwnFunction.apply(x)


def plain():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def with_inside(module):
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), module), nn.Linear(6, 3))


def world_of(model, **changes):
    return federation(model, samples(30), split_by_size(SIZES), **changes)


def plan_of(world, asked, chunk=None):
    return make_plan(asked, chunk, world.setting, world.model, world.data, world.declared)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Item, r"the module '1.1' \(Item\)"),
        (Branch, r"the module '1.1' \(Branch\)"),
        (Silent, r"the module '1.1' \(Silent\) cannot run for many clients at once \(NotImplementedError\)"),
        (Recurrent, r"the module '1.1.lstm' \(LSTM\)"),
        (Custom, r"the module '1.1' \(Custom\)"),
        (lambda: nn.BatchNorm1d(6, momentum=None), r"the module '1.1' \(BatchNorm1d\)"),
    ],
    ids=["item", "branch", "silent", "recurrent", "custom", "cumulative batch norm"],
)
@pytest.mark.parametrize("asked", ["auto", "stacked"])
def test_a_module_that_cannot_be_stacked_is_named_and_looped_over(module, named, asked):
    world = world_of(with_inside(module()))
    with pytest.warns(FedStrataWarning, match=f"The clients are trained one by one: {named}"):
        assert plan_of(world, asked) == Plan("loop", 1)
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in world.model.modules())
    outcome = build_engine(Plan("loop", 1), world.setting, world.model, world.data, world.declared).round(
        1, range(4), False
    )
    assert bool(torch.isfinite(outcome.loss).all())


def test_the_model_itself_may_be_the_obstacle():
    class Whole(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x[0, 0].detach())

    world = world_of(Whole(6, 3))
    obstacle = stacking_obstacle(world.setting, world.model, world.data)
    assert obstacle is not None
    assert obstacle.startswith("the module 'Whole' (Whole) cannot run for many clients at once")


def test_an_ordinary_model_has_no_obstacle_and_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    world = world_of(model)
    before = {name: tensor.clone() for name, tensor in world.model.state_dict().items()}
    assert stacking_obstacle(world.setting, world.model, world.data) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in world.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in world.model.modules())


def test_a_mistake_that_a_sentence_explains_is_no_obstacle():
    world = world_of(with_inside(Noise()))
    with pytest.raises(FedStrataError, match="draws random numbers with 'randn_like'"):
        plan_of(world, "stacked")
    assert not any(module._forward_pre_hooks for module in world.model.modules())


def test_batches_of_one_sample_are_refused_before_the_first_round():
    world = world_of(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), batch_size=1)
    with pytest.raises(FedStrataError, match="larger batch_size"):
        plan_of(world, "stacked")


def test_a_loop_is_given_to_who_asks_for_it_without_a_trial():
    assert plan_of(world_of(with_inside(Item())), "loop") == Plan("loop", 1)


@pytest.mark.parametrize(("chunk", "at_once"), [(1, 1), (3, 3), (99, 4), (None, 4)])
def test_a_chunk_is_taken_as_given_but_no_larger_than_the_federation(chunk, at_once):
    assert plan_of(world_of(plain()), "stacked", chunk) == Plan("stacked", at_once)


def taking(costs, monkeypatch):
    """Let a trial take as long as is said, for each engine, clients at once and threads; note what is prepared."""
    now, prepared = [0.0], []

    def short_rounds(plan, setting, model, data, declared):
        def one_round(clients, steps):
            now[0] += costs[plan.engine, plan.chunk, torch.get_num_threads()] * clients * steps

        def prepare(ids, steps):
            prepared.append((plan.engine, plan.chunk, ids, steps))
            return lambda: one_round(len(ids), steps)

        return prepare

    monkeypatch.setattr(planning, "_short_rounds", short_rounds)
    monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return prepared


@pytest.mark.parametrize(
    ("looped", "stacked", "engine"), [(0.1, 0.2, "loop"), (0.2, 0.1, "stacked"), (0.1, 0.1, "stacked")]
)
def test_the_faster_engine_is_chosen_on_a_cpu(looped, stacked, engine, monkeypatch):
    monkeypatch.setattr(planning, "_THREADS", 1)
    taking({("loop", 1, 1): looped, ("stacked", len(SIZES), 1): stacked}, monkeypatch)
    plan = plan_of(world_of(plain(), rounds=1000), "auto")
    assert plan == Plan(engine, 1 if engine == "loop" else len(SIZES), threads=1)


@pytest.mark.parametrize("best", [("stacked", 4, 1), ("loop", 1, 1), ("loop", 2, 1), ("stacked", 4, 2), ("loop", 1, 2)])
def test_the_fastest_way_to_use_the_threads_is_chosen_and_set(best, monkeypatch):
    """One thread or all of them for an operation, or a client for each."""
    before = torch.get_num_threads()
    ways = [("stacked", 4, 1), ("loop", 1, 1), ("loop", 2, 1), ("stacked", 4, 2), ("loop", 1, 2)]
    monkeypatch.setattr(planning, "_THREADS", 2)
    prepared = taking({way: 0.001 if way == best else 0.005 for way in ways}, monkeypatch)
    try:
        plan = plan_of(world_of(plain(), rounds=1000), "auto")
        plan.set_threads()
        assert plan == Plan(*best)
        assert torch.get_num_threads() == best[2]
        assert len(prepared) == len(set(prepared)), "what differs in threads alone is prepared once"
    finally:
        torch.set_num_threads(before)


def test_auto_decides_by_itself():
    assert plan_of(world_of(plain(), batch_size=4), "auto").engine in ("loop", "stacked")


@pytest.mark.parametrize("plan", [Plan("stacked", 3, 1), Plan("loop", 1, 1), Plan("loop", 2, 1)])
def test_a_trial_is_a_short_round_and_leaves_no_trace(plan, monkeypatch):
    world = world_of(plain(), batch_size=2, epochs=5)
    before = {name: tensor.clone() for name, tensor in world.setting.initial.items()}
    weights = {name: tensor.clone() for name, tensor in world.model.state_dict().items()}
    steps, batches = [], world.data.batches

    def noted(*arguments):
        for batch in batches(*arguments):
            steps.append(len(batch.positions))
            yield batch

    monkeypatch.setattr(world.data, "batches", noted)
    one_round = planning._short_rounds(plan, world.setting, world.model, world.data, world.declared)([0, 2, 3], 2)
    steps.clear()
    one_round()
    assert sorted(steps) == ([3, 3] if plan.engine == "stacked" else [1] * 6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in world.setting.initial.items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in world.model.state_dict().items())


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("plan", [Plan("stacked", 4, 1), Plan("loop", 1, 1), Plan("loop", 2, 1)])
def test_a_trial_replays_its_steps_as_a_run_does(plan, steps, monkeypatch):
    """Batches are not all alike, and a round has fewer steps than it takes to record one."""
    world = world_of(plain(), batch_size=4, replay=True)
    ran, run = [], Replayer.run

    def noted(replayer, *arguments):
        before = replayer.replayed
        run(replayer, *arguments)
        ran.append(replayer.replayed - before)

    monkeypatch.setattr(Replayer, "run", noted)
    one_round = planning._short_rounds(plan, world.setting, world.model, world.data, world.declared)(
        range(plan.chunk), steps
    )
    assert 0 in ran
    ran.clear()
    one_round()
    assert ran
    assert all(ran)


def test_a_trial_does_not_wait_for_steps_that_are_never_replayed(monkeypatch):
    """The model looks at values on the host: one round tells, and the next is the trial."""
    world, rounds = world_of(with_inside(Item()), replay=True), []
    whole = ClientSide.round
    monkeypatch.setattr(ClientSide, "round", lambda side, *arguments: rounds.append(1) or whole(side, *arguments))
    prepare = planning._short_rounds(Plan("loop", 1, 1), world.setting, world.model, world.data, world.declared)
    with pytest.warns(FedStrataWarning, match="Training steps are not recorded and replayed"):
        prepare([0], 2)
    assert len(rounds) == 1


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 4), (1.0, 1)])
def test_a_trial_that_takes_long_is_not_repeated_until_its_steps_are_replayed(monkeypatch, seconds, rounds):
    clock, ran = iter(range(100)), []
    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: seconds * next(clock)))
    planning._learned(lambda: ran.append(1), [SimpleNamespace(trainer=SimpleNamespace(learning=True))])
    assert len(ran) == rounds


def test_what_is_tried_in_any_case_is_a_stack_and_a_client_on_each_core(monkeypatch):
    """Of a large model there is no time to try more."""
    world = world_of(nn.Sequential(nn.Linear(6, 3)))
    monkeypatch.setattr(planning, "_THREADS", 2)
    plans = planning._possible("auto", None, world.setting, world.model, world.data)
    assert plans[:2] == [Plan("stacked", 4, 1), Plan("loop", 2, 1)]
    assert len(set(plans)) == len(plans) == 5
    monkeypatch.setattr(planning, "_THREADS", 1)
    assert planning._possible("auto", None, world.setting, world.model, world.data) == [
        Plan("stacked", 4, 1), Plan("loop", 1, 1),
    ]  # fmt: skip


def fitting(world, memory, monkeypatch):
    monkeypatch.setattr(planning, "free_memory", lambda device: memory)
    return clients_that_fit(world.setting, world.model, world.data)


def test_the_chunk_follows_thefree_memory(monkeypatch):
    world = world_of(nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 3)), batch_size=4)
    assert fitting(world, 0, monkeypatch) == 1
    some, twice = fitting(world, 10**6, monkeypatch), fitting(world, 2 * 10**6, monkeypatch)
    assert 1 < some < 10**6 / (6 * 8 * 1003), "six copies of the weights in float64 at the very least"
    assert abs(twice - 2 * some) <= 1
    assert fitting(world_of(world.model, batch_size=9), 10**6, monkeypatch) < some
    plan = plan_of(world, "stacked")
    assert plan.chunk == min(some, len(SIZES))
    monkeypatch.setattr(planning, "free_memory", lambda device: 0)
    assert plan_of(world, "stacked") == Plan("stacked", 1)


def testfree_memory_of_a_cpu_is_known_or_assumed(monkeypatch):
    known = planning.free_memory(torch.device("cpu"))
    assert 0 < known <= 4 * 2**30
    monkeypatch.setattr(os, "sysconf_names", {}, raising=False)
    assert planning.free_memory(torch.device("cpu")) == 0.4 * 2**32


def test_the_engine_is_built_as_planned():
    world = world_of(plain())
    assert isinstance(build_engine(Plan("loop", 1), world.setting, world.model, world.data, world.declared), LoopEngine)
    stacked = build_engine(Plan("stacked", 3), world.setting, world.model, world.data, world.declared)
    assert isinstance(stacked, StackedEngine)
    assert stacked.chunk == 3
