"""Loggers hear every number once, whatever happens to the run, and change nothing whatever they do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import fedstrata
from fedstrata import Callback, Experiment, FedStrataError, FedStrataWarning, RoundView
from fedstrata.loggers import LoggedRun, Logger, loggers, make_loggers
from fedstrata.runs.folder import RunFolder
from fedstrata.spec import parameter

TINY = Experiment(
    model="mlp(hidden=4)", clients=2, rounds=4, epochs=1, batch_size=256, engine="stacked", evaluate_every=2,
    partition="iid", checkpoint_every=2,
)  # fmt: skip


@dataclass
class Heard:
    """Keeps what it is told, and fails where it is asked to."""

    fails_in: str
    run: LoggedRun
    rounds: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    ends: list[Mapping[str, Any]] = field(default_factory=list)
    closed: int = 0

    def write(self, round: int, values: Mapping[str, float]) -> None:
        self._fail("write")
        self.rounds.append((round, dict(values)))

    def end(self, summary: Mapping[str, Any]) -> None:
        self._fail("end")
        self.ends.append(summary)

    def close(self) -> None:
        self.closed += 1
        self._fail("close")

    def _fail(self, hook: str) -> None:
        print("this is no result")
        if hook == self.fails_in:
            raise OSError("the disk is full")


@dataclass(frozen=True)
class Ear(Logger):
    """Listen."""

    fails_in: str = parameter("", "Where it fails.")
    opened: ClassVar[list[Heard]] = []

    def open(self, run: LoggedRun) -> Heard:
        if self.fails_in == "open":
            raise OSError("the disk is full")
        self.opened.append(Heard(self.fails_in, run))
        return self.opened[-1]


@pytest.fixture
def ear() -> Iterator[list[Heard]]:
    loggers.register("ear")(Ear)
    Ear.opened.clear()
    yield Ear.opened
    loggers.put("ear", None)


class Cut(Callback):
    """The power goes off."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, view: RoundView) -> None:
        if view.round == self.round:
            raise KeyboardInterrupt


def test_every_number_of_the_round_tables_is_heard_under_its_name(ear: list[Heard]) -> None:
    result = fedstrata.run(TINY, log="ear")
    [heard] = ear
    assert [round for round, _ in heard.rounds] == [1, 2, 3, 4]
    assert heard.ends[0]["final"] == result.summary["final"]
    assert heard.closed == 1
    told = {(round, name): value for round, values in heard.rounds for name, value in values.items()}
    tables = result.metrics.to_tables()
    expected = {
        (row["round"], row["metric"].replace(".", "/")): row["value"] for row in tables["rounds"].to_pylist()
    } | {(row["round"], f"layers/{row['metric']}/{row['layer']}"): row["value"] for row in tables["layers"].to_pylist()}
    assert told == expected
    assert told[4, "layers/cosine/stages.0.linear"] < 1
    assert heard.run.name == "fedavg-digits-seed0"
    assert heard.run.settings["model"] == "mlp(hidden=4)"


def contents(folder: Path) -> dict[str, bytes]:
    names = ("experiment.toml", "data.json", "model.safetensors", "metrics/rounds.parquet", "metrics/layers.parquet")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize("hook", ["open", "write", "end", "close"])
def test_one_that_fails_is_told_once_and_changes_nothing(ear: list[Heard], tmp_path: Path, hook: str) -> None:
    fedstrata.run(TINY, out=tmp_path / "without")
    with pytest.warns(FedStrataWarning, match=r"'ear\(fails_in=\w+\)' is off from now on.*the disk is full") as told:
        fedstrata.run(TINY, out=tmp_path / "with", log=f"ear(fails_in={hook})")
    assert len([one for one in told if "is off" in str(one.message)]) == 1
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_after_an_interruption_no_round_is_heard_twice_and_none_is_missed(ear: list[Heard], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):  # after round 3 was written, and before the checkpoint of round 4
        fedstrata.run(TINY, out=tmp_path / "run", log="ear", callbacks=[Late(3)])
    result = fedstrata.resume(tmp_path / "run", log="ear(fails_in=nowhere)")
    first, second, new = ear
    assert [round for round, _ in first.rounds + second.rounds] == [1, 2, 3, 4]
    assert first.run.identity == second.run.identity
    assert (first.closed, second.closed) == (1, 1)
    assert [round for round, _ in new.rounds] == [1, 2, 3, 4]
    assert [values["train/loss"] for _, values in new.rounds] == result.metrics.series("train.loss")[1].tolist()
    fedstrata.extend(tmp_path / "run", 6)
    assert [round for round, _ in ear[3].rounds] == [5, 6]


class Late(Cut):
    """Cuts after all others were called: loggers come after callbacks, so one round later, before its own."""

    def on_round(self, view: RoundView) -> None:
        if view.round == self.round + 1:
            raise KeyboardInterrupt


def test_a_logger_that_cannot_be_had_any_more_does_not_stop_a_resumed_run(ear: list[Heard], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(TINY, out=tmp_path / "run", log="ear", callbacks=[Late(3)])
    loggers.put("ear", None)
    with pytest.warns(FedStrataWarning, match="'ear' is off from now on"):
        fedstrata.resume(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").finished


def test_each_run_of_a_comparison_has_its_own(ear: list[Heard], tmp_path: Path) -> None:
    fedstrata.compare("fedavg, local", TINY, rounds=1, out=tmp_path, log=["ear"])
    assert [one.run.name for one in ear] == ["fedavg-seed0", "local-seed0"]
    assert len({one.run.identity for one in ear}) == 2


def test_what_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match=r"no logger 'tensorbord'\. Did you mean 'tensorboard'"):
        fedstrata.run(TINY, log="tensorbord", out=tmp_path / "run")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(FedStrataError, match=r"pip install 'fedstrata\[wandb\]'"):
        make_loggers("wandb(project=mine)")
    assert not (tmp_path / "run").exists()


def test_without_a_run_folder_there_must_be_another_one() -> None:
    pytest.importorskip("tensorboard")
    with pytest.warns(FedStrataWarning, match=r"has none; give the run a folder"):
        fedstrata.run(TINY, rounds=1, log="tensorboard")


# The tools themselves -------------------------------------------------------------------------------------------------


def interrupted_and_resumed(folder: Path, log: str) -> fedstrata.Result:
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(TINY, out=folder, log=log, callbacks=[Late(3)])
    return fedstrata.resume(folder)


def test_tensorboard_reads_back_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = interrupted_and_resumed(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("train.loss", "client_after.accuracy.mean"):
        rounds, values = result.metrics.series(name)
        read = events.Scalars(name.replace(".", "/"))
        assert [one.step for one in read] == rounds.tolist()
        np.testing.assert_array_equal([one.value for one in read], values.astype(np.float32))
    assert [one.step for one in events.Scalars("layers/cosine/head")] == [2, 3, 4]
    [settings] = events.Tensors("settings/text_summary")
    assert "mlp(hidden=4)" in settings.tensor_proto.string_val[0].decode()


def test_mlflow_reads_back_every_number(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    result = interrupted_and_resumed(tmp_path / "run", "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("fedstrata")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["model"] == "mlp(hidden=4)"
    for name in ("train.loss", "client_after.accuracy.mean"):
        rounds, values = result.metrics.series(name)
        read = client.get_metric_history(run.info.run_id, name.replace(".", "/"))
        assert [(one.step, one.value) for one in read] == list(zip(rounds.tolist(), values.tolist(), strict=True))


def test_weights_and_biases_writes_offline_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.chdir(tmp_path)
    result = interrupted_and_resumed(tmp_path / "run", "wandb(project=layers)")
    read: dict[int, dict[str, float]] = {}
    for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    (one.key or "/".join(one.nested_key)): json.loads(one.value_json) for one in record.history.item
                }
                assert items["_step"] not in read
                read[items["_step"]] = items
    assert list(read) == [1, 2, 3, 4]
    assert [read[round]["train/loss"] for round in read] == result.metrics.series("train.loss")[1].tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def records(content: bytes) -> Iterator[bytes]:
    """Read the records of a log in LevelDB's format: blocks of 32 KiB, after a head of seven bytes."""
    place, begun, block = 7, b"", 32 * 1024
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        begun += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield begun
            begun = b""
