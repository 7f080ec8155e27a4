"""What parts remember and learn while clients train: memory that changes in a step, memory that is trained, phases, and
the client's previous model.

The clients are unequal, so that the stacked engine trains now all of them, now some.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from federations import samples, split_by_size
from torch import nn

from fedstrata.engines.planning import Plan
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Facts, Kept, Message, Method, Needs, Part, Phase, Touches, methods
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.stack import Stack, clone, under

SIZES = (5, 12, 8, 12)
STEPS = (2, 4, 3, 4)
"""Steps of an epoch in batches of three: all clients together in the first, then only some at once."""
ONE_BY_ONE, TOGETHER, IN_CHUNKS = Plan("loop", 1), Plan("stacked", 99), Plan("stacked", 3)
PLANS = pytest.mark.parametrize("plan", [ONE_BY_ONE, TOGETHER, IN_CHUNKS], ids=["loop", "stacked", "chunks"])
STACKED = pytest.mark.parametrize("plan", [TOGETHER, IN_CHUNKS], ids=["stacked", "chunks"])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def prepared(*parts: Part, plan: Plan = TOGETHER, **changes: Any) -> Driver:
    """Prepare a federation of four unequal clients, in batches of three."""
    dataset, split = samples(sum(SIZES)), split_by_size(SIZES)
    experiment = Experiment(
        rounds=3,
        epochs=1,
        batch_size=3,
        precision="fp64",
        transforms="none",
        optimiser="sgd(learning_rate=0.1)",
        replay=False,
    ).with_changes(changes)
    method = Method("+".join(part.name for part in parts), parts)
    return Driver.prepare(experiment, Ingredients(dataset, split, network, method), plan)


def one_round(driver: Driver, round: int = 1, participants: range | list[int] = range(4)) -> Stack:
    """Do a round without tests, and return the clients' state."""
    driver.engine.round(round, list(participants), evaluate=False)
    return driver.engine.clients()


def assert_close(left: Stack, right: Stack) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name].double(), right[name].double(), rtol=1e-10, atol=1e-12), name


@dataclass(frozen=True)
class Noting(Part):
    """Notes the parameters after each step of each client."""

    name: ClassVar[str] = "noting"
    facts: ClassVar[Facts] = Facts("test", "none")
    touches: ClassVar[Touches] = Touches()

    after: dict[int, list[dict[str, torch.Tensor]]] = field(default_factory=dict, compare=False)

    def project(self, clients, step, parameters):
        for row, client in enumerate(clients.ids):
            own = {name: tensor[row].clone() for name, tensor in parameters.items()}
            self.after.setdefault(client, []).append(own)
        return parameters, clients.memory


# Memory that changes in a step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tracing(Noting):
    """Counts its steps, and follows the first weight with a running mean."""

    name: ClassVar[str] = "tracing"

    def client_memory(self, clients, model):
        trace = under("trace", {"0.weight": torch.zeros_like(model["0.weight"])})
        return trace | {"steps": torch.zeros_like(clients.sizes), "still": clients.sizes * 10}

    def project(self, clients, step, parameters):
        super().project(clients, step, parameters)
        trace = {name: 0.5 * old + parameters[name] for name, old in clients.memory.group("trace").items()}
        return parameters, clients.memory | under("trace", trace) | {"steps": clients.memory["steps"] + 1}


@dataclass(frozen=True)
class TracingBriefly(Tracing):
    """Returns only what it changed, and looks at it in the next step."""

    def loss(self, clients, step, loss):
        assert clients.memory["steps"].tolist() == [step.number] * len(clients.ids)
        return loss

    def gradients(self, clients, step, gradients):
        assert clients.memory["steps"].tolist() == [step.number] * len(clients.ids)
        return gradients

    def project(self, clients, step, parameters):
        assert clients.memory["steps"].tolist() == [step.number] * len(clients.ids)
        parameters, memory = super().project(clients, step, parameters)
        return parameters, {name: tensor for name, tensor in memory.items() if name != "still"}


@PLANS
@pytest.mark.parametrize("kind", [Tracing, TracingBriefly])
def test_memory_that_changes_in_a_step_is_each_clients_own(plan, kind):
    part = kind()
    memory = one_round(prepared(part, plan=plan)).group("memory/tracing")
    assert memory["steps"].tolist() == list(STEPS)
    assert memory["still"].tolist() == [10 * size for size in SIZES]
    for client, steps in enumerate(STEPS):
        assert len(part.after[client]) == steps
        trace = torch.zeros(4, 6, dtype=torch.float64)
        for parameters in part.after[client]:
            trace = 0.5 * trace + parameters["0.weight"]
        assert torch.allclose(memory["trace/0.weight"][client], trace, rtol=1e-12, atol=1e-14)


@STACKED
@pytest.mark.parametrize("kind", [Tracing, TracingBriefly])
def test_loop_and_stacked_agree_on_memory_that_changes_in_a_step(plan, kind):
    changes = {"epochs": 3, "optimiser": "sgd(learning_rate=0.1, momentum=0.9, keep=true)"}
    loop, stacked = (one_round(prepared(kind(), plan=one, **changes)) for one in (ONE_BY_ONE, plan))
    assert_close(loop, stacked)
    assert loop["memory/tracing/steps"].tolist() == [3 * steps for steps in STEPS]


@PLANS
def test_remembering_does_not_change_training(plan):
    left, right = (prepared(part, plan=plan) for part in (Tracing(), Noting()))
    for driver in (left, right):
        one_round(driver)
    for name, tensor in left.engine.server.model.items():
        assert torch.equal(tensor, right.engine.server.model[name]), name


@PLANS
def test_parameters_that_are_remembered_stay_what_they_were(plan):
    """Training goes on in its own tensors, not in those that a part was shown."""

    class Keeping(Noting):
        name: ClassVar[str] = "keeping"

        def client_memory(self, clients, model):
            return under("first", {name: torch.zeros_like(model[name]) for name in clients.layers.parameter_names})

        def project(self, clients, step, parameters):
            super().project(clients, step, parameters)
            return parameters, under("first", parameters) if step.number == 0 else clients.memory

    part = Keeping()
    first = one_round(prepared(part, plan=plan)).group("memory/keeping/first")
    for client in range(4):
        for name, tensor in part.after[client][0].items():
            assert torch.equal(first[name][client], tensor), name
        assert not torch.equal(first["0.weight"][client], part.after[client][-1]["0.weight"])


@PLANS
def test_training_for_a_survey_leaves_the_memory_alone(plan):
    """What changes first in a step of all clients, or only later in one of some, changes in the survey only."""

    class Late(Tracing):
        def client_memory(self, clients, model):
            return {**super().client_memory(clients, model), "late": torch.zeros_like(clients.sizes)}

        def project(self, clients, step, parameters):
            parameters, memory = super().project(clients, step, parameters)
            return parameters, memory | {"late": memory["late"] + step.number} if step.number else memory

    models = []

    class Trying:
        def survey(self, clients, model):
            models.append(clients.probe.train(model, epochs=1))
            return Message()

    driver = prepared(Late(), plan=plan)
    before = clone(driver.engine.clients())
    engine, message = driver.engine, driver.engine.side.broadcast(driver.engine.server, range(4), 1)
    if plan.engine == "loop":
        for member in engine.members:
            member.side.answer_survey(member.ids, member.state, Trying(), message, 1)
    else:
        engine.client_side.answer_survey(range(4), engine.clients(), Trying(), message, 1)
    assert not torch.equal(models[0]["0.weight"], message.tensors["0.weight"].expand_as(models[0]["0.weight"]))
    after = driver.engine.clients()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert one_round(driver)["memory/tracing/late"].tolist() == [sum(range(steps)) for steps in STEPS]


@PLANS
def test_a_model_that_is_remembered_once_stays_as_others_go_on(plan):
    """What a part remembers of its first training is not what the client keeps of its model, though equal at first."""

    class Keeping(Noting):
        name: ClassVar[str] = "keeping"

        def keeps(self, layers):
            return Kept(resident=layers.parameter_names)

        def client_memory(self, clients, model):
            return under("first", model)

        def finish(self, clients, training):
            memory = under("first", training.trained) if clients.round == 1 else clients.memory
            return training.trained, memory

    part = Keeping()
    driver = prepared(part, plan=plan)
    for round, participants in ((1, range(4)), (2, [1, 2]), (3, [2, 3])):
        state = one_round(driver, round, participants)
    for client, steps in enumerate(STEPS):
        for name in driver.setting.layers.parameter_names:
            assert torch.equal(state[f"memory/keeping/first/{name}"][client], part.after[client][steps - 1][name]), name
            assert torch.equal(state[f"own/{name}"][client], part.after[client][-1][name]), name


# Memory that is trained ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learning(Part):
    """Learns a number for each class beside the model: a bowl around one, from zero."""

    name: ClassVar[str] = "learning"
    facts: ClassVar[Facts] = Facts("test", "none")
    touches: ClassVar[Touches] = Touches()

    after: dict[int, list[torch.Tensor]] = field(default_factory=dict, compare=False)

    @property
    def needs(self):
        return Needs(learns=("numbers",))

    def client_memory(self, clients, model):
        zeros = torch.zeros(len(clients.ids), 3, dtype=torch.float64)
        return under("numbers", {"bowl": zeros}) | {"numbers": zeros, "other/bowl": zeros}

    def loss(self, clients, step, loss):
        return loss + 0.5 * (clients.memory["numbers/bowl"] - 1).square().sum(1)

    def project(self, clients, step, parameters):
        assert parameters.keys() == step.parameters.keys() == set(clients.layers.parameter_names)
        assert not clients.memory["numbers/bowl"].requires_grad
        for row, client in enumerate(clients.ids):
            self.after.setdefault(client, []).append(clients.memory["numbers/bowl"][row].clone())
        return parameters, clients.memory


@PLANS
def test_what_is_learned_beside_the_model_follows_its_own_gradient(plan):
    """From zero towards one with a rate of .1: after n steps 1 - .9^n, and the hooks see every step of it."""
    part = Learning()
    memory = one_round(prepared(part, plan=plan)).group("memory/learning")
    for client, steps in enumerate(STEPS):
        ways = [1 - 0.9**count for count in range(1, steps + 1)]
        assert [own.tolist() for own in part.after[client]] == [pytest.approx([way] * 3) for way in ways]
        assert memory["numbers/bowl"][client].tolist() == pytest.approx([ways[-1]] * 3)
    assert not memory["numbers"].any()  # only the group is learned, not what is called like it
    assert not memory["other/bowl"].any()


@PLANS
def test_what_is_learned_has_an_optimiser_that_goes_on_where_it_is_kept(plan):
    """Momentum .5: v = 1, w = .1; then v = .5 + .9, w = .24; over two rounds as over one with twice the steps."""
    driver = prepared(Learning(), plan=plan, steps=1, optimiser="sgd(learning_rate=0.1, momentum=0.5, keep=true)")
    assert one_round(driver)["memory/learning/numbers/bowl"][2].tolist() == pytest.approx([0.1] * 3)
    assert one_round(driver, 2)["memory/learning/numbers/bowl"].flatten().tolist() == pytest.approx([0.24] * 12)
    kept = [name for name in driver.engine.clients() if name.startswith("optimiser/") and "numbers/bowl" in name]
    assert len(kept) == 1
    fresh = prepared(Learning(), plan=plan, steps=1, optimiser="sgd(learning_rate=0.1, momentum=0.5)")
    one_round(fresh)
    assert one_round(fresh, 2)["memory/learning/numbers/bowl"].flatten().tolist() == pytest.approx([0.19] * 12)


@PLANS
def test_what_is_learned_neither_travels_nor_changes_the_model(plan):
    learning, plain = prepared(Learning(), plan=plan), prepared(methods.make("fedavg"), plan=plan)
    reports = [driver.engine.round(1, range(4), evaluate=False) for driver in (learning, plain)]
    assert (reports[0].bytes_up, reports[0].bytes_down) == (reports[1].bytes_up, reports[1].bytes_down)
    for name, tensor in plain.engine.server.model.items():
        assert torch.equal(tensor, learning.engine.server.model[name]), name


@STACKED
def test_loop_and_stacked_agree_on_what_is_learned(plan):
    changes = {"epochs": 2, "optimiser": "adam(learning_rate=0.05, keep=true)"}
    loop, stacked = (prepared(Learning(), Tracing(), plan=one, **changes) for one in (ONE_BY_ONE, plan))
    for driver in (loop, stacked):
        one_round(driver)
        one_round(driver, 2, [0, 2, 3])
    assert_close(loop.engine.clients(), stacked.engine.clients())


@PLANS
def test_memory_that_is_learned_may_be_changed_in_a_step_too(plan):
    """A part that puts what it learns elsewhere after a step must not bring back what the optimiser has left."""

    class Counting(Learning):
        def client_memory(self, clients, model):
            return {**super().client_memory(clients, model), "steps": torch.zeros_like(clients.sizes)}

        def project(self, clients, step, parameters):
            _, memory = super().project(clients, step, parameters)
            return parameters, memory | {"steps": memory["steps"] + 1}

    memory = one_round(prepared(Counting(), plan=plan)).group("memory/learning")
    assert memory["steps"].tolist() == list(STEPS)
    for client, steps in enumerate(STEPS):
        assert memory["numbers/bowl"][client].tolist() == pytest.approx([1 - 0.9**steps] * 3)


# Before a phase ------------------------------------------------------------------------------------------------------


@PLANS
def test_model_and_memory_may_change_before_a_phase(plan):
    """The second phase begins at what ``before`` returned, with the memory of the first one's steps."""
    arrived, begun = {}, {}

    class Resetting(Tracing):
        def loss(self, clients, step, loss):
            if step.phase.name == "second" and step.number == 0:
                for row, client in enumerate(clients.ids):
                    begun[client] = {name: tensor[row].detach().clone() for name, tensor in step.parameters.items()}
            return loss

        def phases(self, clients):
            assert set(clients.memory) == {"steps", "still", "trace/0.weight"}
            return Phase(steps=1, name="first", before=self.reset), Phase(name="second", before=self.halve)

        def reset(self, clients, model):
            return model, clients.memory | {"steps": clients.memory["steps"] + 100}

        def halve(self, clients, model):
            for row, client in enumerate(clients.ids):
                arrived[client] = {name: tensor[row].clone() for name, tensor in model.items()}
            assert clients.memory["steps"].tolist() == [101] * len(clients.ids)
            halved = {**model, "0.weight": model["0.weight"] / 2, "1.running_mean": model["1.running_mean"] + 7}
            return halved, clients.memory | {"still": clients.memory["still"] + 1}

    part = Resetting()
    state = one_round(prepared(part, plan=plan)).group("memory/tracing")
    assert state["steps"].tolist() == [100 + 1 + steps for steps in STEPS]
    assert state["still"].tolist() == [10 * size + 1 for size in SIZES]
    for client in range(4):
        first = part.after[client][0]
        for name, tensor in begun[client].items():
            assert torch.equal(arrived[client][name], first[name]), name
            assert torch.equal(tensor, first[name] / 2 if name == "0.weight" else first[name]), name


@STACKED
def test_loop_and_stacked_agree_on_phases_with_something_before_them(plan):
    class Doubling(Tracing):
        def phases(self, clients):
            return Phase(span=(0.0, 0.4)), Phase(span=(0.4, 1.0), continues=True, before=self.double)

        def double(self, clients, model):
            doubled = {**model, "3.bias": 2 * model["3.bias"] + clients.memory["steps"][:, None]}
            return doubled, clients.memory | {"still": clients.memory["steps"]}

    changes = {"optimiser": "sgd(learning_rate=0.1, momentum=0.9)", "epochs": 2}
    loop, stacked = (prepared(Doubling(), plan=one, **changes) for one in (ONE_BY_ONE, plan))
    for driver in (loop, stacked):
        one_round(driver)
    assert_close(loop.engine.clients(), stacked.engine.clients())
    assert_close(Stack(loop.engine.server.model), Stack(stacked.engine.server.model))
    assert loop.engine.clients()["memory/tracing/steps"].tolist() == [2 * steps for steps in STEPS]
    assert int(loop.engine.clients()["memory/tracing/still"].min()) > 0


# The previous model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recalling(Noting):
    """Notes what it sees of each client's previous model: at the start, in each step and when a model is used."""

    name: ClassVar[str] = "recalling"

    seen: dict[tuple[str, int], tuple[bool, dict[str, torch.Tensor]]] = field(default_factory=dict, compare=False)
    trained: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict, compare=False)

    @property
    def needs(self):
        return Needs(previous=True)

    def see(self, where, clients):
        assert clients.trained.shape == (len(clients.ids),)
        for row, client in enumerate(clients.ids):
            own = {name: tensor[row].clone() for name, tensor in clients.previous.items()}
            self.seen[where, client] = bool(clients.trained[row]), own

    def start(self, clients, message, model):
        self.see("start", clients)
        return model, clients.memory

    def gradients(self, clients, step, gradients):
        self.see("step", clients)
        return gradients

    def finish(self, clients, training):
        self.see("finish", clients)
        changed = {**training.trained, "3.bias": training.trained["3.bias"] + 1}
        for row, client in enumerate(clients.ids):
            self.trained[client] = {name: tensor[row].clone() for name, tensor in changed.items()}
        return changed, clients.memory

    def deployed(self, clients, model):
        self.see("used", clients)
        return model


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@PLANS
def test_the_previous_model_is_the_clients_own_as_its_last_training_left_it(plan):
    """Whole, buffers included, and as the hooks changed it; before the first training it is the initial one."""
    part = Recalling()
    driver = prepared(part, plan=plan)
    initial, last = driver.setting.initial, {}
    for round, participants in ((1, [0, 2]), (2, [1, 2, 3]), (3, [0, 1, 2, 3])):
        part.seen.clear()
        state = one_round(driver, round, participants)
        for client in participants:
            for where in ("start", "step", "finish"):
                has_trained, previous = part.seen[where, client]
                assert has_trained == (client in last)
                assert_same(previous, last.get(client, initial))
            assert part.seen["used", client][0]
            assert_same(part.seen["used", client][1], part.trained[client])
            last[client] = part.trained[client]
        for client in range(4):
            kept = {name: tensor[client] for name, tensor in state.group("previous").items()}
            assert_same(kept, last.get(client, initial))
    assert len({tuple(own["0.weight"].flatten().tolist()) for own in last.values()}) == 4


@PLANS
def test_clients_are_tested_with_their_previous_model_at_hand(plan):
    part = Recalling()
    driver = prepared(part, plan=plan)
    one_round(driver, 1, [0, 2])
    part.seen.clear()
    message = driver.engine.side.broadcast(driver.engine.server, range(4), 2, testing=True)
    if plan.engine == "loop":
        for member in driver.engine.members:
            member.side.deployed_model(member.ids, member.state, message, 1)
    else:
        driver.engine.client_side.deployed_model(range(4), driver.engine.clients(), message, 1)
    for client in range(4):
        has_trained, previous = part.seen["used", client]
        assert has_trained == (client in (0, 2))
        assert_same(previous, part.trained[client] if has_trained else driver.setting.initial)


def test_nobody_keeps_a_previous_model_that_no_part_needs():
    driver = prepared(Noting())
    state = one_round(driver)
    assert not any(name.startswith("previous") for name in state)
    assert prepared(Noting(), Recalling()).engine.clients().group("previous").keys() == driver.setting.initial.keys()


@PLANS
def test_memory_that_was_not_prepared_is_refused(plan):
    class Surprising(Noting):
        name: ClassVar[str] = "surprising"

        def project(self, clients, step, parameters):
            return parameters, {"late": clients.sizes}

    class SurprisingLater(Surprising):
        def project(self, clients, step, parameters):
            return parameters, clients.memory

        def finish(self, clients, training):
            return training.trained, {"later": clients.sizes}

    for kind in (Surprising, SurprisingLater):
        with pytest.raises(FedStrataError, match=r"'surprising/late.*client_memory did not prepare"):
            one_round(prepared(kind(), plan=plan))


def test_a_hook_may_probe_with_some_of_its_clients():
    """A view of some clients asks the data of those, with what all parts remember of them."""
    seen = []

    class Asking(Noting):
        name: ClassVar[str] = "asking"

        def client_memory(self, clients, model):
            return {"number": torch.tensor(clients.ids)}

        def start(self, clients, message, model):
            some = torch.tensor([1, 3])
            probe = clients.rows(some).probe
            seen.append((probe.clients.ids, probe.clients.memory["asking/number"].tolist()))
            return model, clients.memory

    one_round(prepared(Asking()))
    assert seen == [((1, 3), [1, 3])]


def test_those_who_go_on_are_trained_where_their_weights_are(monkeypatch):
    """Of four unequal clients only the two small last batches, of one client each, are taken out and put back."""
    taken = []
    plain = torch.Tensor.index_copy_
    monkeypatch.setattr(
        torch.Tensor, "index_copy_", lambda own, *given: taken.append(given[1].tolist()) or plain(own, *given)
    )
    one_round(prepared(methods.make("fedavg")))
    assert set(map(tuple, taken)) == {(2,), (3,)}
