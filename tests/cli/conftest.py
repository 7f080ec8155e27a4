"""Calling the command line: in this process for speed, as a real process where that matters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Call, Outcome, environment

from fedstrata.cli import main


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Call:
    """Call the command line as a process of its own, in an empty folder."""

    def run(*arguments: str, **options: Any) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "fedstrata", *arguments],
            cwd=tmp_path,
            env=environment(),
            text=True,
            timeout=120,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        return Outcome(done.returncode, done.stdout or "", done.stderr or "")

    return run
