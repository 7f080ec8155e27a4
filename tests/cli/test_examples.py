from __future__ import annotations

from pathlib import Path

import pytest
from cli_calls import ROOT, Call

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(call: Call, path: Path) -> None:
    assert call("run", str(path), "--rounds", "1", "--epochs", "1", "--engine", "stacked", "--no-report").code == 0


def test_there_are_examples() -> None:
    assert EXAMPLES
