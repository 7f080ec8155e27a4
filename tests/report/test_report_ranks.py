"""Ranks over settings: the table behind them, the chart of critical differences, and when the page has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_runs import MakeRun

from fedstrata.ranks import mean_ranks
from fedstrata.report import read_run
from fedstrata.report.opening import read_runs
from fedstrata.report.page import report
from fedstrata.report.paper_figures import FiguresAsked, write_figures
from fedstrata.report.rank_charts import critical_difference_chart, rank_rows
from fedstrata.report.ranking import MEASURES, rank_table, ranking
from fedstrata.report.view import View

LEVELS = {"fedavg": (0.5, 0.9), "fedbn": (0.7, 0.6), "local": (0.3, 0.3)}
"""What methods reach with 8 and with 6 clients: fedbn and fedavg are first once each, local is always the last."""


@pytest.fixture
def folders(make_run: MakeRun) -> list[Path]:
    return [
        make_run(f"{method}-{clients}", method=method, level=level, clients=clients, rounds=2)
        for method, levels in LEVELS.items()
        for clients, level in zip((8, 6), levels, strict=True)
    ]


def test_methods_are_ranked_over_settings_by_each_measure(folders: list[Path]) -> None:
    view = View.of(read_runs(folders), None)
    found = rank_table(view.groups, view.rows)
    assert {method: len(values) for method, values in found.items()} == dict.fromkeys(LEVELS, 2)
    assert mean_ranks(found) == {"fedavg": 1.5, "fedbn": 1.5, "local": 3.0}
    _, measure, higher = MEASURES["Fairness"]
    unfair = rank_table(view.groups, view.rows, measure)
    by_hand = {
        run.experiment["method"] + str(run.experiment["clients"]): run.summary["final"]["client_after.accuracy.std"]
        ** 2
        for run in view.runs
    }
    assert not higher
    for method, values in unfair.items():
        assert values == pytest.approx([by_hand[method + clients] for clients in ("8", "6")])
    _, measure, _ = MEASURES["Incentive"]
    assert rank_table(view.groups, view.rows, measure) == {}  # only fedbn is neither local nor fedavg


def test_without_three_methods_at_all_of_two_settings_nothing_is_ranked(folders: list[Path]) -> None:
    for some in (folders[:4], folders[::2], folders[:5]):
        assert ranking(View.of(read_runs(some), None), with_charts=False) is None


def test_incentives_in_a_sweep_are_against_local_and_fedavg_of_the_same_setting(folders: list[Path]) -> None:
    rows = {row.label: row for row in View.of(read_runs(folders), None).rows}
    parts = {label: row.incentive for label, row in rows.items() if label.startswith("fedbn")}
    assert len(parts) == 2
    assert [part is not None and part.count for part in parts.values()] == [1, 1]


def test_the_page_has_the_table_and_what_the_test_says(folders: list[Path]) -> None:
    runs = [read_run(path) for path in folders]
    page = report(runs, with_charts=False)
    assert "Ranks over settings" in page
    assert "Over 2 settings the 3 methods cannot be told apart by the Friedman test: chi-square 3.00, p = 0.22." in page
    assert "Ranks over settings" not in report(runs[:2], with_charts=False)


def test_the_chart_is_laid_out_with_the_best_on_top() -> None:
    rows = rank_rows({"c": 2.5, "a": 1.0, "b": 1.8, "d": 4.0}, 1.0)
    assert [row["row"] for row in rows["methods"]] == ["a", "b", "c", "d"]
    assert [(row["from"], row["to"], row["methods"]) for row in rows["bars"]] == [
        (1.0, 1.8, "a, b"),
        (1.8, 2.5, "b, c"),
    ]
    assert rows["difference"] == [{"row": "critical difference", "from": 1.0, "to": 2.0, "difference": 1.0}]
    pytest.importorskip("altair")
    drawn = critical_difference_chart({"a": 1.0, "b": 3.0}, 1.0).specification()
    assert drawn["datasets"]["bars"] == []


@pytest.mark.slow
def test_the_chart_is_written_like_the_others(folders: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    section = ranking(View.of(read_runs(folders), None), with_charts=True)
    assert section is not None
    assert "critical difference of Nemenyi" in str(section.body)
    write_figures(folders, FiguresAsked(tmp_path / "figures"))
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"ranks.svg", "ranks.pdf", "ranks.png"} <= names
    assert any(name.startswith("ranks") and name.endswith(".csv") for name in names)
