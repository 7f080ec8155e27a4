"""What a call of the command line gives, and the smallest experiment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

TINY = ("--model", "mlp(hidden=8)", "--clients", "4", "--epochs", "1", "--engine", "stacked")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def sentence(self) -> str:
        """The only line on standard error, of a command that failed without any result."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("Error: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("Error: ").strip()


Call = Callable[..., Outcome]


def environment() -> dict[str, str]:
    """An environment in which the package is found without an installation."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMP_PROC_BIND": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
