"""The rounds of a run on disk as they come: complete rounds only, nothing twice, and nothing depends on it."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata
from fedstrata.callbacks import RoundView
from fedstrata.errors import FedStrataWarning
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.live_log import LIVE_FILE, LiveLog, read_live_log
from fedstrata.runs.metrics import MetricLog, TimingLog

SMALL = {"model": "mlp", "clients": 3, "epochs": 1, "partition": "iid", "engine": "loop"}


def note(metrics: MetricLog, timings: TimingLog, round: int) -> None:
    metrics.add_round(round, {"train.loss": 1 / round, "undefined": float("nan")})
    metrics.add_clients(round, "accuracy", [0, 2], [0.5, round / 10])
    if round % 2:
        metrics.add_layers(round, "update", {"conv": 0.1 * round, "head": 1.0})
    timings.add(round, "train", 0.25)


def written(path: Path, rounds: range, before: int = 0) -> tuple[MetricLog, TimingLog]:
    """Write a log of some rounds, after rounds that are elsewhere."""
    metrics, timings = MetricLog(), TimingLog()
    for round in range(1, before + 1):
        note(metrics, timings, round)
    log = LiveLog(path)
    log.begin(before, metrics, timings)
    for round in rounds:
        note(metrics, timings, round)
        log.add(metrics, timings)
    return metrics, timings


def tables(metrics: MetricLog, timings: TimingLog) -> dict[str, list[dict[str, object]]]:
    return {
        name: [{key: str(value) for key, value in row.items()} for row in table.to_pylist()]
        for name, table in {**metrics.to_tables(), "timings": timings.to_table()}.items()
    }


def test_what_was_written_is_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / LIVE_FILE
    metrics, timings = written(path, range(4, 8), before=3)
    live = read_live_log(path)
    assert live is not None
    assert live.after == 3
    assert live.tables["rounds"].column("round").to_pylist() == [4, 4, 5, 5, 6, 6, 7, 7]
    earlier = MetricLog(), TimingLog()
    for round in range(1, 4):
        note(*earlier, round)
    assert tables(*live.following(*earlier, 3)) == tables(metrics, timings)


def test_rounds_of_a_newer_checkpoint_are_not_taken_twice_and_a_gap_takes_none(tmp_path: Path) -> None:
    path = tmp_path / LIVE_FILE
    whole = written(path, range(4, 8), before=3)
    live = read_live_log(path)
    assert live is not None
    newer = MetricLog(), TimingLog()
    for round in range(1, 6):
        note(*newer, round)
    assert tables(*live.following(*newer, 5)) == tables(*whole)
    older = MetricLog(), TimingLog()
    note(*older, 1)
    assert live.following(*older, 1) == older


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_log_that_is_cut_anywhere_holds_its_complete_rounds(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.arrows"
    whole, ends = log_of_three_rounds(path)
    path.write_bytes(whole[:cut])
    live = read_live_log(path)
    seen = [] if live is None or not live.tables else live.tables["timings"].column("round").to_pylist()
    assert (live is None) == (cut < ends[0])
    assert seen == [round for round in (1, 2, 3) if cut >= ends[round]]


@cache
def log_of_three_rounds(path: Path) -> tuple[bytes, list[int]]:
    """Write a log; return it, and where its beginning and its rounds end."""
    ends = []
    for rounds in range(4):
        written(path, range(1, rounds + 1))
        ends.append(path.stat().st_size)
    return path.read_bytes(), ends


def test_a_run_shows_every_round_and_takes_the_log_away_when_it_is_done(tmp_path: Path) -> None:
    seen: list[int] = []
    folder = tmp_path / "run"

    def look(view: RoundView) -> None:
        metrics, _ = RunFolder.open(folder).logs_so_far()
        seen.append(int(max(metrics.series("train.loss")[0], default=0)))

    fedstrata.run(**SMALL, rounds=3, checkpoint_every=2, out=folder, callbacks=[look])
    assert seen == [0, 1, 2]
    assert not (folder / LIVE_FILE).exists()
    fedstrata.run(**SMALL, rounds=3, out=tmp_path / "other")
    for file in sorted((folder / "metrics").iterdir()):
        assert file.read_bytes() == (tmp_path / "other" / "metrics" / file.name).read_bytes()


def test_a_run_that_fails_leaves_its_log_and_resumes_without_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def fail(view: RoundView) -> None:
        if view.round == 4:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        fedstrata.run(**SMALL, rounds=5, checkpoint_every=2, out=folder, callbacks=[fail])
    live = read_live_log(folder / LIVE_FILE)
    assert live is not None
    assert (live.after, live.tables["timings"].column("round").unique().to_pylist()) == (2, [3])
    (folder / LIVE_FILE).write_bytes(b"nonsense")
    result = fedstrata.resume(folder)
    assert result.summary["rounds"] == 5
    assert not (folder / LIVE_FILE).exists()


def test_a_disk_that_refuses_the_log_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    metrics, timings = MetricLog(), TimingLog()
    folder.mkdir()
    (folder / LIVE_FILE).mkdir()
    log = LiveLog(folder / LIVE_FILE)
    with pytest.warns(FedStrataWarning, match="those who watch this run see its checkpoints only"):
        log.begin(0, metrics, timings)
    note(metrics, timings, 1)
    log.add(metrics, timings)
    log.end()
    assert read_live_log(folder / LIVE_FILE) is None
