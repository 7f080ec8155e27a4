"""Files with components of one's own, wherever the command line can name such a component."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_calls import TINY, Call
from typer.main import get_command

from fedstrata.cli import app
from fedstrata.cli.listing import LISTED
from fedstrata.methods import methods
from fedstrata.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("fresh_imports")

COMPONENTS = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedstrata.data import DatasetSource, Partitioner, Split, datasets, from_arrays, partitions
from fedstrata.methods import Facts, Kept, Part, methods
from fedstrata.models import ModelSpec, models
from fedstrata.spec import parameter

print("this is no result")


@methods.register("mine")
@dataclass(frozen=True)
class Mine(Part):
    "My method."
    facts: ClassVar[Facts] = Facts("own", "nobody")

    def keeps(self, layers):
        return Kept(personal=layers.head_names)


@models.register("net")
@dataclass(frozen=True)
class Net(ModelSpec):
    "My model."

    def build(self, input_shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Linear(8, classes))


@datasets.register("points")
@dataclass(frozen=True)
class Points(DatasetSource):
    "My data."

    def load(self, root=None):
        labels = torch.arange(120) % 3
        return from_arrays(torch.nn.functional.one_hot(labels).float(), labels, name=str(self))


@partitions.register("halves")
@dataclass(frozen=True)
class Halves(Partitioner):
    "My division."
    seed: int | None = parameter(None, "Not used.")

    def split(self, dataset, clients):
        parts = ([part[client::clients] for client in range(clients)] for part in (dataset.train, dataset.test))
        return Split(*map(tuple, parts))
"""
OWN = ("--method", "mine", "--model", "net", "--data", "points", "--partition", "halves")
SHORT = ("--clients", "3", "--rounds", "1", "--epochs", "1", "--engine", "stacked", "--no-report")


@pytest.fixture
def file(call: Call, tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(COMPONENTS)
    return path


def test_every_command_that_names_components_can_import_some() -> None:
    able = {
        name
        for name, command in get_command(app).commands.items()
        if any("--import" in parameter.opts for parameter in command.params)
    }
    naming = {"run", "compare", "layers", "partition", *LISTED}
    assert able == naming | {"predict", "evaluate", "export"} | {"server", "client", "deploy"}


def test_run_report_and_resume(call: Call, file: Path, tmp_path: Path) -> None:
    told = call("run", "--import", "own.py", *OWN, *SHORT, "--out", "a", "--json")
    assert (told.code, told.json["method"], told.json["data"]) == (0, "mine", "points")
    assert "this is no result" in told.err
    [text] = RunFolder.open(Path("a")).experiment.imports
    assert text.startswith("own.py@sha256:")
    assert call("report", "a", "--quiet").code == 0
    again = call("run", "a/experiment.toml", "--seed", "1", *SHORT, "--out", "b", "--quiet")
    assert (again.code, again.out) == (0, "")
    shown = call("run", "--import", "own.py", *OWN, *SHORT, "--out", "c")
    assert "--import own.py" in shown.out.replace("\n", " ")


def test_an_experiment_file_names_what_it_needs(call: Call, file: Path, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    file.rename("study/own.py")
    Path("study/experiment.toml").write_text('imports = ["own.py"]\nmethod = "mine"\nmodel = "mlp(hidden=8)"\n')
    assert call("run", "study/experiment.toml", *SHORT, "--out", "a", "--quiet").code == 0
    other = COMPONENTS.replace("My method.", "My better method.")
    Path("own.py").write_text(other)
    assert call("run", "study/experiment.toml", "--import", "own.py", *SHORT, "--out", "b", "--quiet").code == 0
    assert Path("b/imports/own.py").read_text() == other
    assert Path("a/imports/own.py").read_text() == COMPONENTS
    assert call("run", "--set", "imports=own.py", *OWN, *SHORT, "--out", "c", "--quiet").code == 0


def test_compare(call: Call, file: Path) -> None:
    arguments = ("compare", "fedavg, mine", "--import", "own.py", *OWN[2:], *SHORT, "--out", "c", "--json")
    first = call(*arguments)
    assert [row["method"] for row in first.json["methods"]] == ["fedavg", "mine"]
    assert "2 of 2 runs are finished already" in call(*arguments).err
    file.write_text(COMPONENTS.replace("My method.", "Changed."))
    changed = call(*arguments)
    assert (changed.code, changed.out) == (2, "")
    assert "holds a run of another experiment (imports is own.py@sha256:" in changed.err


@pytest.mark.parametrize(
    ("command", "name", "summary"),
    [
        ("methods", "mine", "My method."),
        ("models", "net", "My model."),
        ("datasets", "points", "My data."),
        ("partitions", "halves", "My division."),
    ],
)
def test_lists_tell_what_comes_from_elsewhere(call: Call, file: Path, command: str, name: str, summary: str) -> None:
    text = " ".join(call(command, "--import", "own.py").out.split())
    assert f"{name} {summary} (from own.py)" in text
    assert text.count("(from ") == 1
    listed = {entry["name"]: entry["origin"] for entry in call(command, "--import", "own.py", "--json").json}
    assert {key: origin for key, origin in listed.items() if origin} == {name: "own.py"}
    assert "from own.py" in " ".join(call(command, name, "--import", "own.py").out.split())


def test_layers_and_partition(call: Call, file: Path) -> None:
    rows = call("layers", "--import", "own.py", "--model", "net", "--data", "points", "--method", "mine", "--json").json
    assert [row["personal"] for row in rows] == ["", "all"]
    own = ("--data", "points", "--partition", "halves", "--clients", "2")
    assert call("partition", "--import", "own.py", *own, "--json").json["sizes"] == [45, 45]


@pytest.mark.parametrize("command", [("run",), ("compare", "fedavg"), ("methods",), ("layers",), ("partition",)])
def test_a_file_that_cannot_be_imported_is_told_in_one_sentence(call: Call, tmp_path: Path, command: list[str]) -> None:
    assert call(*command, "--import", "absent.py").sentence.startswith("There is no file 'absent.py' to import")
    Path("bad.py").write_text("import json\n\nraise KeyError('x')\n")
    assert call(*command, "--import", "bad.py").sentence == "'bad.py' cannot be imported: line 3: KeyError: 'x'."
    Path("empty.py").write_text("")
    assert "registers nothing" in call(*command, "--import", "empty.py").sentence
    traced = call(*command, "--import", "bad.py", "--debug")
    assert traced.code == 2
    assert "Traceback" in traced.err


def test_two_files_that_take_the_same_name_are_both_named(call: Call, file: Path) -> None:
    Path("other.py").write_text(COMPONENTS.replace("My method", "Another method"))
    said = call("run", *TINY, "--import", "own.py", "--import", "other.py")
    assert said.code == 2
    assert "'mine', from own.py; choose another name in other.py" in said.err
    assert methods.describe("mine")["summary"] == "My method."


def test_a_client_imports_before_it_connects(call: Call) -> None:
    pytest.importorskip("flwr")
    client = ("client", "--server", "127.0.0.1:1", "--site", "a", "--keys", "nowhere", "--import", "absent.py")
    assert "no file 'absent.py'" in call(*client).sentence


def test_a_dry_run_tells_what_sites_must_import(call: Call, file: Path) -> None:
    pytest.importorskip("flwr")
    assert call("keys", "--host", "localhost", "--site", "a", "--site", "b", "--json").code == 0
    arguments = ("--import", "own.py", *OWN[:6], "--sites", "keys/server/sites.toml", "--address", "127.0.0.1:1")
    told = call("server", *arguments, "--dry-run", "--json")
    [line] = json.loads(told.out)["imports"]
    assert line.startswith("own.py@sha256:")
    assert line.endswith("which every site must import too")


def test_a_mistake_in_one_s_own_file_is_told_with_its_line_and_called_no_bug(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "hooked.py"
    file.write_text(COMPONENTS.replace("return Kept(personal=layers.head_names)", "return Kept(personal=heads)"))
    line = 1 + file.read_text().splitlines().index("        return Kept(personal=heads)")
    outcome = call("run", *TINY, "--import", str(file), "--method", "mine", "--out", str(tmp_path / "run"))
    assert outcome.code == 2
    expected = f"'hooked.py' failed in line {line}, in 'keeps': NameError: name 'heads' is not defined. --debug shows"
    assert expected in outcome.err
    assert "bug in FedStrata" not in outcome.err


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_mistake_in_one_s_own_file_keeps_no_other_run_of_a_comparison_from_being_done(call: Call, jobs: str) -> None:
    kept = "        return Kept(personal=layers.head_names)\n"
    Path("own.py").write_text(
        COMPONENTS.replace(kept, f"{kept}\n    def metrics(self, server):\n        return heads\n")
    )
    line = 1 + Path("own.py").read_text().splitlines().index("        return heads")
    outcome = call("compare", "local, mine, fedavg", "--import", "own.py", *TINY, "--rounds", "1", "--jobs", jobs)
    why = f"mine, seed 0: 'own.py' failed in line {line}, in 'metrics': NameError: name 'heads' is not defined."
    assert outcome.code == 2
    if jobs == "1":  # side by side it may be the last to be done, beside which there are no others
        assert f"Warning: A run has failed, and the others go on. {why}" in outcome.err
    assert f"Error: 1 of 3 runs has failed, the others are finished. {why}" in outcome.err
    assert "bug in FedStrata" not in outcome.err
    assert [text.split()[0] for text in outcome.out.splitlines() if text.startswith(("local ", "fedavg "))] == [
        "local",
        "fedavg",
    ]
