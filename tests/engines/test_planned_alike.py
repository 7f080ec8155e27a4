"""Runs that stand beside each other are planned alike, and every method can be tried before it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest

import fedstrata
from fedstrata.engines import planning
from fedstrata.engines.planning import Plan
from fedstrata.engines.trying import Candidate
from fedstrata.methods import methods
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.recalling import plan_of

SPLIT = "dirichlet(alpha=1.0, samples=20, test_samples=10)"
SMALL = {"data": "digits", "model": "mlp(hidden=8)", "clients": 2, "partition": SPLIT, "rounds": 1, "epochs": 1}


@pytest.fixture
def another_each_time(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Let trials come out otherwise with every run, as they do on a busy machine."""
    turns, chosen = cycle(("loop", "stacked")), []

    def fastest(candidates: Sequence[Candidate[Plan]], *more: object) -> Plan:
        wanted = next(turns)
        chosen.append(next(one.choice for one in candidates if one.choice.engine == wanted))
        return chosen[-1]

    monkeypatch.setattr(planning, "fastest", fastest)
    return chosen


def engines_in(folder: Path) -> dict[str, str]:
    plans = {path.parent.name: plan_of(RunFolder.open(path.parent)) for path in folder.glob("*/experiment.toml")}
    return {name: plan.engine for name, plan in plans.items() if plan is not None}


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_runs_of_a_comparison_are_done_by_one_engine(
    another_each_time: list[Plan], tmp_path: Path, jobs: int
) -> None:
    """Their last bits are the same then, and what differs is the method's; also of those that come later."""
    fedstrata.compare("fedavg, fedprox(mu=0.1)", seeds=2, out=tmp_path, jobs=jobs, **SMALL)
    assert set(engines_in(tmp_path).values()) == {"loop"}
    assert len(another_each_time) == 1
    fedstrata.compare("fedavg, local", seeds=2, out=tmp_path, jobs=jobs, **SMALL)
    assert len(engines_in(tmp_path)) == 6
    assert set(engines_in(tmp_path).values()) == {"loop"}


def test_runs_with_other_work_are_planned_for_themselves(another_each_time: list[Plan], tmp_path: Path) -> None:
    fedstrata.compare("fedavg, local", sweep={"batch_size": [5, 10]}, out=tmp_path, **SMALL)
    found = engines_in(tmp_path)
    assert {engine for name, engine in found.items() if "batch_size=5" in name} == {"loop"}
    assert {engine for name, engine in found.items() if "batch_size=10" in name} == {"stacked"}


def test_what_cannot_be_alike_is_planned_as_it_can() -> None:
    one, other = Plan("loop", 2, 1), Plan("stacked", 20, 1)
    assert one.is_like(Plan("loop", 4, 1))
    assert not one.is_like(other)
    assert not one.is_like(Plan("loop", 2, 2))


@pytest.mark.filterwarnings("ignore::fedstrata.FedStrataWarning")
@pytest.mark.parametrize("name", methods.names())
def test_every_method_can_be_tried_on_every_engine(name: str) -> None:
    """With the engine that is chosen by default; trials repeat the first round, whose messages fit no later one."""
    result = fedstrata.run(method=name, **{**SMALL, "model": "cnn" if name == "subfedavg" else SMALL["model"]})
    assert result.summary["rounds"] == 1
