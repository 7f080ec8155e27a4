from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import MakeRun

from fedstrata.report import charts, read_run, series
from fedstrata.report.groups import Group, group_runs
from fedstrata.report.reading import Run
from fedstrata.report.sections import curves
from fedstrata.report.view import View


def one_group(*paths: Path) -> Group[Run]:
    (group,) = group_runs([read_run(path) for path in paths])
    return group


def test_thin_keeps_ends_and_a_single_spike() -> None:
    x = np.arange(10_000)
    y = np.sin(x / 900)
    y[6_543] = 40.0
    kept = series.thin(x, y, 100)
    assert len(kept) == 100
    assert kept[0] == 0
    assert kept[-1] == 9_999
    assert 6_543 in kept


@given(st.integers(0, 300), st.integers(3, 50))
def test_thin_returns_rising_positions_within_the_limit(count: int, limit: int) -> None:
    kept = series.thin(np.arange(count), np.cos(np.arange(count)), limit)
    assert len(kept) == min(count, limit)
    assert (np.diff(kept) > 0).all()


def test_over_seeds_is_the_mean_and_the_sample_deviation_at_common_rounds(make_run: MakeRun) -> None:
    group = one_group(make_run("a", seed=0, rounds=6), make_run("b", seed=1, rounds=6))
    metric = "client_after.accuracy.mean"
    averaged = series.over_seeds(group, metric)
    assert averaged is not None
    first, second = (run.series[metric][1] for run in group.runs)
    np.testing.assert_allclose(averaged.mean, (first + second) / 2)
    assert averaged.std is not None
    np.testing.assert_allclose(averaged.std, np.abs(first - second) / np.sqrt(2))
    assert averaged.rounds.tolist() == [1, 2, 3, 4, 5, 6]
    assert series.over_seeds(group, "no such metric") is None


def test_a_single_seed_has_no_spread(make_run: MakeRun) -> None:
    rows = series.curve_rows([one_group(make_run("a"))], ["client_after.accuracy.mean"])
    assert len(rows) == 12
    assert {row["spread"] for row in rows} == {None}


def test_long_curves_are_thinned(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "CURVE_POINTS", 50)
    group = one_group(make_run("a", rounds=200, clients=2))
    rows = series.curve_rows([group], ["client_after.accuracy.mean"])
    assert len(rows) == 50
    assert (rows[0]["round"], rows[-1]["round"]) == (1, 200)


def test_cost_adds_up_bytes_and_seconds(make_run: MakeRun) -> None:
    group = one_group(make_run("a", rounds=5, clients=8))
    rows = series.cost_rows([group])
    assert [row["up"] for row in rows] == [320_000.0 * number for number in (1, 2, 3, 4, 5)]
    assert rows[-1]["down"] == 5 * 52_000
    assert rows[-1]["seconds"] == pytest.approx(group.runs[0].summary["seconds"], rel=1e-3)
    assert series.traffic_rows([group])[0]["bytes"] == 5 * 320_000


def test_cost_of_evaluations_that_skip_rounds_counts_the_skipped_ones() -> None:
    totals = series._at(np.array([1, 2, 3, 4]), np.array([10.0, 20.0, 30.0, 40.0]), np.array([0, 2, 4, 9]))
    assert totals.tolist() == [0.0, 20.0, 40.0, 40.0]


def test_clients_of_all_seeds_are_pooled_from_the_last_round(make_run: MakeRun) -> None:
    group = one_group(make_run("a", seed=0), make_run("b", seed=1))
    rows = series.client_rows([group], ["client_after.accuracy"])
    assert len(rows.points) == 16
    (box,) = rows.boxes
    final = np.concatenate([run.clients["client_after.accuracy"][1] for run in group.runs])
    assert box["clients"] == 16
    assert box["median"] == pytest.approx(np.median(final), rel=1e-3)
    assert final.mean() == pytest.approx(
        np.mean([run.summary["final"]["client_after.accuracy.mean"] for run in group.runs])
    )


def test_too_many_clients_are_thinned_from_worst_to_best(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "CLIENT_POINTS", 20)
    rows = series.client_rows([one_group(make_run("a", clients=80, rounds=2))], ["client_after.accuracy"])
    values = [point["value"] for point in rows.points]
    assert len(values) == 20
    assert values == sorted(values)
    assert rows.boxes[0]["clients"] == 80


def test_skew_rows_hold_counts_and_shares_of_what_is_there() -> None:
    rows = series.skew_rows(np.array([[3, 1], [0, 5]]), ["cat", "dog"])
    assert rows == [
        {"client": 0, "class": "cat", "count": 3, "share": 0.75},
        {"client": 0, "class": "dog", "count": 1, "share": 0.25},
        {"client": 1, "class": "dog", "count": 5, "share": 1.0},
    ]


def test_an_unfinished_run_is_summed_up_from_its_checkpoint(make_run: MakeRun) -> None:
    finished, unfinished = read_run(make_run("a")), read_run(make_run("b", finish=False))
    assert unfinished.summary["headline"] == "client_after"
    for section in ("final", "last_ten", "best"):
        assert unfinished.summary[section] == pytest.approx(finished.summary[section])
    assert unfinished.summary["bytes_up"] == finished.summary["bytes_up"]


@pytest.mark.parametrize(("rounds", "values"), [([1, 2], [1, 2]), ([1, 3, 5], [1, 3, 5]), (list(range(1, 20)), None)])
def test_a_few_rounds_have_a_tick_each(rounds: list[int], values: list[int] | None) -> None:
    """Else there was one at 1.5, written 2."""
    pytest.importorskip("altair")
    rows = [
        {"method": "fedavg", "metric": "global.accuracy", "round": round, "value": 0.5, "spread": None, "raw": 0.5}
        for round in rounds
    ]
    drawing = charts.curves(rows, ["fedavg"], ["fedavg"], "global.accuracy", "accuracy", percent=True)
    axis = drawing.specification()["layer"][0]["encoding"]["x"]["axis"]
    assert (axis.get("values"), axis["format"]) == (values, "d")


def diverging(run: Run, metric: str, after: int) -> Run:
    rounds, values = run.series[metric]
    run.series[metric] = (rounds, np.where(rounds > after, np.nan, values))  # type: ignore[index]
    return run


def test_a_seed_that_diverged_leaves_the_curve_of_the_others_and_is_told_of(make_run: MakeRun) -> None:
    pytest.importorskip("altair")
    runs = [read_run(make_run(f"a{seed}", seed=seed, rounds=4)) for seed in (0, 1)]
    metric = "client_after.loss.mean"
    first, second = (run.series[metric][1] for run in runs)
    view = View.of([runs[0], diverging(runs[1], metric, after=2)], None)
    rows = series.curve_rows(view.groups, [metric])
    expected = [*(first[:2] + second[:2]) / 2, *first[2:]]
    np.testing.assert_allclose([row["value"] for row in rows], expected, rtol=1e-3)
    assert [row["spread"] is None for row in rows] == [False, False, True, True]
    assert series.not_finite(view.groups[0], [metric]) == 1
    section = curves(view, with_charts=True)
    assert section is not None
    said = "Not drawn: loss that is not finite (fedavg diverged in 1 of 2 seeds); a line is then the mean of the other"
    assert said in section.body
    assert "accuracy that is not finite" not in section.body


def test_where_nothing_is_finite_a_sentence_stands_for_the_chart(make_run: MakeRun) -> None:
    pytest.importorskip("altair")
    run = read_run(make_run("a", rounds=4))
    for metric in run.series:
        if ".loss" in metric:
            diverging(run, metric, after=0)
    section = curves(View.of([run], None), with_charts=True)
    assert section is not None
    assert list(section.charts) == ["accuracy"]
    said = "Loss over the rounds has no chart. Not drawn: loss that is not finite (fedavg diverged in 1 of 1 seed)."
    assert said in section.body
