"""How runs are given to workers, and what becomes of what these tell; the workers are made up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from fedstrata.callbacks import RoundView
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.progress import Progress
from fedstrata.runs.signals import Interrupted
from fedstrata.side_by_side import workers
from fedstrata.side_by_side.failures import RunFailedError, as_error
from fedstrata.side_by_side.workers import Job, Workers, environment_of_worker

Message = dict[str, Any]
Script = Callable[[str, Message], Sequence[Message | None]]

DONE: Message = {"done": True}
MISTAKE: Message = {"failed": {"kind": "mistake", "text": "No.", "trace": "", "system": None}}
NO_MEMORY: Message = {"failed": {"kind": "memory", "text": "", "trace": "", "system": None}}
KILLED: Message = {"killed": True}
"""What the script of a process says that ends for want of memory; it sends nothing."""


def round_of(name: str, round: int, rounds: int = 4) -> Message:
    view = {"method": name, "seed": 0, "round": round, "rounds": rounds, "seconds": 1.0, "metrics": {}}
    return {**view, "evaluated": True}


class Noted(Progress):
    """Writes down what it is to show."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(9, 36, at_a_time=2)
        self.log = log

    def show_doing(self, words: str) -> None:
        self.log.append(f"{self.current.name}: {words}")

    def show_round(self, view: RoundView) -> None:
        self.log.append(f"{self.current.name}: round {view.round}")

    def show_end(self, view: RoundView) -> None:
        self.log.append(f"{self.current.name}: end")

    def show_leaving(self) -> None:
        self.log.append(f"{self.current.name}: leaves")


class MadeUp:
    """A worker that answers every message by a script, and a process that ends at once."""

    def __init__(self, events: SimpleQueue[Any], script: Script, log: list[str]) -> None:
        self.events, self.script, self.log = events, script, log
        self.job: Job | None = None
        self.rounds_left = 0
        self.needed: float | None = None
        self.process = self
        self.code = -11

    def send(self, **message: Any) -> None:
        name = message.get("run") or (self.job.name if self.job else "")
        self.log.append(f"{name} <- {next(iter(message))}")
        for answer in self.script(name, message):
            if answer == KILLED:
                self.code = -9
            self.events.put((self, None if answer == KILLED else answer))

    def end(self) -> None:
        self.log.append("ended")

    def kill(self) -> None:
        self.log.append("killed")

    def wait(self, seconds: float | None = None) -> int:
        return self.code


@pytest.fixture
def perform(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Do some runs by workers that follow a script, two at a time with 100 bytes."""

    def run(
        names: str,
        script: Script,
        stop: Sequence[int] = (),
        log: list[str] | None = None,
        shown: Noted | None = None,
    ) -> list[str]:
        log = [] if log is None else log
        monkeypatch.setattr(workers, "Worker", lambda events: MadeUp(events, script, log))
        jobs = [Job(name, Experiment(method="fedavg"), Path(name), True, 4) for name in names.split()]
        with Workers(jobs, 2, 100.0, shown or Noted(log), set()) as made_up:
            made_up.work(stop)
        for error in made_up.failed.values():
            raise error
        return log

    return run


def test_a_worker_gets_the_next_run_when_it_is_done(perform: Callable[..., list[str]]) -> None:
    log = perform("a b c", lambda name, message: [DONE])
    assert [line for line in log if "<-" in line] == ["a <- run", "b <- run", "c <- run"]
    assert log.count("ended") == 2


def test_rounds_are_shown_under_the_name_of_their_run(perform: Callable[..., list[str]]) -> None:
    def script(name: str, message: Message) -> list[Message]:
        return [{"doing": "waiting"}, {"round": round_of(name, 1)}, {"end": round_of(name, 4)}, DONE]

    log = perform("a b", script)
    assert [line for line in log if line.startswith("b:")] == ["b: preparing", "b: waiting", "b: round 1", "b: end"]


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ({"a": 60.0, "b": 40.0}, ["a <- granted", "b <- granted", "a: end", "b: end"]),
        ({"a": 60.0, "b": 41.0}, ["a <- granted", "a: end", "b <- granted", "b: end"]),
        ({"a": 500.0, "b": 0.0}, ["a <- granted", "a: end", "b <- granted", "b: end"]),
        ({"a": 1.0, "b": 500.0}, ["a <- granted", "a: end", "b <- granted", "b: end"]),
    ],
    ids=["both fit", "the second waits", "too large for all", "too large beside others"],
)
def test_what_does_not_fit_beside_the_others_waits_for_them(
    perform: Callable[..., list[str]], needs: dict[str, float], expected: list[str]
) -> None:
    def script(name: str, message: Message) -> list[Message]:
        return [{"needed": needs[name]}] if "run" in message else [{"end": round_of(name, 4)}, DONE]

    log = perform("a b", script)
    assert [line for line in log if "granted" in line or line.endswith(": end")] == expected


@pytest.mark.parametrize(
    ("others", "held", "granted"),
    [
        (Experiment(), 30.0, "abc"),
        (Experiment(), 45.0, "ab"),
        (Experiment(), 70.0, "a"),
        (Experiment(method="fedprox"), 15.0, "ab"),
        (Experiment(method="fedprox"), 30.0, "a"),
    ],
    ids=["all fit", "two fit", "no other fits", "others by their estimates", "another method, by its estimate"],
)
def test_a_run_that_was_measured_counts_as_that_and_so_do_those_that_differ_in_the_seed(
    monkeypatch: pytest.MonkeyPatch, others: Experiment, held: float, granted: str
) -> None:
    """Each of three asks for 80 of 100 bytes, and the first, once it has begun, is seen to hold less."""
    log: list[str] = []
    monkeypatch.setattr(workers, "Worker", lambda events: MadeUp(events, lambda name, message: (), log))
    kinds = {"a": Experiment(), "b": others, "c": others}
    jobs = [
        Job(name, kind.with_changes({"seed": seed}), Path(name), True, 4)
        for seed, (name, kind) in enumerate(kinds.items())
    ]
    with Workers(jobs, 3, 100.0, Noted(log), set()) as made_up:
        made_up._give_out()
        for worker in made_up.active:
            made_up._hear(worker, {"needed": 80.0})
        assert [line for line in log if "granted" in line] == ["a <- granted"]
        made_up._hear(made_up.active[0], {"held": held})
    assert [line[0] for line in log if "granted" in line] == list(granted)


def test_the_others_are_done_where_a_run_fails_and_its_error_is_kept(
    perform: Callable[..., list[str]],
) -> None:
    log: list[str] = []
    with (
        pytest.warns(FedStrataWarning, match=r"A run has failed, and the others go on\. a: No\."),
        pytest.raises(FedStrataError, match=r"a: No\."),
    ):
        perform("a b c", lambda name, message: [MISTAKE] if name == "a" else [DONE], log=log)
    assert "c <- run" in log


def test_a_process_that_dies_is_told_and_another_takes_its_place(perform: Callable[..., list[str]]) -> None:
    log: list[str] = []
    with (
        pytest.warns(FedStrataWarning, match="A run has failed"),
        pytest.raises(FedStrataError, match="a: the process that did it has ended by the signal 11"),
    ):
        perform("a b c", lambda name, message: [None] if name == "a" else [DONE], log=log)
    assert "c <- run" in log


@pytest.mark.parametrize("short", [NO_MEMORY, KILLED], ids=["an error", "the process is killed"])
def test_what_found_no_memory_beside_others_is_done_last_beside_fewer(
    perform: Callable[..., list[str]], short: Message
) -> None:
    """a finds no memory beside b, so c and d are done one at a time, and then a once more."""
    begun: list[str] = []

    def script(name: str, message: Message) -> list[Message]:
        begun.append(name)
        return [{"round": round_of(name, 1)}, short] if name == "a" and begun.count("a") == 1 else [DONE]

    log: list[str] = []
    with pytest.warns(FedStrataWarning, match=r"^a: .*is done again, beside fewer\.$") as caught:
        perform("a b c d", script, log=log)
    assert (begun, len(caught)) == (["a", "b", "c", "d", "a"], 1)
    assert log.count("a: leaves") == 1
    assert log.count("ended") == (2 if short is NO_MEMORY else 1)


def test_what_finds_no_memory_even_alone_has_failed(perform: Callable[..., list[str]]) -> None:
    """A run that never fits is tried beside others, and at last alone."""
    log: list[str] = []
    with (
        pytest.warns(FedStrataWarning, match="beside fewer"),
        pytest.raises(FedStrataError, match="a: there is not enough memory; do fewer runs at a time"),
    ):
        perform("a b c", lambda name, message: [NO_MEMORY] if name == "a" else [DONE], log=log)
    assert [line for line in log if "<-" in line] == ["a <- run", "b <- run", "c <- run", "a <- run"]


def test_rounds_of_a_run_that_is_put_back_are_waited_for_again(perform: Callable[..., list[str]]) -> None:
    begun: list[str] = []

    def script(name: str, message: Message) -> list[Message]:
        begun.append(name)
        first = name == "a" and begun.count("a") == 1
        rounds = range(1, 3 if first else 5)
        return [*({"round": round_of(name, round)} for round in rounds), NO_MEMORY if first else DONE]

    shown = Noted([])
    with pytest.warns(FedStrataWarning, match="beside fewer"):
        perform("a b", script, shown=shown)
    assert shown.left.rounds == 36 - 8  # of the nine runs that it was told of, two were done


def test_a_signal_stops_all_and_nothing_new_begins(perform: Callable[..., list[str]]) -> None:
    def script(name: str, message: Message) -> list[Message]:
        if "run" in message:
            return [{"round": round_of(name, 1)}]
        return [{"interrupted": 2 if name == "a" else 0, "signal": message["stop"]}]

    log: list[str] = []
    with pytest.raises(Interrupted) as stop:
        perform("a b c", script, [signal.SIGINT], log)
    assert (stop.value.signal_number, stop.value.saved) == (signal.SIGINT, "Round 2 is saved in 'a'")
    assert "c <- run" not in log
    assert "killed" not in log


def test_a_signal_in_the_last_rounds_of_all_runs_leaves_nothing_undone(perform: Callable[..., list[str]]) -> None:
    perform("a b", lambda name, message: [DONE] if "stop" in message else [], [signal.SIGTERM])


def test_several_that_stop_say_where_each_is_saved() -> None:
    stop = Interrupted(2, 3, Path("a"), (5, Path("b")))
    assert stop.saved == "Round 3 is saved in 'a', round 5 is saved in 'b'"
    assert Interrupted(2, 0, None).saved == ""


def test_nobody_is_left_behind_by_an_error_of_the_display(perform: Callable[..., list[str]]) -> None:
    log: list[str] = []
    with pytest.raises(TypeError):
        perform("a b", lambda name, message: [{"round": {"nonsense": 1}}], log=log)
    assert log.count("killed") == 2


def test_warnings_come_once_with_the_name_of_the_first_run(perform: Callable[..., list[str]]) -> None:
    with pytest.warns(FedStrataWarning) as caught:
        perform("a b", lambda name, message: [{"warning": "Mind the gap."}, DONE])
    assert [str(one.message) for one in caught] == ["a: Mind the gap."]


def test_errors_keep_their_kind() -> None:
    told: Message = {"kind": "system", "text": "", "trace": "", "system": [28, "No space left", "x"]}
    full = as_error("a", told)
    assert isinstance(full, OSError)
    assert (full.errno, full.filename, full.strerror) == (28, "x", "a: No space left")
    assert "fewer runs at a time with --jobs" in str(as_error("a", {**told, "kind": "memory"}))
    assert "--jobs" not in str(as_error("a", {**told, "kind": "memory"}, beside_others=False))
    bug = as_error("a", {**told, "kind": "bug", "text": "ValueError: x", "trace": "in line 3"})
    assert isinstance(bug, RunFailedError)
    assert (str(bug), bug.__notes__) == ("a: ValueError: x", ["in line 3"])


def test_threads_of_workers_are_as_many_as_here_unbound_and_asleep_while_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "threads_of_this_process", lambda: 3)
    given = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "PYTHONPATH": "x", "HOME": "h"}
    root = Path(workers.__file__).parents[2]
    expected = {"OMP_NUM_THREADS": "3", "OMP_PROC_BIND": "false", "OMP_WAIT_POLICY": "PASSIVE", "HOME": "h"}
    monkeypatch.setattr("site.getsitepackages", lambda: ["elsewhere"])
    made = environment_of_worker(given)
    assert made == {**expected, "PYTHONPATH": f"{root}{os.pathsep}x"}
    monkeypatch.setattr("site.getsitepackages", lambda: [str(root)])
    assert environment_of_worker(given) == {**expected, "PYTHONPATH": "x"}
