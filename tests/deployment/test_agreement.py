"""What the samples of all sites have in common: nobody decides it alone, and who differs is told by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from direct_network import DirectNetwork
from replaying import merged_sites
from small_world import EXPERIMENT, Net, ingredients

from fedstrata.deployment.agreement import Agreement
from fedstrata.deployment.declarations import Declaration, Schema
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients

NAMES = ["berlin", "paris", "rome"]
LIAR = 0


def deployment(folder: Path, names: list[str], rules: Rules | None = None, **changes: Any) -> Deployment:
    """A server that has no data, and knows nothing of that of its sites."""
    experiment = EXPERIMENT.with_changes({"method": "fedavg", "rounds": 1, **changes})
    own = Ingredients(model=Net, secret="")
    return Deployment(experiment, names, folder / "run", rules or Rules(max_refusals=1), ingredients=own)


def network(folder: Path, sites: int, lies: Mapping[str, Any], liars: tuple[int, ...] = (LIAR,)) -> DirectNetwork:
    """Let some sites declare something else, and be the first to answer."""

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if site in liars and request.kind == "hello":
            return [(0.01, replace(reply, facts={**reply.facts, **lies}))]
        return [(0.1, reply)]

    return DirectNetwork(folder, sites, tamper, ingredients((9, 16, 12, 23)[:sites]))


LIES = {
    "classes": ({"class_names": ["ill", "well"], "label_counts": [4, 5]}, "ill, well"),
    "shape": ({"input_shape": [3, 99, 99]}, "[3, 99, 99]"),
    "type": ({"input_type": "int64"}, "whole numbers"),
    "columns": ({"columns": "0123abcd"}, "other columns or categories"),
    "normalisation": ({"normalises_by": {"mean": [0.5], "deviation": [9.0]}}, "the constants [0.5] and [9.0]"),
    "no normalisation": ({"normalises_by": "nothing"}, "normalised by nothing"),
}


@pytest.mark.attack(
    "The first site to answer declares other classes, shapes, types, columns or constants than all others have.",
    "What more than half of the sites declare is the schema; the liar is refused by name, and the honest sites run.",
)
@pytest.mark.parametrize("lie", LIES)
def test_the_first_to_answer_decides_nothing(lie, tmp_path):
    told, words = LIES[lie]
    lines: list[str] = []
    deployment(tmp_path, NAMES).run(network(tmp_path, 3, told), log=lines.append)
    [refusal] = [line for line in lines if "refused" in line]
    assert "the reply of berlin is refused" in refusal
    assert words in refusal
    folder = RunFolder.open(tmp_path / "run")
    assert folder.data()["input_shape"] == [1, 8, 8]
    assert merged_sites(folder) == {1: [1, 2]}


@pytest.mark.attack(
    "Of two sites one declares other samples than the other.",
    "The run does not begin; server and sites are told who declares what, and the rules can say who is right.",
)
@pytest.mark.parametrize("lie", ["classes", "normalisation"])
def test_where_no_more_than_half_agree_the_run_does_not_begin(lie, tmp_path):
    told, words = LIES[lie]
    sites = network(tmp_path, 2, told)
    with pytest.raises(FedStrataError, match="No more than half of the sites agree") as refusal:
        deployment(tmp_path, NAMES[:2]).run(sites)
    assert f"berlin declares {words}" in str(refusal.value).replace(
        "the shape [1, 8, 8] of float32 and the classes ", ""
    )
    assert "paris declares the s" in str(refusal.value)
    assert not (tmp_path / "run").exists()
    for lines in sites.lines:
        assert any("berlin declares" in line and "paris declares" in line for line in lines), "both are told"


def test_the_rules_can_say_what_samples_are(tmp_path):
    rules = Rules(min_sites=1, max_refusals=1, classes="0, 1, 2, 3, 4, 5, 6, 7, 8, 9", input_shape="1 8 8")
    lines: list[str] = []
    deployment(tmp_path, NAMES, rules).run(network(tmp_path, 3, LIES["shape"][0], (0, 1)), log=lines.append)
    refusals = [line for line in lines if "refused" in line]
    assert len(refusals) == 2
    assert all("and the rules say the shape [1, 8, 8]" in line for line in refusals)
    assert merged_sites(RunFolder.open(tmp_path / "run")) == {1: [2]}
    with pytest.raises(FedStrataError, match="write it like '3 64 64'"):
        Rules(input_shape="3 x 3").check(3)


def test_who_comes_later_is_held_to_what_was_agreed_on(tmp_path):
    sites = network(tmp_path, 3, LIES["shape"][0], (2,))
    sites.connected.discard(2)
    sites.queue = [entry for entry in sites.queue if entry[2].site != 2]
    lines: list[str] = []

    def watch(standing: Any) -> None:
        if standing.question.startswith("train 2") and 2 not in sites.connected:
            sites.restart(2)

    rules = Rules(min_sites=2, round_timeout=10, max_refusals=1)
    deployment(tmp_path, NAMES, rules, rounds=3).run(sites, watch=watch, log=lines.append)
    assert any("the reply of rome is refused: its samples have" in line for line in lines)
    assert merged_sites(RunFolder.open(tmp_path / "run")) == {1: [0, 1], 2: [0, 1], 3: [0, 1]}


def test_a_restarted_server_knows_what_was_agreed_on(tmp_path):
    """Also where now most sites declare something else."""

    class Killed(BaseException):
        pass

    def killing(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if request.round == 2:
            raise Killed
        return [(0.1, reply)]

    own = DirectNetwork(tmp_path, 3, killing, ingredients((9, 16, 12)))
    with pytest.raises(Killed):
        deployment(tmp_path, NAMES, rounds=2).run(own)
    rules = Rules(min_sites=1, max_refusals=1)
    for lie in ("shape", "normalisation"):
        lines: list[str] = []
        sites = network(tmp_path, 3, LIES[lie][0], (0, 1))
        if lie == "shape":
            sites.tamper = killing_after(sites.tamper, Killed)
            with pytest.raises(Killed):
                deployment(tmp_path, NAMES, rules, rounds=2).run(sites, log=lines.append)
        else:
            deployment(tmp_path, NAMES, rules, rounds=2).run(sites, log=lines.append)
        assert sum("refused" in line for line in lines) == 2, lie
    assert merged_sites(RunFolder.open(tmp_path / "run"))[2] == [2]


def killing_after(tamper: Any, killed: type[BaseException]) -> Any:
    def then(site: int, request: Request, reply: Reply) -> Any:
        if request.kind == "train":
            raise killed
        return tamper(site, request, reply)

    return then


def test_more_than_half_by_hand():
    schemas = [Schema((1, 8, 8), ("a", "b")), Schema((1, 8, 8), ("a", "c"))]
    declared = [Declaration(schema, 2, 0, (1, 1)) for schema in schemas]

    def settled(*which: int) -> Schema | None:
        return Agreement().settled({site: declared[one] for site, one in enumerate(which)}, "vwxyz").schema

    assert settled(0) == settled(1, 0, 0) == settled(1, 1, 0, 0, 0) == schemas[0]
    for even in ((0, 1), (1, 1, 0, 0)):
        with pytest.raises(FedStrataError, match=r"v declares .*; w declares"):
            settled(*even)
