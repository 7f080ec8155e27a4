from __future__ import annotations

import pytest

from fedstrata.errors import FedStrataError
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
