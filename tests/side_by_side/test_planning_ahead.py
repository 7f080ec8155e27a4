"""Engines are chosen before the first worker starts, where that takes a measurement."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedstrata.engines.planning import Plan, SharedMemory
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.progress import Silence
from fedstrata.runs.preparing import Ingredients
from fedstrata.side_by_side import workers
from fedstrata.side_by_side.workers import Job

PLANS = {"fedavg": Plan("loop", 1, 1), "local": Plan("stacked", 4, 2)}


def planned(monkeypatch: pytest.MonkeyPatch, *experiments: Experiment, new: bool = True) -> tuple[list[Any], list[str]]:
    prepared = []

    def prepare(experiment: Experiment, *given: Any) -> Any:
        prepared.append(f"{experiment.method}, seed {experiment.seed}")
        if experiment.method not in PLANS:
            raise FedStrataError("No.") if experiment.method == "fedbn" else KeyError("weights")
        warnings.warn("Mind the gap.", FedStrataWarning, stacklevel=1)
        return SimpleNamespace(plan=PLANS[experiment.method])

    monkeypatch.setattr(workers.Driver, "prepare", prepare)
    jobs = [Job(f"{one.method}, seed {one.seed}", one, Path("x"), new, 4) for one in experiments]
    shared = SharedMemory(1e9, lambda needed: None)
    made = workers._plan_ahead(jobs, shared, Silence(9, 9, at_a_time=2), Ingredients(), set())
    assert [job.name for job in made] == [job.name for job in jobs]
    return [job.plan for job in made], prepared


def test_each_method_is_measured_once_for_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = [
        Experiment(method=method, seed=seed, device="cpu")
        for seed in (0, 1)
        for method in ("fedavg", "local", "fedbn", "own")
    ]
    with pytest.warns(FedStrataWarning) as caught:
        plans, prepared = planned(monkeypatch, *experiments)
    assert [str(one.message) for one in caught] == ["fedavg, seed 0: Mind the gap."]
    assert prepared == ["fedavg, seed 0", "local, seed 0", "fedbn, seed 0", "own, seed 0"]
    # What cannot be prepared fails where it is to be run, with its sentence.
    assert plans == [PLANS["fedavg"], PLANS["local"], None, None] * 2


def test_nothing_is_measured_where_nothing_is_left_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Experiment(engine="stacked", device="cpu")
    assert planned(monkeypatch, fixed) == ([None], [])
    assert planned(monkeypatch, Experiment(device="cpu"), new=False) == ([None], [])
