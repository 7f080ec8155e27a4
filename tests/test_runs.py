from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from forking import CONTEXT
from torch import Tensor

from fedstrata.data.contents import fingerprint
from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.runs import checkpoints
from fedstrata.runs.describing import describe_environment
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog, TimingLog
from fedstrata.trained import Card

EXPERIMENT = Experiment(clients=2, method="fedbn", rounds=1000)
DATASET = Dataset(
    name="tiny",
    inputs=torch.zeros(6, 1, 2, 2),
    labels=torch.tensor([0, 1, 2, 0, 0, 1]),
    train=np.arange(5),
    test=np.array([5]),
    class_names=("zero", "one", "two"),
)
SPLIT = Split(train=(np.array([0, 3, 4]), np.array([2, 1])), test=(np.array([5]), np.array([], dtype=np.int64)))
ENVIRONMENT = {"python": "3.11", "resolved": {"engine": "loop"}}


def create(path: Path) -> RunFolder:
    return RunFolder.create(path, EXPERIMENT, DATASET, SPLIT, ENVIRONMENT)


def state_after(round: int) -> dict[str, Tensor]:
    return {
        "weight": torch.full((50, 20), float(round)),
        "steps": torch.tensor(round),
        "mask": torch.tensor([True, False]),
    }


def logs_after(round: int) -> tuple[MetricLog, TimingLog]:
    metrics, timings = MetricLog(), TimingLog()
    add_rounds(metrics, timings, range(1, round + 1))
    return metrics, timings


def add_rounds(metrics: MetricLog, timings: TimingLog, rounds: range) -> None:
    for number in rounds:
        metrics.add_round(number, {"accuracy": number / 1000})
        metrics.add_clients(number, "accuracy", [0, 1], [0.5, 1 / number])
        timings.add(number, "train", 0.125)


def save(run: RunFolder, round: int) -> None:
    run.save_checkpoint(round, state_after(round), {"last": round}, *logs_after(round))


CARD = Card("mlp", (4,), "float32", (), ("no", "yes"))
SUMMARY = {"final": {"accuracy": 0.75}, "loss": float("nan")}


def finish(run: RunFolder) -> None:
    run.finish(state_after(7), {}, CARD, *logs_after(7), SUMMARY)


def newest_round(run: RunFolder) -> int:
    """Load the newest checkpoint, insist that all of it belongs to one round, and return that round (0 without)."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return 0
    expected = state_after(checkpoint.round)
    assert checkpoint.state.keys() == expected.keys()
    assert all(torch.equal(checkpoint.state[name], tensor) for name, tensor in expected.items())
    assert checkpoint.facts == {"last": checkpoint.round}
    metrics, timings = logs_after(checkpoint.round)
    assert checkpoint.metrics.to_tables() == metrics.to_tables()
    assert checkpoint.timings.to_table() == timings.to_table()
    return checkpoint.round


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What a run folder holds.


def test_a_new_run_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "below" / "run"
    create(path).close()
    assert everything_below(path) == [".lock", "data.json", "environment.json", "experiment.toml", "split.parquet"]
    assert [entry.name for entry in path.parent.iterdir()] == ["run"]
    run = RunFolder.open(path)
    assert run.experiment == EXPERIMENT
    assert run.environment() == ENVIRONMENT
    assert run.data() == {
        "dataset": "tiny",
        "class_names": ["zero", "one", "two"],
        "label_counts": [[3, 0, 0], [0, 1, 1]],
        "sizes": [3, 2],
        "test_sizes": [1, 0],
        "split_hash": SPLIT.hash,
        "input_shape": [1, 2, 2],
        "samples": 6,
        "contents": fingerprint(DATASET),
    }
    split = run.split()
    assert [part.tolist() for part in split.train] == [[0, 3, 4], [2, 1]]
    assert [part.tolist() for part in split.test] == [[5], []]
    assert split.hash == SPLIT.hash
    assert not run.finished
    assert run.load_checkpoint() is None
    assert run.metrics().latest() == {}
    assert run.timings().totals() == {}


def test_a_finished_run_can_be_read_back(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        finish(run)
    run = RunFolder.open(tmp_path / "run")
    assert run.finished
    assert run.summary() == {"final": {"accuracy": 0.75}, "loss": None}
    assert run.metrics().to_tables() == logs_after(7)[0].to_tables()
    assert run.timings().totals() == {"train": 7 * 0.125}
    assert torch.equal(run.model()["weight"], torch.full((50, 20), 7.0))
    assert everything_below(run.path / "metrics") == ["clients.parquet", "layers.parquet", "rounds.parquet"]


def test_a_run_that_went_on_from_a_checkpoint_leaves_the_same_bytes(tmp_path: Path) -> None:
    with create(tmp_path / "unbroken") as run:
        finish(run)
    with create(tmp_path / "broken") as run:
        save(run, 3)
    with RunFolder.resume(tmp_path / "broken") as run:
        checkpoint = run.load_checkpoint()
        assert checkpoint is not None
        add_rounds(checkpoint.metrics, checkpoint.timings, range(4, 8))
        run.finish(state_after(7), {}, CARD, checkpoint.metrics, checkpoint.timings, SUMMARY)
    shutil.rmtree(tmp_path / "broken" / "checkpoints")
    assert content_of(tmp_path / "broken") == content_of(tmp_path / "unbroken")


def test_an_unfinished_run_tells_what_was_measured_so_far(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        save(run, 4)
    run = RunFolder.open(tmp_path / "run")
    assert run.metrics().latest() == {"accuracy": 0.004}
    assert run.timings().totals() == {"train": 0.5}
    for read in (run.summary, run.model):
        with pytest.raises(FedStrataError, match="is not finished; go on with 'fedstrata resume"):
            read()


def test_environment_is_plain_and_names_nobody() -> None:
    environment = describe_environment("cpu", {"engine": "loop", "chunk": None})
    assert environment["resolved"] == {"engine": "loop", "chunk": None}
    assert environment["torch"] == str(torch.__version__)
    assert environment["device"] == "cpu"
    text = json.dumps(environment)
    assert str(Path.home()) not in text
    assert os.uname().nodename not in text


# Where a run may be created, and what can be opened.


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with create(path) as run:
        save(run, 1)
        before = content_of(path)
        with pytest.raises(
            FedStrataError, match=r"already holds a run that is not finished; .*'fedstrata resume .*--out"
        ):
            create(path)
        with pytest.raises(FedStrataError, match=r"already holds a run that is not finished"):
            RunFolder.create(path, EXPERIMENT.with_changes({"seed": 1}), DATASET, SPLIT, ENVIRONMENT)
        assert content_of(path) == before
        finish(run)
    with pytest.raises(FedStrataError, match="already holds a finished run; choose another --out"):
        create(path)


def test_foreign_content_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FedStrataError, match="is a file, not a folder"):
        create(tmp_path / "file")
    with pytest.raises(FedStrataError, match="a file stands where a folder is needed"):
        create(tmp_path / "file" / "run")
    for name in ("thesis.tex", "data.json", ".lock"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        (folder / "other").write_text("mine")
        with pytest.raises(FedStrataError, match="holds other things"):
            create(folder)
        assert content_of(folder) == {name: b"mine", "other": b"mine"}
    with pytest.raises(FedStrataError, match="file name too long"):
        create(tmp_path / ("x" * 300))


def test_an_empty_folder_is_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It may be a mount point or the current folder, which cannot be renamed over.
    monkeypatch.chdir(tmp_path)
    create(Path()).close()
    assert RunFolder.open(tmp_path).experiment == EXPERIMENT
    assert Path("experiment.toml").exists()


def test_a_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(28, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        calls = 0
        with pytest.raises(FedStrataError, match="the disk is full"):
            create(tmp_path / name)
    assert everything_below(tmp_path) == ["empty"]


def test_what_is_not_a_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match="There is no run folder"):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(FedStrataError, match="is not a run folder"):
        RunFolder.open(tmp_path)
    create(tmp_path / "run").close()
    (tmp_path / "run" / "data.json").unlink()
    with pytest.raises(FedStrataError, match=r"lacks data\.json"):
        RunFolder.open(tmp_path / "run")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        finish(run)
    for name in content_of(run.path):
        if name != ".lock":
            (run.path / name).write_bytes(b"\xffnonsense")
    run = RunFolder.open(run.path)
    readers: dict[str, Callable[[], Any]] = {
        "environment.json": run.environment,
        "data.json": run.data,
        "split.parquet": run.split,
        "rounds.parquet": run.metrics,
        "timings.parquet": run.timings,
        "summary.json": run.summary,
        "model.safetensors": run.model,
        "experiment.toml": lambda: run.experiment,
    }
    for name, read in readers.items():
        with pytest.raises(FedStrataError, match=name):
            read()


def test_a_split_that_was_exchanged_is_noticed(tmp_path: Path) -> None:
    create(tmp_path / "a").close()
    path = tmp_path / "a" / "split.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take([1, 0, *range(2, table.num_rows)]), path)
    with pytest.raises(FedStrataError, match="hash differs"):
        RunFolder.open(tmp_path / "a").split()


# Checkpoints.


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        for round in (1, 2, 3, 1_000_000):
            run.save_checkpoint(round, {}, {}, MetricLog(), TimingLog())
        assert {entry.name for entry in (run.path / "checkpoints").iterdir()} == {"round-000003", "round-1000000"}
        checkpoint = run.load_checkpoint()
        assert checkpoint is not None
        assert (checkpoint.round, checkpoint.state, checkpoint.facts) == (1_000_000, {}, {})


def test_facts_come_back(tmp_path: Path) -> None:
    facts = {
        "nested": {"list": [1, 2.5, None, True, "ä\ud800"]},
        "large": 2**70,
        "tiny": 1e-320,
        "infinite": float("inf"),
    }
    with create(tmp_path / "run") as run:
        run.save_checkpoint(1, {}, facts, MetricLog(), TimingLog())
        checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.facts == facts


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "run"
    with create(path) as run:
        save(run, 1)
        save(run, 2)
    return path


CHECKPOINT_FILES = [
    "clients.parquet",
    "layers.parquet",
    "manifest.json",
    "rounds.parquet",
    "state.safetensors",
    "timings.parquet",
]


def test_a_checkpoint_holds_these_files(two_checkpoints: Path) -> None:
    assert everything_below(two_checkpoints / "checkpoints" / "round-000002") == CHECKPOINT_FILES


def damage(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_after_damage_the_checkpoint_before_is_used(two_checkpoints: Path, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(two_checkpoints, tmp_path / "run")
    newest = path / "checkpoints" / "round-000002"
    original = (newest / name).read_bytes()
    choose = random.Random(0)
    for position in (0, len(original) - 1, *(choose.randrange(len(original)) for _ in range(10))):
        if name == "manifest.json" and original[position : position + 1].isspace():
            continue  # whitespace may turn into other whitespace, which is no damage
        damage(newest / name, position)
        with pytest.warns(FedStrataWarning, match=f"passed over: .*round-000002/{name}.* is damaged"):
            assert newest_round(RunFolder.open(path)) == 1
        (newest / name).write_bytes(original)
    (newest / name).unlink()
    with pytest.warns(FedStrataWarning, match=f"passed over: .*round-000002/{name}.* cannot be read"):
        assert newest_round(RunFolder.open(path)) == 1


def test_where_every_checkpoint_is_damaged_the_user_decides(two_checkpoints: Path, tmp_path: Path) -> None:
    path = shutil.copytree(two_checkpoints, tmp_path / "run")
    for number in (1, 2):
        damage(path / "checkpoints" / f"round-00000{number}" / "state.safetensors", 100)
    with (
        pytest.warns(FedStrataWarning, match="passed over"),
        pytest.raises(FedStrataError, match="delete that folder to begin at the first round again"),
    ):
        RunFolder.open(path).load_checkpoint()


def test_a_damaged_checkpoint_is_replaced_and_a_whole_one_stays(two_checkpoints: Path, tmp_path: Path) -> None:
    path = shutil.copytree(two_checkpoints, tmp_path / "run")
    whole = content_of(path)
    with RunFolder.resume(path) as run:
        save(run, 2)
        assert content_of(path) == whole
        damage(path / "checkpoints" / "round-000002" / "rounds.parquet", 20)
        save(run, 2)
        assert content_of(path) == whole


def test_going_on_from_before_a_damaged_checkpoint_keeps_the_whole_ones(two_checkpoints: Path, tmp_path: Path) -> None:
    path = shutil.copytree(two_checkpoints, tmp_path / "run")
    (path / "checkpoints" / "round-000002").rename(path / "checkpoints" / "round-000009")
    damage(path / "checkpoints" / "round-000009" / "state.safetensors", 100)
    with RunFolder.resume(path) as run:
        save(run, 3)
    assert {entry.name for entry in (path / "checkpoints").iterdir()} == {"round-000001", "round-000003"}


def test_a_checkpoint_of_another_version_is_not_called_damaged(
    two_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(two_checkpoints, tmp_path / "run")
    now = checkpoints._CHECKPOINT_VERSION
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_VERSION", now + 1)
    sentence = f"has the checkpoint format {now}, but FedStrata .* reads the format {now + 1}; go on with the version"
    with RunFolder.resume(path) as run:
        with pytest.raises(FedStrataError, match=sentence):
            run.load_checkpoint()
        with pytest.raises(FedStrataError, match=sentence):
            save(run, 2)
    assert content_of(path) == content_of(two_checkpoints)


def test_opened_for_reading_means_reading_only(two_checkpoints: Path) -> None:
    before = content_of(two_checkpoints)
    run = RunFolder.open(two_checkpoints)
    with pytest.raises(FedStrataError, match="opened for reading"):
        save(run, 3)
    with pytest.raises(FedStrataError, match="opened for reading"):
        finish(run)
    assert content_of(two_checkpoints) == before


# Real processes, killed and starved.


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def write_for_ever(path: Path) -> None:
    torch.set_num_threads(1)
    run = RunFolder.resume(path) if path.exists() else create(path)
    round = newest_round(run)
    while True:
        round += 1
        save(run, round)


def wait_for_a_checkpoint_after(round: int, path: Path) -> None:
    deadline = time.monotonic() + 60
    while not any(entry.name > f"round-{round:06d}" for entry in path.glob("checkpoints/*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_run_killed_at_random_moments_always_opens_at_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    moments = random.Random(0)
    reached = 0
    for _ in range(15):
        process = start(write_for_ever, path)
        wait_for_a_checkpoint_after(reached, path)
        time.sleep(moments.uniform(0, 0.05))
        kill(process)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with RunFolder.resume(path) as run:
                now = newest_round(run)
        assert now > reached
        reached = now
        assert not [name for name in everything_below(path) if "partial" in name]


def die_at(step: int, action: Callable[[Path], None], path: Path) -> None:
    """Run an action, but be killed before its ``step``-th operation on the file system."""
    operations = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "fcntl.flock"}
    left = step

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        touches_run = event == "fcntl.flock" or str(path.parent) in str(arguments[0]) or isinstance(arguments[0], int)
        if event in operations and touches_run:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    sys.addaudithook(watch)
    action(path)
    os._exit(0)


def create_and_leave(path: Path) -> None:
    create(path)


def save_third(path: Path) -> None:
    save(RunFolder.resume(path), 3)


def finish_and_leave(path: Path) -> None:
    finish(RunFolder.resume(path))


def killed_at_every_step(action: Callable[[Path], None], prepare: Callable[[int], Path]) -> list[Path]:
    """Repeat an action on fresh folders, killed one step later each time, until it comes to its end."""
    folders: list[Path] = []
    while True:
        folders.append(prepare(len(folders)))
        process = start(die_at, len(folders) - 1, action, folders[-1])
        process.join()
        if process.exitcode == 0:
            return folders
        assert process.exitcode == -signal.SIGKILL
        assert len(folders) < 100


def test_a_save_killed_at_any_step_leaves_a_whole_checkpoint(two_checkpoints: Path, tmp_path: Path) -> None:
    folders = killed_at_every_step(
        save_third, lambda number: shutil.copytree(two_checkpoints, tmp_path / str(number) / "run")
    )
    rounds = []
    for path in folders:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with RunFolder.resume(path) as run:
                rounds.append(newest_round(run))
                for checkpoint in (path / "checkpoints").iterdir():
                    assert everything_below(checkpoint) == CHECKPOINT_FILES
                save(run, 3)
                assert newest_round(run) == 3
        assert not [name for name in everything_below(path) if "partial" in name]
    assert rounds == sorted(rounds)
    assert set(rounds) == {2, 3}


@pytest.mark.parametrize("existing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_creation_killed_at_any_step_leaves_a_run_or_none(tmp_path: Path, existing: bool) -> None:
    def prepare(number: int) -> Path:
        path = tmp_path / str(number) / "run"
        (path if existing else path.parent).mkdir(parents=True)
        return path

    outcomes = []
    for path in killed_at_every_step(create_and_leave, prepare):
        outcomes.append((path / "experiment.toml").exists())
        assert existing or outcomes[-1] == path.exists()
        with RunFolder.resume(path) if outcomes[-1] else create(path) as run:
            assert run.experiment == EXPERIMENT
            assert run.split().hash == SPLIT.hash
        assert [entry.name for entry in path.parent.iterdir()] == ["run"]
        assert everything_below(path) == [".lock", "data.json", "environment.json", "experiment.toml", "split.parquet"]
    assert set(outcomes) == {False, True}


def test_an_end_killed_at_any_step_is_an_end_or_none(two_checkpoints: Path, tmp_path: Path) -> None:
    folders = killed_at_every_step(
        finish_and_leave, lambda number: shutil.copytree(two_checkpoints, tmp_path / str(number) / "run")
    )
    finished = []
    for path in folders:
        with RunFolder.resume(path) as run:
            finished.append(run.finished)
            assert run.metrics().latest() == {"accuracy": 0.007 if run.finished else 0.002}
            finish(run)
        assert content_of(path) == content_of(folders[-1])
    assert set(finished) == {False, True}


def save_too_much(path: Path, answers: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    run = RunFolder.resume(path)
    try:
        run.save_checkpoint(3, {"weight": torch.zeros(10_000)}, {}, MetricLog(), TimingLog())
    except FedStrataError as error:
        answers.send(str(error))


def test_a_disk_that_takes_no_more_loses_nothing(two_checkpoints: Path, tmp_path: Path) -> None:
    path = shutil.copytree(two_checkpoints, tmp_path / "run")
    before = content_of(path)
    answers, answering = CONTEXT.Pipe(duplex=False)
    process = start(save_too_much, path, answering)
    process.join()
    assert answers.poll()
    assert answers.recv() == f"'{path / 'checkpoints' / 'round-000003'}' cannot be written: file too large."
    assert content_of(path) == before
    assert newest_round(RunFolder.open(path)) == 2


def hold(path: Path, answers: Any) -> None:
    run = RunFolder.resume(path)
    answers.send("held")
    time.sleep(600)
    run.close()


def test_two_processes_cannot_write_one_run(two_checkpoints: Path, tmp_path: Path) -> None:
    path = shutil.copytree(two_checkpoints, tmp_path / "run")
    answers, answering = CONTEXT.Pipe(duplex=False)
    process = start(hold, path, answering)
    try:
        assert answers.recv() == "held"
        with pytest.raises(FedStrataError, match="is being written by another process"):
            RunFolder.resume(path)
        assert newest_round(RunFolder.open(path)) == 2
    finally:
        kill(process)
    with RunFolder.resume(path) as run:
        save(run, 3)
