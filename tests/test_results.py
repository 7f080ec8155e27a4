"""The published results: small text files that agree with each other."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean, stdev

import pytest

from fedstrata.cli import main
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.report import read_runs, write_report
from fedstrata.report.rows import comparison_rows

RESULTS = Path(__file__).parents[1] / "results"
COMPARISONS = sorted(path.parent for path in RESULTS.glob("*/summary.csv"))


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_all_files_are_small_and_text():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    for path in files:
        assert path.suffix in {".csv", ".html", ".json", ".md", ".toml"}, path
        assert path.stat().st_size < 500 * 1024, path
    assert sum(path.stat().st_size for path in files) < 10**6


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: folder.name)
def test_the_summary_follows_from_the_rounds(folder):
    summary, rounds = rows(folder / "summary.csv"), rows(folder / "rounds.csv")
    assert {row["run"] for row in summary} == {row["run"] for row in rounds} == {p.stem for p in folder.glob("*.toml")}
    for row in summary:
        own = [line for line in rounds if line["run"] == row["run"]]
        values = [float(line[row["accuracy"]]) for line in own if line[row["accuracy"]]]
        assert float(row["last_round"]) == values[-1]
        assert float(row["last_ten"]) == pytest.approx(mean(values[-10:]), abs=1e-6)
        assert float(row["best"]) == max(values)
        for way in ("up", "down"):
            assert int(row[f"bytes_{way}"]) == sum(int(float(line[f"bytes.{way}"])) for line in own)
        assert int(row["rounds"]) == int(own[-1]["round"])


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: folder.name)
def test_every_experiment_can_be_repeated(folder):
    for row in rows(folder / "summary.csv"):
        experiment = Experiment.read(folder / f"{row['run']}.toml")
        assert (str(experiment.seed), str(experiment.rounds)) == (row["seed"], row["rounds"])
        assert (experiment.data, experiment.model, experiment.precision) == (
            row["data"], row["model"], row["precision"],
        )  # fmt: skip


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: folder.name)
def test_a_report_opens_what_is_published(folder, tmp_path):
    runs = read_runs([folder])
    told = {row["run"]: row for row in rows(folder / "summary.csv")}
    assert [run.path.name for run in runs] == list(told)
    for run in runs:
        row = told[run.path.name]
        assert run.summary["final"][row["accuracy"]] == float(row["last_round"])
        assert run.summary["last_ten"][row["accuracy"]] == pytest.approx(float(row["last_ten"]), abs=1e-6)
        assert (run.summary["bytes_up"], run.rounds_done) == (int(row["bytes_up"]), int(row["rounds"]))
        layers = [line for line in rows(folder / "layers.csv") if line["run"] == run.path.name]
        assert set(run.layers["layer"]) == {line["layer"] for line in layers}
    page = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Only tables of these runs were kept" in page
    assert all(row.label.partition(" [")[0].partition("(")[0] in page for row in comparison_rows(runs))


def test_published_runs_are_compared_as_the_readme_says():
    found = {row.label: row for row in comparison_rows(read_runs([RESULTS / "lips-cifar100"]))}
    lips = found["lips"]
    assert (round(100 * lips.last.mean, 1), lips.last.count) == (48.1, 2)
    assert round(100 * lips.comparison.difference.mean, 1) == 4.6
    assert lips.seconds is None
    cosine = next(run for run in read_runs([RESULTS / "lips-cifar100"]) if run.path.name == "fedbn-0").layers
    assert cosine["round"].max() == 300
    assert len(set(cosine["round"][cosine["metric"] == "cosine"])) > 20


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "holds published comparisons; give one of them: .*lips-cifar100'"),
        ("digits-defaults.csv", "is a table of 58 rows with the columns method, before_0, .*README.md' tells"),
        ("README.md", "is a file, not a run"),
        ("lips-cifar100/rounds.csv", "is a table of a published comparison; 'fedstrata report .*lips-cifar100' shows"),
        ("lips-cifar100/lips-0.toml", "is an experiment, not a run: 'fedstrata run .*lips-0.toml' runs it, and"),
    ],
)
def test_what_is_published_beside_runs_is_answered_with_what_it_is(path, said):
    with pytest.raises(FedStrataError, match=said):
        read_runs([RESULTS / path])


def test_the_command_line_opens_published_runs_and_leaves_their_folder_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(RESULTS.rglob("*"))
    assert main(["report", str(RESULTS / "ssfl-cifar10")]) == 0
    assert "42.9 ± 2.6" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert sorted(RESULTS.rglob("*")) == before


def test_the_tables_under_attack_are_those_of_the_published_numbers():
    told = rows(RESULTS / "robust-digits.csv")
    assert len(told) == 2 * 8 * 5
    page = (RESULTS.parent / "docs" / "robust.md").read_text(encoding="utf-8")
    for row in told:
        values = [float(row[f"seed_{seed}"]) for seed in range(3)]
        assert float(row["mean"]) == pytest.approx(mean(values), abs=0.01)
        assert float(row["deviation"]) == pytest.approx(stdev(values), abs=0.01)
    for partition in ("iid", "dirichlet:0.1"):
        of_partition = [row for row in told if row["partition"] == partition]
        for method in {row["method"] for row in of_partition}:
            of_method = [row for row in of_partition if row["method"] == method]
            cells = (f"{float(row['mean']):.1f} ± {float(row['deviation']):.1f}" for row in of_method)
            assert f"| `{method}` | {' | '.join(cells)} |" in page


def test_the_demo_is_what_was_published():
    told = rows(RESULTS / "demo-digits" / "summary.csv")
    section = (RESULTS / "README.md").read_text(encoding="utf-8").partition("## The demo")[2].partition("\n## ")[0]
    for method in ("fedavg", "ssfl", "fedbn", "lips"):
        [line] = [line for line in section.splitlines() if line.startswith(f"| `{method}` |")]
        for seeds in (("0", "1", "2"), ("10", "11", "12")):
            own = [row for row in told if row["method"] == method and row["seed"] in seeds]
            values = [100 * float(row["last_round"]) for row in own]
            assert f"{mean(values):.1f} ± {stdev(values):.1f}" in line

    def words(text):
        return text.replace("\\\n", " ").split()

    makefile = (RESULTS.parent / "Makefile").read_text(encoding="utf-8")
    command = section.partition("```\n")[2].partition("```")[0]
    assert words(command) == ["fedstrata", *words(makefile.partition("DEMO := ")[2].partition("\n\n")[0])]
