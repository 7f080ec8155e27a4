"""A run as the report sees it: everything is read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.metrics import MetricLog, TimingLog
from fedstrata.runs import RunFolder

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

    @property
    def split_hash(self) -> str:
        """The fingerprint of the split."""
        return str(self.data["split_hash"])

    @cached_property
    def metrics(self) -> MetricLog:
        """All that was measured."""
        return self.folder.metrics()

    @cached_property
    def timings(self) -> TimingLog:
        """How long everything took."""
        return self.folder.timings()

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The summary of the run; of an unfinished one, the same numbers up to its newest checkpoint."""
        if self.finished:
            return self.folder.summary()
        final = self.metrics.latest()
        labels = {metric.split(".", 1)[0] for metric in final if ".accuracy" in metric}
        return {
            "headline": next((label for label in _HEADLINES_OF_AN_UNFINISHED_RUN if label in labels), "client_after"),
            "final": final,
            "last_ten": self.metrics.last_ten(),
            "best": self.metrics.best(),
            "bytes_up": float(self.metrics.series("bytes.up")[1].sum()),
            "bytes_down": float(self.metrics.series("bytes.down")[1].sum()),
            "seconds": sum(self.timings.totals().values()),
        }

    @property
    def rounds_done(self) -> int:
        """The last round for which there are numbers."""
        rounds = self.table("rounds")["round"]
        return int(rounds.max(initial=0))

    def table(self, name: str) -> dict[str, np.ndarray]:
        """The columns of the table ``rounds``, ``clients`` or ``layers``."""
        table = self._tables[name]
        return {column: table.column(column).to_numpy() for column in table.column_names}

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        return self.metrics.to_tables()

    def cumulative_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """The rounds that took time, and the seconds from the beginning to the end of each."""
        table = self.timings.to_table()
        rounds, seconds = table.column("round").to_numpy(), table.column("seconds").to_numpy()
        distinct, position = np.unique(rounds, return_inverse=True)
        return distinct, np.cumsum(np.bincount(position, weights=seconds, minlength=len(distinct)))


def read_run(path: Path) -> Run:
    """Open the run in a folder; a folder that holds none is refused."""
    return Run(RunFolder.open(Path(path)))
