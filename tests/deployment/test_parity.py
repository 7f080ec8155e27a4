"""The same method in simulation and on Flower: the same weights, whatever order the answers come in."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcessGrid
from small_world import ACTING, EXPERIMENT, SITES, ingredients, simulated

from fedstrata.deployment.flower import AskedNodes, GridNetwork, client_app
from fedstrata.deployment.server import Deployment
from fedstrata.errors import FedStrataError
from fedstrata.methods import Method, methods
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients

COMBINATIONS = ["fedbn+fedprox(mu=0.1)", "fedbn+lips(every=1)+lws", "ssfl(sparsity=0.8, refresh_every=1)+fedbn+lws"]


@dataclass
class Outcome:
    model: dict[str, torch.Tensor]
    metrics: dict[str, Any]


def in_simulation(method: str, **changes: Any) -> Outcome:
    simulation = simulated(method, **changes)
    simulation.run()
    return Outcome(simulation.model, simulation.metrics.to_tables())


def on_flower(method: str, folder: Path, seed: int = 0, own: Ingredients | None = None, **changes: Any) -> Outcome:
    own = own or ingredients()
    grid = InProcessGrid(client_app(folder / "sites", part_of_partition=True, ingredients=own), SITES, seed)
    names = [f"site-{number}" for number in range(SITES)]
    experiment = EXPERIMENT.with_changes({"method": method, **changes})
    deployment = Deployment(experiment, names, folder / "run", rehearsal=True, ingredients=own)
    deployment.run(GridNetwork(grid, AskedNodes(grid, SITES, 0.0), 0.0))
    run = RunFolder.open(folder / "run")
    return Outcome(run.model(), run.metrics().to_tables())


def assert_same(left: Outcome, right: Outcome) -> None:
    assert left.model.keys() == right.model.keys()
    for name, tensor in left.model.items():
        assert torch.equal(tensor, right.model[name]), name
    for name, table in left.metrics.items():
        assert table.schema == right.metrics[name].schema
        columns = [column for column in table.column_names if column != "value"]
        assert table.select(columns) == right.metrics[name].select(columns), name
        values, others = (one.column("value").to_numpy() for one in (table, right.metrics[name]))
        assert values == pytest.approx(others, rel=1e-6, abs=1e-7, nan_ok=True)


def not_on_network(method: str) -> str | None:
    """Tell why a method cannot run on a network, if it cannot."""
    reasons = (part.facts.not_on_network for part in Method.make(method).parts)
    return next((reason for reason in reasons if reason is not None), None)


NETWORKED = [name for name in methods.names() if not_on_network(name) is None]


@pytest.mark.parametrize("method", [name for name in methods.names() if name not in NETWORKED])
def test_what_cannot_run_on_a_network_is_refused_with_the_reason(method, tmp_path):
    with pytest.raises(FedStrataError, match=re.escape(not_on_network(method) or "")):
        on_flower(method, tmp_path)


@pytest.mark.filterwarnings("ignore::fedstrata.errors.FedStrataWarning")  # that three rounds are too few for some
@pytest.mark.parametrize("method", [*(ACTING.get(name, name) for name in NETWORKED), *COMBINATIONS])
def test_three_rounds_on_flower_equal_three_rounds_in_simulation(method, tmp_path):
    """Steps are replayed in the combinations; that every method can be replayed is a matter of the contract."""
    changes = {**privately(method), "replay": method in COMBINATIONS}
    assert_same(in_simulation(method, **changes), on_flower(method, tmp_path, **changes))


def privately(method: str) -> dict[str, str]:
    """Under a method that promises privacy no sums of samples may leave a site."""
    return {} if Method.make(method).answering_for_privacy is None else {"transforms": "normalise:site"}


def test_some_of_the_sites_in_each_round(tmp_path):
    assert_same(in_simulation("fedbn", participation=0.5), on_flower("fedbn", tmp_path, participation=0.5))


def test_the_order_of_answers_does_not_matter(tmp_path):
    one, other = (on_flower("ssfl+fedbn", tmp_path / str(seed), seed) for seed in (1, 2))
    assert_same(one, other)


@pytest.mark.parametrize("method", ["fedbn", "ssfl(sparsity=0.5)"])
def test_narrower_values_lose_the_same_on_flower(method, tmp_path):
    narrow = {"upload_values": "int8", "download_values": "bf16"}
    assert_same(on_flower(method, tmp_path, **narrow), in_simulation(method, **narrow))


def test_the_noise_of_a_deployment_cannot_be_told_from_the_seed(tmp_path):
    """Nobody gives a secret, so server and sites draw their own: two runs with one seed end differently."""
    models = []
    for number, method in enumerate(["fedbn+central-dp", "fedbn+central-dp", "fedbn+local-dp", "fedbn+local-dp"]):
        own = replace(ingredients(), secret=None)
        models.append(on_flower(method, tmp_path / str(number), own=own, rounds=1, **privately(method)).model)
    for left, right in (models[:2], models[2:]):
        assert not any(torch.equal(left[name], right[name]) for name in left if left[name].is_floating_point())
