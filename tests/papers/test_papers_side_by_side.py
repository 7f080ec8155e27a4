"""Cells are run side by side with the same numbers as one after another, and go on where they were stopped."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedstrata.callbacks import RoundView
from fedstrata.papers.cells import Cell, Smaller, cells_of
from fedstrata.papers.keeping import read_results
from fedstrata.papers.reading import read_papers
from fedstrata.papers.running import Planned, collect, perform, plan
from fedstrata.progress import Silence
from fedstrata.runs.signals import Interrupted, ask_to_stop

SMALL = Path(__file__).parent / "small"
pytestmark = pytest.mark.filterwarnings("ignore:The model has no normalisation layers")


class Stopping(Silence):
    """Asks for an end after so many rounds, as Ctrl-C does."""

    def __init__(self, rounds: int) -> None:
        super().__init__(4, 8)
        self.wanted = rounds

    def show_round(self, view: RoundView) -> None:
        self.wanted -= 1
        if self.wanted == 0:
            ask_to_stop(signal.SIGINT)


def some_cells(rounds: int = 2) -> list[Cell]:
    return cells_of(read_papers(SMALL)["tiny"].part("table1"), 1, Smaller(rounds=rounds))


def numbers(planned: Planned) -> dict[tuple[str, str], float]:
    return {(one.row, one.column): one.value for one in collect(planned, "a test")}


def test_what_was_interrupted_goes_on_and_nothing_is_run_twice(tmp_path: Path) -> None:
    cells = some_cells()
    whole = plan(cells, tmp_path / "whole")
    perform(whole, Silence(4, 8))
    for rounds, finished, begun in ((3, 1, 2), (4, 2, 2)):  # within the second run, and at its end
        folder = tmp_path / str(rounds)
        with pytest.raises(Interrupted):
            perform(plan(cells, folder), Stopping(rounds))
        again = plan(cells, folder)
        states = [run.state for run in again.runs.values()]
        assert (states.count("finished"), len(list(folder.iterdir()))) == (finished, begun)
        assert sum(run.rounds_left for run in again.to_do) == 8 - rounds
        assert len(numbers(again)) == finished
        perform(again, Silence(4, 8))
        assert numbers(again) == numbers(whole)


def test_runs_that_differ_in_their_rows_only_have_names_of_their_own(tmp_path: Path) -> None:
    cells = some_cells()
    alike = [
        dataclasses.replace(
            cell, row=row, experiment=cell.experiment.with_changes({"method": "fedbn", "epochs": epochs})
        )
        for cell in cells[:1]
        for row, epochs in (("short", 1), ("long", 2))
    ]
    names = [run.name for run in plan(alike, tmp_path).to_do]
    assert names == ["fedbn, short, .1, seed 0", "fedbn, long, .1, seed 0"]
    assert [run.name for run in plan(cells[:1], tmp_path).to_do] == ["fedbn, .1, seed 0"]


def command(out: Path, *further: str) -> list[str]:
    words = ("paper", "--recipes", str(SMALL), "tiny", "table1", "--seeds", "1", "--no-report", "--json", "--out", out)
    return [sys.executable, "-m", "fedstrata", *map(str, words), *further]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def values(out: Path) -> list[tuple[str, str, float, int]]:
    return [(one.row, one.column, one.value, one.bytes) for one in read_results([out])]


@pytest.mark.slow
def test_killed_side_by_side_it_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    """A real process with two workers is killed in the middle, and the same command finishes its runs."""
    rounds = ("--rounds", "120")
    subprocess.run(command(tmp_path / "one", *rounds), env=environment(), check=True, stdout=subprocess.DEVNULL)
    out = tmp_path / "two"
    with subprocess.Popen(
        command(out, *rounds, "--jobs", "2"), env=environment(), stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        _wait_for(lambda: any(out.glob("runs/*/checkpoints/*")), process)
        process.kill()
    assert not (out / "results.csv").exists()
    assert len(list(out.glob("runs/*/summary.json"))) < 4
    subprocess.run(command(out, *rounds, "--jobs", "2"), env=environment(), check=True, stdout=subprocess.DEVNULL)
    assert values(out) == values(tmp_path / "one")


def _wait_for(condition: object, process: subprocess.Popen[bytes]) -> None:
    assert callable(condition)
    while not condition():
        assert process.poll() is None
        time.sleep(0.05)
