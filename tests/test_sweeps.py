"""Sweeps: which runs they make, how these are told apart, what they are tested against, and the charts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata import Experiment, FedStrataError
from fedstrata.cli import main
from fedstrata.comparing import plan
from fedstrata.report.groups import group_runs
from fedstrata.report.notes import notes, reference_name
from fedstrata.report.opening import read_runs
from fedstrata.report.rows import Row, comparison_rows
from fedstrata.report.sweeps import axes, inertia, sweep_rows
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.sweeping import cells, read_sweeps, swept_methods, with_parameter

TINY = Experiment(
    model="mlp(hidden=4-4)", clients=2, rounds=3, epochs=1, batch_size=256, engine="stacked", evaluate_every=3,
    partition="dirichlet(alpha=1.0, samples=20)", reference_round=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("clients", "is no sweep; write it like"),
        ("clients=", "is no sweep; write it like"),
        ("clients=4", "needs at least two values"),
        ("clients=4,4", "needs at least two values"),
        ("client=4,5", "Did you mean 'clients'"),
        ("seed=1,2", "--seeds 5"),
        ("method=fedavg,fedbn", "listed, as what is compared"),
        ("rounds.x=1,2", "'rounds' has no parameters"),
        (["clients=1,2", "clients=3,4"], "swept twice"),
    ],
)
def test_what_cannot_be_swept_is_refused_in_a_sentence(given: Any, said: str) -> None:
    with pytest.raises(FedStrataError, match=said):
        read_sweeps(given)


def test_a_grid_has_every_combination() -> None:
    made = list(cells(TINY, read_sweeps({"partition.alpha": [0.1, 1.0], "clients": [2, 3]})))
    assert [words for words, _ in made] == [
        "alpha=0.1, clients=2", "alpha=0.1, clients=3", "alpha=1.0, clients=2", "alpha=1.0, clients=3",
    ]  # fmt: skip
    assert {cell.partition for _, cell in made} == {
        "dirichlet(alpha=0.1, samples=20)", "dirichlet(alpha=1.0, samples=20)",
    }  # fmt: skip
    assert made[3][1] == TINY.with_changes({"clients": 3})


@pytest.mark.parametrize(
    ("key", "text", "path", "value", "changed"),
    [
        ("optimiser", "sgd(momentum=0.9)", ("learning_rate",), 0.5, "sgd(learning_rate=0.5, momentum=0.9)"),
        ("partition", "dirichlet:0.5", ("alpha",), 0.1, "dirichlet(alpha=0.1)"),  # also where it is the default
        ("model", "cnn", ("depth",), 5, "cnn(depth=5)"),
        ("transforms", "crop:1+normalise", ("crop", "padding"), 2, "crop(padding=2)+normalise"),
        ("method", "fedbn+fedprox", ("mu",), 1.0, "fedbn+fedprox(mu=1.0)"),
        ("method", "fedavg", ("mu",), 1.0, None),
    ],
)
def test_a_parameter_is_set_inside_a_text(key: str, text: str, path: Any, value: Any, changed: str | None) -> None:
    assert with_parameter(key, text, path, value) == changed


def test_whose_parameter_it_is_must_be_said_where_several_have_it() -> None:
    with pytest.raises(FedStrataError, match=r"say whose: method\.fedprox\.mu or method\.fednova\.mu"):
        with_parameter("method", "fedprox+fednova", ("mu",), 1.0)
    assert with_parameter("method", "fedprox+fednova", ("fednova", "mu"), 1.0) == "fedprox+fednova(mu=1.0)"


def test_methods_without_the_parameter_are_run_once() -> None:
    swept = read_sweeps("method.mu=0.1,1")
    assert swept_methods(["fedavg", "fedprox"], swept) == ["fedavg", "fedprox(mu=0.1)", "fedprox(mu=1.0)"]
    with pytest.raises(FedStrataError, match=r"no parameter of these methods called 'method\.mu'.* Known: "):
        swept_methods(["fedavg", "fedbn"], swept)


def test_a_parameter_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for sweep, said in (("partition.alpha=0.1,-1", "outside"), ("partition.beta=1,2", "Known: partition.alpha, ")):
        with pytest.raises(FedStrataError, match=said):
            fedstrata.compare("fedavg", TINY, sweep=sweep, out=tmp_path)
    assert not any(tmp_path.iterdir())


def test_without_a_partition_its_default_is_swept() -> None:
    planned = plan(Experiment(), ["fedavg"], 1, None, sweeps=read_sweeps("partition.alpha=0.1,1"))
    assert [run.experiment.partition for run in planned] == ["dirichlet(alpha=0.1)", "dirichlet(alpha=1.0)"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("swept")
    fedstrata.compare("fedavg, local", TINY, seeds=2, sweep="partition.alpha=0.1,1", out=out)
    return out


def table(folder: Path) -> list[Row]:
    paths = sorted(folder.glob("*-seed*"), key=lambda path: path.stat().st_mtime_ns)
    return comparison_rows(read_runs(paths))


def test_each_cell_has_a_folder_and_is_not_run_again(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {
        f"{method}-alpha={alpha}-seed{seed}"
        for method in ("fedavg", "local")
        for alpha in ("0.1", "1.0")
        for seed in (0, 1)
    }
    assert {path.name for path in swept.iterdir()} == {*names, "order.json"}
    begun = {path: path.stat().st_mtime_ns for path in swept.glob("*/summary.json")}
    (swept.parent / "tiny.toml").write_text(TINY.to_toml())
    arguments = ["fedavg, local", str(swept.parent / "tiny.toml"), "--seeds", "2", "--out", str(swept), "--no-report"]
    assert main(["compare", *arguments, "--sweep", "partition.alpha=0.1,1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {path: path.stat().st_mtime_ns for path in swept.glob("*/summary.json")} == begun
    assert [(row["method"], row["settings"]) for row in told["methods"]] == [
        ("fedavg [alpha=0.1]", {"partition.alpha": 0.1}), ("local [alpha=0.1]", {"partition.alpha": 0.1}),
        ("fedavg [alpha=1.0]", {"partition.alpha": 1.0}), ("local [alpha=1.0]", {"partition.alpha": 1.0}),
    ]  # fmt: skip
    assert main(["compare", *arguments, "--quiet"]) == 2  # without the sweep it is another experiment
    assert "holds a run of another experiment" in capsys.readouterr().err


def test_methods_are_tested_against_the_first_at_the_same_setting(swept: Path) -> None:
    rows = table(swept)
    assert [row.comparison and row.comparison.reference for row in rows] == [
        None, "fedavg [alpha=0.1]", None, "fedavg [alpha=1.0]",
    ]  # fmt: skip
    for row in rows[1::2]:
        assert row.comparison is not None
        assert row.comparison.difference is not None
        assert row.comparison.difference.count == 2  # paired by seed and split, which another alpha would not share
    assert reference_name(rows) == "fedavg at the same setting"
    assert any("against fedavg at the same setting" in note for note in notes(rows))


def test_the_chart_has_a_line_for_each_method(swept: Path) -> None:
    runs = read_runs(sorted(swept.glob("*-seed*")))
    [axis] = axes(group_runs(runs))
    assert axis.name == "partition.alpha"
    assert {label: list(points) for label, points in axis.lines.items()} == {"fedavg": [0.1, 1.0], "local": [0.1, 1.0]}
    rows = sweep_rows(axis, "accuracy")
    by_hand = [
        RunFolder.open(swept / f"fedavg-alpha=1.0-seed{seed}").summary()["final"]["client_after.accuracy.mean"]
        for seed in (0, 1)
    ]
    [point] = [row for row in rows if (row["line"], row["at"]) == ("fedavg", 1.0)]
    assert point["value"] == pytest.approx(sum(by_hand) / 2)
    measured = sweep_rows(axis, "inertia")
    assert {row["line"] for row in measured} == {"fedavg"}  # nothing travels where everybody trains alone
    run = next(run for run in runs if run.path.name == "fedavg-alpha=1.0-seed0")
    last = RunFolder.open(run.path).metrics().of_layers(3)["cosine"]
    assert inertia(run) == pytest.approx(list(last.values())[1])  # the middle one of three layers


def test_the_page_shows_both_charts(swept: Path) -> None:
    pytest.importorskip("altair")
    from fedstrata.report.page import report

    page = report(read_runs(sorted(swept.glob("*-seed*"))))
    assert "Accuracy against partition.alpha" in page
    assert "Inertia against partition.alpha" in page


def test_methods_that_differ_in_a_number_are_a_line_too() -> None:
    runs = fedstrata.compare("fedavg", TINY.with_changes({"rounds": 1}), sweep={"clients": [2, 3], "epochs": [1, 2]})
    assert [row.label for row in runs.rows] == [
        "fedavg [clients=2, epochs=1]", "fedavg [clients=2, epochs=2]", "fedavg [clients=3, epochs=1]",
        "fedavg [clients=3, epochs=2]",
    ]  # fmt: skip
    assert runs.result("fedavg [clients=3, epochs=2]").experiment.epochs == 2
    assert runs.to_rows()[2]["clients"] == 3
