"""Runs that are diagnosed: by a key of the experiment, on the command line, resumed, and after they are finished."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedstrata
from fedstrata.cli import main
from fedstrata.diagnostics import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.report.reading import read_run
from fedstrata.runs.afterwards import diagnose
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.stack import Stack

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 3, "rounds": 2, "steps": 2, "model": "mlp", "engine": "stacked", "device": "cpu",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def ending() -> Iterator[None]:
    """Register a diagnostic that a finished run tells too, and one that only the uploads tell."""

    @diagnostics.register("ending")
    @dataclass(frozen=True)
    class Ending(Diagnostic):
        needs: ClassVar[frozenset[Need]] = frozenset({Need.MODELS, Need.DATA})
        quantities: ClassVar[Mapping[str, Quantity]] = {"ending.loss": Quantity("Loss", "The loss of a client.")}
        afterwards: ClassVar[bool] = True

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            assert seen.probe is not None
            loss = seen.probe.test(seen.trained)[1]
            return Measured(clients={"ending.loss": loss}, clients_in_layers={"ending.loss": {"": loss}})

    @diagnostics.register("sent")
    @dataclass(frozen=True)
    class Sent(Diagnostic):
        needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
        quantities: ClassVar[Mapping[str, Quantity]] = {"sent.size": Quantity("Size", "How many tensors are sent.")}

        def due(self, round: int, rounds: int) -> bool:
            return round == rounds

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            return Measured(of_round={"sent.size": len(seen.uploads.tensors)})

    yield
    diagnostics.put("ending", None)
    diagnostics.put("sent", None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    fedstrata.run(**SMALL, out=folder)
    return folder


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed") / "run"
    fedstrata.run(**SMALL, diagnose="inertia, norms(every=2), ending", out=folder)
    return folder


def test_numbers_are_in_the_tables_and_the_cost_is_told(diagnosed: Path) -> None:
    run = read_run(diagnosed)

    assert set(run.layers["metric"]) == {
        "update", "cosine", "inertia.step", "norms.gradient_before", "norms.gradient_after", "norms.update",
    }  # fmt: skip
    assert set(run.diagnostics["round"][run.diagnostics["metric"] == "norms.update"]) == {2}
    assert {"diagnose/inertia", "diagnose/norms"} <= run.timings.totals().keys()
    cost = json.loads((diagnosed / "summary.json").read_bytes())["cost_of_diagnostics"]
    assert cost["norms"]["seconds"] == cost["norms"]["seconds_per_round"] > 0
    assert cost["inertia"]["seconds"] == pytest.approx(2 * cost["inertia"]["seconds_per_round"])


def test_the_mean_over_clients_stands_in_the_layers_table(diagnosed: Path) -> None:
    run = read_run(diagnosed)

    def rows(table: Mapping[str, np.ndarray], layer: str) -> np.ndarray:
        chosen = (table["round"] == 2) & (table["metric"] == "norms.update") & (table["layer"] == layer)
        return table["value"][chosen]

    for layer in set(run.layers["layer"]):
        assert rows(run.layers, layer) == pytest.approx(rows(run.diagnostics, layer).mean())
    parts = [rows(run.diagnostics, layer) ** 2 for layer in sorted(set(run.diagnostics["layer"])) if layer]
    assert rows(run.diagnostics, "") ** 2 == pytest.approx(np.sum(parts, axis=0))


def test_a_run_that_goes_on_drops_what_was_measured_only_at_its_end(tmp_path: Path) -> None:
    for rounds, name in ((1, "short"), (2, "whole")):
        fedstrata.run(**{**SMALL, "rounds": rounds}, diagnose="sent+inertia", out=tmp_path / name)
    fedstrata.extend(tmp_path / "short", 2)

    for table in ("rounds", "layers"):
        both = [(tmp_path / name / "metrics" / f"{table}.parquet").read_bytes() for name in ("short", "whole")]
        assert both[0] == both[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inerta", "inertia"),
        ("inertia, inertia", "asked for twice"),
        ("all(every=2)", "'all' takes no parameters"),
        ("norms(evry=2)", "every"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(FedStrataError, match=words.replace("(", r"\(")):
        fedstrata.run(**SMALL, diagnose=text)


def test_what_has_nothing_to_measure_is_left_out_with_a_word() -> None:
    """Refused, it would end a comparison in which other methods give it something to measure."""
    experiment = Experiment(**SMALL, method="local")
    with pytest.warns(FedStrataWarning, match="left out: sent, because with 'local' clients send nothing"):
        named = Driver.prepare(experiment.with_changes({"diagnose": "sent+inertia"}))
    assert [one.name for one in named.diagnosis.chosen] == ["inertia"]
    with pytest.warns(FedStrataWarning, match="sent, because with 'local' clients send nothing"):
        driver = Driver.prepare(experiment.with_changes({"diagnose": "all"}))
    names = {one.name for one in driver.diagnosis.chosen}
    assert {"inertia", "norms", "ending"} <= names
    assert "sent" not in names


def test_a_promise_of_privacy_does_not_cover_numbers_of_single_clients() -> None:
    with pytest.warns(FedStrataWarning, match="does not cover the numbers of 'sent'"):
        Driver.prepare(Experiment(**SMALL, method="central-dp", diagnose="sent"))


def test_a_finished_run_is_diagnosed_beside_its_metrics(plain: Path) -> None:
    before = {path.name: path.read_bytes() for path in (plain / "metrics").iterdir()}
    told = diagnose(plain, "ending")
    run = read_run(plain)

    assert told.rows["ending"] == 6
    assert {path.name: path.read_bytes() for path in (plain / "metrics").iterdir()} == before
    clients, losses = run.clients["ending.loss"]
    assert clients.tolist() == [0, 1, 2]
    assert run.diagnostics["value"].tolist() == losses.tolist()
    assert "ending.loss" not in RunFolder.open(plain).metrics().to_tables()["clients"]["metric"].to_pylist()


def test_diagnosing_again_replaces_the_numbers(plain: Path) -> None:
    first, second = (diagnose(plain, "ending"), len(read_run(plain).diagnostics["value"]))
    diagnose(plain, "ending")

    assert len(read_run(plain).diagnostics["value"]) == second == first.rows["ending"] / 2


def test_what_a_finished_run_does_not_tell_is_refused(plain: Path, diagnosed: Path) -> None:
    with pytest.raises(
        FedStrataError, match=r"'norms' cannot .* can be asked for while a run goes on, with --diagnose"
    ):
        diagnose(plain, "norms")
    with pytest.raises(FedStrataError, match="the run has measured it itself"):
        diagnose(diagnosed, "ending")


def test_the_command_line_diagnoses(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(plain), "--diagnose", "ending", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)

    assert told["rows"] == {"ending": 6}
    assert main(["diagnose", str(plain), "--diagnose", "norms"]) == 2


def test_the_command_line_lists_diagnostics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnostics", "norms", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)

    assert told["needs"] == [Need.MODELS.value, Need.DATA.value]
    assert [one["name"] for one in told["quantities"]] == list(diagnostics.get("norms").quantities)
    assert main(["diagnostics", "norms"]) == 0
    assert "on real sites" in capsys.readouterr().out


def test_the_terminal_tells_what_diagnostics_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--{key}={value}" for key, value in SMALL.items()]
    assert main(["run", *options, "--diagnose", "inertia", "--no-report", "--out", str(tmp_path / "run")]) == 0

    assert re.search(r"inertia +[\d,.]+ ms +[\d.]+ \w?B", capsys.readouterr().out)


def test_the_norms_are_those_of_plain_gradients_over_all_samples() -> None:
    result = fedstrata.run(**{**SMALL, "rounds": 1, "precision": "fp64"}, diagnose="norms")
    driver = result.driver
    assert driver is not None
    model, data = driver.network, driver.engine.client_side.data
    model.load_state_dict(driver.setting.initial)
    told = result.metrics.to_tables()["diagnostics"].to_pylist()
    for client in range(3):
        positions = torch.from_numpy(np.asarray(data.split.train[client]))[None]
        inputs, labels = data.make(positions, None, clients=torch.tensor([client]))
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[0]), labels[0]).backward()
        for layer in driver.setting.layers.layers:
            own = [model.get_parameter(name).grad.square().sum() for name in layer.parameters]
            (row,) = (
                row["value"]
                for row in told
                if (row["metric"], row["client"], row["layer"]) == ("norms.gradient_before", client, layer.name)
            )
            assert row == pytest.approx(float(torch.stack(own).sum().sqrt()), rel=1e-9)
