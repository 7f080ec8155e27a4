"""What a server asks a site, and what the site answers: a few plain facts, and a payload of encoded bytes.

=========  =============================================================  =============================================
kind       the request brings                                             the answer brings
=========  =============================================================  =============================================
who        nothing                                                        the site's number, where it knows one itself
hello      the experiment, the site's number, the last committed round    the shape, classes and sizes of its data
survey     the current model                                              the site's answer to a survey before a round
adopt      what the server concluded from a survey                        nothing
train      the model of a round                                           the site's upload, its loss, its scores
keys       nothing                                                        the site's public keys of the round
shares     the neighbours' public keys                                    sealed shares of the site's secrets for them
masked     their sealed shares for this site                              the site's upload, masked
unmask     who has sent an upload                                         shares by which masks of the sum are removed
test       the model after a round                                        the scores of the site's own model
adapt      the same, after the last round                                 the scores after the final adaptation
notice     a sentence for the site's log, such as why it was refused      nothing
=========  =============================================================  =============================================

A payload that the site got before is named by its digest instead of being sent again. Under secure aggregation
(:mod:`fedstrata.deployment.secure`) the answer to ``train`` has no upload; it follows in the four steps after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fedstrata.errors import FedStrataError

SECURE_KINDS = ("keys", "shares", "masked", "unmask")
KINDS = ("who", "hello", "survey", "adopt", "train", *SECURE_KINDS, "test", "adapt", "notice")
OK, REFUSED, UNREADY, BEHIND, MISSING = "ok", "refused", "unready", "behind", "missing"
STATUSES = (OK, REFUSED, UNREADY, BEHIND, MISSING)
"""Done; not done, for the reason in the facts; a hello is needed first; an announcement is; the named payload is."""
LONGEST_FACTS = 2**20


class ProtocolError(FedStrataError):
    """Something that does not follow the protocol; nothing of it is used."""


@dataclass(frozen=True)
class Request:
    """A question of the server. ``step`` is its place in the run: the round, and the number of the step in it."""

    kind: str
    run: str = ""
    step: tuple[int, int] = (0, 0)
    facts: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes = b""

    @property
    def ticket(self) -> str:
        """A name that the answer repeats, so that late and double answers are known as such."""
        return f"{self.kind} {self.step[0]}.{self.step[1]}"

    @property
    def round(self) -> int:
        """The round that the request belongs to."""
        return self.step[0]

    def header(self) -> str:
        """Write all but the payload as JSON."""
        return _write({"kind": self.kind, "run": self.run, "step": list(self.step), "facts": dict(self.facts)})

    @classmethod
    def read(cls, header: str, payload: bytes) -> Request:
        """Read a request; whatever does not follow the protocol is a :class:`ProtocolError`."""
        values = _read(header, {"kind": str, "run": str, "step": list, "facts": dict})
        if values["kind"] not in KINDS:
            raise ProtocolError(f"A request of the unknown kind {values['kind'][:40]!r} came.")
        step = values["step"]
        if len(step) != 2 or not all(type(number) is int and 0 <= number < 2**31 for number in step):
            raise ProtocolError(f"A request for the impossible step {str(step)[:40]} came.")
        return cls(values["kind"], values["run"], (step[0], step[1]), values["facts"], payload)


@dataclass(frozen=True)
class Reply:
    """The answer of a site."""

    ticket: str
    status: str = OK
    facts: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes = b""

    def header(self) -> str:
        """Write all but the payload as JSON."""
        return _write({"ticket": self.ticket, "status": self.status, "facts": dict(self.facts)})

    @classmethod
    def read(cls, header: str, payload: bytes) -> Reply:
        """Read an answer; whatever does not follow the protocol is a :class:`ProtocolError`."""
        values = _read(header, {"ticket": str, "status": str, "facts": dict})
        if values["status"] not in STATUSES:
            raise ProtocolError(f"An answer with the unknown status {values['status'][:40]!r} came.")
        return cls(values["ticket"], values["status"], values["facts"], payload)

    @property
    def reason(self) -> str:
        """Why a request was not done."""
        return str(self.facts.get("reason", "no reason was given"))[:500]


def digest(payload: bytes) -> str:
    """Name a payload by its content."""
    return blake2b(payload, digest_size=16).hexdigest()


def _write(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def _read(header: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    if len(header) > LONGEST_FACTS:
        raise ProtocolError(f"A message with {len(header)} characters of facts came; {LONGEST_FACTS} are the most.")
    try:
        values = json.loads(header)
    except (ValueError, RecursionError):
        raise ProtocolError("A message came whose facts are not JSON.") from None
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ProtocolError(f"A message came that does not hold just {', '.join(kinds)}.")
    for name, kind in kinds.items():
        if not isinstance(values[name], kind):
            raise ProtocolError(f"In a message, {name} is not what it should be.")
    return values
