"""Audit logs: whoever changes one is found out, and whoever is killed while it writes one is not accused."""

from __future__ import annotations

import datetime
import json
import re
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.deployment.audit import NOTHING_BEFORE, AuditError, AuditLog, records_in, verify
from fedstrata.deployment.server_audit import STRANGERS_A_MINUTE, ServerAudit
from fedstrata.errors import FedStrataError


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(6):
        log.note("asked", {"kind": "train", "round": number}, wait=False)
    return log


def lines_of(log: AuditLog) -> list[bytes]:
    return log.path.read_bytes().splitlines(keepends=True)


def forged(line: bytes, old: str, new: str) -> bytes:
    """Change a line and give it the hash that goes with what it says now."""
    record = json.loads(line.decode().replace(old, new))
    del record["hash"]
    content = json.dumps(record, separators=(",", ":"))
    return f'{content[:-1]},"hash":"{sha256(content.encode()).hexdigest()}"}}\n'.encode()


def test_every_line_names_the_one_before_and_anybody_can_check_that(log):
    before = NOTHING_BEFORE
    for number, line in enumerate(log.path.read_text().splitlines(), 1):
        record = json.loads(line)
        assert (record["number"], record["before"]) == (number, before)
        before = sha256(re.sub(r',"hash":"[0-9a-f]{64}"}$', "}", line).encode()).hexdigest()
        assert record["hash"] == before
    assert log.head == before
    found = verify(log.path, [before])
    assert (found.records, found.head, found.torn, found.behind) == (6, before, (), {before: 0})
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_a_restart_goes_on_with_the_chain(log):
    head = log.head
    again = AuditLog(log.path)
    again.note("start", {})
    again.close()
    again.note("stop", {})
    assert verify(log.path.parent, [head]).behind == {head: 2}
    assert [record.event for record in records_in(log.path)][-2:] == ["start", "stop"]


def test_what_others_say_stays_in_its_line_and_is_cut(log):
    log.note("refused", {"reason": "x\n\x1b[2J\ud800" + "y" * 10_000, "loss": float("nan"), "path": Path("a")})
    last = lines_of(log)[-1]
    assert last.isascii()
    assert all(32 <= byte < 127 for byte in last[:-1])
    assert json.loads(last)["facts"]["loss"] is None
    assert len(json.loads(last)["facts"]["reason"]) == 500
    assert verify(log.path).records == 7


def with_line(number: int, *instead: bytes):
    return lambda lines: [*lines[: number - 1], *instead, *lines[number:]]


CHANGES = {
    "a byte": (lambda lines: with_line(3, lines[2].replace(b'"round":2', b'"round":7'))(lines), "Line 3 .* changed"),
    "a byte between fields": (lambda lines: with_line(3, lines[2].replace(b',"e', b', "e'))(lines), "Line 3 .*hash"),
    "a line removed": (with_line(3), "Line 3 .* record 4 where 3 should"),
    "the first removed": (with_line(1), "Line 1 .* record 2 where 1 should"),
    "two lines swapped": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "Line 3 .* swapped"),
    "a line twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], "Line 4 .* record 3 where 4 should"),
    "a line with another hash": (
        lambda lines: with_line(3, forged(lines[2], '"round":2', '"round":7'))(lines),
        "Line 4 .* does not follow",
    ),
    "a line put in": (
        lambda lines: [*lines[:3], forged(lines[3], '"round":3', '"round":7'), *lines[3:]],
        "Line 5 .* record 4 where 5 should",
    ),
    "a torn line that never was": (
        lambda lines: [*lines[:5], forged(lines[5], '"asked"', '"torn"')],
        "Line 6 .* torn line that is not there",
    ),
    "something else at the end": (lambda lines: [*lines, b"hello\n"], "Line 7 .* no record"),
    "half a line": (lambda lines: [*lines[:5], lines[5][:50]], "Line 6 .* torn"),
}


@pytest.mark.attack(
    "Somebody who can write an audit log changes a byte in it, removes, swaps, repeats or forges a line, or adds one.",
    "'fedstrata audit verify' exits with 2 and names the first line that is wrong.",
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_log_is_found(change, log, capsys):
    altered, words = CHANGES[change]
    lines = lines_of(log)
    log.path.write_bytes(b"".join(altered(lines)))
    with pytest.raises(AuditError, match=words):
        verify(log.path)
    assert command("audit", "verify", str(log.path)) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))


def command(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.attack(
    "The last lines of an audit log are cut off, or the whole log is written anew with hashes that fit.",
    "The chain alone cannot show it; beside a head that was noted elsewhere (--head) it is found. Server and sites "
    "write each other's heads down.",
)
@pytest.mark.parametrize("anew", [False, True])
def test_a_log_without_its_end_is_found_by_its_head(anew, log, tmp_path, capsys):
    head, lines = log.head, lines_of(log)
    if anew:
        other = AuditLog(tmp_path / "other.jsonl")
        for record in records_in(log.path):
            other.note(record.event, {**record.facts, "round": 0})
        log.path.write_bytes(other.path.read_bytes())
    else:
        log.path.write_bytes(b"".join(lines[:-1]))
    assert command("audit", "verify", str(log.path)) == 0, "from the chain alone nobody could tell"
    assert command("audit", "verify", str(log.path), "--head", head) == 2
    assert "missing at its end" in " ".join(capsys.readouterr().err.split())


@pytest.mark.attack(
    "A process is killed at any byte of a line that it writes into its audit log, and once more while it repairs that.",
    "Nothing is taken away: the next record tells how many bytes are torn and their hash, and 'audit verify' names it.",
)
def test_a_torn_line_is_told_by_the_next_record(tmp_path):
    whole = AuditLog(tmp_path / "whole.jsonl")
    for number in range(3):
        whole.note("left", {"round": number}, wait=False)
    content = whole.path.read_bytes()
    begin = content.rindex(b'{"number":3')
    for cut in (1, 5, begin + 1, begin + 20, len(content) - 1):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(content[:cut])
        with pytest.raises(AuditError, match="torn"):
            verify(path)
        AuditLog(path).note("start", {}, wait=False)
        assert path.read_bytes().startswith(content[:cut])
        records, whole = content[:cut].count(b"\n"), cut == len(content) - 1  # of which only the end is missing
        assert verify(path).torn == (() if whole else (records + 1,))
        repaired = path.read_bytes()
        for again in range(cut + 1, len(repaired), 37):  # killed while it repairs
            path.write_bytes(repaired[:again])
            AuditLog(path).note("start", {}, wait=False)
            assert verify(path).records in (records + 2, records + 3)
            assert path.read_bytes().startswith(repaired[:again])


def test_a_file_that_is_no_log_is_left_alone(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(FedStrataError, match="move it to another place"):
        AuditLog(path).note("start", {})
    assert path.read_text() == "my notes\n"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedStrataError, match="cannot be written"):
        AuditLog(path).note("start", {})


@pytest.mark.attack(
    "A second process writes into an audit log at the very moment when the first one does.",
    "It waits; their records stand one after the other in one whole chain.",
)
def test_writers_exclude_each_other(tmp_path):
    second = AuditLog(tmp_path / "audit.jsonl")
    intruder = threading.Thread(target=lambda: second.note("left", {"by": "the second"}))

    def now() -> datetime.datetime:
        """Let the second writer come when the first knows what its line will be, and has not written it yet."""
        if not intruder.ident:
            intruder.start()
            intruder.join(0.1)
        return datetime.datetime.now(datetime.UTC)

    first = AuditLog(tmp_path / "audit.jsonl", now)
    first.note("left", {"by": "the first"})
    intruder.join()
    first.note("left", {"by": "the first"})
    assert [record.facts["by"] for record in records_in(tmp_path)] == ["the first", "the second", "the first"]
    assert verify(tmp_path).records == 3


@pytest.mark.attack(
    "10,000 strangers are turned away within a minute, to fill the disk with an audit log of failed log-ins.",
    "60 of them are written down with address, fingerprint and reason, and of the others how many they were.",
)
def test_strangers_do_not_fill_the_log(tmp_path, record_property):
    time = [0.0]
    audit = ServerAudit(AuditLog(tmp_path / "audit.jsonl"), ["berlin"], lambda: time[0])
    audit.connected(0, "10.0.0.1:5000")
    for number in range(10_000):
        audit.refused(f"10.0.0.2:{number}", "SHA256:" + "x" * 43, "its key is not in the sites file")
    record_property("measured", f"a log of {audit.log.path.stat().st_size // 1000} kB")
    time[0] = 61.0
    audit.refused("10.0.0.3:1", "SHA256:y", "its key is not in the sites file")
    audit.disconnected("berlin")
    events = [(record.event, record.facts) for record in records_in(tmp_path)]
    assert events[0] == ("connected", {"site": "berlin", "address": "10.0.0.1:5000"})
    assert [event for event, _ in events].count("stranger") == STRANGERS_A_MINUTE + 1
    assert ("strangers", {"more": 10_000 - STRANGERS_A_MINUTE}) in events
    assert verify(tmp_path).records == STRANGERS_A_MINUTE + 4


def test_the_command_tells_what_a_log_holds(log, capsys):
    assert command("audit", "verify", str(log.path.parent), "--head", log.head, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["records"], told["head"], told["behind"]) == (6, log.head, {log.head: 0})
    assert command("audit", "verify", str(log.path)) == 0
    assert f"head {log.head}" in capsys.readouterr().out
    assert command("audit", "verify", "nowhere") == 2
