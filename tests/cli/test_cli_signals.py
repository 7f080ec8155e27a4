"""Ctrl-C and SIGTERM, on real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from cli_calls import TINY, environment

LONG = (*TINY, "--rounds", "100000", "--evaluate-every", "100000", "--checkpoint-every", "20", "--no-report")


def stop_after_a_checkpoint(
    tmp_path: Path, number: signal.Signals, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedstrata", *arguments]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 90
        while (
            not any(tmp_path.glob("**/checkpoints/round-*")) and time.monotonic() < deadline and process.poll() is None
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
