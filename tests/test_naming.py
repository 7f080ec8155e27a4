"""Clients by the names of their sites: in the run folder, and where a client is asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import fedstrata
from fedstrata.cli import main
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.naming import number_of, unknown_client

SITES = ("south", "north [/b]", "1")
SMALL = {"model": "mlp(hidden=4)", "method": "ditto", "rounds": 1, "epochs": 1}


def hospitals() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    chance = np.random.default_rng(0)
    sizes = dict(zip(SITES, (40, 60, 80), strict=True))
    return {
        name: (chance.normal(size=(size, 3)).astype(np.float32), np.arange(size) % 2) for name, size in sizes.items()
    }


def table(folder: Path) -> str:
    rows = [
        f"{site},{x[0]},{y}"
        for site, (inputs, labels) in hospitals().items()
        for x, y in zip(inputs, labels, strict=True)
    ]
    path = folder / "patients.csv"
    path.write_text("\n".join(["hospital,dose,outcome", *rows]))
    return f"table(path={path}, label=outcome, site=hospital)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedstrata.Result:
    folder = tmp_path_factory.mktemp("runs")
    return fedstrata.run(data=table(folder), out=folder / "run", **SMALL)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(list(map(str, arguments))) == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_names_of_sites_are_in_the_run_folder(run: fedstrata.Result, tmp_path: Path) -> None:
    assert RunFolder.open(run.out).data()["client_names"] == list(SITES)
    given = fedstrata.run(data=hospitals(), out=tmp_path / "dict", **SMALL)
    assert RunFolder.open(given.out).client_names() == list(SITES)


def test_with_another_partition_there_are_no_names(run: fedstrata.Result, tmp_path: Path) -> None:
    data = run.experiment.data
    mixed = fedstrata.run(data=data, partition="iid", clients=3, out=tmp_path / "iid", **SMALL)
    assert "client_names" not in RunFolder.open(mixed.out).data()
    assert RunFolder.open(mixed.out).client_names() == []


def test_a_client_is_tested_by_its_name(run: fedstrata.Result, capsys: pytest.CaptureFixture[str]) -> None:
    named = told(capsys, "evaluate", run.out, "--client", "south", "--part", "train")
    assert named == told(capsys, "evaluate", run.out, "--client", 0, "--part", "train")
    assert (named["samples"], named["part"]) == (30, "train, south (client 0)")
    assert main(["evaluate", str(run.out), "--client", SITES[1]]) == 0
    assert "test, north [/b] (client 1)" in " ".join(capsys.readouterr().out.split())


def test_a_name_that_is_a_number_of_a_client_is_the_number(
    run: fedstrata.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "evaluate", run.out, "--client", "1")["part"] == "test, north [/b] (client 1)"


def test_predictions_and_exports_take_names(
    run: fedstrata.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.csv").write_text("dose\n-1.5\n0.5\n")
    asked = ("predict", run.out, tmp_path / "new.csv", "--client")
    assert told(capsys, *asked, "south") == told(capsys, *asked, 0)
    monkeypatch.chdir(tmp_path)
    assert told(capsys, "export", run.out, "--client", "south")["out"] == "model-client-0"
    assert json.loads((tmp_path / "model-client-0" / "model.json").read_text())["origin"]["client"] == 0
    lost = refused(capsys, "predict", "model-client-0", tmp_path / "new.csv", "--client", "south")
    assert "'model-client-0' is not the folder of a run, so that there is no client south in it." in lost


def test_an_unknown_client_is_told_the_nearest_name(run: fedstrata.Result, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "evaluate", run.out, "--client", "suoth")
    assert "There is no client 'suoth'; the run has 3, from 0 to 2. Did you mean 'south'?" in said
    said = refused(capsys, "evaluate", run.out, "--client", "zzz")
    assert f"the run has 3, from 0 to 2. Their names: {', '.join(SITES)}." in said


def test_without_names_only_numbers_are_known() -> None:
    assert number_of("2", 3, ()) == 2
    with pytest.raises(FedStrataError, match=r"no client 'north'; the run has 3, from 0 to 2\. They have no names\.$"):
        number_of("north", 3, ())
    with pytest.raises(FedStrataError, match=r"no client -1; the run has 3, from 0 to 2\.$"):
        number_of("-1", 3, ())
    assert str(unknown_client("zzz", 14, [f"q{one:02}" for one in range(14)])).endswith("q10, q11, ...")


def test_a_run_folder_of_before_has_no_names(run: fedstrata.Result, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.out / "data.json"
    kept = path.read_text()
    try:
        path.write_text(json.dumps({key: value for key, value in json.loads(kept).items() if key != "client_names"}))
        assert told(capsys, "evaluate", run.out, "--client", 0)["part"] == "test, client 0"
        assert "They have no names." in refused(capsys, "evaluate", run.out, "--client", "south")
    finally:
        path.write_text(kept)


def test_python_takes_names_too_and_a_whole_number_is_no_name(run: fedstrata.Result) -> None:
    """The second site by number is called 1, like the third one by name: a number is one, a text first of all, too."""
    read = dataclasses.replace(run, driver=None)
    for one in (run, read):
        assert one.client_model("south").card == one.client_model(0).card
        assert one.client_model("1").card == one.client_model(1).card
    assert fedstrata.load(run.out, client="south").card == run.client_model(0).card
    with pytest.raises(FedStrataError, match=r"There is no client 'suoth'.* Did you mean 'south'"):
        run.client_model("suoth")


def test_clients_that_are_sites_may_be_said_to_be_divided_naturally() -> None:
    assert fedstrata.run(data=hospitals(), partition="natural", clients=3, **SMALL).experiment.clients == 3
