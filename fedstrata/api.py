"""The few calls that most people need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedstrata.data import Dataset, Split, from_clients
from fedstrata.engines.planning import ENGINES, Plan
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Method, Part
from fedstrata.models import ModelSpec
from fedstrata.plugins import IMPORTS_FOLDER, load_imports
from fedstrata.runs.driver import Driver, Listener
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog
from fedstrata.runs.models import load_model
from fedstrata.runs.preparing import Ingredients
from fedstrata.trained import TrainedModel

Data = Dataset | tuple[Dataset, Split] | Mapping[str, Any]
"""A dataset, a dataset with its split, or a dict from each client's name to what it has."""


@dataclass(frozen=True)
class Result:
    """What a run gave: summary, metrics, the global model (its shared part), and what clients keep, as stacks."""

    summary: dict[str, Any]
    metrics: MetricLog
    model: dict[str, Tensor]
    resident: dict[str, Tensor]
    out: Path | None
    driver: Driver = field(repr=False, compare=False)

    def global_model(self) -> TrainedModel:
        """Make the global model, ready to use: raw inputs in, classes out."""
        return self.driver.global_model()

    def client_model(self, client: int) -> TrainedModel:
        """Make the model that a client uses, the one behind the headline of the run, ready to use."""
        return self.driver.client_model(client)


def run(
    experiment: Experiment | None = None,
    *,
    data: str | Data | None = None,
    split: Split | None = None,
    model: str | nn.Module | ModelSpec | Callable[..., nn.Module] | None = None,
    method: str | Method | Part | None = None,
    out: str | Path | None = None,
    listener: Listener | None = None,
    **changes: Any,
) -> Result:
    """Run one experiment.

    Start from an :class:`Experiment` (or the defaults) and change any key of it by name. ``data``, ``model`` and
    ``method`` may also be your own objects; ``data`` is then a dataset, a dict from each client's name to what it has
    (see :func:`from_clients`), or a dataset and its split. ``split`` is your own division of the data; without one, and
    without a ``partition``, the sites of the data are the clients. ``imports`` are Python files
    that register components of your own, which can then be named; the run folder keeps a copy of them. With ``out``,
    the run folder is written there; without, nothing is.

    >>> result = run(data="digits", clients=4, rounds=1, epochs=1, model="mlp", method="fedavg")
    >>> 0 <= result.summary["final"]["client_after.accuracy.mean"] <= 1
    True
    """
    named: dict[str, Any] = {
        key: value for key, value in (("data", data), ("model", model), ("method", method)) if isinstance(value, str)
    }
    chosen = (experiment or Experiment()).with_changes({**changes, **named})
    if out is not None:
        RunFolder.refuse_taken(Path(out))
    chosen = load_imports(chosen, Path())
    simulation = Driver.prepare(chosen, _ingredients(data, split, model, method))
    if out is None:
        return _result(simulation, simulation.run(None, listener), None)
    folder = RunFolder.create(
        Path(out), simulation.experiment, simulation.dataset, simulation.split, simulation.environment()
    )
    with folder:
        return _result(simulation, simulation.run(folder, listener), folder.path)


def resume(
    out: str | Path,
    *,
    data: Data | None = None,
    split: Split | None = None,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    method: Method | Part | None = None,
    listener: Listener | None = None,
) -> Result:
    """Go on with an interrupted run from its folder; objects from Python that it was made with must be given again.

    Files that it imported are taken from the folder.
    """
    with RunFolder.resume(Path(out)) as folder:
        if folder.finished:
            raise FedStrataError(f"The run in '{out}' is finished already; 'fedstrata report {out}' shows it.")
        environment = folder.environment()
        resolved = environment["resolved"]
        if resolved["engine"] not in ENGINES:
            raise FedStrataError(
                f"The run in '{out}' was made on a network of sites; to go on, start the same 'fedstrata server' or "
                "'fedstrata deploy' command again."
            )
        plan = Plan(resolved["engine"], resolved["chunk"], environment["threads"])
        experiment = load_imports(folder.experiment, folder.path / IMPORTS_FOLDER)
        experiment = experiment.with_changes({"device": environment["device"]})
        simulation = Driver.prepare(experiment, _ingredients(data, split, model, method), plan)
        if simulation.split.hash != folder.data()["split_hash"]:
            raise FedStrataError(
                f"The data of the run in '{out}' has changed since it began: its split is not the same any more."
            )
        simulation.restore(folder)
        return _result(simulation, simulation.run(folder, listener), folder.path)


def load(
    path: str | Path, *, client: int | None = None, network: nn.Module | Callable[..., nn.Module] | None = None
) -> TrainedModel:
    """Load a model, ready to use: from the folder of a run, or from one that was saved or exported.

    Of a run, it is the global model, or with ``client`` the one that this client uses. A network that was made in
    Python is given again: the module, or a function that returns it.
    """
    return load_model(path, client, network)


def _ingredients(data: Any, split: Split | None, model: object, method: object) -> Ingredients:
    if isinstance(data, Mapping):
        data = from_clients(data)
    if isinstance(data, tuple) and split is None:
        data, split = data
    given = {"dataset": data, "model": model, "method": method}
    return Ingredients(split=split, **{key: value for key, value in given.items() if not isinstance(value, str)})


def _result(simulation: Driver, summary: dict[str, Any], out: Path | None) -> Result:
    resident = simulation.engine.clients().group("own")
    return Result(summary, simulation.metrics, simulation.model, resident, out, simulation)
