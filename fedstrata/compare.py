"""Several methods over several seeds: which runs that makes, and which of them are done already."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from fedstrata import api
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Method, methods
from fedstrata.runs.driver import Listener
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import divide, load_data
from fedstrata.spec import split_outside

ALL = "all"
NOT_DECISIVE = frozenset({"data_root", "checkpoint_every"})
"""Keys of an experiment that change no number of its result."""
COMPARED = frozenset({"method", "seed"})
"""Keys in which the runs of a comparison differ."""

State = Literal["new", "unfinished", "finished"]


class OtherExperimentError(FedStrataError):
    """A folder holds a run of another experiment."""


@dataclass(frozen=True)
class PlannedRun:
    """One method with one seed: where it lies, and whether it is to be begun, continued or only read."""

    experiment: Experiment
    path: Path
    state: State
    rounds_done: int = 0

    @classmethod
    def find(cls, experiment: Experiment, path: Path) -> PlannedRun:
        """Look what a folder holds; a run of another experiment is refused."""
        if not (path / "experiment.toml").exists():
            return cls(experiment, path, "new")
        folder = RunFolder.open(path)
        _refuse_other_experiment(folder, experiment, NOT_DECISIVE)
        if folder.finished:
            return cls(experiment, path, "finished", experiment.rounds)
        rounds, _ = folder.metrics().series("train.loss")
        return cls(experiment, path, "unfinished", int(rounds.max(initial=0)))

    @property
    def name(self) -> str:
        """Name the run in a few words."""
        return f"{self.experiment.method}, seed {self.experiment.seed}"

    @property
    def rounds_left(self) -> int:
        """The rounds still to do."""
        return self.experiment.rounds - self.rounds_done


def read_methods(text: str) -> list[str]:
    """Read a list such as ``fedavg, fedprox(mu=0.01)``, or ``all``. Each method counts once; unknown ones are refused.

    >>> read_methods("fedavg, fedbn+fedprox:0.1, fedavg")
    ['fedavg', 'fedbn+fedprox(mu=0.1)']
    """
    given = methods.names() if text.strip() == ALL else [piece.strip() for piece in split_outside(text, ",")]
    named = [piece for piece in given if piece]
    if not named:
        raise FedStrataError("There is no method to compare; write them like 'fedavg, fedbn, local', or 'all'.")
    return list(dict.fromkeys(str(Method.make(name)) for name in named))


def plan(experiment: Experiment, texts: Sequence[str], seeds: int, out: Path) -> list[PlannedRun]:
    """List the runs, seed by seed, each in its own folder in ``out``.

    Runs that are there already must be of the same experiment, but for method and seed, so that all can be compared.
    """
    if seeds < 1:
        raise FedStrataError(f"{seeds} seeds make no comparison; use at least 1.")
    there = [RunFolder.open(path.parent) for path in sorted(out.glob("*/experiment.toml"))]
    if there and (experiment.clients is None or experiment.partition is None):
        # Runs record how the data was divided; only with what "none" means here can they be recognised.
        experiment, _ = divide(experiment, load_data(experiment))
    for folder in there:
        _refuse_other_experiment(folder, experiment, NOT_DECISIVE | COMPARED)
    planned = []
    for seed in range(experiment.seed, experiment.seed + seeds):
        for text in texts:
            own = experiment.with_changes({"method": text, "seed": seed})
            path = out / f"{file_name(text)}-seed{seed}"
            planned.append(PlannedRun.find(own, path))
    return planned


def perform(planned: Sequence[PlannedRun], begin: Callable[[PlannedRun], None], listener: Listener) -> None:
    """Do what is still to do of the runs, in their order."""
    for run in planned:
        if run.state == "finished":
            continue
        begin(run)
        if run.state == "new":
            api.run(run.experiment, out=run.path, listener=listener)
        else:
            api.resume(run.path, listener=listener)


def file_name(text: str) -> str:
    """Turn the text of a component into a name for files and shells.

    >>> file_name("fedbn+fedprox(mu=0.01)")
    'fedbn+fedprox-mu=0.01'
    """
    return re.sub(r"[^\w.+=]+", "-", text).strip("-.") or "run"


def numbered(path: Path) -> Iterator[Path]:
    """Yield a path, then the same with 2, 3 and so on at its end."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def _refuse_other_experiment(folder: RunFolder, experiment: Experiment, but_for: Set[str]) -> None:
    there, asked = folder.experiment.to_mapping(), experiment.to_mapping()
    for key in {**asked, **there}:
        if key not in but_for and there.get(key) != asked.get(key):
            raise OtherExperimentError(
                f"'{folder.path}' holds a run of another experiment ({key} is {_in_words(there.get(key))} there, "
                f"not {_in_words(asked.get(key))}); choose another --out, or delete that folder."
            )


def _in_words(value: object) -> str:
    return "none" if value is None else ", ".join(value) if isinstance(value, tuple) else str(value)
