"""Diagnostics over sites: what the server sees of uploads is that of the simulation, and nothing else leaves a site."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow.compute as pc
import pytest
from small_world import EXPERIMENT, SITES, ingredients
from test_parity import assert_same, in_simulation, on_flower

from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.diagnostics import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.stack import Stack, squared_norm


@pytest.fixture(autouse=True)
def uploaded() -> Iterator[None]:
    @diagnostics.register("uploaded")
    @dataclass(frozen=True)
    class Uploaded(Diagnostic):
        needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
        quantities: ClassVar[Mapping[str, Quantity]] = {
            "uploaded.norm": Quantity("Norm", "The squared norm of an upload.")
        }

        def update(self, seen: Seen, memory: Stack) -> Stack:
            return Stack(before=squared_norm(seen.uploads.tensors).double())

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            return Measured(clients_in_layers={"uploaded.norm": {"": memory["before"]}})

    yield
    diagnostics.put("uploaded", None)


def deployment(tmp_path: Path, method: str, diagnose: str, **rules: bool) -> Deployment:
    names = [f"site-{number}" for number in range(SITES)]
    experiment = EXPERIMENT.with_changes({"method": method, "diagnose": diagnose})
    return Deployment(experiment, names, tmp_path / "run", Rules(**rules), ingredients=ingredients())


def test_uploads_are_diagnosed_as_in_simulation_and_the_rest_is_left_out(tmp_path: Path) -> None:
    with pytest.warns(FedStrataWarning, match=r"norms.*, because it looks at the clients' models"):
        sites = on_flower("fedbn", tmp_path, diagnose="all", rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        simulated = in_simulation("fedbn", diagnose="inertia+uploaded", rounds=1)
    assert simulated.metrics["diagnostics"].num_rows == SITES
    known = {name: set(simulated.metrics[name]["metric"].to_pylist()) for name in ("layers", "diagnostics")}
    for outcome in (simulated, sites):
        outcome.metrics = {
            name: outcome.metrics[name].filter(pc.field("metric").isin(sorted(metrics)))
            for name, metrics in known.items()
        }
    assert_same(simulated, sites)


@pytest.mark.parametrize(
    ("method", "diagnose", "rules", "words"),
    [
        ("fedavg", "norms", {}, "which would have to leave the sites"),
        ("fedavg", "inertia+uploaded", {"secure": True}, "of which secure aggregation shows only the sum"),
        ("central-dp", "uploaded", {}, "the account of 'central-dp' does not cover"),
    ],
)
def test_what_the_server_cannot_see_is_refused_before_anybody_connects(
    method: str, diagnose: str, rules: dict[str, bool], words: str, tmp_path: Path
) -> None:
    with pytest.raises(FedStrataError, match=words):
        deployment(tmp_path, method, diagnose, **rules).check()
