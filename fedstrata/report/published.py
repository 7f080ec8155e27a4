"""Runs of which only tables were kept, as ``results/`` publishes them: an experiment per run, and tables over all.

``NAME.toml`` is the experiment of the run NAME. ``summary.csv`` has a row for each run, ``rounds.csv`` one for each of
its rounds and ``layers.csv`` one for each layer in the last round; ``cosine.csv`` and the like have that metric of each
layer in every round, and ``pairs.csv`` metrics of pairs of clients in one round. ``layers.json`` tells what the layers
are, and in which of them each run masked weights. Else nothing of single clients, of splits, times and models was kept.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata import files
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.report.labels import label_of
from fedstrata.report.reading import Run
from fedstrata.runs.folder import LAYERS_FILE, RunFolder
from fedstrata.runs.metrics import MetricLog, TimingLog

_TABLES = ("summary.csv", "rounds.csv")
_OF_PAPERS = ("results.csv", "runs.csv")
"""The same runs as cells of papers' tables, of which a report tells nothing."""
PAIRS = "pairs.csv"
_DECIDING_THE_SPLIT = ("data", "clients", "partition", "validation", "seed")
_SOFTWARE = ("fedstrata", "torch", "device", "engine", "clients_at_once")

Rows = list[dict[str, str]]


def is_published(path: Path) -> bool:
    """Tell whether a folder holds published runs."""
    return all((path / name).is_file() for name in _TABLES)


@dataclass(frozen=True)
class PublishedRun(Run):
    """One run in a folder of published ones."""

    name: str
    told: Mapping[str, str]
    """Its row in ``summary.csv``."""
    rounds: Rows
    layer_rows: Rows
    """Its rows in ``layers.csv``."""
    layer_series: Mapping[str, Rows]
    """Its rows in the tables of one metric of the layers."""
    pair_rows: Rows
    """Its rows in ``pairs.csv``."""
    about_layers: Mapping[str, Any]
    """What ``layers.json`` tells of all runs."""

    @property
    def path(self) -> Path:
        """Where the run would lie beside the others."""
        return self.folder.path / self.name

    @property
    def finished(self) -> bool:
        """Only finished runs are published."""
        return True

    @cached_property
    def experiment(self) -> Mapping[str, Any]:
        """The keys and values of the experiment, without those that are none."""
        return Experiment.read(self.folder.path / f"{self.name}.toml").to_mapping()

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """What is known of the data: its name."""
        return {"dataset": self.told["data"]}

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """With which software the run was made, and on what."""
        return {name: self.told[name] for name in _SOFTWARE if name in self.told}

    @cached_property
    def layer_facts(self) -> Mapping[str, Any]:
        """What is known of the layers of the model."""
        masked = self.about_layers.get("masked", {})
        return {**self.about_layers, "masked": masked.get(self.name, [])}

    @property
    def split_hash(self) -> str:
        """A fingerprint of what decides the split, since the split itself was not kept."""
        deciding = [self.experiment.get(key) for key in _DECIDING_THE_SPLIT]
        return sha256(json.dumps(deciding).encode()).hexdigest()[:16]

    @cached_property
    def timings(self) -> TimingLog:
        """Times were not kept."""
        return TimingLog()

    @cached_property
    def metrics(self) -> MetricLog:
        """The metrics of its rounds."""
        log = MetricLog()
        for row in self.rounds:
            log.add_round(int(row["round"]), _numbers(row, ("run", "round")))
        return log

    @cached_property
    def series(self) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """Every metric of the round table: the rounds in which it was noted, and its values."""
        names = [name for name in self.rounds[0] if name not in ("run", "round")] if self.rounds else []
        found = {name: self.metrics.series(name) for name in names}
        return {name: numbers for name, numbers in found.items() if len(numbers[0])}

    @cached_property
    def clients(self) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """Single clients were not kept."""
        return {}

    @cached_property
    def layers(self) -> Mapping[str, np.ndarray]:
        """The columns of the layer table."""
        noted = [
            (int(row["round"]), layer, metric, value)
            for metric, rows in self.layer_series.items()
            for row in rows
            for layer, value in _numbers(row, ("run", "round")).items()
        ]
        noted += [
            (self.rounds_done, row["layer"], metric, value)
            for row in self.layer_rows
            for metric, value in _numbers(row, ("run", "layer")).items()
            if metric not in self.layer_series
        ]
        names = ("round", "layer", "metric", "value")
        return {name: np.array([entry[place] for entry in noted]) for place, name in enumerate(names)}

    @cached_property
    def diagnostics(self) -> Mapping[str, np.ndarray]:
        """The columns of the table of clients in layers: of pairs, where some were kept, over all layers."""
        rows = self.pair_rows
        columns: dict[str, np.ndarray] = {
            name: np.array([int(row[name]) for row in rows]) for name in ("round", "client", "other")
        }
        return {
            **columns,
            "metric": np.array([row["metric"] for row in rows], dtype=object),
            "layer": np.array([""] * len(rows), dtype=object),
            "value": np.array([float(row["value"]) for row in rows]),
        }

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The summary of the run; its headline is the accuracy by which it was published."""
        return {
            "headline": label_of(self.told["accuracy"]),
            "final": self.metrics.latest(),
            "last_ten": self.metrics.last_ten(),
            "best": self.metrics.best(),
            **self.metrics.traffic(),
            **self.metrics.work(),
        }

    def cumulative_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """The rounds, and no seconds."""
        rounds = np.array([int(row["round"]) for row in self.rounds])
        return rounds, np.full(len(rounds), np.nan)


def read_published(path: Path) -> list[Run]:
    """Read the runs of a published comparison."""
    summary, rounds = (_of_runs(path / name) for name in _TABLES)
    others = {
        file.stem: _of_runs(file) for file in sorted(path.glob("*.csv")) if file.name not in (*_TABLES, *_OF_PAPERS)
    }
    layers, pairs = others.pop("layers", {}), others.pop(Path(PAIRS).stem, {})
    about = path / LAYERS_FILE
    about_layers = files.from_json(files.read_bytes(about), about) if about.exists() else {}
    return [
        PublishedRun(
            RunFolder(path),
            name,
            rows[0],
            rounds.get(name, []),
            layers.get(name, []),
            {metric: table[name] for metric, table in others.items() if name in table},
            pairs.get(name, []),
            about_layers,
        )
        for name, rows in summary.items()
    ]


def refuse_what_is_no_run(path: Path) -> None:
    """Say what a file or folder is that holds no run, and how to see it; what looks like one passes."""
    if path.is_file():
        raise FedStrataError(f"{_what_it_is(path)}.")
    inside = sorted(folder for folder in path.glob("*/") if is_published(folder)) if path.is_dir() else []
    if inside:
        listed = ", ".join(f"'{folder}'" for folder in inside)
        raise FedStrataError(f"'{path}' holds published comparisons; give one of them: {listed}.")


def _what_it_is(path: Path) -> str:
    whole = f"'fedstrata report {path.parent}'" if is_published(path.parent) else None
    if path.suffix == ".toml":
        shows = "" if whole is None else f", and {whole} shows what it gave"
        return f"'{path}' is an experiment, not a run: 'fedstrata run {path}' runs it{shows}"
    if path.suffix == ".csv" and whole is not None:
        return f"'{path}' is a table of a published comparison; {whole} shows all of it"
    if path.suffix == ".csv":
        rows = _rows(path)
        columns = ", ".join(rows[0]) if rows else "none"
        readme = path.parent / "README.md"
        told = f"; '{readme}' tells what they are" if readme.is_file() else ""
        return (
            f"'{path}' is a table of {len(rows)} rows with the columns {columns}{told}. It was not kept as runs, so "
            "that there is no page to draw; any spreadsheet opens it, and so does pandas.read_csv"
        )
    return f"'{path}' is a file, not a run; give the folder of a run, or a folder that holds such folders"


def _of_runs(path: Path) -> dict[str, Rows]:
    """Read a table, and part its rows by the run that they belong to."""
    parts: dict[str, Rows] = {}
    for row in _rows(path):
        if "run" not in row:
            raise FedStrataError(f"'{path}' has no column 'run', as tables of published runs have; take it away.")
        parts.setdefault(row["run"], []).append(row)
    return parts


def _rows(path: Path) -> Rows:
    return list(csv.DictReader(files.read_bytes(path).decode("utf-8").splitlines()))


def _numbers(row: Mapping[str, str], without: Sequence[str]) -> dict[str, float]:
    """Take the numbers of a row; an empty cell is none."""
    return {name: float(text) for name, text in row.items() if name not in without and text}
