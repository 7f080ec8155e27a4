from pathlib import Path
from typing import Any

import pytest
from made_up_runs import MakeRun, write_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run folder: ``make_run("a", method="fedbn", seed=1)``."""

    def make(name: str, **options: Any) -> Path:
        return write_run(tmp_path / name, **options)

    return make
