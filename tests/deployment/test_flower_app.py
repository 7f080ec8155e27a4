"""FedStrata as an ordinary Flower app: the example, with the configuration of Flower's run and of its nodes."""

from __future__ import annotations

import importlib.util
import tomllib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from in_process import InProcessGrid
from small_world import EXPERIMENT, SITES, ingredients

from fedstrata.deployment.flower import app as apps
from fedstrata.deployment.flower import client_app, configured, server_app
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.engines.planning import Plan
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"
DESCRIBED = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
RUN = 12


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Look for answers and nodes without pauses."""
    for name in ("GridNetwork", "AskedNodes"):
        monkeypatch.setattr(apps, name, partial(getattr(apps, name), seconds_between=0.01))


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("app", EXAMPLE / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def context_of_server(**changes: Any) -> Context:
    """What 'flwr run --run-config' makes of the app's configuration."""
    config = {key.replace("_", "-"): value for key, value in changes.items()}
    assert config.keys() <= DESCRIBED["config"].keys(), "Flower changes no other keys"
    return Context(RUN, 1, {}, RecordDict(), {**DESCRIBED["config"], **config})


def test_the_example_gives_the_weights_of_the_simulation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert DESCRIBED["components"] == {"serverapp": "app:server", "clientapp": "app:client"}
    app, partition = example(), "dirichlet(alpha=0.5, samples=60)"
    changes = {"method": "ssfl(sparsity=0.5)", "rounds": 2, "partition": partition}
    app.server(InProcessGrid(app.client, 3), context_of_server(sites=3, **changes))
    folder = RunFolder.open(tmp_path / "runs" / f"flower-{RUN}")
    assert folder.finished
    experiment = Experiment().with_changes({**changes, "epochs": 1, "clients": 3})
    simulation = Driver.prepare(experiment, plan=Plan("loop", 1))
    simulation.run()
    model = folder.model()
    for name, tensor in simulation.model.items():
        assert model[name].equal(tensor), name
    told = capsys.readouterr().out
    assert "waits for 3 nodes" in told
    assert "round 2 of 2: loss" in told
    assert "round 2 of 2" in (folder.path / "deployment.log").read_text()
    assert all((tmp_path / "sites" / f"site-{number}").is_dir() for number in range(3))


def test_a_node_chooses_its_own_folder_and_the_run_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = client_app(part_of_partition=True, ingredients=ingredients())
    grid = InProcessGrid(client, SITES)
    for context in grid.contexts.values():
        context.node_config["state"] = str(tmp_path / "own")
        context.run_config["state"] = str(tmp_path / "theirs")
    server = server_app(EXPERIMENT.with_changes({"rounds": 1}), SITES, tmp_path / "run", ingredients=ingredients())
    server(grid, Context(RUN, 1, {}, RecordDict(), {}))
    assert RunFolder.open(tmp_path / "run").finished
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == [f"site-{number}" for number in range(SITES)]
    assert not (tmp_path / "theirs").exists()
    assert not (tmp_path / "sites").exists()


def test_a_site_that_knows_no_such_device_says_so(tmp_path):
    grid = InProcessGrid(client_app(tmp_path / "sites", part_of_partition=True, ingredients=ingredients()), SITES)
    for context in grid.contexts.values():
        context.node_config["device"] = "abacus"
    lines: list[str] = []
    server = server_app(EXPERIMENT, SITES, tmp_path / "run", ingredients=ingredients(), log=lines.append)
    with pytest.raises(FedStrataError, match=r"not all take part: site-0 refuses .*'abacus'"):
        server(grid, Context(RUN, 1, {}, RecordDict(), {}))
    assert any("abacus" in line for line in lines)


def test_the_configuration_of_a_run_changes_experiment_rules_sites_and_folder(tmp_path):
    given = Deployment(Experiment(rounds=9, seed=4), ["site-0"], tmp_path, Rules(max_refusals=7))
    changes = {"batch-size": 8, "round_timeout": 5.0, "min-sites": 2, "sites": 3, "out": "", "my-own-key": True}
    changed = configured(given, changes)
    assert (changed.experiment.rounds, changed.experiment.seed, changed.experiment.batch_size) == (9, 4, 8)
    assert (changed.rules.max_refusals, changed.rules.round_timeout, changed.rules.min_sites) == (7, 5.0, 2)
    assert changed.names == ["site-0", "site-1", "site-2"]
    assert changed.out == tmp_path
    assert configured(given, {"out": "elsewhere"}).out == Path("elsewhere")
    assert configured(given, {}) == given
    with pytest.raises(FedStrataError, match="rounds"):
        configured(given, {"rounds": 0})
