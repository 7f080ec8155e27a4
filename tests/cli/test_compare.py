from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from fedstrata import comparing
from fedstrata.api import Result
from fedstrata.callbacks import RoundView
from fedstrata.errors import FedStrataError, FedStrataWarning, NotHereError
from fedstrata.experiment import Experiment
from fedstrata.methods import methods
from fedstrata.progress import Silence
from fedstrata.runs import preparing
from fedstrata.runs.preparing import load_data
from fedstrata.runs.signals import Interrupted, ask_to_stop
from fedstrata.side_by_side import failures

TINY = Experiment(model="mlp(hidden=8)", clients=3, epochs=1, rounds=4, engine="stacked", checkpoint_every=1)


class Kill(BaseException):
    pass


def test_methods_are_read_checked_and_counted_once() -> None:
    assert comparing.read_methods("fedavg,fedprox( mu=0.5 ), fedavg,") == ["fedavg", "fedprox(mu=0.5)"]
    assert comparing.read_methods("all") == methods.names()
    with pytest.raises(FedStrataError, match="Did you mean 'fedavg'"):
        comparing.read_methods("fedavg, fedavgg")


def test_file_names_are_safe_for_shells() -> None:
    assert comparing.file_name("a(b='c d', e=1)") == "a-b=-c-d-e=1"
    assert comparing.file_name("../..") == "run"


def test_runs_are_planned_seed_by_seed(tmp_path: Path) -> None:
    planned = comparing.plan(Experiment(seed=5), ["fedavg", "fedbn"], 2, tmp_path)
    assert [run.name for run in planned] == ["fedavg, seed 5", "fedbn, seed 5", "fedavg, seed 6", "fedbn, seed 6"]
    assert {run.state for run in planned} == {"new"}
    assert planned[3].path == tmp_path / "fedbn-seed6"


@pytest.mark.parametrize(
    ("methods", "changes", "said"),
    [
        (["fedavg", "fedrod"], {"loss": "focal"}, "'fedrod' decides the local loss itself"),
        (["fedavg", "fedper"], {"validation": 100}, "with 'fedper' clients use models of their own"),
        (["fedavg", "fedavg+central-dp:1"], {"upload_values": "fp16"}, "uploads cannot travel as fp16"),
        (["fedavg", "dispfl"], {"late_clients": 1, "join_round": 2}, "Nobody can join later"),
    ],
)  # fmt: skip
def test_what_the_last_run_would_be_refused_for_is_said_before_the_first_one(
    tmp_path: Path, methods: list[str], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(FedStrataError, match=said):
        comparing.plan(TINY.with_changes(changes), methods, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_runs_are_checked_with_data_that_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(preparing, "load_data", lambda one: read.append(one.data) or load_data(one))
    experiment = TINY.with_changes({"validation": 100, "rounds": 1})
    comparing.perform(comparing.plan(experiment, ["fedavg", "fedprox"], 2, tmp_path), Silence(4, 4))
    assert read == ["digits"]
    read.clear()
    comparing.plan(TINY.with_changes({"rounds": 1}), ["fedavg", "local"], 1, tmp_path / "others")
    assert read == []  # where no data is needed to tell


def test_a_killed_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    def kill_in_the_second_run(update: object) -> None:
        if (update.method, update.round) == ("local", 3):  # type: ignore[attr-defined]
            raise Kill

    texts = ["fedavg", "local", "fedbn"]
    with pytest.raises(Kill), pytest.warns(UserWarning, match="no normalisation"):
        comparing.perform(comparing.plan(TINY, texts, 1, tmp_path), Silence(3, 12), [kill_in_the_second_run])
    planned = comparing.plan(TINY, texts, 1, tmp_path)
    assert [run.state for run in planned] == ["finished", "unfinished", "new"]
    assert [run.rounds_left for run in planned] == [0, 2, 4]
    rounds = []
    with pytest.warns(UserWarning, match="no normalisation"):
        results = comparing.perform(planned, Silence(2, 6), [lambda view: rounds.append((view.method, view.round))])
    assert [result.summary["method"] for result in results] == texts
    assert rounds[:3] == [("local", 3), ("local", 4), ("fedbn", 1)]
    assert {run.state for run in comparing.plan(TINY, texts, 1, tmp_path)} == {"finished"}


def test_the_number_of_clients_is_found_again_when_it_was_left_open(tmp_path: Path) -> None:
    experiment = TINY.with_changes({"clients": None, "rounds": 1, "partition": "iid"})
    comparing.perform(comparing.plan(experiment, ["fedavg"], 1, tmp_path), Silence(1, 1))
    assert [run.state for run in comparing.plan(experiment, ["fedavg"], 1, tmp_path)] == ["finished"]
    with pytest.raises(comparing.OtherExperimentError, match="clients is 20 there, not 5"):
        comparing.plan(experiment.with_changes({"clients": 5}), ["local"], 1, tmp_path)


def test_what_decides_no_number_does_not_make_another_experiment(tmp_path: Path) -> None:
    comparing.perform(comparing.plan(TINY, ["fedavg"], 1, tmp_path), Silence(1, 4))
    changed = TINY.with_changes({"checkpoint_every": 2, "data_root": "elsewhere"})
    assert comparing.plan(changed, ["fedavg"], 1, tmp_path)[0].state == "finished"


def test_a_request_to_stop_in_the_last_round_of_a_run_ends_the_comparison_after_it(tmp_path: Path) -> None:
    def ask_in_the_last_round(view: RoundView) -> None:
        if view.round == view.rounds:
            ask_to_stop(signal.SIGINT)

    with pytest.raises(Interrupted) as stop:
        comparing.perform(
            comparing.plan(TINY, ["fedavg", "local"], 1, tmp_path), Silence(2, 8), [ask_in_the_last_round]
        )
    assert stop.value.saved == f"Round 4 is saved in '{tmp_path / 'fedavg-seed0'}'"
    planned = comparing.plan(TINY, ["fedavg", "local"], 1, tmp_path)
    assert [run.state for run in planned] == ["finished", "new"]
    last = comparing.perform(planned[1:], Silence(1, 4), [ask_in_the_last_round])
    assert last[0].summary["rounds"] == 4


def test_where_a_run_fails_the_others_are_done_and_all_that_failed_are_named(tmp_path: Path) -> None:
    def fail_with_local(view: RoundView) -> None:
        if view.method == "local" and view.round == 2:
            raise FedStrataError("No.")

    shown = Silence(6, 24)
    with (
        pytest.raises(FedStrataError, match=r"^2 of 6 runs have failed, the others are finished: local, seed 0; local, "
                      r"seed 1\. local, seed 0: No\.$"),
        pytest.warns(FedStrataWarning, match=r"A run has failed, and the others go on\. local, seed \d: No\.") as told,
    ):  # fmt: skip
        comparing.perform(comparing.plan(TINY, ["fedavg", "local", "fedprox"], 2, tmp_path), shown, [fail_with_local])
    assert len(told) == 2  # none of files that are left open
    states = [run.state for run in comparing.plan(TINY, ["fedavg", "local", "fedprox"], 2, tmp_path)]
    assert states == ["finished", "unfinished", "finished"] * 2
    assert (shown.done, shown.left.rounds) == (4, 0)  # nobody waits for the rounds of those that failed


def test_what_the_first_run_does_not_find_here_ends_the_comparison(tmp_path: Path) -> None:
    def find_nothing(view: RoundView) -> None:
        raise NotHereError("There is no such data here.", "no data")

    with pytest.raises(NotHereError):
        comparing.perform(comparing.plan(TINY, ["fedavg", "local"], 1, tmp_path), Silence(2, 8), [find_nothing])
    assert [run.state for run in comparing.plan(TINY, ["fedavg", "local"], 1, tmp_path)] == ["unfinished", "new"]


def test_a_bug_keeps_no_other_run_from_being_done_and_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = comparing.api.carry_out

    def break_down(experiment: Experiment, *arguments: Any, **more: Any) -> Result:
        if experiment.method == "local":
            raise KeyError("weights")
        return do(experiment, *arguments, **more)

    monkeypatch.setattr(comparing.api, "carry_out", break_down)
    monkeypatch.setattr(failures, "mistake_of_others", lambda error: None)  # as if the test were in FedStrata's code
    planned = comparing.plan(TINY, ["local", "fedavg"], 1, tmp_path)
    with (
        pytest.raises(
            comparing.RunsFailedError, match=r"^1 of 2 runs has failed.*local, seed 0: KeyError: 'w"
        ) as failed,
        pytest.warns(FedStrataWarning, match="local, seed 0: KeyError: 'weights'"),
    ):
        comparing.perform(planned, Silence(2, 8))
    assert [run.state for run in comparing.plan(TINY, ["local", "fedavg"], 1, tmp_path)] == ["new", "finished"]
    with pytest.raises(failures.RunFailedError, match=r"^local, seed 0: KeyError: 'weights'") as raised:
        failed.value.raise_worst()
    assert "in break_down\n" in raised.value.__notes__[0]


def test_what_fails_in_somebody_s_own_code_keeps_no_other_run_from_being_done(tmp_path: Path) -> None:
    def break_down(view: RoundView) -> None:
        if view.method == "local":
            raise ZeroDivisionError("none")

    with (
        pytest.raises(comparing.RunsFailedError, match=r"local, seed 0: 'test_compare\.py' failed in line \d+, in "
                      r"'break_down': ZeroDivisionError: none\.$") as failed,
        pytest.warns(FedStrataWarning, match="A run has failed, and the others go on. local, seed 0"),
    ):  # fmt: skip
        comparing.perform(comparing.plan(TINY, ["local", "fedavg"], 1, tmp_path), Silence(2, 8), [break_down])
    assert failed.value.unexplained is None
    states = [run.state for run in comparing.plan(TINY, ["local", "fedavg"], 1, tmp_path)]
    assert states == ["unfinished", "finished"]


def test_what_a_run_warns_of_comes_with_its_name_once_for_each_method(tmp_path: Path) -> None:
    """A perceptron has no normalisation layers, of which FedBN warns in the same words, alone or not, at each seed."""
    planned = comparing.plan(TINY.with_changes({"rounds": 1}), ["fedbn", "fedbn+fedprox"], 2, tmp_path)
    with pytest.warns(FedStrataWarning, match="no normalisation") as told:
        comparing.perform(planned, Silence(4, 4))
    assert [str(one.message).split(": ")[0] for one in told] == ["fedbn, seed 0", "fedbn+fedprox, seed 0"]
    (alone,) = comparing.plan(TINY.with_changes({"rounds": 1}), ["fedbn"], 1, tmp_path / "alone")
    with pytest.warns(FedStrataWarning, match="^(?!fedbn, seed)"):
        comparing.perform([alone], Silence(1, 1))
