"""Seconds of aggregation, apart from the rest of a round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedstrata
from fedstrata import Experiment
from fedstrata.engines import stopwatch
from fedstrata.engines.stopwatch import Stopwatch
from fedstrata.report import read_run
from fedstrata.runs.metrics import TimingLog

TINY = Experiment(clients=3, rounds=2, steps=1, model="mlp(hidden=4)", method="fedavg", engine="loop")


def test_stretches_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 10.0, 12.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.measuring():
            pass
    assert watch.seconds() == 2.5


def test_on_a_gpu_events_are_recorded_and_read_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the device while the round goes on: events are recorded, and their times asked for later."""
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("recorded")

        def elapsed_time(self, end: Event) -> float:
            told.append("read")
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        with watch.measuring():
            told.append("work")
    assert told == ["recorded", "work", "recorded"] * 2
    assert watch.seconds() == 0.5


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_tells_its_seconds_of_aggregation_and_its_operations(engine: str, tmp_path: Path) -> None:
    result = fedstrata.run(TINY, engine=engine, out=tmp_path / "run")
    totals = read_run(tmp_path / "run").timings.totals()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["aggregation_seconds"] < summary["seconds"]
    assert summary["train_flops"] == result.metrics.series("train.flops")[1].sum() > 0
    assert summary["train_sparse_flops"] <= summary["train_flops"]
    assert set(totals) == {"train", "aggregate", "evaluate"}
    assert summary["aggregation_seconds"] == totals["aggregate"]


def test_the_phases_add_up_to_all_seconds() -> None:
    log = TimingLog()
    for round in (1, 2):
        log.add(round, "train", 1.0)
        log.add(round, "aggregate", 0.25)
    assert log.summary() == {"seconds": 2.5, "aggregation_seconds": 0.5}
    assert TimingLog().summary() == {"seconds": 0}
