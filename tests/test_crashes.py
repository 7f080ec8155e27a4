"""A run that is killed at any moment and resumed ends as if nothing had happened: real processes, real signals."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from forking import Forked

EXPERIMENT = [
    "--data", "digits", "--clients", "6", "--partition", "dirichlet(alpha=0.5, samples=24)", "--model", "cnn",
    "--method", "fedbn+fedavgm", "--rounds", "16", "--epochs", "1", "--batch-size", "8", "--participation", "0.5",
    "--optimiser", "sgd(learning_rate=0.05, momentum=0.9, keep=true)", "--engine", "stacked", "--checkpoint-every", "1",
    "--transforms", "crop:1+normalise", "--no-report", "--quiet",
]  # fmt: skip
COMPARED = ("metrics/rounds.parquet", "metrics/clients.parquet", "metrics/layers.parquet", "model.safetensors")
LONGEST = 120


def start(folder: Path, *arguments: str) -> Forked:
    return Forked(folder.with_suffix(".log"), *arguments)


def finish(process: Forked) -> str:
    """Wait for the end of a command that must succeed; return what it printed."""
    code, printed = process.wait(LONGEST), process.log.read_text()
    assert code == 0, printed
    return printed


def contents(folder: Path) -> dict[str, bytes]:
    newest = max((folder / "checkpoints").iterdir())
    return {name: (folder / name).read_bytes() for name in COMPARED} | {
        "state": (newest / "state.safetensors").read_bytes()
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    finish(start(folder, "run", *EXPERIMENT, "--out", str(folder)))
    return contents(folder)


def wait_for(path: Path, process: Forked) -> None:
    began = time.monotonic()
    while not path.exists() and process.poll() is None and time.monotonic() - began < LONGEST:
        time.sleep(0.002)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_the_run_ends_with_the_same_bytes(seed, unbroken, tmp_path):
    chance = random.Random(seed)
    folder = tmp_path / "run"
    process = start(folder, "run", *EXPERIMENT, "--out", str(folder))
    kills = 0
    while True:
        wait_for(folder / "checkpoints" / f"round-{2 * kills + 1:06d}", process)
        if process.poll() is None and kills < 3:
            time.sleep(chance.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=LONGEST)
            kills += 1
        else:
            finish(process)
            break
        if (folder / "summary.json").exists():
            break
        process = start(folder, "resume", str(folder), "--no-report", "--quiet")
    assert kills
    assert contents(folder) == unbroken


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_a_run_saves_says_how_to_go_on_and_goes_on(number, unbroken, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, "run", *EXPERIMENT, "--out", str(folder))
    wait_for(folder / "checkpoints" / "round-000001", process)
    process.send_signal(number)
    assert process.wait(LONGEST) == 128 + number
    errors = process.log.read_text()
    assert f"fedstrata resume {folder}" in errors
    assert "Traceback" not in errors
    assert not (folder / "summary.json").exists()
    resumed = start(folder, "resume", str(folder), "--no-report", "--quiet")
    errors = finish(resumed)
    assert contents(folder) == unbroken


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(unbroken, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, "run", *EXPERIMENT, "--out", str(folder))
    wait_for(folder / "checkpoints" / "round-000003", process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=LONGEST)
    newest = max((folder / "checkpoints").glob("round-*")) / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    resumed = start(folder, "resume", str(folder), "--no-report", "--quiet")
    errors = finish(resumed)
    assert newest.parent.name in errors
    assert contents(folder) == unbroken
