"""A run as the report sees it: everything is read from its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedstrata import files
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import CLASSES, DIAGNOSTICS, METRIC_SCHEMAS, OPTIONAL_SCHEMAS, MetricLog, TimingLog
from fedstrata.runs.naming import CLIENT_NAMES, called

_SCHEMAS = {**METRIC_SCHEMAS, **OPTIONAL_SCHEMAS}
_HEADLINES_OF_AN_UNFINISHED_RUN = ("client_adapted", "client_after", "global_on_clients", "global")


@dataclass(frozen=True)
class Run:
    """One run. What is not there (a run without layers, or one that is not finished) is empty."""

    folder: RunFolder

    @property
    def path(self) -> Path:
        """Where the run lies."""
        return self.folder.path

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.folder.finished

    @cached_property
    def experiment(self) -> Mapping[str, Any]:
        """The keys and values of the experiment, without those that are none."""
        return self.folder.experiment.to_mapping()

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The data in numbers."""
        return self.folder.data()

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """With which software the run was made, and on what."""
        return self.folder.environment()

    @cached_property
    def layer_facts(self) -> Mapping[str, Any]:
        """What is known of the layers of the model: nothing of a run of an earlier version."""
        return self.folder.layers()

    @property
    def client_names(self) -> Sequence[str]:
        """What the clients are called, where they are sites that have names; else nothing."""
        names: Sequence[str] = self.data.get(CLIENT_NAMES, ())
        return names

    def pointed_at(self, client: int) -> int | str:
        """What stands for a client in a chart that names it: its number, or its name and number where it has one."""
        return called(client, self.client_names) if self.client_names else client

    @property
    def split_hash(self) -> str:
        """The fingerprint of the split."""
        return str(self.data["split_hash"])

    @cached_property
    def timings(self) -> TimingLog:
        """How long everything took."""
        return self.folder.timings() if self.finished else self._so_far[1]

    @cached_property
    def _so_far(self) -> tuple[MetricLog, TimingLog]:
        """The logs of a run that goes on, or did: up to its last round where that can be seen, else to a checkpoint."""
        return self.folder.logs_so_far()

    @cached_property
    def series(self) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """Every metric of the round table: the rounds in which it was noted, and its values."""
        table = self._table("rounds")
        rounds, values = table.column("round").to_numpy(), table.column("value").to_numpy()
        return {name: (rounds[rows], values[rows]) for name, rows in _rows_by_metric(table).items()}

    @cached_property
    def clients(self) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """Every metric of single clients in the last round that has it: the clients, and their values."""
        table = self._table("clients")
        rounds, clients, values = (table.column(name).to_numpy() for name in ("round", "client", "value"))
        last = {name: rows & (rounds == rounds[rows].max()) for name, rows in _rows_by_metric(table).items()}
        return {name: (clients[rows], values[rows]) for name, rows in last.items()}

    @cached_property
    def client_accuracies(self) -> Mapping[int, float]:
        """Each client's accuracy behind the headline when it was last tested, by the client's number."""
        clients, values = self.clients.get(f"{self.summary['headline']}.accuracy", (np.empty(0), np.empty(0)))
        return dict(zip(clients.tolist(), values.tolist(), strict=True))

    @cached_property
    def layers(self) -> Mapping[str, np.ndarray]:
        """The columns of the layer table."""
        table = self._table("layers")
        return {name: table.column(name).to_numpy() for name in table.column_names}

    @cached_property
    def classes(self) -> Mapping[str, np.ndarray]:
        """The columns of the table of single classes, which is empty where none were asked for."""
        return self._optional(CLASSES)

    @cached_property
    def diagnostics(self) -> Mapping[str, np.ndarray]:
        """The columns of the table of clients in layers, which is empty where no diagnostic gave such numbers."""
        return self._optional(DIAGNOSTICS)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The summary of the run; of an unfinished one, the same numbers up to its last round that can be seen."""
        if self.finished:
            return self.folder.summary()
        metrics, _ = self._so_far
        labels = {metric.split(".", 1)[0] for metric in self.series if ".accuracy" in metric}
        return {
            "headline": next((label for label in _HEADLINES_OF_AN_UNFINISHED_RUN if label in labels), "client_after"),
            "final": metrics.latest(),
            "last_ten": metrics.last_ten(),
            "best": metrics.best(),
            **metrics.traffic(),
            **metrics.participation(),
            **metrics.work(),
            **self.timings.summary(),
        }

    @property
    def rounds_done(self) -> int:
        """The last round for which there are numbers."""
        return max((int(rounds[-1]) for rounds, _ in self.series.values()), default=0)

    def cumulative_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """The rounds that took time, and the seconds from the beginning to the end of each."""
        table = self.timings.to_table()
        rounds, seconds = table.column("round").to_numpy(), table.column("seconds").to_numpy()
        distinct, position = np.unique(rounds, return_inverse=True)
        return distinct, np.cumsum(np.bincount(position, weights=seconds, minlength=len(distinct)))

    def _optional(self, name: str) -> Mapping[str, np.ndarray]:
        """Read the columns of a table that is there only where it has rows."""
        table = self._table(name)
        return {column: table.column(column).to_numpy() for column in table.column_names}

    def _table(self, name: str) -> pa.Table:
        """Read one table of metrics; of a finished run straight from its file, which may hold millions of rows.

        What was computed after the run was finished comes after it.
        """
        if not self.finished:
            return self._so_far[0].to_tables().get(name, _SCHEMAS[name].empty_table())
        path = self.path / "metrics" / f"{name}.parquet"
        if name in OPTIONAL_SCHEMAS and not path.exists():
            table = _SCHEMAS[name].empty_table()
        else:
            table = files.from_parquet(files.read_bytes(path), _SCHEMAS[name], path)
        later = self._diagnosis.get(name)
        return table if later is None else pa.concat_tables([table, later])

    @cached_property
    def _diagnosis(self) -> Mapping[str, pa.Table]:
        return self.folder.diagnosis()


def names_of(runs: Iterable[Run]) -> dict[Path, str]:
    """Short names of runs: their folders, as seen from the folder that holds them all."""
    paths = {run.path: run.path.resolve() for run in runs}
    root = Path(os.path.commonpath([path.parent for path in paths.values()]))
    return {path: place.relative_to(root).as_posix() for path, place in paths.items()}


def unfinished(runs: Sequence[Run], names: Mapping[Path, str] | None = None) -> list[str]:
    """Say of the runs that are not finished of which round their numbers are; ``names`` may be those among others."""
    left = [run for run in runs if not run.finished]
    called = names or (names_of(runs) if left else {})
    return [
        f"{called[run.path]} is not finished: its numbers are those after round {run.rounds_done} of "
        f"{run.experiment['rounds']}."
        for run in left
    ]


def read_run(path: Path) -> Run:
    """Open the run in a folder; a folder that holds none is refused."""
    return Run(RunFolder.open(Path(path)))


def _rows_by_metric(table: pa.Table) -> dict[str, np.ndarray]:
    """Mark the rows of each metric of a table."""
    encoded = table.column("metric").combine_chunks().dictionary_encode()
    codes = np.asarray(encoded.indices)
    return {str(name): codes == code for code, name in enumerate(encoded.dictionary.to_pylist())}
