"""Ctrl-C and SIGTERM, on real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_calls import TINY, environment

from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder

LONG = (*TINY, "--rounds", "100000", "--evaluate-every", "100000", "--checkpoint-every", "20", "--no-report")


def runs_with_checkpoints(folder: Path) -> int:
    try:
        return len({path.parent for path in folder.glob("**/checkpoints/round-*")})
    except FileNotFoundError:  # a folder was just put in its place
        return 0


def stop_after_a_checkpoint(
    tmp_path: Path, number: signal.Signals, *arguments: str, checkpoints_of: int = 1
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedstrata", *arguments]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 90
        while (
            runs_with_checkpoints(tmp_path) < checkpoints_of and time.monotonic() < deadline and process.poll() is None
        ):
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_a_run_stopped_by_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    stopped = stop_after_a_checkpoint(tmp_path, signal.SIGINT, "run", *LONG, "--json", "--out", "a b")
    assert (stopped.returncode, stopped.stdout) == (130, "")
    assert "Warning: Stopping after this round; press Ctrl-C again to stop at once.\nStopped: Round " in stopped.stderr
    assert stopped.stderr.endswith("is saved in 'a b'; go on with: fedstrata resume 'a b'\n")
    assert "Traceback" not in stopped.stderr


def test_a_comparison_stopped_by_the_system_goes_on_by_the_same_command(tmp_path: Path) -> None:
    stopped = stop_after_a_checkpoint(tmp_path, signal.SIGTERM, "compare", "local, fedavg", *LONG, "--out", "c")
    assert (stopped.returncode, stopped.stdout) == (143, "")
    assert "go on with: the same command" in stopped.stderr
    assert (tmp_path / "c/local-seed0/experiment.toml").exists()
    assert not (tmp_path / "c/local-seed0/summary.json").exists()


SIDE_BY_SIDE = ("compare", "local, fedavg, fedprox", *LONG, "--jobs", "2", "--out", "c")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_side_by_side_all_stop_after_their_round(tmp_path: Path, number: signal.Signals) -> None:
    stopped = stop_after_a_checkpoint(tmp_path, number, *SIDE_BY_SIDE, "--json", checkpoints_of=2)
    assert (stopped.returncode, stopped.stdout) == (128 + number, "")
    assert stopped.stderr.count("Warning: Stopping after this round") == 1
    last = stopped.stderr.splitlines()[-1]
    assert last.startswith("Stopped: Round ")
    assert last.endswith("; go on with: the same command")
    assert last.count("is saved in 'c/") == 2
    assert "Traceback" not in stopped.stderr
    assert not (tmp_path / "c/fedprox-seed0").exists()


@pytest.mark.slow
def test_workers_stop_where_nobody_is_left_to_tell_them_anything(tmp_path: Path) -> None:
    killed = stop_after_a_checkpoint(tmp_path, signal.SIGKILL, *SIDE_BY_SIDE, checkpoints_of=2)
    assert killed.returncode == -signal.SIGKILL
    for name in ("local", "fedavg"):
        with when_nobody_writes(tmp_path / f"c/{name}-seed0") as run:
            saved = run.load_checkpoint()
            assert saved is not None
            assert saved.round >= 20


def when_nobody_writes(path: Path) -> RunFolder:
    deadline = time.monotonic() + 60
    while True:
        try:
            return RunFolder.resume(path)
        except FedStrataError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
