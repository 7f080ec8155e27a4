"""A finished run goes on: the same bytes as one long run where nothing plans for the end, and a word where it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedstrata
from fedstrata.cli import main
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.methods import Method, methods
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.signals import Interrupted
from fedstrata.testing.world import prepare

SHORT = Experiment(clients=3, rounds=3, steps=2, model="mlp(hidden=16)", method="fedprox", engine="loop", seed=2)
SAME = ("metrics/rounds.parquet", "metrics/clients.parquet", "metrics/layers.parquet", "model.safetensors")
SAME = (*SAME, "clients.safetensors", "model.json")


def same_bytes(one: Path, other: Path) -> None:
    for name in SAME:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    summaries = [json.loads((path / "summary.json").read_text()) for path in (one, other)]
    for summary in summaries:
        del summary["seconds"], summary["aggregation_seconds"]
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"evaluate_every": 2},  # round 3 was evaluated only because it was the last
        {"method": "fedavg-ft", "evaluate_every": 2},  # and clients adapted their models after it
        {"method": "ditto", "schedule": "exponential", "validation_fraction": 0.2},
        {"method": "fedbabu", "validation_fraction": 0.2},  # adapted models were chosen that are none of a round
        {"schedule": "plateau(patience=0)"},
        {"metrics": "f1+recall:each", "evaluate_every": 4},
    ],
    ids=str,
)
def test_it_ends_with_the_bytes_of_one_long_run(changes: dict[str, object], tmp_path: Path) -> None:
    experiment = SHORT.with_changes(changes)
    fedstrata.run(experiment, out=tmp_path / "long", rounds=5)
    fedstrata.run(experiment, out=tmp_path / "extended")
    result = fedstrata.extend(tmp_path / "extended", 5)
    assert result.summary["rounds"] == 5
    assert RunFolder.open(tmp_path / "extended").experiment.rounds == 5
    same_bytes(tmp_path / "long", tmp_path / "extended")


def test_it_can_be_interrupted_before_its_first_checkpoint(tmp_path: Path) -> None:
    experiment = SHORT.with_changes({"evaluate_every": 2})

    def stop(view: fedstrata.RoundView) -> None:
        if view.round == 4:
            raise Interrupted(2, 4, None)

    fedstrata.run(experiment, out=tmp_path / "long", rounds=5)
    fedstrata.run(experiment, out=tmp_path / "parts")
    with pytest.raises(Interrupted):
        fedstrata.extend(tmp_path / "parts", 5, callbacks=[stop])
    fedstrata.resume(tmp_path / "parts")
    same_bytes(tmp_path / "long", tmp_path / "parts")


def test_what_ended_early_goes_on(tmp_path: Path) -> None:
    def stop(view: fedstrata.RoundView) -> None:
        if view.round == 2:
            raise fedstrata.StopRun("enough")

    fedstrata.run(SHORT, out=tmp_path / "long")
    fedstrata.run(SHORT, out=tmp_path / "early", rounds=9, callbacks=[stop])
    assert RunFolder.open(tmp_path / "early").summary()["stopped"] == "enough"
    result = fedstrata.extend(tmp_path / "early", 3)
    assert "stopped" not in result.summary
    same_bytes(tmp_path / "long", tmp_path / "early")


def test_where_something_plans_for_the_end_a_word_says_so(tmp_path: Path) -> None:
    fedstrata.run(SHORT, out=tmp_path / "cosine", schedule="cosine")
    with pytest.warns(FedStrataWarning, match=r"not end like one run of 5 rounds: the schedule 'cosine' plans for all"):
        fedstrata.extend(tmp_path / "cosine", 5)
    fedstrata.run(SHORT, out=tmp_path / "dispfl", method="dispfl(density=0.5, neighbours=2)")
    with pytest.warns(FedStrataWarning, match="'dispfl' would have begun otherwise, because its masks move less"):
        fedstrata.extend(tmp_path / "dispfl", 5)


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    fedstrata.run(SHORT, out=tmp_path / "run")
    with pytest.raises(FedStrataError, match="has 3 rounds already; to go on, give more than that, not 3"):
        fedstrata.extend(tmp_path / "run", 3)
    with pytest.raises(FedStrataError, match="'many' does not fit the parameter 'rounds'"):
        fedstrata.extend(tmp_path / "run", "many")  # type: ignore[arg-type]
    fedstrata.run(SHORT, out=tmp_path / "private", method="central-dp(epsilon=50)", transforms="none")
    with pytest.raises(FedStrataError, match=r"more rounds would spend more than 'central-dp.*' promises"):
        fedstrata.extend(tmp_path / "private", 5)
    assert RunFolder.open(tmp_path / "private").finished


def test_what_cannot_begin_again_stays_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{number % 7},{number % 5},{'ab'[number % 2]}\n" for number in range(60))
    (tmp_path / "x.csv").write_text(f"one,two,label\n{rows}")
    data = f"table(path={tmp_path / 'x.csv'}, label=label)"
    fedstrata.run(SHORT, out=tmp_path / "table", data=data, model="mlp", clients=2)
    arrays = fedstrata.from_arrays(torch.rand(60, 4), [0, 1] * 30)
    fedstrata.run(SHORT, out=tmp_path / "arrays", data=arrays, model="mlp", clients=2)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*.*") if path.is_file()}
    (tmp_path / "x.csv").rename(tmp_path / "y.csv")
    assert main(["run", "--continue", str(tmp_path / "table"), "--rounds", "4", "--no-report"]) == 2
    assert "x.csv" in capsys.readouterr().err
    (tmp_path / "x.csv").write_text(f"one,two,label\n{rows.replace('6', '8')}")
    with pytest.raises(FedStrataError, match=r"The data of the run in .* has changed since it began"):
        fedstrata.extend(tmp_path / "table", 4)
    with pytest.raises(FedStrataError, match="data from Python"):
        fedstrata.extend(tmp_path / "arrays", 5)
    assert {path: path.read_bytes() for path in before} == before
    assert main(["export", str(tmp_path / "table"), "--out", str(tmp_path / "exported")]) == 0
    (tmp_path / "x.csv").unlink()
    (tmp_path / "y.csv").rename(tmp_path / "x.csv")
    assert fedstrata.extend(tmp_path / "table", 4).summary["rounds"] == 4


EARLY = {"transient": "transient(every=1)", "lips": "lips(every=1)", "fedlama": "fedlama(warmup=0, factor=2)"}
"""With parameters under which a method acts within three rounds."""


@pytest.mark.filterwarnings("ignore::fedstrata.FedStrataWarning")
@pytest.mark.parametrize("name", methods.names())
def test_methods_say_whether_they_plan_ahead(name: str) -> None:
    """What does not say so must begin alike, whether three rounds are all or some."""
    method = EARLY.get(name, name)
    states = []
    for rounds in (3, 7):
        driver = prepare(method, "stacked", rounds=rounds, steps=1, evaluate_every=9)
        for _ in range(3):
            driver.step()
        states.append({**driver.engine.server.model, **driver.engine.clients()})
    alike = all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
    assert alike or Method.make(method).plans_ahead


def test_the_command_line_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fedstrata.run(SHORT, out=tmp_path / "run")
    run = str(tmp_path / "run")
    assert main(["run", "--continue", run, "--rounds", "4", "--no-report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 4
    for arguments, sentence in {
        ("--continue", run): "Say how many rounds the run is to have in all",
        ("--continue", run, "--rounds", "9", "--seed", "1"): "'--seed' cannot be given with --continue",
        ("--continue", run, "--rounds", "9", "--out", "x"): "'--out' cannot be given with --continue",
        ("--continue", run, "--rounds", "4"): "has 4 rounds already",
        ("--continue", str(tmp_path), "--rounds", "4"): "is not a run folder",
    }.items():
        assert main(["run", *arguments]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())
