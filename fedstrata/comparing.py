"""Several methods over several seeds: which runs that makes, which are done already, and the table over them."""

from __future__ import annotations

import dataclasses
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NoReturn

from rich.console import Console
from torch import nn

from fedstrata import api
from fedstrata._platform import CHOSEN_THREADS
from fedstrata.api import Result
from fedstrata.callbacks import Callbacks
from fedstrata.data import Split
from fedstrata.engines.planning import free_memory
from fedstrata.errors import FedStrataError, FedStrataWarning, NotHereError, unknown_name
from fedstrata.experiment import Experiment
from fedstrata.loggers import Logger, make_loggers
from fedstrata.loggers.logging import Given as Log
from fedstrata.methods import Method, Part
from fedstrata.methods import methods as registry
from fedstrata.models import ModelSpec
from fedstrata.plugins import load_imports
from fedstrata.progress import Progress, show_if_wanted
from fedstrata.report import rich_table
from fedstrata.report.formats import plural
from fedstrata.report.groups import group_runs
from fedstrata.report.notes import notes
from fedstrata.report.results import comparison_table
from fedstrata.report.rows import Row, accuracy_or_nothing, comparison_rows
from fedstrata.runs.devices import choose_device
from fedstrata.runs.folder import RunFolder, folder_named, note_order
from fedstrata.runs.preparing import Ingredients, NamedData, divide, refuse_unfit
from fedstrata.runs.recalling import plan_of, same_work
from fedstrata.runs.signals import Interrupted, noted_stops
from fedstrata.runs.sweeping import Given as Swept
from fedstrata.runs.sweeping import Sweep, cells, read_sweeps, swept_methods
from fedstrata.side_by_side.failures import as_error, describe, warn_of_failure
from fedstrata.side_by_side.how_many import as_many_as_fit, read_jobs, usable_cores
from fedstrata.side_by_side.travelling import obstacle
from fedstrata.side_by_side.workers import Job
from fedstrata.side_by_side.workers import perform_what_can_be as side_by_side
from fedstrata.significance import Estimate
from fedstrata.spec import split_outside

ALL = "all"
NOT_DECISIVE = frozenset({"data_root", "checkpoint_every", "replay"})
"""Keys of an experiment that change no number of its result."""
COMPARED = frozenset({"method", "seed"})
"""Keys in which the runs of a comparison differ."""

State = Literal["new", "unfinished", "finished"]


class OtherExperimentError(FedStrataError):
    """A folder holds a run of another experiment, or is that of a run itself."""


class RunsFailedError(FedStrataError):
    """Some of several runs have failed; the others are done. ``failed`` tells why, by the names of the runs.

    ``unexplained`` is the first error that is no mistake which a sentence explains, where there is one.
    """

    def __init__(self, message: str, failed: Mapping[str, Exception]) -> None:
        super().__init__(message)
        self.failed = {name: str(error).removeprefix(f"{name}: ") for name, error in failed.items()}
        self.unexplained = next((error for error in failed.values() if not isinstance(error, FedStrataError)), None)

    def raise_worst(self) -> NoReturn:
        """Raise what no sentence explains as it is: it comes before the mistakes of a user."""
        if self.unexplained is None:
            raise self
        if len(self.failed) > 1:
            warnings.warn(str(self), FedStrataWarning, stacklevel=2)
        raise self.unexplained


@dataclass(frozen=True)
class PlannedRun:
    """One method with one seed: where it lies, and whether it is to be begun, continued or only read."""

    experiment: Experiment
    path: Path | None
    state: State
    rounds_done: int = 0
    given: Ingredients = field(default_factory=Ingredients)
    setting: str = ""
    """The values of a sweep, in words; nothing where nothing is swept."""

    @classmethod
    def find(cls, experiment: Experiment, path: Path | None) -> PlannedRun:
        """Look what a folder holds, if there is to be one; a run of another experiment is refused."""
        if path is None or not (path / "experiment.toml").exists():
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
        return ", ".join(filter(None, (self.experiment.method, self.setting, f"seed {self.experiment.seed}")))

    @property
    def rounds_left(self) -> int:
        """The rounds still to do."""
        return self.experiment.rounds - self.rounds_done


@dataclass(frozen=True)
class Compared:
    """A result as the table of a comparison looks at it."""

    experiment: Mapping[str, Any]
    summary: Mapping[str, Any]
    split_hash: str
    client_accuracies: Mapping[int, float]
    result: Result


@dataclass(frozen=True, repr=False)
class Comparison:
    """What a comparison gave: the result of each run, seed by seed, and the table over them."""

    results: tuple[Result, ...]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the table, one for each method and setting, with means over seeds and tests against the first."""
        return comparison_rows(self._compared)

    @cached_property
    def _compared(self) -> list[Compared]:
        return [
            Compared(
                one.experiment.to_mapping(),
                one.summary,
                one.split_hash,
                one.metrics.of_clients(f"{one.summary['headline']}.accuracy"),
                one,
            )
            for one in self.results
        ]

    def result(self, method: str, seed: int | None = None) -> Result:
        """Return the result of a method, written as in the table, with a seed, or with the first one."""
        named = {group.label: [run.result for run in group.runs] for group in group_runs(self._compared)}
        found = named.get(method) or [one for one in self.results if one.summary["method"] == method]
        if not found:
            raise unknown_name("method in this comparison called", method, [row.label for row in self.rows])
        for one in found:
            if seed is None or one.summary["seed"] == seed:
                return one
        raise FedStrataError(
            f"'{method}' was not run with the seed {seed}, but with {', '.join(str(r.summary['seed']) for r in found)}."
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Give the table as flat rows, such as ``pandas.DataFrame`` takes; accuracies are fractions.

        ``accuracy`` is that of the last round, ``difference`` the one to the first method, ``p`` the paired t-test's.
        ``incentive`` is the part of the clients that fare better than with ``local`` and with ``fedavg``, where these
        are compared too.
        """
        return [_flat(row) for row in self.rows]

    def table(self, width: int = 80) -> str:
        """Set the table as text, as the command line prints it."""
        page = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False, legacy_windows=False)
        page.print(rich_table(self.rows, width=width))
        return "\n".join(line.rstrip() for line in page.file.getvalue().splitlines())  # type: ignore[attr-defined]

    def __str__(self) -> str:
        """Set the table as text, with what it cannot show."""
        return "\n".join([self.table(), "", *notes(self.rows)])

    def __repr__(self) -> str:
        """Tell in a line what was compared."""
        seeds = len({one.summary["seed"] for one in self.results})
        data = ", ".join(dict.fromkeys(str(one.summary["data"]) for one in self.results))
        best = max(self.rows, key=accuracy_or_nothing)
        reached = "" if best.last is None else f"; best: {best.label}, {100 * best.last.mean:.1f} %"
        return f"Comparison({plural(len(self.rows), 'method')}, {plural(seeds, 'seed')}, on {data}{reached})"

    def _repr_html_(self) -> str:
        """Draw the table, for a notebook."""
        return comparison_table(self.rows, sortable=False)


def _flat(row: Row) -> dict[str, Any]:
    def mean(value: Estimate | None) -> float | None:
        return None if value is None else value.mean

    compared = row.comparison
    return {
        "method": row.label,
        **row.settings,
        "headline": row.headline,
        "seeds": len(row.seeds),
        "accuracy": mean(row.last),
        "accuracy_std": None if row.last is None else row.last.std,
        "last_ten": mean(row.last_ten),
        "best": mean(row.best),
        "worst10": mean(row.worst),
        "validated": mean(row.validated),
        "difference": None if compared is None else mean(compared.difference),
        "p": None if compared is None else compared.adjusted,
        "bytes_up": mean(row.bytes_up),
        "bytes_down": mean(row.bytes_down),
        "seconds": mean(row.seconds),
        "aggregation_seconds": mean(row.aggregation),
        "train_flops": mean(row.flops),
        "train_sparse_flops": mean(row.sparse_flops),
        "fairness": mean(row.fairness),
        "incentive": mean(row.incentive),
    }


def compare(
    methods: str | Sequence[str | Method | Part],
    experiment: Experiment | None = None,
    *,
    data: api.Given = None,
    split: Split | None = None,
    model: str | nn.Module | ModelSpec | Callable[..., nn.Module] | None = None,
    seeds: int = 1,
    sweep: Swept | None = None,
    metrics: api.Metrics | None = None,
    learning_rate: float | None = None,
    out: str | Path | None = None,
    callbacks: Iterable[object] = (),
    log: Log | None = None,
    progress: bool | None = None,
    jobs: int | str = 1,
    **changes: Any,
) -> Comparison:
    """Run several methods on the same data, each with several seeds, and set the outcome as a table.

    ``methods`` is a list, or a text such as ``"fedavg, fedbn, local"``. Everything else is as in :func:`fedstrata.run`;
    seeds are counted from ``seed`` on. With ``out``, each run has a folder there, and nothing is done twice: an
    interrupted comparison goes on, and a longer list adds to it. Without, nothing is written. The data is loaded once.

    ``sweep`` runs all of it with other values of keys of the experiment, or of parameters inside its texts:
    ``sweep="partition.alpha=0.01,0.1,0.5"``, ``sweep={"clients": [10, 20], "method.mu": [0.1, 1.0]}``; several make a
    grid. Methods are then tested against the first one at the same setting.

    ``jobs`` is how many runs are done at a time, in processes of their own, or ``"auto"``. Their numbers do not depend
    on it. It takes an ``out``, and what cannot travel to another process, such as objects and callbacks, is refused;
    with ``"auto"``, runs are then done one after another, with a warning.

    >>> comparison = compare("fedavg, local", data="digits", model="mlp", clients=3, rounds=1, epochs=1)
    >>> [row["method"] for row in comparison.to_rows()]
    ['fedavg', 'local']
    """
    if "method" in changes:
        raise FedStrataError("A comparison takes its methods first: compare(['fedavg', 'fedbn'], rounds=5).")
    kept = make_loggers(log)
    given_by_name = {"data": data, "model": model, "metrics": metrics}
    named = {key: value for key, value in given_by_name.items() if isinstance(value, str)}
    chosen = api.choose_experiment(experiment, {**changes, **named}, learning_rate, compare)
    chosen = load_imports(chosen, Path())
    given = dataclasses.replace(api.make_ingredients(data, split, model, None, metrics), named=NamedData())
    planned = plan(
        chosen, make_methods(methods), seeds, None if out is None else folder_named(out), given, read_sweeps(sweep)
    )
    called = list(Callbacks(callbacks))
    at_a_time = choose_jobs(jobs, planned, called)
    to_do = [run for run in planned if run.state != "finished"]
    with show_if_wanted(progress, len(to_do), sum(run.rounds_left for run in to_do), at_a_time) as shown:
        try:
            return Comparison(tuple(perform(planned, shown, called, at_a_time, kept)))
        except RunsFailedError as error:
            error.raise_worst()


def make_methods(given: str | Sequence[str | Method | Part]) -> list[Method]:
    """Make the methods of a comparison, each once: of a list, or of a text such as ``fedavg, fedprox(mu=0.01)``."""
    listed: Sequence[str | Method | Part] = read_methods(given) if isinstance(given, str) else list(given)
    if not listed:
        raise FedStrataError("There is no method to compare; write them like ['fedavg', 'fedbn', 'local'].")
    made = {str(method): method for method in map(Method.make, listed)}
    return list(made.values())


def read_methods(text: str) -> list[str]:
    """Read a list such as ``fedavg, fedprox(mu=0.01)``, or ``all``. Each method counts once; unknown ones are refused.

    >>> read_methods("fedavg, fedbn+fedprox:0.1, fedavg")
    ['fedavg', 'fedbn+fedprox(mu=0.1)']
    """
    given = registry.names() if text.strip() == ALL else [piece.strip() for piece in split_outside(text, ",")]
    named = [piece for piece in given if piece]
    if not named:
        raise FedStrataError("There is no method to compare; write them like 'fedavg, fedbn, local', or 'all'.")
    return list(dict.fromkeys(str(Method.make(name)) for name in named))


def plan(
    experiment: Experiment,
    methods: Sequence[str | Method],
    seeds: int,
    out: Path | None,
    given: Ingredients | None = None,
    sweeps: Sequence[Sweep] = (),
) -> list[PlannedRun]:
    """List the runs, seed by seed, each in its own folder in ``out``, if they are to be written.

    Runs that are there already must be of the same experiment, but for method, seed and what is swept, so that all can
    be compared. A run that could not be done is refused here, before others have trained for hours.
    """
    _refuse_odd_seeds(seeds)
    given = dataclasses.replace(given or Ingredients(named=NamedData()), plans={})
    experiment = given.describe(experiment)
    there = [] if out is None else [RunFolder.open(path.parent) for path in sorted(out.glob("*/experiment.toml"))]
    if out is not None and (out / "experiment.toml").exists():
        raise OtherExperimentError(f"'{out}' is the folder of one run; name another one with --out.")
    if experiment.partition is None and any(sweep.key == "partition" and sweep.path for sweep in sweeps):
        experiment = experiment.with_changes({"partition": divide(experiment, given.load(experiment))[0].partition})
    settings = [(words, _divided(cell, given) if there else cell) for words, cell in cells(experiment, sweeps)]
    swept = {sweep.key for sweep in sweeps}
    for folder in there:
        _refuse_other_experiment(folder, settings[0][1], NOT_DECISIVE | COMPARED | swept)
    made = _with_swept_parameters([Method.make(method) for method in methods], sweeps)
    planned = []
    for seed in range(experiment.seed, experiment.seed + seeds):
        for words, cell in settings:
            for method in made:
                own = cell.with_changes({"method": str(method), "seed": seed})
                name = "-".join(filter(None, (file_name(str(method)), words and file_name(words), f"seed{seed}")))
                found = PlannedRun.find(own, None if out is None else out / name)
                ingredients = dataclasses.replace(given, method=method)
                planned.append(dataclasses.replace(found, given=ingredients, setting=words))
    _refuse_unfit(planned)
    plan_like_those_there(planned)
    return planned


def plan_like_those_there(planned: Iterable[PlannedRun]) -> None:
    """Note how runs that lie there already were planned, so that those beside them will be planned alike."""
    for run in planned:
        if run.state != "new" and run.path is not None and run.given.plans is not None:
            there = plan_of(RunFolder.open(run.path))
            if there is not None:
                run.given.plans.setdefault(same_work(run.experiment), there)


def _refuse_odd_seeds(seeds: object) -> None:
    if isinstance(seeds, bool) or not isinstance(seeds, Integral):
        raise FedStrataError(f"{seeds!r} is no number of seeds; say how many each method runs with, such as seeds=3.")
    if int(seeds) < 1:
        raise FedStrataError(f"{seeds} seeds make no comparison; use at least 1.")


def _refuse_unfit(planned: Sequence[PlannedRun]) -> None:
    """Refuse runs that could not be begun, each kind once for all seeds; the data of the first run is read last."""
    kinds = {run.experiment.with_changes({"seed": 0}): run for run in planned if run.state == "new"}
    for run in sorted(kinds.values(), key=lambda run: run.experiment.data == planned[0].experiment.data):
        refuse_unfit(run.experiment, run.given)


def _divided(experiment: Experiment, given: Ingredients) -> Experiment:
    """Say how the data is divided: runs record it, and only with what "none" means here can they be recognised."""
    if experiment.clients is not None and experiment.partition is not None:
        return experiment
    return divide(experiment, given.load(experiment))[0]


def _with_swept_parameters(methods: Sequence[Method], sweeps: Sequence[Sweep]) -> list[Method]:
    if not any(sweep.of_method for sweep in sweeps):
        return list(methods)
    return [Method.make(text) for text in swept_methods([str(method) for method in methods], sweeps)]


def choose_jobs(asked: int | str, planned: Sequence[PlannedRun], callbacks: Sequence[object] = ()) -> int:
    """Choose how many of the runs to do at a time, no more than there are to do.

    Where some cannot be done in another process, to ask for several at a time is refused; ``auto`` then means one.
    """
    number = read_jobs(asked)
    to_do = [run for run in planned if run.state != "finished"]
    if number == 1 or len(to_do) < 2:
        return 1
    for run in to_do:
        reason = obstacle(run.experiment, run.given, callbacks, run.path is not None)
        if reason is not None and number is None:
            warnings.warn(
                f"The runs are done one after another, not in other processes: {reason}.", FedStrataWarning, 2
            )
            return 1
        if reason is not None:
            raise FedStrataError(
                f"{number} runs at a time are done in other processes, but {reason}, or leave jobs out."
            )
    if number is None:
        device = choose_device(to_do[0].experiment.device)
        number = as_many_as_fit(device.type, free_memory(device), CHOSEN_THREADS, usable_cores())
    return min(number, len(to_do))


def perform(
    planned: Sequence[PlannedRun],
    shown: Progress,
    callbacks: Iterable[object] = (),
    at_a_time: int = 1,
    log: Sequence[Logger] = (),
) -> list[Result]:
    """Do what is still to do of the runs, in their order, so many at a time, and return the results of all.

    Where one of several fails, a warning says so at once, the others are done all the same, and in the end it is raised
    which have failed.
    """
    with _order_noted(planned):
        if at_a_time == 1:
            return _one_after_another(planned, shown, callbacks, log)
        failed = side_by_side(jobs_of(planned, log), at_a_time, shown, planned[0].given)
        names = {run.path: run.name for run in planned}
        _raise_failed({names[path]: failed[path] for path in names if path in failed}, len(planned))
        return [api.read_result(run.path) for run in planned if run.path is not None]


@contextmanager
def _order_noted(planned: Sequence[PlannedRun]) -> Iterator[None]:
    """Note in the end in which order several runs are compared, however far they came, so that reports keep to it."""
    try:
        yield
    finally:
        places = [run.path for run in planned if run.path is not None]
        if len(places) > 1 and places[0].parent.is_dir():
            with suppress(OSError, FedStrataError):  # where nothing may be written, the order is that of their making
                note_order(places[0].parent, [place.name for place in places])


def jobs_of(planned: Sequence[PlannedRun], log: Sequence[Logger] = ()) -> list[Job]:
    """Write down what is still to do of the runs, for other processes."""
    return [
        Job(run.name, run.experiment, run.path, run.state == "new", run.rounds_left, log=tuple(map(str, log)))
        for run in planned
        if run.state != "finished" and run.path is not None
    ]


def _one_after_another(
    planned: Sequence[PlannedRun], shown: Progress, callbacks: Iterable[object], log: Sequence[Logger]
) -> list[Result]:
    called = Callbacks(callbacks)
    results: list[Result] = []
    failed: dict[str, Exception] = {}
    to_do = [run for run in planned if run.state != "finished"]
    told: set[tuple[str, str, str]] = set()
    with noted_stops() as stop:
        for run in planned:
            if run.state == "finished" and run.path is not None:
                results.append(api.read_result(run.path))
                continue
            if stop:  # in the last round of the run before, which has come to its end
                last = (results[-1].summary["rounds"], results[-1].out) if results else (0, None)
                raise Interrupted(stop[0], *last)
            shown.begin(run.name)
            try:
                with _named_warnings(run, told) if len(planned) > 1 else nullcontext():
                    results.append(_do(run, called, shown, log))
            except Exception as error:
                # What the first run does not find on this machine, the others would not find either.
                hopeless = isinstance(error, NotHereError) and run is to_do[0]
                if len(planned) == 1 or hopeless or isinstance(error, Interrupted | BrokenPipeError):
                    raise
                failed[run.name] = as_error(run.name, describe(error), beside_others=False)
                if run is not to_do[-1]:
                    shown.leave(run.rounds_left if shown.current.left is None else shown.current.left.rounds)
                    warn_of_failure(failed[run.name])
    _raise_failed(failed, len(planned))
    return results


def _do(run: PlannedRun, called: Callbacks, shown: Progress, log: Sequence[Logger]) -> Result:
    """Begin a run or go on with it; the data and the clients' state of all runs together would fill the memory."""
    if run.state == "new" or run.path is None:
        result = api.carry_out(run.experiment, run.given, run.path, called, shown, log=log)
    else:
        result = api.carry_on(run.path, run.given, called, shown, log=log)
    return dataclasses.replace(result, driver=None)


@contextmanager
def _named_warnings(run: PlannedRun, told: set[tuple[str, str, str]]) -> Iterator[None]:
    """Put the name of a run before what it warns of, also where one of another method has warned of the same.

    What a method warns of with every seed is ``told`` with the first one.
    """
    with warnings.catch_warnings():
        show_on = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, FedStrataWarning):
                known = (run.experiment.method, run.setting, str(message))
                if known in told:
                    return
                told.add(known)
                message = category(f"{run.name}: {message}")
            show_on(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _raise_failed(failed: Mapping[str, Exception], of: int) -> None:
    """Raise which of so many runs have failed, if some have, and why the first did; bugs come before mistakes."""
    if not failed:
        return
    said = f"{len(failed)} of {plural(of, 'run')} {'has' if len(failed) == 1 else 'have'} failed"
    said += ", the others are finished" if len(failed) < of else ""
    said += f": {'; '.join(failed)}" if len(failed) > 1 else ""
    first = next((error for error in failed.values() if not isinstance(error, FedStrataError)), None)
    first = first or next(iter(failed.values()))
    raise RunsFailedError(f"{said}. {first}", failed) from first


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
