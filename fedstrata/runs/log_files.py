"""The logs of a run as Parquet files, one for each table."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from fedstrata import files
from fedstrata.runs.metrics import METRIC_SCHEMAS, OPTIONAL_SCHEMAS, TIMING_SCHEMA, MetricLog, TimingLog


def logs_to_parquet(metrics: MetricLog, timings: TimingLog) -> dict[str, bytes]:
    """Write the tables of both logs, by the names of their files."""
    tables = {**metrics.to_tables(), "timings": timings.to_table()}
    return {f"{name}.parquet": files.to_parquet(table) for name, table in tables.items()}


def metrics_from_parquet(read: Callable[[str], bytes], folder: Path, there: Collection[str]) -> MetricLog:
    """Read the tables of metrics: those that every run has, and of the others those that are there."""
    optional = {name: schema for name, schema in OPTIONAL_SCHEMAS.items() if f"{name}.parquet" in there}
    schemas = {**METRIC_SCHEMAS, **optional}
    names = {name: f"{name}.parquet" for name in schemas}
    return MetricLog.from_tables(
        {name: files.from_parquet(read(file), schemas[name], folder / file) for name, file in names.items()}
    )


def timings_from_parquet(read: Callable[[str], bytes], folder: Path) -> TimingLog:
    """Read the table of timings."""
    return TimingLog.from_table(files.from_parquet(read("timings.parquet"), TIMING_SCHEMA, folder / "timings.parquet"))
