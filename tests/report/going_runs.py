"""A run that goes on, in the hands of a test: each step is a round, with made-up numbers."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow.compute as pc
from made_up_runs import _data, _numbers

from fedstrata.experiment import Experiment
from fedstrata.runs.describing import describe_environment
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog, TimingLog


class GoingRun:
    """A run folder that is being written; leaving it is like the death of its process."""

    def __init__(self, path: Path, class_names: tuple[str, ...] | None = None, **settings: Any) -> None:
        self.experiment = Experiment(**{"rounds": 12, "clients": 4, "evaluate_every": 1, **settings})
        self.path, self.round = path, 0
        dataset, split = _data(self.experiment, 400, 10, class_names)
        self._logs = _numbers(self.experiment, np.random.default_rng(0), 0.8, False, True, 0.5, False)
        self._folder = RunFolder.create(path, self.experiment, dataset, split, describe_environment("cpu", {}))
        self._folder.begin_live(0, MetricLog(), TimingLog())

    def step(self) -> None:
        """Do a round."""
        self.round += 1
        done = pc.field("round") <= self.round
        metrics, timings = self._logs
        self._folder.show_round(
            MetricLog.from_tables({name: table.filter(done) for name, table in metrics.to_tables().items()}),
            TimingLog.from_table(timings.to_table().filter(done)),
        )

    def stop(self) -> None:
        """End in good order, for the time being."""
        self._folder.end_live()
        self._folder.close()

    def __enter__(self) -> GoingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.close()
