"""What stands in the audit logs of a server and its sites after a run: all that was asked and all that left."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from direct_network import DirectNetwork
from small_world import EXPERIMENT, SITES, hello, ingredients, request, simulated

from fedstrata.cli import main
from fedstrata.deployment.audit import AuditError, AuditLog, heads_noted, records_in, verify
from fedstrata.deployment.protocol import REFUSED, Place, Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_audit import SiteAudit
from fedstrata.deployment.site_data import SiteData
from fedstrata.methods.contract.views import Message
from fedstrata.wire import encode, outline

DOCS = Path(__file__).parents[2] / "docs" / "trust.md"
NAMES = [f"site-{number}" for number in range(SITES)]


def run(folder, network, **changes):
    experiment = EXPERIMENT.with_changes({"method": "fedbn", "rounds": 2, "metrics": "f1", **changes})
    rules = Rules(min_sites=2, round_timeout=30)
    deployment = Deployment(experiment, NAMES, folder / "run", rules, rehearsal=True, ingredients=ingredients())
    lines: list[str] = []
    deployment.run(network, log=lines.append)
    return lines


def lying(site: int, request: Request, reply: Reply):
    broken = site == 3 and request.kind == "train" and request.round == 1
    return [(0.1, replace(reply, payload=reply.payload[:-1]) if broken else reply)]


def events(folder, *names):
    return [record.facts for record in records_in(folder) if record.event in names]


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    network = DirectNetwork(folder, SITES, lying)
    return folder, network, run(folder, network)


def test_both_ends_write_the_same_hashes_of_what_travelled(after):
    folder = after[0]
    left = [facts for facts in events(folder / "site-0", "left") if facts["kind"] == "train"]
    came = [
        facts for facts in events(folder / "run", "answered")
        if facts["site"] == "site-0" and facts["ticket"].startswith("train")
    ]  # fmt: skip
    assert [facts["sha256"] for facts in left] == [facts["sha256"] for facts in came]
    assert [facts["bytes"] for facts in left] == [facts["bytes"] for facts in came]
    asked = [facts for facts in events(folder / "run", "asked") if facts["site"] == "site-0" and facts["bytes"]]
    heard = [facts for facts in events(folder / "site-0", "asked") if facts["bytes"]]
    assert [facts["sha256"] for facts in asked] == [facts["sha256"] for facts in heard]
    [start], [greeting] = events(folder / "run", "start"), [
        facts for facts in events(folder / "site-0", "asked") if facts["kind"] == "hello" and facts["server_head"]
    ][:1]  # fmt: skip
    assert greeting["experiment"] == start["experiment"]
    stored = next((folder / "site-0").glob("*/step-000002-training-0000/reply.bin"))
    assert left[-1]["sha256"] == sha256(stored.read_bytes()).hexdigest()


def test_a_site_writes_down_the_names_and_shapes_of_all_that_leaves_and_no_value(after):
    folder = after[0]
    [first, _] = [facts for facts in events(folder / "site-0", "left") if facts["kind"] == "train"]
    assert ["head.weight", "f32", [10, 8]] in first["tensors"]
    assert not any("norm" in name for name, *_ in first["tensors"]), "fedbn keeps them"
    assert {"loss", "scores.accuracy", "scores.metrics.f1"} <= set(first["facts"])
    assert not any(isinstance(value, float) for facts in events(folder / "site-0", "left") for value in facts.values())
    [saved] = events(folder / "site-0", "saved")
    assert saved["sha256"]


def test_the_server_writes_down_refusals_and_the_model_of_every_round(after):
    folder = after[0]
    [refusal] = events(folder / "run", "refused")
    assert refusal["site"] == "site-3"
    assert "checksum" in refusal["reason"]
    rounds = events(folder / "run", "round")
    assert [facts["round"] for facts in rounds] == [1, 2]
    assert rounds[-1]["model"] == sha256((folder / "run" / "model.safetensors").read_bytes()).hexdigest()
    assert [facts["state"] for facts in events(folder / "run", "end")] == ["finished"]
    assert {facts["site"] for facts in events(folder / "run", "joined")} == set(NAMES)


def test_each_log_holds_heads_of_the_other(after):
    folder, _, lines = after
    of_server = {facts["server_head"] for facts in events(folder / "site-1", "asked") if "server_head" in facts}
    of_site = {
        facts["site_head"] for facts in events(folder / "run", "answered")
        if facts["site"] == "site-1" and "site_head" in facts
    }  # fmt: skip
    assert len(of_server) >= 2
    assert len(of_site) >= 2
    assert min(verify(folder / "run", sorted(of_server)).behind.values()) < 3 * SITES
    assert min(verify(folder / "site-1", sorted(of_site)).behind.values()) == 0
    assert lines[-1].endswith(f"its head is {verify(folder / 'run').head}")


def test_the_page_is_followed(after, capsys):
    folder, _, lines = after
    section = DOCS.read_text().partition("## The audit log")[2].partition("\n## ")[0]
    commands = re.findall(r"(?m)^fedstrata (audit .*)", section)
    assert len(commands) == 3
    head = lines[-1].rpartition(" ")[2]
    here = {"runs/consortium": str(folder / "run"), "HASH": head, "site-berlin": str(folder / "site-0")}
    for command in commands:
        assert not main(here.get(word, word) for word in shlex.split(command))
        assert head in capsys.readouterr().out
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`.*?) \|", section))))
    written = {record.event for name in ("run", "site-0") for record in records_in(folder / name)}
    assert written <= told


@pytest.mark.attack(
    "After a run, the operator of the server cuts the last round off its audit log.",
    "Whoever has the log of a site finds it: 'fedstrata audit verify RUN --against STATE' misses heads that the site "
    "has written down.",
)
def test_a_log_is_held_against_that_of_the_other_end(after, tmp_path):
    folder = after[0]
    content = (folder / "run" / "audit.jsonl").read_bytes()
    cut = tmp_path / "audit.jsonl"
    cut.write_bytes(content[: content.index(b'"event":"round"')].rpartition(b"\n")[0] + b"\n")
    assert verify(cut).records > 10
    with pytest.raises(AuditError, match="missing at its end"):
        verify(cut, heads_noted(folder / "site-2", cut))
    with pytest.raises(AuditError, match="no head"):
        heads_noted(folder / "site-1", folder / "site-2")
    named = SiteAudit(AuditLog(tmp_path / "named.jsonl"))
    named.start(site="site-1")
    assert len(heads_noted(folder / "run", named.log.path)) >= 2


def test_a_server_that_goes_on_goes_on_with_its_log(tmp_path):
    network = DirectNetwork(tmp_path, SITES)

    def stop(site: int, request: Request, reply: Reply):
        if request.kind == "train" and request.round == 2:
            raise KeyboardInterrupt
        return [(0.1, reply)]

    network.tamper = stop
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, network)
    run(tmp_path, DirectNetwork(tmp_path, SITES))
    starts = events(tmp_path / "run", "start")
    assert [facts["committed"] for facts in starts] == [0, 1]
    assert len({facts["run"] for facts in starts}) == 1
    verify(tmp_path / "run")


@pytest.mark.attack(
    "The disk of a site is full, so that its audit log cannot be written.",
    "Nothing leaves the site: it refuses, with the reason, until there is space again.",
)
def test_what_cannot_be_written_down_does_not_leave(tmp_path, monkeypatch):
    here = Site(tmp_path, SiteData(part=0, ingredients=ingredients()))
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if b'"left"' in content:
            write(descriptor, content[:30])
            raise OSError(errno.ENOSPC, "no space")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    answer = here.answer(hello())
    assert (answer.status, set(answer.facts)) == (REFUSED, {"reason"})
    assert "the disk is full" in answer.reason
    monkeypatch.undo()
    assert here.answer(hello()).facts["size"] == 9
    assert len(verify(tmp_path).torn) == 1


def test_the_epsilon_that_was_spent_stands_beside_what_left(tmp_path):
    here = Site(tmp_path, SiteData(part=0, ingredients=ingredients()))
    here.answer(hello(method="fedbn+local-dp(noise=1)"))
    [payload] = simulated("fedbn").engine.central.messages([0], 1)
    here.answer(request("train", Place.training(1), payload))
    assert [facts["epsilon"] for facts in events(tmp_path, "left")] == [0.0, pytest.approx(4.377, abs=1e-3)]


def test_the_end_of_a_site_is_written_down_and_its_head_told(tmp_path):
    here, lines = Site(tmp_path, SiteData()), []
    with pytest.raises(ValueError, match="no key"), here.audit.until_stopped(lines.append):
        raise ValueError("no key")
    assert events(tmp_path, "stop") == [{"reason": "no key"}]
    assert lines == [f"the audit log has 1 records; its head is {verify(tmp_path).head}"]


def test_an_outline_reads_no_values():
    mask = torch.tensor([[True, False]])
    message = Message({"a": torch.ones(1, 2), "b": torch.ones(1, 3)}, {"a": mask}, {"c": torch.ones(1)})
    assert json.loads(json.dumps(outline(encode(message, values="fp16")))) == [
        ["a", "f32:f16", [2], 1], ["b", "f32:f16", [3]], ["c", "f32", []],
    ]  # fmt: skip
    assert outline(encode(Message())) == []
