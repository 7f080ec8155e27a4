"""State that is gone, or set back to an older copy, at a site or at the server: never in silence."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from direct_network import DirectNetwork
from replaying import assert_same_model, merged_sites
from small_world import EXPERIMENT, SITES, ingredients, simulated

from fedstrata.cli.showing import summary_of_run
from fedstrata.cli.terminal import results
from fedstrata.deployment.federation import LostState
from fedstrata.deployment.last_steps import LastSteps, Step, what_is_missing
from fedstrata.deployment.protocol import LOST, Place, ProtocolError, Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.errors import FedStrataError
from fedstrata.report import read_runs
from fedstrata.report.notes import notes
from fedstrata.report.rows import comparison_rows
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients

NAMES = ["berlin", "paris", "rome", "oslo"]
ROUNDS = 7
PLAIN = {"optimiser": "sgd(learning_rate=0.05)"}
Between = Callable[[Path], None]


class Killed(BaseException):
    """The server is killed, as by SIGKILL: nothing of it but its files remains."""


def deployment(folder: Path, method: str, rules: Rules | None = None, **changes: Any) -> Deployment:
    experiment = EXPERIMENT.with_changes({"method": method, "rounds": ROUNDS, "evaluate_every": ROUNDS, **changes})
    return Deployment(experiment, NAMES, folder / "run", rules or Rules(), rehearsal=True, ingredients=ingredients())


def killed_in(folder: Path, rounds: tuple[int, ...], method: str, between: dict[int, Between], **changes: Any) -> None:
    """Run until the server is killed in each of some rounds; after that, do something to the folders."""
    for round in rounds:

        def tamper(site: int, request: Request, reply: Reply, until: int = round) -> list[tuple[float, Reply]]:
            if request.kind == "train" and request.round == until:
                raise Killed
            return [(0.1, reply)]

        with pytest.raises(Killed):
            deployment(folder, method, **changes).run(DirectNetwork(folder, SITES, tamper))
        between.get(round, lambda place: None)(folder)


def gone_on(
    folder: Path, method: str, rules: Rules | None = None, **changes: Any
) -> tuple[RunFolder, list[str], DirectNetwork]:
    lines: list[str] = []
    network = DirectNetwork(folder, SITES)
    deployment(folder, method, rules, **changes).run(network, log=lines.append)
    return RunFolder.open(folder / "run"), lines, network


def copied(name: str) -> Between:
    return lambda folder: shutil.copytree(folder / name, folder / f"{name}-copy")


def put_back(name: str) -> Between:
    def back(folder: Path) -> None:
        shutil.rmtree(folder / name)
        shutil.copytree(folder / f"{name}-copy", folder / name)

    return back


def removed(name: str) -> Between:
    return lambda folder: shutil.rmtree(folder / name)


LOSSES: dict[str, tuple[dict[int, Between], str]] = {
    "gone": ({5: removed("site-2")}, "taken part up to round 4, and nothing is left"),
    "older copy": ({3: copied("site-2"), 5: put_back("site-2")}, "up to round 4, but its state is of round 2"),
    "server set back": ({2: copied("run"), 6: put_back("run")}, "the server goes on after round 1.*come to round"),
}


@pytest.mark.attack(
    "A site's state is deleted, or set back to an older copy, or the server's run folder is set back by four rounds, "
    "under a method whose clients keep something (FedBN).",
    "The run stops with a sentence that names the site, what is missing and what to do; nothing is merged.",
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_state_stops_the_run_with_a_sentence(loss, tmp_path):
    between, words = LOSSES[loss]
    killed_in(tmp_path, tuple(between) if len(between) > 1 else (5,), "fedbn", between)
    committed = RunFolder.open(tmp_path / "run").load_checkpoint().round
    who = "berlin" if loss == "server set back" else "rome"
    with pytest.raises(LostState, match=rf"{who} has lost .*{words}.*--accept-lost-state"):
        gone_on(tmp_path, "fedbn")
    assert RunFolder.open(tmp_path / "run").load_checkpoint().round == committed


def test_the_site_is_told_too_with_its_folder(tmp_path):
    killed_in(tmp_path, (3,), "fedbn", {3: removed("site-2")})
    network = DirectNetwork(tmp_path, SITES)
    with pytest.raises(LostState):
        deployment(tmp_path, "fedbn").run(network)
    [line] = [line for line in network.lines[2] if "cannot do" in line]
    assert str(tmp_path / "site-2") in line
    assert "--accept-lost-state" in line
    assert any("given the run up" in line for line in network.lines[0])


@pytest.mark.attack(
    "A site's state is deleted in the middle of a run, while the server goes on.",
    "With min_sites the others go on without that site; it is named in the log.",
)
def test_with_min_sites_the_others_go_on(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if site == 2 and request.kind == "train" and request.round == 3:
            shutil.rmtree(tmp_path / "site-2")
            network.restart(2, after=0.2)
        return [(0.1, reply)]

    network, lines = DirectNetwork(tmp_path, SITES, tamper), []
    deployment(tmp_path, "fedbn", Rules(min_sites=3), evaluate_every=1).run(network, log=lines.append)
    assert merged_sites(RunFolder.open(tmp_path / "run")) == {
        round: [0, 1, 2, 3] if round <= 3 else [0, 1, 3] for round in range(1, ROUNDS + 1)
    }
    assert any("rome has lost" in line and "left out" in line for line in lines)


@pytest.mark.attack(
    "A state is gone or set back, and the server was told to go on all the same (--accept-lost-state).",
    "The site begins anew; log, metrics, table and report say so, also after another restart of the server.",
)
def test_a_loss_that_is_accepted_is_told_in_the_results(tmp_path):
    accepting = Rules(accept_lost_state=True)
    killed_in(tmp_path, (3,), "fedbn", {3: removed("site-2")})
    killed_in(tmp_path, (5,), "fedbn", {}, rules=accepting)
    folder, lines, _ = gone_on(tmp_path, "fedbn")
    assert not any("has lost" in line for line in lines), "what was accepted is not lost again"
    rounds, values = folder.metrics().series("sites.without_state")
    assert (rounds.tolist(), set(values)) == ([3, 4, 5, 6, 7], {1.0})
    said = "Sites that had lost their state and went on without it: fedbn 1."
    assert said in notes(comparison_rows(read_runs([folder.path])))
    with results.capture() as shown:
        results.print(summary_of_run(folder.experiment, folder.summary()))
    assert "went on without it: 1" in shown.get()
    simulation = simulated("fedbn", rounds=ROUNDS, evaluate_every=ROUNDS)
    simulation.run()
    with pytest.raises(AssertionError):
        assert_same_model(folder, simulation)


@pytest.mark.parametrize("loss", LOSSES)
def test_where_clients_keep_nothing_nothing_is_lost(loss, tmp_path):
    """With plain SGD, FedAvg's clients keep nothing: the result is that of an unbroken run, bit for bit."""
    between, _ = LOSSES[loss]
    killed_in(tmp_path, tuple(between) if len(between) > 1 else (5,), "fedavg", between, **PLAIN)
    folder, _, network = gone_on(tmp_path, "fedavg", **PLAIN)
    assert any("nothing was kept in it" in line for line in network.lines[2])
    simulation = simulated("fedavg", rounds=ROUNDS, evaluate_every=ROUNDS, **PLAIN)
    simulation.run()
    assert_same_model(folder, simulation)
    assert "sites.without_state" not in folder.metrics().latest()


@pytest.mark.attack(
    "The server's run folder is set back by one round, or by two, to an older copy; the sites are ahead of it.",
    "The sites still have the states from before: the run ends bit for bit like an unbroken one.",
)
@pytest.mark.parametrize(("method", "rounds"), [("fedbn", 1), ("fedbn", 2), ("ssfl(refresh_every=1)+fedavgm", 1)])
def test_a_server_set_back_a_little_ends_as_if_nothing_had_happened(method, rounds, tmp_path):
    killed_in(tmp_path, (4 - rounds, 4), method, {4 - rounds: copied("run"), 4: put_back("run")})
    folder, lines, _ = gone_on(tmp_path, method)
    assert any(f"goes on after round {3 - rounds}" in line for line in lines)
    simulation = simulated(method, rounds=ROUNDS, evaluate_every=ROUNDS)
    simulation.run()
    assert_same_model(folder, simulation)


def test_a_site_of_another_course_of_the_run_does_not_come_back_unnoticed(tmp_path):
    """The server was set back while a site was away, which still has the states of the course that was given up."""
    killed_in(tmp_path, (2, 6), "fedbn", {2: copied("run"), 6: put_back("run")})
    for site in (0, 1, 3):
        shutil.rmtree(tmp_path / f"site-{site}")
    network, lines = DirectNetwork(tmp_path, SITES, away=(2,)), []

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if request.kind == "train" and request.round == 6 and 2 not in network.connected:
            network.restart(2)
        return [(0.1, reply)]

    network.tamper = tamper
    rules = Rules(min_sites=3, round_timeout=5, accept_lost_state=True)
    deployment(tmp_path, "fedbn", rules).run(network, log=lines.append)
    assert any("rome has lost" in line and "come to round 5 since" in line for line in lines)
    assert RunFolder.open(tmp_path / "run").metrics().latest()["sites.without_state"] == 4


def test_a_site_that_is_late_again_and_again_has_lost_nothing(tmp_path):
    """What the server last heard of is kept, however many rounds a site does after that for nothing."""

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        late = site == 1 and request.kind == "train" and 2 <= request.round <= 6
        return [(60.5 if late else 0.1, reply)]

    lines: list[str] = []
    network = DirectNetwork(tmp_path, SITES, tamper)
    rules = Rules(min_sites=3, round_timeout=60)
    deployment(tmp_path, "fedbn", rules, evaluate_every=1).run(network, log=lines.append)
    assert merged_sites(RunFolder.open(tmp_path / "run")) == {
        round: [0, 2, 3] if 2 <= round <= 6 else [0, 1, 2, 3] for round in range(1, ROUNDS + 1)
    }
    assert not any("lost" in line for line in lines)


def test_a_site_without_state_gets_old_announcements_after_a_restart_of_the_server(tmp_path):
    method = "ssfl(sparsity=0.5)"
    killed_in(tmp_path, (4,), method, {4: removed("site-2")})
    folder, lines, _ = gone_on(tmp_path, method, Rules(accept_lost_state=True), evaluate_every=ROUNDS)
    assert not any("refuse" in line for line in lines)
    assert folder.finished


@pytest.mark.attack(
    "A site says in the first round, and again in every round, that it has lost its state, which nobody asked for.",
    "Its reply is refused by name; the round goes on, and nothing is noted of a loss.",
)
@pytest.mark.parametrize("accept", [False, True])
def test_nobody_loses_what_nobody_has_asked_for(accept, tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        lies = site == 1 and request.kind == "train"
        return [(0.1, Reply(request.ticket, LOST, {"reason": "it is gone"}) if lies else reply)]

    lines: list[str] = []
    network, rules = DirectNetwork(tmp_path, SITES, tamper), Rules(max_refusals=1, accept_lost_state=accept)
    deployment(tmp_path, "fedbn", rules, rounds=2, evaluate_every=1).run(network, log=lines.append)
    folder = RunFolder.open(tmp_path / "run")
    assert merged_sites(folder) == {1: [0, 2, 3], 2: [0, 2, 3]}
    assert any("paris is refused: it says that it has lost a state which nobody asked for" in line for line in lines)
    assert "sites.without_state" not in folder.metrics().latest()


def changed_ingredients() -> Ingredients:
    """Change one pixel of one training sample of the first site."""
    own = ingredients()
    assert own.dataset is not None
    assert own.split is not None
    inputs = own.dataset.inputs.clone()
    inputs[own.split.train[0][4], 0, 3, 3] += 0.0625
    return dataclasses.replace(own, dataset=dataclasses.replace(own.dataset, inputs=inputs))


@pytest.mark.attack(
    "A site is restarted in a run, and one pixel of one of its samples has changed.",
    "It refuses to go on, with a sentence in both logs; so does the server of a rehearsal.",
)
def test_a_site_whose_samples_have_changed_does_not_go_on(tmp_path):
    killed_in(tmp_path, (2,), "fedbn", {})
    lines: list[str] = []
    network = DirectNetwork(tmp_path, SITES)
    network.own = changed_ingredients()
    network.sites[0] = network.start(0)
    deployment(tmp_path, "fedbn", Rules(min_sites=3)).run(network, log=lines.append)
    assert any("berlin refuses 'hello" in line and "some inputs or labels have changed" in line for line in lines)
    assert any("some inputs or labels have changed" in line for line in network.lines[0])
    assert not list((tmp_path / "site-0").glob("*/step-000003-*"))


def test_the_server_of_a_rehearsal_does_not_go_on_with_other_data(tmp_path):
    killed_in(tmp_path, (2,), "fedavg", {})
    with pytest.raises(FedStrataError, match="has changed since it began: some inputs or labels are others"):
        dataclasses.replace(deployment(tmp_path, "fedavg"), ingredients=changed_ingredients()).run(
            DirectNetwork(tmp_path, SITES)
        )


def test_what_the_server_knows_of_sites_is_read_back_from_a_checkpoint():
    steps = LastSteps({2: Step(Place.training(3), "0f" * 16)}, {1: 5})
    read = LastSteps()
    read.restore(steps.to_stack(4))
    assert read == steps
    read.restore(LastSteps().to_stack(4))
    assert read == LastSteps()
    old = LastSteps()
    old.restore(steps.to_stack(4).__class__())
    assert old == LastSteps()


@pytest.mark.parametrize("value", [1, [], [[1, 1, 0]], [[1, 1, 0], 5], [[1, 9, 0], "a"], "x"])
def test_what_is_no_step_is_refused(value):
    with pytest.raises(ProtocolError):
        Step.read(value)


def test_what_is_missing_is_said_in_words():
    needed = Step(Place.training(4), "0f" * 16)
    assert "another course" in what_is_missing(needed, [Place.training(3), Place.training(4)])
