"""A site that is taken off the list: the run goes on with the others, under the numbers that they have."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from direct_network import DirectNetwork, honest
from replaying import assert_same_model, merged_sites, replayed
from small_world import EXPERIMENT, SITES, ingredients

from fedstrata.deployment.begun import begun_sites
from fedstrata.deployment.federation import Event, TooFewAnswers
from fedstrata.deployment.keys import KeyFolder, make_keys
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.roll import Roll
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.sites_file import SitesFile
from fedstrata.deployment.status import STATUS_FILE, StatusFile
from fedstrata.errors import FedStrataError
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.signals import Interrupted

NAMES = ["berlin", "paris", "rome", "oslo"]
PARIS = 1


def deployment(folder: Path, rules: Rules | None = None, rehearsal: bool = True, **changes: Any) -> Deployment:
    experiment = EXPERIMENT.with_changes({"method": "fedavg", **changes})
    return Deployment(experiment, NAMES, folder / "run", rules or Rules(), rehearsal, ingredients())


def begin(given: Deployment, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first of its rounds, and be stopped in the second."""
    original = Driver.read_numbers

    def read_numbers(self: Driver, callbacks: Any, folder: Any) -> None:
        original(self, callbacks, folder)
        if self.round == 2:
            raise Interrupted(2, 2, folder)

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "read_numbers", read_numbers)
        with pytest.raises(Interrupted):
            given.run(DirectNetwork(folder, SITES))


@pytest.fixture
def made(tmp_path: Path) -> KeyFolder:
    make_keys(tmp_path / "keys", ["localhost"], NAMES)
    return KeyFolder(tmp_path / "keys", datetime.datetime.now(datetime.UTC))


@pytest.mark.attack(
    "A site is removed from the list, or its line is simply deleted, before the server goes on with a run.",
    "The run goes on with the others under the numbers that they had, bit for bit as if the site had stayed away from "
    "then on, and the log says who is missing.",
)
@pytest.mark.parametrize(("how", "rehearsal"), [("marked", True), ("deleted", True), ("deleted", False)])
def test_a_run_goes_on_without_a_site_that_was_removed(how, rehearsal, made, tmp_path, monkeypatch):
    given = deployment(tmp_path, rehearsal=rehearsal)
    begin(given, tmp_path, monkeypatch)
    if how == "marked":
        made.remove("paris", made.sites_file)
    else:
        head, *tables = made.sites_file.read_text().split("[[sites]]")
        made.sites_file.write_text("[[sites]]".join([head, *(one for one in tables if "paris" not in one)]))
    roll = Roll.of(SitesFile.read(made.sites_file), begun_sites(given.out), given.out)
    assert (list(roll.names), roll.removed) == (NAMES, ("paris",))
    lines: list[str] = []
    network = DirectNetwork(tmp_path, SITES, away=[PARIS])
    later = replace(given, names=roll.names, removed=roll.removed)
    StatusFile.begin(later)
    assert json.loads((given.out / STATUS_FILE).read_text())["left_out"] == ["paris"]
    later.run(network, log=lines.append)
    assert (
        "paris is not on the list of sites any more: its key is refused, and the run goes on without it, with "
        in (lines[0])
    )
    assert all(site != PARIS for site, _ in network.sent), "it is not even told how the run ended"
    folder = RunFolder.open(given.out)
    assert merged_sites(folder) == {1: [0, 1, 2, 3], 2: [0, 2, 3], 3: [0, 2, 3]}
    if rehearsal:
        assert_same_model(folder, replayed(merged_sites(folder)))


def test_others_take_the_places_of_removed_sites_where_few_are_chosen(tmp_path, monkeypatch):
    given = deployment(tmp_path, participation=0.25, rounds=6)
    begin(given, tmp_path, monkeypatch)
    replace(given, removed=["berlin", "rome"]).run(DirectNetwork(tmp_path, SITES, away=[0, 2]))
    later = [sites for round, sites in merged_sites(RunFolder.open(given.out)).items() if round > 1]
    assert all(len(sites) == 1 and sites[0] in (1, 3) for sites in later)
    assert len(later) == 5


def test_the_rules_count_those_who_are_left(tmp_path):
    given = replace(deployment(tmp_path, Rules(min_sites=3)), removed=["paris", "rome"])
    with pytest.raises(FedStrataError, match="min_sites is 3, but there are only 2 sites"):
        given.check()
    secure = replace(deployment(tmp_path, Rules(secure=True)), removed=["paris", "rome"])
    with pytest.raises(FedStrataError, match="there would be 2"):
        secure.check()


@pytest.mark.attack(
    "So many sites are revoked while the server waits for a round that fewer than min_sites are left.",
    "The server does not go on with fewer: it stops and says so, with all rounds so far saved.",
)
def test_a_run_stops_when_too_few_are_left(tmp_path):
    network = DirectNetwork(tmp_path, SITES)

    def revoking(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if request.kind == "train" and request.round == 2 and site < 2:
            network.later(0.0, Event(site, revoked=True))
        return list(honest(site, request, reply))

    network.tamper = revoking
    lines: list[str] = []
    with pytest.raises(TooFewAnswers, match=r"Only 2 of the 3 needed sites"):
        deployment(tmp_path, Rules(min_sites=3)).run(network, log=lines.append)
    assert [line.split()[0] for line in lines if "not on the list" in line] == ["berlin", "paris"]
    folder = RunFolder.open(tmp_path / "run")
    assert folder.load_checkpoint().round == 1


def test_other_sites_than_those_of_a_run_are_refused(made, tmp_path, monkeypatch):
    given = deployment(tmp_path)
    begin(given, tmp_path, monkeypatch)
    made.add("bern", None, made.sites_file, None)
    with pytest.raises(FedStrataError, match=r"without bern\. Sites can leave a run, but not join it"):
        Roll.of(SitesFile.read(made.sites_file), begun_sites(given.out), given.out)
    assert begun_sites(tmp_path / "elsewhere") is None
