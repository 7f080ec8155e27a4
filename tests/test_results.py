"""The published results: small text files that agree with each other."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedstrata.experiment import Experiment

RESULTS = Path(__file__).parents[1] / "results"
COMPARISONS = sorted(folder for folder in RESULTS.iterdir() if folder.is_dir())


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_all_files_are_small_and_text():
    for path in RESULTS.rglob("*"):
        if path.is_file():
            assert path.suffix in {".csv", ".toml", ".md", ".html"}, path
            assert path.stat().st_size < 500 * 1024, path


@pytest.mark.parametrize("folder", COMPARISONS, ids=lambda folder: folder.name)
def test_the_summary_follows_from_the_rounds(folder):
    summary, rounds = rows(folder / "summary.csv"), rows(folder / "rounds.csv")
    assert {row["run"] for row in summary} == {row["run"] for row in rounds} == {p.stem for p in folder.glob("*.toml")}
    for row in summary:
        own = [line for line in rounds if line["run"] == row["run"]]
        values = [float(line[row["accuracy"]]) for line in own if line[row["accuracy"]]]
        assert float(row["last_round"]) == values[-1]
        assert float(row["last_ten"]) == pytest.approx(sum(values[-10:]) / 10, abs=1e-6)
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
