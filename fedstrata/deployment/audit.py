"""An audit log: what happened, in lines that are only ever added, each of which names the one before by its hash.

A line is a JSON object with a ``number``, the ``time`` (UTC), an ``event``, its ``facts``, the hash of the line
``before`` and its own ``hash``: the SHA-256 of the line without that last field. So whoever changes, removes, adds or
swaps lines must write all later ones anew, and then the hash of the last line, the *head*, is another one. That lines
are missing at the end shows only beside a head that was noted elsewhere.

A process that is killed while it writes leaves a torn line. Nothing is taken away: the next record, ``torn``, tells how
many bytes those are and their SHA-256, and names the last whole line as the one before.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.errors import FedStrataError

AUDIT_FILE = "audit.jsonl"
TORN = "torn"
NOTHING_BEFORE = "0" * 64
LONGEST_TEXT = 500
"""Texts may come from the other side; longer ones are cut."""
_HASH = b',"hash":"'
_HASH_BYTES = len(_HASH) + 64 + len(b'"}')
_FIRST = b'{"number":1,'
_MOST_TORN = 2**22
_FIRST_LOOK = 2**14
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)


_HEAD = re.compile(r"[0-9a-f]{64}")
ANCHORED = ("hello", "end")
"""With these requests both ends tell each other the heads of their logs, so that each log holds heads of the other."""


class AuditError(FedStrataError):
    """An audit log that is not what was written."""


@dataclass(frozen=True)
class Record:
    """One line of a log."""

    number: int
    time: str
    event: str
    facts: Mapping[str, Any]
    before: str
    hash: str


@dataclass(frozen=True)
class Verified:
    """What is known of a log whose chain is whole."""

    records: int
    first: str | None
    last: str | None
    head: str
    torn: tuple[int, ...] = ()
    """The numbers of the records that tell of a torn line."""
    behind: Mapping[str, int] = field(default_factory=dict)
    """For each head that was noted elsewhere, how many records have come after it."""


class AuditLog:
    """Adds records to a log, also after restarts, and beside other processes that do the same.

    The file is made with the first record, and only its owner can read it.
    """

    def __init__(
        self,
        path: Path,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self.path = path
        self.head = NOTHING_BEFORE
        self.records = 0
        self._now = now
        self._mutex = threading.Lock()
        self._size = 0
        self._descriptor: int | None = None

    def note(self, event: str, facts: Mapping[str, Any], wait: bool = True) -> str:
        """Add a record and return its hash, which then is the head.

        ``wait`` until it is on the disk; else the next record that waits brings it there, and what only the end of the
        machine itself, not of the process, could lose meanwhile.
        """
        with files.explained(self.path):
            with self._mutex:
                descriptor = self._open()
                with _excluding_others(descriptor):
                    grown = os.fstat(descriptor).st_size != self._size
                    self._add(descriptor, event, facts, self._catch_up(descriptor) if grown else b"")
                head = self.head
            if wait:
                os.fsync(descriptor)
        return head

    def __str__(self) -> str:
        """Tell how the log ends, to be noted elsewhere."""
        return f"the audit log has {self.records} records; its head is {self.head}"

    def close(self) -> None:
        """Give the file back; another record opens it again."""
        with self._mutex:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = files.open_to_append(self.path)
        return self._descriptor

    def _catch_up(self, descriptor: int) -> bytes:
        """Go on behind the last whole record; return what must be written first, where something torn follows it."""
        size = os.fstat(descriptor).st_size
        last, torn = _last_record(descriptor, size)
        if last is None and not all(_FIRST.startswith(line[: len(_FIRST)]) for line in torn.split(b"\n")):
            raise AuditError(
                f"'{self.path}' does not end like an audit log. Keep it, move it to another place, and start again: a "
                "new log begins."
            )
        self.head, self.records = (NOTHING_BEFORE, 0) if last is None else (last.hash, last.number)
        self._size = size
        if not torn:
            return b""
        with suppress(AuditError):
            record = _read(torn + b"\n")  # only the end of the line is missing
            if record.before == self.head:
                self.head, self.records = record.hash, record.number
                return b"\n"
        end = b"" if torn.endswith(b"\n") else b"\n"
        return end + self._line(TORN, _torn_facts(torn + end))

    def _add(self, descriptor: int, event: str, facts: Mapping[str, Any], before: bytes) -> None:
        content = before + self._line(event, facts)
        size, self._size = self._size + len(content), -1  # unknown, until all of it is written
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size = size

    def _line(self, event: str, facts: Mapping[str, Any]) -> bytes:
        """Write the next record, which becomes the head."""
        number, time = self.records + 1, self._now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = {"number": number, "time": time, "event": event, "facts": _plain(facts), "before": self.head}
        content = json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
        self.head, self.records = sha256(content).hexdigest(), number
        return b'%s%s%s"}\n' % (content[:-1], _HASH, self.head.encode())


def verify(path: Path, heads: Sequence[str] = ()) -> Verified:
    """Check every line of a log; the first that is broken is an :class:`AuditError` with its number and the reason.

    ``heads`` are hashes that were noted elsewhere: each must be that of a record of the log.
    """
    path = path / AUDIT_FILE if path.is_dir() else path
    chain = _Chain(path, heads)
    with files.explained(path, "read"), path.open("rb") as file:
        for line in file:
            chain.take(line)
    return chain.end()


def heads_noted(other: Path, log: Path) -> list[str]:
    """Find the heads of one log in another, of the server or of a site that took part in its runs."""
    started = [record.facts for record in records_in(log) if record.event == "start"]
    runs, names = ({facts[key] for facts in started if key in facts} for key in ("run", "site"))
    found = []
    for facts in (record.facts for record in records_in(other)):
        found += [facts["server_head"]] if "server_head" in facts and facts.get("run") in runs else []
        found += [facts["site_head"]] if "site_head" in facts and facts.get("site") in names else []
    if not found:
        raise AuditError(f"'{other}' holds no head of '{log}'; they took part in no run together.")
    return found


def records_in(path: Path) -> Iterator[Record]:
    """Read the records of a log without checking how they hang together; torn lines are passed over."""
    path = path / AUDIT_FILE if path.is_dir() else path
    with files.explained(path, "read"), path.open("rb") as file:
        for line in file:
            with suppress(AuditError):
                yield _read(line)


def head_in(facts: Mapping[str, Any]) -> str | None:
    """Find the head of the other side's log in what it sent."""
    head = facts.get("head")
    return head if isinstance(head, str) and _HEAD.fullmatch(head) else None


def payload_facts(payload: bytes) -> dict[str, Any]:
    """Name a payload by its length and its hash, as both ends do."""
    return {"bytes": len(payload), **({"sha256": sha256(payload).hexdigest()} if payload else {})}


class _Chain:
    """Takes one line after the other, and knows what the next one must be."""

    def __init__(self, path: Path, heads: Sequence[str]) -> None:
        self.path = path
        self.heads: dict[str, int | None] = dict.fromkeys(heads)
        self.lines = 0
        self.first: Record | None = None
        self.last: Record | None = None
        self.torn: list[int] = []
        self._broken: str | None = None
        self._pending = b""

    def take(self, line: bytes) -> None:
        """Take a line; one that does not fit may still be a torn one, if the next record says so."""
        self.lines += 1
        try:
            record = _read(line)
            self._require_next(record)
        except AuditError as error:
            self._broken = self._broken or f"Line {self.lines} of '{self.path}' {error}."
            self._pending += line
            if len(self._pending) > _MOST_TORN:
                raise AuditError(self._broken) from None
            return
        if self._pending and (record.event != TORN or record.facts != _torn_facts(self._pending)):
            raise AuditError(str(self._broken))
        if record.event == TORN:
            if not self._pending:
                raise AuditError(f"Line {self.lines} of '{self.path}' tells of a torn line that is not there.")
            self.torn.append(record.number)
            self._pending, self._broken = b"", None
        self.first = self.first or record
        self.last = record
        if record.hash in self.heads:
            self.heads[record.hash] = record.number

    def end(self) -> Verified:
        """Tell what is known now that there are no more lines."""
        if self._broken is not None:
            raise AuditError(self._broken)
        records = 0 if self.last is None else self.last.number
        for head, number in self.heads.items():
            if number is None:
                raise AuditError(
                    f"'{self.path}' holds no record with the hash {head[:64]}, which was noted as its head: records "
                    f"are missing at its end, behind line {self.lines}, or it was written anew."
                )
        return Verified(
            records,
            None if self.first is None else self.first.time,
            None if self.last is None else self.last.time,
            NOTHING_BEFORE if self.last is None else self.last.hash,
            tuple(self.torn),
            {head: records - (number or 0) for head, number in self.heads.items()},
        )

    def _require_next(self, record: Record) -> None:
        number, head = (0, NOTHING_BEFORE) if self.last is None else (self.last.number, self.last.hash)
        if record.number != number + 1:
            raise AuditError(
                f"holds the record {record.number} where {number + 1} should stand: records were removed, put in or "
                "swapped"
            )
        if record.before != head:
            raise AuditError("does not follow from the line before, which is another one than when it was written")


def _read(line: bytes) -> Record:
    """Read a line by itself; what is wrong with it is an error that goes on behind the words 'line 7'."""
    if not line.endswith(b"\n"):
        raise AuditError(
            "is torn: its end is missing. Where a process was killed, its next start adds a record that tells so"
        )
    content, end = line[: -_HASH_BYTES - 1], line[-_HASH_BYTES - 1 : -1]
    if not end.startswith(_HASH) or not end.endswith(b'"}'):
        raise AuditError("is no record of an audit log")
    own = sha256(content + b"}").hexdigest()
    if end[len(_HASH) : -2] != own.encode():
        raise AuditError("was changed: its hash does not fit what it says")
    try:
        return Record(**json.loads(content + b"}"), hash=own)
    except (ValueError, TypeError, RecursionError):
        raise AuditError("is no record of an audit log") from None


def _last_record(descriptor: int, size: int) -> tuple[Record | None, bytes]:
    """Find the last whole record of a file, and all that follows it."""
    look = _FIRST_LOOK
    while True:
        begin = max(0, size - look)
        content = os.pread(descriptor, size - begin, begin)
        lines = content.splitlines(keepends=True)
        for count in range(len(lines) - 1, -1 if begin == 0 else 0, -1):  # the first may be the end of a line
            with suppress(AuditError):
                return _read(lines[count]), b"".join(lines[count + 1 :])
        if begin == 0:
            return None, content
        look *= 4


def _torn_facts(torn: bytes) -> dict[str, Any]:
    return {"bytes": len(torn), "sha256": sha256(torn).hexdigest()}


@contextmanager
def _excluding_others(descriptor: int) -> Iterator[None]:
    """Let one process at a time write, on file systems that can tell processes apart."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _plain(value: Any) -> Any:
    """Turn facts into what JSON can hold: long texts are cut, and what is no number becomes null."""
    if isinstance(value, Mapping):
        return {str(key)[:LONGEST_TEXT]: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)[:LONGEST_TEXT]
