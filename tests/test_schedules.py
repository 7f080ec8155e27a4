from __future__ import annotations

import pytest
import torch

from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.schedules import schedules


@pytest.mark.parametrize(
    ("text", "rounds", "expected"),
    [
        ("constant", 4, [1, 1, 1, 1]),
        ("exponential:0.5", 4, [1, 0.5, 0.25, 0.125]),
        ("exponential", 3, [1, 0.998, 0.998**2]),
        ("exponential:1", 3, [1, 1, 1]),
        ("cosine", 5, [1, 0.8535533905932737, 0.5, 0.14644660940672627, 0]),
        ("cosine:0.2", 3, [1, 0.6, 0.2]),
        ("cosine", 1, [1]),
        ("step", 8, [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        ("step:0.5", 5, [1, 1, 1, 0.5, 0.25]),
        ("step", 2, [1, 0.1]),
        ("step", 1, [1]),
    ],
)
def test_factors(text, rounds, expected):
    schedule = schedules.make(text)
    assert [schedule.factor(round, rounds) for round in range(1, rounds + 1)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("text", ["exponential:0", "exponential:1.1", "cosine:-0.1", "cosine:2", "step:0", "linear"])
def test_impossible_schedules_are_refused(text):
    with pytest.raises(FedStrataError):
        schedules.make(text)


@pytest.mark.parametrize("text", ["constant", "exponential:0.9", "cosine:0.1", "step", "plateau(patience=1)"])
def test_in_a_stage_every_schedule_behaves_as_if_there_were_no_other_rounds(text):
    schedule, losses = schedules.make(text), [5.0, 4.0, 3.0, 2.0, 1.9, 2.0, 2.1, 2.2, 2.1, 2.2]
    for round in range(5, 11):
        expected = schedule.factor(round - 4, 6, losses[4 : round - 1])
        assert schedule.factor_in_stage(round, (5, 10), losses[: round - 1]) == expected
    for round in range(1, 11):
        expected = schedule.factor(round, 10, losses[: round - 1])
        assert schedule.factor_in_stage(round, (1, 10), losses[: round - 1]) == expected


def test_plateau_drops_when_pytorch_does():
    losses = [2.0, 1.5, 1.5, 1.6, 1.49999, 1.4, 1.4, 1.4, 1.5, 1.4, 1.39, 1.39, 1.4, 1.4, 1.4]
    weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, factor=0.5, patience=2, threshold=1e-4)
    plateau = schedules.make("plateau(drop=0.5, patience=2)")
    for round, loss in enumerate(losses, start=1):
        reference.step(loss)
        assert plateau.factor(round + 1, 99, losses[:round]) == pytest.approx(optimiser.param_groups[0]["lr"])
    assert optimiser.param_groups[0]["lr"] < 0.3


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_follows_its_plateau(engine):
    """A loss must fall a hundredfold to be better here: round 2 does not, so from round 3 on nothing moves."""
    experiment = Experiment(
        clients=2, rounds=4, epochs=1, model="mlp", evaluate_every=9, engine=engine, precision="fp64",
        schedule="plateau(drop=1e-300, patience=0, threshold=0.99)",
    )  # fmt: skip
    simulation, updates = Driver.prepare(experiment), []
    for _ in range(4):
        before = simulation.engine.server.model
        simulation.step()
        after = simulation.engine.server.model
        updates.append(max(float((after[name] - before[name]).abs().max()) for name in after))
    assert updates[0] > 1e-3
    assert updates[1] > 1e-3
    assert max(updates[2:]) < 1e-12
