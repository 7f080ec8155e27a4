"""The few calls that most people need."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedstrata.callbacks import Callbacks
from fedstrata.data import Dataset, Split, datasets, read_data
from fedstrata.engines.planning import Plan, SharedMemory
from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.experiment import Experiment
from fedstrata.loggers import LoggedRun, Logger, keep_log, make_loggers
from fedstrata.loggers.logging import Given as Log
from fedstrata.methods import Method, Part, methods
from fedstrata.models import ModelSpec, models
from fedstrata.optimisers import with_learning_rate
from fedstrata.plugins import load_imports
from fedstrata.progress import Progress, show_if_wanted
from fedstrata.report.summary import accuracies_as_html, summary_line
from fedstrata.runs.driver import Driver
from fedstrata.runs.extending import refuse_to_extend
from fedstrata.runs.folder import RunFolder, folder_named
from fedstrata.runs.metrics import MetricLog
from fedstrata.runs.models import client_number, load_model
from fedstrata.runs.preparing import Ingredients
from fedstrata.runs.recalling import experiment_as_run, plan_of
from fedstrata.runs.same_data import refuse_other_data
from fedstrata.scores import Function, Metric, make_metrics
from fedstrata.spec import Registry
from fedstrata.trained import TrainedModel

Data = Any
"""Whatever :func:`fedstrata.data.read_data` takes: a dataset, arrays, a table, a dict of clients, and so on."""
Metrics = str | Metric | Function | Sequence[str | Metric | Function]
"""What models are judged by: a text such as ``f1+auc``, a function of one's own, or several of these."""


Given = str | Data | None
"""Data as a call from Python may give it: named, or of one's own."""


@dataclass(frozen=True, repr=False)
class Result:
    """What a run gave: summary, metrics, the global model (its shared part), and what clients keep, as stacks.

    ``experiment`` is what was run, with how the data was divided; ``split_hash`` tells splits apart.
    """

    summary: dict[str, Any]
    metrics: MetricLog
    model: dict[str, Tensor]
    resident: dict[str, Tensor]
    out: Path | None
    experiment: Experiment
    split_hash: str
    driver: Driver | None = field(default=None, compare=False)

    def global_model(self, last: bool = False) -> TrainedModel:
        """Make the global model, ready to use: raw inputs in, classes out.

        Where validation has chosen it, it is of the best round, unless the ``last`` one is asked for.
        """
        if self.driver is None:
            return load_model(self._saved(), last=last)
        return self.driver.global_model(last)

    def client_model(self, client: int | str, last: bool = False) -> TrainedModel:
        """Make the model that a client uses, the one behind the headline of the run, ready to use.

        A client is named by its number, or by its site where the data has sites.
        """
        if self.driver is None:
            saved = self._saved()
            return load_model(saved, client_number(saved, client), last=last)
        return self.driver.client_model(client, last)

    def _saved(self) -> Path:
        if self.out is None:
            raise FedStrataError(
                "The models of several runs are not all kept in memory; give the runs a folder: out=...."
            )
        return self.out

    def __repr__(self) -> str:
        """Tell the result in a line."""
        return f"Result({summary_line(self.summary)}{'' if self.out is None else f', in {self.out}'})"

    def _repr_html_(self) -> str:
        """Draw the accuracies of the last round, for a notebook."""
        return accuracies_as_html(self.summary)


def run(
    experiment: Experiment | None = None,
    *,
    data: Given = None,
    split: Split | None = None,
    model: str | nn.Module | ModelSpec | Callable[..., nn.Module] | None = None,
    method: str | Method | Part | None = None,
    metrics: Metrics | None = None,
    learning_rate: float | None = None,
    out: str | Path | None = None,
    callbacks: Iterable[object] = (),
    log: Log | None = None,
    progress: bool | Progress | None = None,
    **changes: Any,
) -> Result:
    """Run one experiment.

    Start from an :class:`Experiment` (or the defaults) and change any key of it by name. ``data``, ``model`` and
    ``method`` may also be your own objects; ``data`` is then a dataset, alone or with its split, arrays ``(inputs,
    labels)``, a dataset of PyTorch or of the Hugging Face hub, a table (see :func:`from_table`), or a dict from each
    client's name to one of these (see :func:`from_clients`). ``split`` is your own division of the data; without one,
    and without a ``partition``, the sites of the data are the clients. ``metrics`` are what models are judged by beside
    accuracy and loss: a text such as ``f1+auc``, functions of your own from probabilities ``[n, classes]`` and labels
    ``[n]``, NumPy arrays both, to a number, or a list of these. ``learning_rate`` changes that of the optimiser, and
    nothing else of it. ``imports`` are Python files that register components of your own, which can then be named; the
    run folder keeps a copy of them. With ``out``, the run folder is written there; without, nothing is.

    ``callbacks`` are called while it runs (:class:`Callback`, or a function that is called after every round). ``log``
    keeps its numbers in other tools, too: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, several of them, or with
    parameters (:mod:`fedstrata.loggers`). ``progress`` shows how far it has come: true, false, or in notebooks only
    where it is left open.

    >>> result = run(data="digits", clients=4, rounds=1, epochs=1, model="mlp", method="fedavg")
    >>> 0 <= result.summary["final"]["client_after.accuracy.mean"] <= 1
    True
    """
    chosen = choose_experiment(
        experiment, {**changes, **_named(data=data, model=model, method=method, metrics=metrics)}, learning_rate, run
    )
    kept = make_loggers(log)
    folder = None if out is None else folder_named(out)
    if folder is not None:
        RunFolder.refuse_taken(folder)
    chosen = load_imports(chosen, Path())
    given = make_ingredients(data, split, model, method, metrics)
    described = given.describe(chosen)
    with _shown(progress, 1, chosen.rounds) as shown:
        if shown is not progress:
            shown.begin(f"{described.method}, seed {chosen.seed}")
        return carry_out(chosen, given, folder, callbacks, shown, log=kept)


def carry_out(
    experiment: Experiment,
    given: Ingredients,
    out: Path | None,
    callbacks: Iterable[object],
    shown: Progress,
    plan: Plan | None = None,
    shared: SharedMemory | None = None,
    log: Sequence[Logger] = (),
) -> Result:
    """Run an experiment whose files are imported, and show how far it has come.

    A ``plan`` may have been made before; ``shared`` is given where others run on the same device.
    """
    called = Callbacks(callbacks)
    simulation = Driver.prepare(experiment, given, plan, shown.show_doing, shared)
    shown.show_doing(f"round 1 of {experiment.rounds}")
    if out is None:
        with keep_log(log, _logged(simulation, None)) as logging:
            return _result(simulation, simulation.run(None, [*called, *logging, shown]), None)
    folder = RunFolder.create(
        out, simulation.experiment, simulation.dataset, simulation.split, simulation.environment()
    )
    with folder, keep_log(log, _logged(simulation, out)) as logging:
        return _result(simulation, simulation.run(folder, [*called, *logging, shown]), folder.path)


def resume(
    out: str | Path,
    *,
    data: Data = None,
    split: Split | None = None,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    method: Method | Part | None = None,
    metrics: Metrics | None = None,
    callbacks: Iterable[object] = (),
    log: Log | None = None,
    progress: bool | Progress | None = None,
) -> Result:
    """Go on with an interrupted run from its folder; objects from Python that it was made with must be given again.

    Files that it imported are taken from the folder, and its loggers go on; ``log`` adds others, which hear of the
    rounds before, too. ``callbacks`` and ``progress`` are those of :func:`run`.
    """
    kept = make_loggers(log)
    given = make_ingredients(data, split, model, method, metrics)
    with RunFolder.open(folder_named(out)) as folder, _shown(progress, 1, folder.experiment.rounds) as shown:
        if shown is not progress:
            shown.begin(f"{folder.experiment.method}, seed {folder.experiment.seed}")
        return carry_on(folder.path, given, callbacks, shown, log=kept)


def extend(
    out: str | Path,
    rounds: int,
    *,
    data: Data = None,
    split: Split | None = None,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    method: Method | Part | None = None,
    metrics: Metrics | None = None,
    callbacks: Iterable[object] = (),
    log: Log | None = None,
    progress: bool | Progress | None = None,
) -> Result:
    """Go on with a finished run until it has so many rounds in all, in its folder.

    What comes out is the same as of one long run; where it is not, because the schedule or the method plans for the
    number of rounds, a warning says so. Everything else is as in :func:`resume`.
    """
    kept = make_loggers(log)
    given = make_ingredients(data, split, model, method, metrics)
    with RunFolder.resume(folder_named(out)) as folder:
        refuse_to_extend(folder, rounds, given)
        with _shown(progress, 1, rounds) as shown:
            if shown is not progress:
                shown.begin(f"{folder.experiment.method}, seed {folder.experiment.seed}")
            return _carry_on(folder, given, callbacks, shown, log=kept, rounds=rounds)


def carry_on(
    out: Path,
    given: Ingredients,
    callbacks: Iterable[object],
    shown: Progress,
    shared: SharedMemory | None = None,
    log: Sequence[Logger] = (),
) -> Result:
    """Go on with an interrupted run, and show how far it has come."""
    with RunFolder.resume(out) as folder:
        if folder.finished:
            raise FedStrataError(f"The run in '{out}' is finished already; 'fedstrata report {out}' shows it.")
        return _carry_on(folder, given, callbacks, shown, shared, log)


def _carry_on(
    folder: RunFolder,
    given: Ingredients,
    callbacks: Iterable[object],
    shown: Progress,
    shared: SharedMemory | None = None,
    log: Sequence[Logger] = (),
    rounds: int | None = None,
) -> Result:
    """Go on with a run from its folder; with ``rounds``, a finished one, until it has so many.

    A finished run stays so until all is ready for its further rounds: what cannot go on keeps its results.
    """
    called, out = Callbacks(callbacks), folder.path
    plan = plan_of(folder)
    if plan is None:
        raise FedStrataError(
            f"The run in '{out}' was made on a network of sites; to go on, start the same 'fedstrata server' or "
            "'fedstrata deploy' command again."
        )
    experiment = experiment_as_run(folder)
    if rounds is not None:
        experiment = experiment.with_changes({"rounds": rounds})
    compared = dataclasses.replace(given, only_split=False)  # below, to the data that the run began with
    simulation = Driver.prepare(experiment, compared, plan, shown.show_doing, shared)
    if simulation.experiment.metrics != experiment.metrics:
        raise FedStrataError(
            f"The run in '{out}' measures {experiment.metrics or 'accuracy and loss'}; go on with the same, not "
            f"{simulation.experiment.metrics}."
        )
    refuse_other_data(folder, simulation.dataset, simulation.split)
    simulation.restore(folder)
    shown.show_doing(f"round {simulation.round + 1} of {experiment.rounds}")
    with keep_log(log, _logged(simulation, out), simulation.rounds_done()) as logging:
        if rounds is not None:
            folder.reopen(folder.experiment.with_changes({"rounds": rounds}))
        return _result(simulation, simulation.run(folder, [*called, *logging, shown]), out)


def _logged(simulation: Driver, out: Path | None) -> LoggedRun:
    """Tell loggers of a run: the name of its folder, or of what it is made of, and all its settings."""
    experiment = simulation.experiment
    texts = {key: ", ".join(value) for key, value in experiment.to_mapping().items() if isinstance(value, tuple)}
    name = f"{experiment.method}-{experiment.data}-seed{experiment.seed}" if out is None else out.resolve().name
    return LoggedRun(re.sub(r"[^\w.+=-]+", "-", name), {**experiment.to_mapping(), **texts}, out)


def load(
    path: str | Path,
    *,
    client: int | str | None = None,
    network: nn.Module | Callable[..., nn.Module] | None = None,
    last: bool = False,
) -> TrainedModel:
    """Load a model, ready to use: from the folder of a run, or from one that was saved or exported.

    Of a run, it is the global model, or with ``client`` the one that this client uses. A network that was made in
    Python is given again: the module, or a function that returns it. Where validation has chosen models, these are
    loaded, unless the ``last`` ones are asked for.
    """
    return load_model(path, client, network, last)


def read_result(out: Path) -> Result:
    """Read the result of a finished run from its folder, which does not hold what clients keep."""
    folder = RunFolder.open(out)
    return Result(
        folder.summary(), folder.metrics(), folder.model(), {}, out, folder.experiment, folder.data()["split_hash"]
    )


def choose_experiment(
    experiment: Experiment | None,
    changes: dict[str, Any],
    learning_rate: float | None,
    function: Callable[..., Any],
) -> Experiment:
    """Change an experiment as a call of a function asks; what is none, or no key of one, is told in a sentence."""
    if experiment is not None and not isinstance(experiment, Experiment):
        raise FedStrataError(_no_experiment(experiment, function.__name__))
    keys = [field.name for field in dataclasses.fields(Experiment)]
    for key in changes:
        if key not in keys:
            own = [name for name, one in inspect.signature(function).parameters.items() if one.kind != one.VAR_KEYWORD]
            raise unknown_name(f"keyword of fedstrata.{function.__name__} called", key, {*keys, *own})
    chosen = (experiment or Experiment()).with_changes(changes)
    if learning_rate is None:
        return chosen
    return chosen.with_changes({"optimiser": with_learning_rate(chosen.optimiser, learning_rate)})


def _no_experiment(given: object, function: str) -> str:
    if isinstance(given, str | Path) and str(given).endswith(".toml"):
        return f"'{given}' is the name of a file; read it: {function}(Experiment.read(Path('{given}')))."
    if isinstance(given, str):
        first = re.split(r"[+(:]", given)[0].strip()
        kinds: dict[str, Registry[Any]] = {"method": methods, "data": datasets, "model": models}
        meant = next((key for key, known in kinds.items() if first in known.names()), None)
        shown = "method='fedbn'" if meant is None else f"{meant}='{given}'"
        return f"'{given}' is no experiment but a text; say what it names: {function}({shown})."
    if isinstance(given, Mapping) and set(given) <= {field.name for field in dataclasses.fields(Experiment)}:
        return f"A dict is no experiment; give its keys by name: {function}(**...), or Experiment(**...)."
    if isinstance(given, Dataset | Mapping | tuple):
        return f"What was given first is data, not an experiment; write {function}(data=...)."
    if isinstance(given, Method | Part) or (isinstance(given, type) and issubclass(given, Part)):
        return f"What was given first is a method, not an experiment; write {function}(method=...)."
    return f"{type(given).__name__} is no experiment; give an Experiment, or its keys by name: {function}(rounds=5)."


def _named(**given: Any) -> dict[str, str]:
    return {key: value for key, value in given.items() if isinstance(value, str)}


def _shown(progress: bool | Progress | None, runs: int, rounds: int) -> AbstractContextManager[Progress]:
    """Make a display, or take one that somebody else has begun and will end."""
    return nullcontext(progress) if isinstance(progress, Progress) else show_if_wanted(progress, runs, rounds)


def make_ingredients(data: Any, split: Split | None, model: object, method: object, metrics: Any = None) -> Ingredients:
    """Gather what was given as an object, and not by its name."""
    if data is not None and not isinstance(data, str):
        data, told = read_data(data)
        split = told if split is None else split
    if metrics is not None and not isinstance(metrics, str):
        metrics = make_metrics(metrics)
    given = {"dataset": data, "model": model, "method": method, "metrics": metrics}
    objects = {key: value for key, value in given.items() if not isinstance(value, str)}
    return Ingredients(split=split, only_split=True, **objects)


def _result(simulation: Driver, summary: dict[str, Any], out: Path | None) -> Result:
    resident = simulation.engine.clients().group("own")
    return Result(
        summary,
        simulation.metrics,
        simulation.model,
        resident,
        out,
        simulation.experiment,
        simulation.split.hash,
        simulation,
    )
