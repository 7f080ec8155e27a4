"""Running the cells of a recipe: each run once, in a folder named by the hash of its settings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedstrata import comparing
from fedstrata.comparing import PlannedRun
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.papers.availability import Here
from fedstrata.papers.cells import Cell, by_settings, changes_in_words
from fedstrata.papers.keeping import Kept, asked, mean_of
from fedstrata.papers.numbers import number_of, numbers_of_clients
from fedstrata.progress import Progress
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.local_files import changed_file
from fedstrata.runs.preparing import Ingredients, NamedData
from fedstrata.runs.signals import Interrupted, noted_stops
from fedstrata.side_by_side.failures import as_error, describe
from fedstrata.side_by_side.workers import perform_what_can_be


@dataclass(frozen=True)
class Planned:
    """The cells of a recipe: what is known of them already, what is to run for the others, and what cannot run here."""

    cells: Sequence[Cell]
    folder: Path
    known: Mapping[tuple[str, str, str], Kept]
    runs: Mapping[str, PlannedRun]
    problems: Mapping[str, str]
    """Why runs cannot be done, by the hash of their settings."""
    changed: Mapping[str, str] = field(default_factory=dict)
    """Of which runs a file is not what it was, so that their numbers are of something else."""

    @property
    def to_do(self) -> list[PlannedRun]:
        """The runs that are not finished."""
        return [run for run in self.runs.values() if run.state != "finished"]

    @property
    def waiting(self) -> set[str]:
        """The hashes of what is not finished, here or at all."""
        return {settings for settings, run in self.runs.items() if run.state != "finished"} | set(self.problems)

    @property
    def impossible(self) -> bool:
        """Whether none of the cells is known, and none can be run here."""
        return not self.runs and bool(self.problems) and not any(asked(cell) in self.known for cell in self.cells)

    @property
    def on_disk(self) -> list[Path]:
        """The folders of finished runs, also of cells that are known from a CSV."""
        places = [self.folder / settings for settings in by_settings(self.cells)]
        return [place for place in places if (place / "summary.json").exists()]


def plan(cells: Sequence[Cell], folder: Path, kept: Iterable[Kept] = (), given: Ingredients | None = None) -> Planned:
    """Look which cells are known, which runs lie in the folder, and what keeps others from running.

    Runs of the same data follow each other, so that it is loaded once.
    """
    changed = _changed(cells, folder)
    known = {one.what: one for one in kept if one.settings not in changed}
    missing = [cell for cell in cells if asked(cell) not in known]
    shared = dataclasses.replace(given or Ingredients(named=NamedData()), plans={})
    runs, problems, here = {}, {}, Here(data=shared.dataset is None)
    wanted = sorted(by_settings(missing).items(), key=lambda pair: pair[1].experiment.data)
    called = Counter((cell.experiment.method, cell.column, cell.seed) for _, cell in wanted)
    for settings, cell in wanted:
        found = _find(cell.experiment, folder / settings)
        alone = called[cell.experiment.method, cell.column, cell.seed] == 1
        problem = changed.get(settings) or ("" if found.state == "finished" else here.problem(cell))
        if problem:
            problems[settings] = problem
        else:
            words = cell.column if alone else f"{cell.row}, {cell.column}"
            runs[settings] = dataclasses.replace(found, given=shared, setting=words)
    comparing.plan_like_those_there(runs.values())
    return Planned(cells, folder, known, runs, problems, changed)


def _changed(cells: Sequence[Cell], folder: Path) -> dict[str, str]:
    """Say of which runs in a folder a file that they were made of has been changed."""
    there = {name: cell for name, cell in by_settings(cells).items() if (folder / name / "experiment.toml").exists()}
    told = {name: changed_file(RunFolder.open(folder / name), cell.experiment) for name, cell in there.items()}
    return {name: why for name, why in told.items() if why is not None}


def _find(experiment: Experiment, path: Path) -> PlannedRun:
    """Look what a folder holds; its name tells that it is of this experiment."""
    if not (path / "experiment.toml").exists():
        return PlannedRun(experiment, path, "new")
    folder = RunFolder.open(path)
    if folder.finished:
        return PlannedRun(experiment, path, "finished", experiment.rounds)
    rounds, _ = folder.metrics().series("train.loss")
    return PlannedRun(experiment, path, "unfinished", int(rounds.max(initial=0)))


def perform(planned: Planned, shown: Progress, at_a_time: int = 1) -> dict[str, str]:
    """Do what is to do; a run that fails does not keep others from running, and its error is told by its hash."""
    failed: dict[str, str] = {}
    with noted_stops() as stop:
        if at_a_time > 1:
            jobs = comparing.jobs_of(planned.to_do)
            errors = perform_what_can_be(jobs, at_a_time, shown, planned.to_do[0].given)
            for error in errors.values():
                if not isinstance(error, FedStrataError):  # nothing that a sentence explains
                    raise error
            return {path.name: _without_name(str(error), planned.runs[path.name]) for path, error in errors.items()}
        for settings, run in planned.runs.items():
            if run.state == "finished":
                continue
            if stop:
                raise Interrupted(stop[0], 0, None)
            try:
                comparing.perform([run], shown)
            except (Interrupted, BrokenPipeError):
                raise
            except Exception as error:
                told = as_error(run.name, describe(error), beside_others=False)
                if not isinstance(told, FedStrataError):
                    raise
                failed[settings] = _without_name(str(told), run)
                shown.leave(run.rounds_left)
    return failed


def _without_name(why: str, run: PlannedRun) -> str:
    return why.removeprefix(f"{run.name}: ")


def collect(planned: Planned, command: str) -> list[Kept]:
    """Read the numbers of all cells whose runs are finished, or that were known before, in the order of the cells."""
    found = []
    for cell in planned.cells:
        known = planned.known.get(asked(cell))
        run = planned.runs.get(cell.settings)
        if known is not None:
            found.append(known.of(cell))
        elif run is not None and (planned.folder / cell.settings / "summary.json").exists():
            found.append(read_cell(cell, RunFolder.open(planned.folder / cell.settings), command))
    return found


def read_cell(cell: Cell, folder: RunFolder, command: str) -> Kept:
    """Read the number of a cell off its finished run, and with which program and on what that was made."""
    summary, environment, recipe = folder.summary(), folder.environment(), cell.recipe
    settings, number, at = asked(cell)
    clients = numbers_of_clients(recipe, folder) if recipe.over_clients else ()
    return Kept(
        recipe.paper,
        recipe.part,
        cell.row,
        cell.column,
        cell.seed,
        mean_of(clients) if clients else number_of(recipe, folder),
        number,
        at,
        settings,
        int(summary["rounds"]),
        round(float(summary["seconds"]), 1),
        int(summary["bytes_up"]) + int(summary["bytes_down"]),
        str(environment.get("commit") or environment["fedstrata"]),
        command,
        str(environment.get("device_name") or environment["device"]),
        f"fedstrata {environment['fedstrata']}, torch {environment['torch']}",
        summary.get("train_flops"),
        changes_in_words(cell),
        clients,
    )
