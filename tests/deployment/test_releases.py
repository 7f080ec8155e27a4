"""What has left a server under noise was on its disk before: one model for each release that its account counts."""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_network import DirectNetwork
from small_world import EXPERIMENT, SITES, ingredients, simulated

from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.releases import RELEASES_FOLDER
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.errors import FedStrataError
from fedstrata.functional import gaussian_epsilon
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients

NAMES = ["berlin", "paris", "rome", "oslo"]
METHOD = "fedbn+central-dp(noise=2)"


class Killed(BaseException):
    """The server is killed, as by SIGKILL: nothing of it but its files remains."""


def secretive() -> Ingredients:
    """Have noise drawn as real servers and sites do."""
    return replace(ingredients(), secret=None)


def run(folder: Path, network: DirectNetwork, rules: Rules | None = None, **changes: Any) -> RunFolder:
    experiment = EXPERIMENT.with_changes({"method": METHOD, "transforms": "normalise:site", **changes})
    Deployment(experiment, NAMES, folder / "run", rules or Rules(), True, network.own).run(network)
    return RunFolder.open(folder / "run")


def run_with_kills(folder: Path, own: Ingredients, kills: dict[int, int], **changes: Any) -> dict[int, set[str]]:
    """Kill the server as often as is said when its model of a round has reached some sites, and start it again.

    Return the digests of all models that left, by the round after which they did.
    """
    left: dict[int, set[str]] = defaultdict(set)
    open_kills = dict(kills)

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        after = request.round - 1
        if request.kind == "test":
            left[after].add(request.facts["payload"])
            if site == 2 and open_kills.get(after, 0):
                open_kills[after] -= 1
                raise Killed
        return [(0.1, reply)]

    while True:
        try:
            run(folder, DirectNetwork(folder, SITES, tamper, own), **changes)
            return left
        except Killed:
            pass


@pytest.mark.parametrize("rules", [Rules(), Rules(secure=True)], ids=["in the clear", "secure"])
@pytest.mark.attack(
    "Under central-dp the server is killed again and again, each time when the noisy model of a round has reached some "
    "sites and its checkpoint is not written yet.",
    "The model that left was on disk before, and the restarted server goes on with it: one model leaves in each round, "
    "as many as the account counts.",
)
def test_a_killed_server_publishes_each_round_once(rules, tmp_path, record_property):
    left = run_with_kills(tmp_path, secretive(), {1: 2, 2: 1}, rules=rules)
    releases = sum(len(models) for models in left.values())
    assert {round: len(models) for round, models in left.items()} == {1: 1, 2: 1, 3: 1}
    spent = RunFolder.open(tmp_path / "run").metrics().latest()["privacy.epsilon"]
    assert spent == pytest.approx(gaussian_epsilon(2.0, releases, 1e-5))
    record_property("measured", f"{releases} models left, and {spent:.2f} is accounted")
    assert not (tmp_path / "run" / RELEASES_FOLDER).exists()


def test_a_killed_server_ends_as_if_nothing_had_happened(tmp_path):
    """With noise of the seed the models and all metrics are those of an unbroken run."""
    run_with_kills(tmp_path, ingredients(), {1: 1, 3: 1}, metrics="f1")
    folder = RunFolder.open(tmp_path / "run")
    simulation: Driver = simulated(METHOD, transforms="normalise:site", metrics="f1")
    simulation.run()
    assert all(torch.equal(tensor, simulation.model[name]) for name, tensor in folder.model().items())
    for table in ("rounds", "clients", "layers"):
        ours, theirs = (
            [row for row in log.to_tables()[table].to_pylist() if "pooled" not in str(row)]
            for log in (folder.metrics(), simulation.metrics)
        )
        assert ours == theirs


def killed_after(folder: Path, round: int) -> None:
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if request.kind == "test" and request.round == round + 1:
            raise Killed
        return [(0.1, reply)]

    with pytest.raises(Killed):
        run(folder, DirectNetwork(folder, SITES, tamper, secretive()))


@pytest.mark.attack(
    "A server under central-dp loses its checkpoints, or is given older ones, after later models have left.",
    "It does not publish a round again under another noise: it stops with a sentence.",
)
def test_a_server_set_back_does_not_publish_again(tmp_path):
    killed_after(tmp_path, 3)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "round-000002")
    with pytest.raises(FedStrataError, match=r"The model of round 3 was published.* checkpoint is of round 1"):
        run(tmp_path, DirectNetwork(tmp_path, SITES, own=secretive()))


@pytest.mark.attack(
    "The whole folder of a server under central-dp is set back to an older backup, so that it knows nothing of later "
    "models.",
    "The sites refuse to answer a round for another model; nothing is published twice.",
)
def test_sites_refuse_a_server_that_knows_nothing_of_later_models(tmp_path):
    killed_after(tmp_path, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    shutil.rmtree(tmp_path / "backup" / RELEASES_FOLDER)
    killed_after(tmp_path, 2)
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "backup", tmp_path / "run")
    network = DirectNetwork(tmp_path, SITES, own=secretive())
    with pytest.raises(FedStrataError, match=r"gave a usable answer to 'train 2\.0'"):
        run(tmp_path, network)
    assert any("has answered round 2 for another model" in line for line in network.lines[0])


def test_damage_is_told(tmp_path):
    killed_after(tmp_path, 2)
    path = tmp_path / "run" / RELEASES_FOLDER / "round-000002" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(FedStrataError, match="is damaged: its checksum is wrong"):
        run(tmp_path, DirectNetwork(tmp_path, SITES, own=secretive()))
