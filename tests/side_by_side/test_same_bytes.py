"""Runs side by side in real processes give the same folders as one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.comparing import RunsFailedError
from fedstrata.engines.planning import threads_of_this_process
from fedstrata.errors import FedStrataWarning

TINY: dict[str, Any] = {"model": "mlp(hidden=8)", "clients": 3, "epochs": 1, "rounds": 3, "checkpoint_every": 1}

BREAKS = '''
from dataclasses import dataclass
from fedstrata.callbacks import Callback, callbacks
from fedstrata.methods import Facts, Part, methods


@methods.register("breaks")
@dataclass(frozen=True)
class Breaks(Part):
    """Fails in the second round."""

    facts = Facts("own", "nobody")

    def metrics(self, server):
        return {"breaks/inverse": 1 / (2 - server.round)}


@callbacks.register("talks")
class Talks(Callback):
    def on_round(self, view):
        if view.round == 1:
            print("hello from the first round")
'''

HUNGRY = '''
import time
from dataclasses import dataclass
from pathlib import Path
from fedstrata.methods import Facts, Part, methods

refused = Path(__file__).with_name("refused")


@methods.register("hungry")
@dataclass(frozen=True)
class Hungry(Part):
    """Finds no memory in the second round, once."""

    facts = Facts("own", "nobody")

    def metrics(self, server):
        if server.round == 2 and not refused.exists():
            refused.touch()
            raise MemoryError("no room")
        return {}


@methods.register("patient")
@dataclass(frozen=True)
class Patient(Part):
    """Takes as long as another run needs to find no memory."""

    facts = Facts("own", "nobody")

    def metrics(self, server):
        for _ in range(600):
            if refused.exists():
                return {}
            time.sleep(0.1)
        raise TimeoutError
'''


def contents(folder: Path) -> dict[str, Any]:
    """All bytes of some runs, but for what a clock has touched."""

    def without_times(path: Path) -> Any:
        if path.name == "summary.json":
            return {**json.loads(path.read_bytes()), "seconds": None, "aggregation_seconds": None}
        if path.name == "manifest.json":
            manifest = json.loads(path.read_bytes())
            return {**manifest, "sha256": None, "files": {**manifest["files"], "timings.parquet": None}}
        return path.read_bytes()

    files = (path for path in sorted(folder.glob("*/**/*")) if path.is_file() and path.name != "timings.parquet")
    return {str(path.relative_to(folder)): without_times(path) for path in files}


def interrupt_in_round_two(view: fedstrata.RoundView) -> None:
    if view.round == 2:
        raise KeyboardInterrupt


@pytest.mark.usefixtures("fresh_imports")
def test_side_by_side_gives_the_same_bytes_and_a_failing_run_takes_no_other_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the runs goes on from a checkpoint."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    given = {**TINY, "engine": "stacked", "imports": [str(tmp_path / "breaks.py")]}
    fedstrata.compare(["fedavg", "local"], out=tmp_path / "one", progress=True, **given)
    with pytest.raises(KeyboardInterrupt):
        fedstrata.compare("local", out=tmp_path / "two", callbacks=[interrupt_in_round_two], **given)
    capsys.readouterr()
    with (
        pytest.raises(
            RunsFailedError,
            match=r"breaks, seed 0: 'breaks\.py' failed in line \d+, in 'metrics': "
            "ZeroDivisionError: division by zero",
        ) as failed,
        pytest.warns(FedStrataWarning, match="A run has failed, and the others go on. breaks, seed 0: 'breaks.py' "),
    ):
        fedstrata.compare(["fedavg", "breaks", "local"], out=tmp_path / "two", jobs=2, progress=True, **given)
    assert "in metrics\n" in failed.value.__cause__.__notes__[0]
    err = capsys.readouterr().err
    assert all(f"{name}, seed 0: hello from the first round" in err for name in ("fedavg", "breaks"))
    assert "local, seed 0: accuracy " in err
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert len(one) > 40
    assert one == {name: content for name, content in two.items() if not name.startswith("breaks-seed0")}
    assert not (tmp_path / "two/breaks-seed0/summary.json").exists()
    environment = json.loads(one["fedavg-seed0/environment.json"])
    assert environment["threads"] == threads_of_this_process()


@pytest.mark.usefixtures("fresh_imports")
def test_a_run_that_found_no_memory_beside_another_goes_on_when_that_is_done(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    given = {**TINY, "engine": "stacked", "imports": [str(tmp_path / "hungry.py")]}
    with pytest.warns(FedStrataWarning, match="hungry, seed 0: there is not enough memory for so many runs at a time"):
        fedstrata.compare(["hungry", "patient"], out=tmp_path / "two", jobs=2, **given)
    fedstrata.compare(["hungry", "patient"], out=tmp_path / "one", **given)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_engines_that_are_measured_are_chosen_before_runs_disturb_each_other(tmp_path: Path, model: str) -> None:
    changes = {**TINY, "model": model, "engine": "auto", "rounds": 2}
    side_by_side = fedstrata.compare(["fedavg", "local"], seeds=2, out=tmp_path / "two", jobs="auto", **changes)
    plans = {
        path.parent.name: json.loads(path.read_bytes())["resolved"] for path in tmp_path.glob("two/*/environment.json")
    }
    assert plans["fedavg-seed0"] == plans["fedavg-seed1"]
    assert plans["local-seed0"] == plans["local-seed1"]
    assert len(side_by_side.results) == 4
