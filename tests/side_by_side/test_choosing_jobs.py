"""How many runs at a time, and which cannot be done in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedstrata
from fedstrata import comparing
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.methods import Part, methods
from fedstrata.side_by_side.how_many import as_many_as_fit, read_jobs

TINY: dict[str, Any] = {"model": "mlp(hidden=8)", "clients": 3, "epochs": 1, "rounds": 1, "engine": "stacked"}


@dataclass(frozen=True)
class Mine(Part):
    """A method that nobody has registered."""


def first_class(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return float(probabilities[:, 0].mean())


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", 0, 1.5, True, ""])
def test_what_is_no_number_of_runs_is_refused(given: Any) -> None:
    with pytest.raises(
        FedStrataError, match="is no number of runs at a time; give a whole number from 1 on, or 'auto'"
    ):
        read_jobs(given)


@pytest.mark.parametrize(
    ("device", "free", "threads", "cores", "expected"),
    [
        ("cuda", 9e10, None, 16, 4),
        ("cuda", 9e10, "16", 16, 4),
        ("cuda", 9e10, None, 2, 2),
        ("cuda", 5e8, None, 16, 1),
        ("cpu", 4e9, None, 2, 2),
        ("cpu", 4e9, None, 64, 8),
        ("cpu", 4e9, "4", 8, 2),
        ("cpu", 4e9, "8", 4, 1),
        ("cpu", 4e9, "4,2", 4, 4),
    ],
)
def test_auto_follows_the_cores_and_the_memory(
    device: str, free: float, threads: str | None, cores: int, expected: int
) -> None:
    assert as_many_as_fit(device, free, threads, cores) == expected


def test_no_more_at_a_time_than_there_are_to_do(tmp_path: Path) -> None:
    planned = comparing.plan(Experiment(), ["fedavg", "local"], 2, tmp_path)
    assert comparing.choose_jobs(3, planned) == 3
    assert comparing.choose_jobs("9", planned) == 4
    assert comparing.choose_jobs("9", planned[:1]) == 1
    assert comparing.choose_jobs(1, planned) == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"methods": [Mine(), "local"]}, "the method '.*' is an object of this one"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}, "the model given as an object cannot travel"),
        ({"metrics": [first_class]}, "the metrics given as an object cannot travel"),
        ({"callbacks": [print]}, "callbacks are objects of this one"),
        ({"out": None}, "results come back from these through folders; give out="),
    ],
    ids=["method", "model", "metrics", "callbacks", "no folder"],
)
def test_what_cannot_travel_is_refused_or_done_here_with_a_word(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    arguments = {"methods": ["fedavg", "local"], "out": tmp_path / "runs", **TINY, **given}
    with pytest.raises(FedStrataError, match=f"2 runs at a time are done in other processes, but {named}"):
        fedstrata.compare(**arguments, jobs=2)
    with pytest.warns(FedStrataWarning, match=f"The runs are done one after another, not in other processes: {named}"):
        assert len(fedstrata.compare(**arguments, jobs="auto").results) == 2


@pytest.mark.usefixtures("fresh_methods")
def test_what_was_registered_in_this_process_only_is_refused(tmp_path: Path) -> None:
    methods.register("mine-alone")(Mine)
    with pytest.raises(
        FedStrataError, match="the method 'mine-alone' was registered in this one; register it in a file"
    ):
        fedstrata.compare(["mine-alone", "fedavg"], out=tmp_path, jobs=2, **TINY)
