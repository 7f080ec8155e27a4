"""MLflow's tracking: metrics by round, settings as parameters."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.loggers.logger import LoggedRun, Logger, Writer, loggers, missing
from fedstrata.spec import parameter

_RUN = "fedstrata.run"
"""The tag by which a run is found again when it is resumed."""
_AT_ONCE, _PARAMETERS_AT_ONCE, _LONGEST = 1000, 100, 500
"""How many metrics and parameters MLflow takes in one call, and how long the value of a parameter may be."""


@loggers.register("mlflow")
@dataclass(frozen=True)
class MLflow(Logger):
    """Write to MLflow: by default to files in the run's own folder, else to the store or server of a ``uri``."""

    package: ClassVar[str] = "mlflow"

    folder: str | None = parameter(
        None, "Where the files go, a folder for each run; none: into 'mlflow' in the run's own folder."
    )
    uri: str | None = parameter(
        None, "A store for many runs, instead of files for each: 'sqlite:///runs.db', or the address of a server."
    )
    experiment: str = parameter("fedstrata", "The experiment, in MLflow's sense, that the runs stand under.")

    def require(self) -> None:
        """Refuse with a sentence where MLflow is not installed."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before it is imported, or it tells somebody
        try:
            import mlflow  # noqa: F401
        except ImportError:
            raise missing(self.package) from None

    def open(self, run: LoggedRun) -> Writer:
        """Begin a run of MLflow's, or go on with the one that was begun before."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions would rather have a database
        return _Tracked(self.uri or self.place(self.folder, run).resolve().as_uri(), self.experiment, run)


class _Tracked:
    def __init__(self, uri: str, experiment: str, run: LoggedRun) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        there = self._client.get_experiment_by_name(experiment)
        under = self._client.create_experiment(experiment) if there is None else there.experiment_id
        begun = self._client.search_runs([under], filter_string=f"tags.`{_RUN}` = '{run.identity}'")
        if begun:
            self._id = begun[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(under, tags={_RUN: run.identity}, run_name=run.name).info.run_id
        from mlflow.entities import Param

        settings = [Param(key, str(value)[:_LONGEST]) for key, value in run.settings.items()]
        for start in range(0, len(settings), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=settings[start : start + _PARAMETERS_AT_ONCE])

    def write(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [Metric(name, value, now, round) for name, value in values.items()]
        for start in range(0, len(numbers), _AT_ONCE):
            self._client.log_batch(self._id, metrics=numbers[start : start + _AT_ONCE])

    def end(self, summary: Mapping[str, Any]) -> None:
        self._client.set_terminated(self._id, "FINISHED")

    def close(self) -> None:
        """Nothing is held open."""
