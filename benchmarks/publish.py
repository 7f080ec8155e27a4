"""Condense the folders of finished runs into CSV files that can be published, such as those in ``results/``.

    python benchmarks/publish.py runs/lips-0 runs/fedbn-0 --out results/lips-cifar100 --series cosine

``NAME.toml``     the experiment of the run in the folder NAME: 'fedstrata run NAME.toml' repeats it
``summary.csv``   a row for each run: what it was, its accuracies, bytes, and on what it was made
``rounds.csv``    a row for each round of each run, a column for each metric (or for those in ``--metrics``, beside the
                  accuracy and the bytes); empty where it was not evaluated
``layers.csv``    a row for each layer of each run: its metrics in the last round that has them
``layers.json``   what the layers of the model are, and in which of them each run masked weights
``cosine.csv``    for each metric of layers in ``--series``: a row for each round of each run (or for every Nth, with
                  ``--series-every N``, the first and the last), a column for each layer
``pairs.csv``     for each metric of pairs of clients in ``--pairs``: a row for each two of them, in the last round that
                  has it, all layers together

Fractions keep six digits, bytes all. Metrics of single clients, the split and the models stay behind.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fedstrata import files
from fedstrata.experiment import Experiment
from fedstrata.report.published import PAIRS
from fedstrata.runs.metrics import DIAGNOSTICS, METRIC_SCHEMAS, OPTIONAL_SCHEMAS, MetricLog, higher_is_better


@dataclass(frozen=True)
class Finished:
    """What is published of one run."""

    name: str
    folder: Path

    @cached_property
    def experiment(self) -> Experiment:
        return Experiment.read(self.folder / "experiment.toml")

    @cached_property
    def metrics(self) -> MetricLog:
        return MetricLog.from_tables({name: self.table(name) for name in METRIC_SCHEMAS})

    def table(self, name: str) -> pa.Table:
        path = self.folder / "metrics" / f"{name}.parquet"
        return files.from_parquet(files.read_bytes(path), {**METRIC_SCHEMAS, **OPTIONAL_SCHEMAS}[name], path)

    def facts(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return files.from_json(files.read_bytes(path), path)

    def summary(self, accuracy: str | None) -> dict[str, Any]:
        """Sum up the run by one accuracy: the headline's, where none is named."""
        summary, environment = self.facts("summary.json"), self.facts("environment.json")
        metric = accuracy or f"{summary['headline']}.accuracy.mean"
        rounds, values = self.metrics.series(metric)
        best = values.argmax() if higher_is_better(metric) else values.argmin()
        return {
            "run": self.name,
            "method": summary["method"],
            "data": summary["data"],
            "model": summary["model"],
            "seed": summary["seed"],
            "rounds": summary["rounds"],
            "accuracy": metric,
            "last_round": values[-1],
            "last_ten": values[-10:].mean(),
            "best": values[best],
            "best_round": rounds[best],
            "bytes_up": summary["bytes_up"],
            "bytes_down": summary["bytes_down"],
            "parameters": summary["parameters"],
            "precision": self.experiment.precision,
            "engine": summary["engine"],
            "clients_at_once": environment["resolved"]["chunk"],
            "device": environment["device_name"],
            "torch": environment["torch"],
            "fedstrata": environment["fedstrata"],
        }

    def rounds(self, only: Sequence[str] = ()) -> Iterable[dict[str, Any]]:
        table = self.table("rounds")
        yield from self._by_round(table.filter(pc.field("metric").isin(only)) if only else table, "metric")

    def series(self, metric: str, every: int = 1) -> Iterable[dict[str, Any]]:
        found = list(self._by_round(self.table("layers").filter(pc.field("metric") == metric), "layer"))
        ends = (found[0], found[-1]) if found else ()
        yield from (row for row in found if row["round"] % every == 0 or row in ends)

    def layers(self) -> Iterable[dict[str, Any]]:
        last: dict[str, dict[str, float]] = {}
        for row in self.table("layers").to_pylist():
            last.setdefault(row["layer"], {})[row["metric"]] = row["value"]
        yield from ({"run": self.name, "layer": layer, **values} for layer, values in last.items())

    def pairs(self, metric: str) -> Iterable[dict[str, Any]]:
        table = self.table(DIAGNOSTICS)
        found = table.filter((pc.field("metric") == metric) & (pc.field("layer") == "")).to_pylist()
        last = max((row["round"] for row in found), default=None)
        kept = ("metric", "round", "client", "other", "value")
        yield from ({"run": self.name, **{name: row[name] for name in kept}} for row in found if row["round"] == last)

    def _by_round(self, table: pa.Table, column: str) -> Iterable[dict[str, Any]]:
        found: dict[int, dict[str, float]] = {}
        for row in table.to_pylist():
            found.setdefault(row["round"], {})[row[column]] = row["value"]
        yield from ({"run": self.name, "round": round, **values} for round, values in found.items())


def publish(
    runs: Sequence[Finished],
    out: Path,
    accuracy: str | None,
    series: Sequence[str],
    metrics: Sequence[str] = (),
    series_every: int = 1,
    pairs: Sequence[str] = (),
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    summary = [run.summary(accuracy) for run in runs]
    kept = [*metrics, "bytes.up", "bytes.down", *(row["accuracy"] for row in summary)] if metrics else []
    for run in runs:
        files.write_atomically(out / f"{run.name}.toml", files.read_bytes(run.folder / "experiment.toml"))
    write(out / "summary.csv", summary)
    write(out / "rounds.csv", [row for run in runs for row in run.rounds(kept)])
    write(out / "layers.csv", [row for run in runs for row in run.layers()])
    about = [run.facts("layers.json") if (run.folder / "layers.json").exists() else {} for run in runs]
    if all(about):
        masked = {run.name: facts["masked"] for run, facts in zip(runs, about, strict=True) if facts["masked"]}
        files.write_atomically(out / "layers.json", files.to_json({"layers": about[0]["layers"], "masked": masked}))
    for metric in series:
        write(out / f"{metric}.csv", [row for run in runs for row in run.series(metric, series_every)])
    if pairs:
        write(out / PAIRS, [row for run in runs for metric in pairs for row in run.pairs(metric)])


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that may lack some columns, which are in the order in which they are first met."""
    columns = dict.fromkeys(column for row in rows for column in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows({column: written(value) for column, value in row.items()} for row in rows)


def written(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() and abs(value) > 1e6 else f"{value:.6g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="FOLDER", help="a finished run; NAME=FOLDER renames it")
    parser.add_argument("--out", type=Path, required=True, help="where the files go")
    parser.add_argument("--accuracy", metavar="METRIC", help="what summary.csv tells, such as global.accuracy")
    parser.add_argument("--series", nargs="*", default=[], metavar="METRIC", help="metrics of layers in every round")
    parser.add_argument("--series-every", type=int, default=1, metavar="N", help="of these rounds only every Nth")
    parser.add_argument("--metrics", nargs="*", default=[], metavar="METRIC", help="of rounds, if not all")
    parser.add_argument("--pairs", nargs="*", default=[], metavar="METRIC", help="metrics of pairs of clients")
    arguments = parser.parse_args()
    runs = []
    for text in arguments.runs:
        name, _, folder = text.rpartition("=")
        runs.append(Finished(name or Path(folder).name, Path(folder)))
    publish(
        runs, arguments.out, arguments.accuracy, arguments.series, arguments.metrics, arguments.series_every,
        arguments.pairs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
