"""Steps are recorded once and replayed: the same bits, and nothing that changes is baked into a record."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from federations import samples, split_by_size
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from fedstrata.engines.planning import Plan
from fedstrata.engines.recording import Recording
from fedstrata.engines.replaying import KeyRing, Replayer, fill_, hold, shape_of
from fedstrata.engines.watching import Conditions, WatchedIds, WatchedNumber
from fedstrata.errors import FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.layers import LayerMap
from fedstrata.methods import Clients, Facts, LocalStep, Method, ModelAndMemory, Part, Touches
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.stack import Tensors

SIZES = (7, 4, 9, 4)
PLANS = {"loop": Plan("loop", 1), "stacked": Plan("stacked", 4), "chunks": Plan("stacked", 3)}


def prepared(*parts: Part, plan: Plan = PLANS["stacked"], replay: bool = True, **changes: Any) -> Driver:
    dataset, split = samples(sum(SIZES)), split_by_size(SIZES)
    experiment = Experiment(
        rounds=20, epochs=2, batch_size=3, transforms="none", optimiser="sgd(learning_rate=0.1, momentum=0.9)"
    ).with_changes({"replay": replay, **changes})
    network = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.ReLU(), nn.Linear(5, 3))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in network.parameters():
            nn.init.normal_(parameter)
    method = Method("+".join(part.name for part in parts), parts) if parts else Method.make("fedavg")
    return Driver.prepare(experiment, Ingredients(dataset, split, network, method), plan)


def models(driver: Driver, rounds: int) -> list[Tensors]:
    found = []
    for round in range(1, rounds + 1):
        driver.engine.round(round, range(4), evaluate=False)
        found.append(dict(driver.engine.server.model))
    return found


def replayers(driver: Driver) -> list[Any]:
    side = driver.engine.members[0].side if driver.plan.engine == "loop" else driver.engine.client_side  # type: ignore[attr-defined]
    return [replayer for _, replayer in side.trainer.kept.values()]


def assert_same_bits(left: list[Tensors], right: list[Tensors]) -> None:
    for round, (one, other) in enumerate(zip(left, right, strict=True), start=1):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), f"{name} in round {round}"


@dataclass(frozen=True)
class Looking(Part):
    """A part whose hooks can be filled in."""

    facts = Facts(family="test", paper="none")
    touches = Touches()
    name = "looking"


def part(**hooks: Any) -> Part:
    kind = dataclass(frozen=True)(type("Looking", (Looking,), {**hooks, "__annotations__": {}}))
    made: Part = kind()
    return made


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("optimiser", ["sgd(momentum=0.9, nesterov=true, weight_decay=0.01, clip=1.0)", "adamw:0.01"])
def test_replayed_steps_leave_the_same_bits(plan, optimiser):
    changes = {"plan": plan, "optimiser": optimiser, "schedule": "exponential:0.5"}
    replayed, in_python = prepared(**changes), prepared(replay=False, **changes)
    assert_same_bits(models(replayed, 3), models(in_python, 3))
    assert sum(replayer.replayed for replayer in replayers(replayed)) > 0
    assert not replayers(in_python)


def test_the_first_steps_of_a_kind_run_in_python_and_no_other():
    calls = []

    def loss(self: Part, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        calls.append(tuple(step.outputs.shape[:2]))
        return loss

    models(prepared(part(loss=loss)), 8)
    assert len(calls) > 6
    assert all(calls.count(kind) == 3 for kind in calls)  # one to look at it, two that must do the same


@pytest.mark.parametrize("decide", [random.random, iter(range(9**9)).__next__, time.perf_counter])
def test_what_python_decides_by_itself_is_noticed(decide):
    def loss(self: Part, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        return loss * (1 + decide())

    driver = prepared(part(loss=loss), optimiser="sgd(learning_rate=0.00001)")
    with pytest.warns(FedStrataWarning, match="Python"):
        models(driver, 3)
    assert sum(replayer.replayed for replayer in replayers(driver)) == 0


@pytest.mark.parametrize(
    "factor",
    [
        lambda clients, step: step.learning_rate,
        lambda clients, step: step.number,
        lambda clients, step: 1 / clients.round,
        lambda clients, step: float(clients.round),
        lambda clients, step: 0.5**clients.round,
        lambda clients, step: 1 if clients.round < 3 else 2,
        lambda clients, step: step.outputs.new_full((), clients.round),
        lambda clients, step: len(f"{'x' * 9:>{clients.round}}"),
        lambda clients, step: [5, 6, 7, 8, 9][clients.round % 5],
        lambda clients, step: sum(clients.ids),
        lambda clients, step: len(clients.ids),
        lambda clients, step: 1 + clients.numbers,
        lambda clients, step: clients.keys("mine")[:, 0] % 7,
        lambda clients, step: {1: 3, 2: 4, 3: 5}.get(clients.round, 6),
    ],
)
@pytest.mark.filterwarnings("ignore:Training steps are not recorded")
def test_nothing_that_changes_is_baked_in(factor):
    def loss(self: Part, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        return loss * factor(clients, step)

    changes = {"schedule": "exponential:0.7", "optimiser": "sgd(learning_rate=0.01)"}
    replayed, in_python = prepared(part(loss=loss), **changes), prepared(part(loss=loss), replay=False, **changes)
    assert_same_bits(models(replayed, 6), models(in_python, 6))


def test_a_record_is_used_in_all_rounds_in_which_a_comparison_comes_out_the_same():
    def loss(self: Part, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        return loss * 2 if clients.round > 3 else loss

    driver = prepared(part(loss=loss))
    models(driver, 12)
    [replayer] = replayers(driver)
    assert replayer.obstacle is None
    assert {len(known.records) for known in replayer._known.values()} == {2}


def test_steps_of_rounds_that_a_hook_tells_apart_need_not_do_the_same():
    """Each kind of step comes once in a round: the first that is written down is of another kind of round."""

    def loss(self: Part, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        return loss if clients.round <= 2 else loss * 2

    driver = prepared(part(loss=loss), epochs=1)
    models(driver, 7)
    [replayer] = replayers(driver)
    assert replayer.obstacle is None
    assert replayer.replayed > 0


@pytest.mark.parametrize(("kinds", "replayed"), [(100, 100), (300, 0)])
def test_a_federation_of_unequal_clients_has_records_for_all_kinds_of_its_steps(kinds, replayed):
    """Kinds come in turns: with one more than there are records, each is forgotten before it comes again."""
    clients = Clients(1, 0, 1, LayerMap(()), (0,), 1, torch.ones(1), torch.ones(1, 1), frozenset())
    replayer, places = Replayer(torch.device("cpu")), torch.zeros(kinds)
    for _ in range(4):
        for kind in range(kinds):
            replayer.run(kind, clients, None, lambda _, place=places[kind]: place.add_(1), KeyRing(clients))
    assert places.tolist() == [4.0] * kinds
    assert replayer.replayed == replayed
    assert replayer.learning == (replayed == 0)


@pytest.mark.filterwarnings("ignore:Training steps are not recorded")
def test_a_hook_that_does_something_else_in_every_round_is_soon_left_in_python():
    def loss(self: Part, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        return loss * 0.9**clients.round

    driver = prepared(part(loss=loss), epochs=1)
    models(driver, 8)
    [replayer] = replayers(driver)
    assert replayer.obstacle is not None
    assert replayer.obstacle.startswith("what a hook makes of the round")


@pytest.mark.parametrize(
    ("look", "named"),
    [
        (lambda loss: loss.sum().item(), "item"),
        (lambda loss: 1.0 if loss.sum() > 0 else 2.0, "__bool__"),
        (lambda loss: loss.tolist()[0], "tolist"),
        (lambda loss: torch.tensor([1.0] * len(loss)), "tensor"),
        (lambda loss: torch.from_numpy(loss.detach().numpy().copy()), "numpy"),
        (lambda loss: loss[loss > 0].sum(), "__getitem__"),
    ],
)
def test_what_looks_at_values_runs_in_python_and_the_hook_is_named(look, named):
    def loss(self: Part, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        return loss * look(loss.detach())

    slowly = "sgd(learning_rate=0.001)"
    replayed, in_python = (prepared(part(loss=loss), replay=replay, optimiser=slowly) for replay in (True, False))
    with pytest.warns(FedStrataWarning, match=f"the hook 'loss' of 'looking' uses {named}"):
        found = models(replayed, 3)
    assert_same_bits(found, models(in_python, 3))


def test_noise_that_nobody_can_draw_again_is_never_replayed():
    drawn = []

    def gradients(self: Part, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        noise = clients.noise("mine", (1,))
        drawn.append(noise)
        return gradients

    driver = prepared(part(gradients=gradients))
    object.__setattr__(driver.setting, "secret", True)
    with pytest.warns(FedStrataWarning, match="the hook 'gradients' of 'looking'"):
        models(driver, 2)
    values = [tuple(noise.flatten().tolist()) for noise in drawn]
    assert len(values) == len(set(values)) > 4


def test_memory_that_hooks_change_in_steps_is_the_same():
    def client_memory(self: Part, clients: Clients, model: Tensors) -> Tensors:
        return {"seen": torch.zeros(len(clients.ids)), "other": torch.ones(len(clients.ids))}

    def project(self: Part, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        return parameters, {"seen": clients.memory["seen"] * 0.5 + step.outputs.mean((1, 2)) * clients.memory["other"]}

    hooks = {"client_memory": client_memory, "project": project}
    replayed, in_python = prepared(part(**hooks)), prepared(part(**hooks), replay=False)
    assert_same_bits(models(replayed, 4), models(in_python, 4))
    assert torch.equal(*(driver.engine.clients()["memory/looking/seen"] for driver in (replayed, in_python)))


def test_what_training_returns_does_not_change_when_the_places_are_used_again():
    driver = prepared(plan=PLANS["stacked"])
    driver.engine.round(1, range(4), evaluate=False)
    before = {name: tensor.clone() for name, tensor in driver.engine.server.model.items()}
    held = driver.engine.server.model
    driver.engine.round(2, range(4), evaluate=False)
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


# The pieces -----------------------------------------------------------------------------------------------------------


def test_places_keep_what_is_expanded_expanded():
    given = {"same": torch.arange(3.0).expand(4, 3), "own": torch.arange(12.0).reshape(4, 3)}
    places = hold(given)
    assert places["same"].stride() == (0, 1)
    assert places["same"].untyped_storage().nbytes() == 12
    fill_(places, {"same": torch.ones(3).expand(4, 3), "own": torch.zeros(4, 3)})
    assert places["same"].tolist() == [[1.0] * 3] * 4
    assert given["own"].sum() == 66
    assert shape_of(places) == shape_of(given) != shape_of({**given, "same": torch.ones(4, 3)})


@given(some.integers(-5, 50), some.integers(-5, 50))
def test_a_watched_number_is_compared_like_a_number_and_notes_the_outcome(value, other):
    conditions = Conditions()
    watched = WatchedNumber(value, conditions)
    outcomes = (watched < other, watched >= other, watched == other, other < watched)
    assert outcomes == (value < other, value >= other, value == other, other < value)
    assert len(conditions.comparisons) == 4
    assert all(bool(compare(value, number)) == outcome for compare, number, outcome in conditions.comparisons)


@pytest.mark.parametrize(
    "use",
    [int, float, bool, str, hash, abs, lambda n: n + 1, lambda n: 2 - n, lambda n: n // 2, lambda n: -n,
     lambda n: divmod(n, 3), lambda n: list(range(n)), lambda n: f"{n:03}", lambda n: torch.ones(2) * n,
     lambda n: torch.full((2,), 1.0) ** n, lambda n: round(n), lambda n: {n: 1}[5], lambda n: 0.5**n],
)  # fmt: skip
def test_any_other_use_of_a_watched_number_ties_the_record_to_it(use):
    conditions = Conditions()
    result, plain = use(WatchedNumber(5, conditions)), use(5)
    assert torch.equal(result, plain) if isinstance(plain, Tensor) else result == plain
    kept = [compare(6, number) == outcome for compare, number, outcome in conditions.comparisons]
    assert not all(kept)


def test_to_count_clients_is_free_and_to_look_at_them_is_not():
    conditions = Conditions()
    ids = WatchedIds((3, 5), conditions)
    assert len(ids) == 2
    assert conditions.ids is None
    assert list(ids) == [3, 5]
    assert conditions.ids == (3, 5)


def test_a_recording_does_it_again_with_other_values_in_the_places():
    place, result = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def run() -> None:
        weights = place.detach().requires_grad_()
        (slope,) = torch.autograd.grad((weights.view(2, 1).square() * 3).sum(), weights)
        result.copy_(slope)
        result[0].add_(1)

    recording = Recording(run)
    assert result.tolist() == [7.0, 12.0]
    place.copy_(torch.tensor([10.0, 0.5]))
    recording.replay()
    assert result.tolist() == [61.0, 3.0]


def test_a_recording_leaves_out_what_nobody_uses():
    place = torch.ones(3)

    def run() -> None:
        unused = place.exp().sin()
        unused.mul(2)
        place.add_(1)

    assert "sin" not in repr(Recording(run).operations)
    assert len(Recording(run).operations) == 1


def test_what_nobody_uses_does_not_tell_two_steps_apart() -> None:
    """A tensor that only such an operation looked at may lie anywhere, as what 'player' remembers does."""
    place = torch.ones(3)

    def step(elsewhere: Tensor) -> Recording:
        return Recording(lambda: (elsewhere * 2, place.add_(1))[1])  # type: ignore[arg-type]

    one, other = step(torch.ones(2)), step(torch.ones(2))
    assert one.is_like(other)
    assert len(one.outside) == 1
    one.replay()
    assert place.tolist() == [4.0, 4.0, 4.0]


def test_a_recording_that_looked_at_values_is_spoilt():
    place = torch.ones(3)
    assert Recording(lambda: place.mul_(place.sum().item())).spoilt is not None  # type: ignore[func-returns-value, arg-type]
