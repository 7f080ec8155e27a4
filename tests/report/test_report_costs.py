"""Accuracy against cost: the front, and where zero is."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import MakeRun

from fedstrata.report import read_run
from fedstrata.report.groups import group_runs
from fedstrata.report.pareto import Axis, on_the_front, pareto
from fedstrata.report.series import running_mean

POINTS = st.dictionaries(st.text("abc", min_size=1), st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1)


@given(POINTS)
def test_the_front_is_what_nobody_beats(points: dict[str, tuple[int, int]]) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    leading = on_the_front({name: (float(cost), float(value)) for name, (cost, value) in points.items()})
    assert leading
    for name, own in points.items():
        assert (name in leading) == (not any(beats(other, own) for other in points.values()))


def test_an_axis_goes_in_powers_of_ten_where_costs_lie_far_apart_and_zero_stands_by_itself() -> None:
    near = Axis.of([0.0, 10e6, 20e6])
    assert not near.logarithmic
    assert near.place(0.0) == 0.0
    assert near.ticks == (0.0, 5e6, 10e6, 15e6, 20e6)
    far = Axis.of([0.0, 2e4, 3e6])
    assert far.logarithmic
    assert far.place(0.0) == 3.5 < far.place(2e4) == math.log10(2e4)
    assert far.ticks == (3.5, 4.0, 5.0, 6.0, 7.0)
    assert Axis.of([2e4, 3e6]).ticks == (4.0, 5.0, 6.0, 7.0)


def test_a_method_behind_is_not_on_the_front_and_the_front_goes_on_to_the_end(make_run: MakeRun) -> None:
    runs = [
        read_run(make_run("good", method="fedavg", level=0.9, clients=8)),
        read_run(make_run("cheap", method="fedbn", level=0.6, clients=4, rounds=6)),
        read_run(make_run("bad", method="fedprox", level=0.4, clients=8, rounds=14)),
    ]
    found = pareto(group_runs(runs))
    label = {group.runs[0].experiment["method"]: group.label for group in group_runs(runs)}
    shown = {row["method"]: row for row in found.points if row["measure"] == "up" and row["point"] == "last"}
    assert shown[label["fedavg"]]["standing"] == shown[label["fedbn"]]["standing"] == "on the front"
    assert shown[label["fedprox"]]["standing"] == "behind"
    assert shown[label["fedbn"]]["cost"] == 6 * 4 * 40_000
    steps = [(row["x"], row["value"]) for row in found.front if row["measure"] == "up" and row["point"] == "last"]
    assert [x for x, _ in steps] == [6 * 4 * 40_000, 12 * 8 * 40_000, 14 * 8 * 40_000]
    assert steps[1][1] == steps[2][1] == shown[label["fedavg"]]["value"]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(1, 8))
def test_the_running_mean_is_that_of_the_rounds_up_to_it(values: list[float], span: int) -> None:
    rounds = np.cumsum(np.arange(len(values)) % 3 + 1)
    slow = [np.mean([v for r, v in zip(rounds, values, strict=True) if now - span < r <= now]) for now in rounds]
    np.testing.assert_allclose(running_mean(rounds, np.array(values), span), slow, atol=1e-9)


def test_the_running_mean_passes_what_is_not_finite() -> None:
    smooth = running_mean(np.array([1, 2, 3]), np.array([math.nan, 2.0, 4.0]), 2)
    assert math.isnan(smooth[0])
    assert smooth[1:].tolist() == [2.0, 3.0]
