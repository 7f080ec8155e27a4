"""What a server asks a site, and what the site answers: a few plain facts, and a payload of encoded bytes.

==========  ============================================================  ==============================================
kind        the request brings                                            the answer brings
==========  ============================================================  ==============================================
who         nothing                                                       the site's number, where it knows one itself
hello       the experiment, the site's number, the last committed round   the shape, classes and sizes of its data
statistics  nothing                                                       sums of its samples' channels (``normalise``)
survey      the current model                                             the site's answer to a survey before a round
adopt       what the server concluded from a survey                       nothing
train       the model of a round                                          the site's upload, loss, cost and scores
keys        nothing                                                       the site's public keys of the round
shares      the neighbours' public keys                                   sealed shares of its secrets for them
masked      their sealed shares for this site                             the site's upload, masked
unmask      who has sent an upload                                        shares by which masks of the sum are removed
test        the model after a round                                       the scores of the site's own model
adapt       the same, after the last round                                the scores after the final adaptation
notice      a sentence for the site's log, such as why it was refused     nothing
end         that the run is finished, or why it is not                    nothing
==========  ============================================================  ==============================================

A payload that the site got before is named by its digest instead of being sent again. Under secure aggregation
(:mod:`fedstrata.deployment.secure`) the answers to ``statistics`` and ``train`` have no sums and no upload; they follow
in the four steps after it. A hello also brings mean and deviation of all sites' samples, once they are known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple

from fedstrata.deployment.foreign_text import clean
from fedstrata.errors import FedStrataError

SECURE_KINDS = ("keys", "shares", "masked", "unmask")
KINDS = ("who", "hello", "statistics", "survey", "adopt", "train", *SECURE_KINDS, "test", "adapt", "notice", "end")
OK, REFUSED, UNREADY, BEHIND, MISSING, LOST = "ok", "refused", "unready", "behind", "missing", "lost"
STATUSES = (OK, REFUSED, UNREADY, BEHIND, MISSING, LOST)
"""Done; not done, for the reason in the facts; a hello is needed first; an announcement is; the named payload is; the
state from which to go on is not there any more, for the reason in the facts.
"""
LONGEST_FACTS = 2**20
SMALL_ANSWER = 2**16
"""So many bytes an answer may have beside its facts, where no payload is asked for."""


class ProtocolError(FedStrataError):
    """Something that does not follow the protocol; nothing of it is used."""


class Stage(IntEnum):
    """The stages of a round, in their order: what comes before training, training, and adding uploads up securely."""

    EXCHANGES = 0
    TRAINING = 1
    SECURE_SUM = 2


class Place(NamedTuple):
    """A place in the run: the round, the stage of the round, and the number of the step in that stage.

    Places are ordered as their steps are taken. An exchange before training has two steps, its survey and its
    announcement; training is one; and so is every attempt to add uploads up. ``Place(round)`` is where a round begins.
    """

    round: int = 0
    stage: Stage = Stage.EXCHANGES
    number: int = 0

    @classmethod
    def survey(cls, round: int, exchange: int) -> Place:
        """Tell where the survey of an exchange before a round's training is."""
        return cls(round, Stage.EXCHANGES, 2 * exchange)

    @classmethod
    def announcement(cls, round: int, exchange: int) -> Place:
        """Tell where the announcement of an exchange before a round's training is."""
        return cls(round, Stage.EXCHANGES, 2 * exchange + 1)

    @classmethod
    def training(cls, round: int) -> Place:
        """Tell where a round's training is."""
        return cls(round, Stage.TRAINING)

    @classmethod
    def secure_sum(cls, round: int, attempt: int) -> Place:
        """Tell where an attempt to add up a round's uploads is."""
        return cls(round, Stage.SECURE_SUM, attempt)

    @property
    def exchange(self) -> int:
        """Which of the round's exchanges a survey or an announcement belongs to."""
        return self.number // 2

    def to_facts(self) -> list[int]:
        """Write it as plain numbers."""
        return [int(number) for number in self]

    @classmethod
    def read(cls, value: Any) -> Place:
        """Read a place from a message; whatever cannot be one is a :class:`ProtocolError`."""
        whole = isinstance(value, list) and all(type(number) is int and 0 <= number < 2**31 for number in value)
        if not whole or len(value) != len(cls._fields) or value[1] not in list(Stage):
            raise ProtocolError(f"A request for the impossible place {str(value)[:40]} came.")
        return cls(value[0], Stage(value[1]), value[2])


BEGINNING = Place()
"""Where a run begins, before anything was done in it."""


@dataclass(frozen=True)
class Request:
    """A question of the server, and the place in the run where it is asked.

    ``most_bytes`` is the most that the payload of an answer may have; it stays at the server.
    """

    kind: str
    run: str = ""
    place: Place = BEGINNING
    facts: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    most_bytes: int = SMALL_ANSWER

    @property
    def ticket(self) -> str:
        """A name that the answer repeats, so that late and double answers are known as such."""
        return f"{self.kind} {self.place.round}.{self.place.number}"

    @property
    def round(self) -> int:
        """The round that the request belongs to."""
        return self.place.round

    @property
    def is_in_its_place(self) -> bool:
        """Whether a survey, an announcement or a training is asked for where the run has one."""
        round, exchange = self.place.round, self.place.exchange
        places = {
            "survey": Place.survey(round, exchange),
            "adopt": Place.announcement(round, exchange),
            "train": Place.training(round),
        }
        return self.place == places.get(self.kind)

    def header(self) -> str:
        """Write all but the payload as JSON."""
        return _write({"kind": self.kind, "run": self.run, "place": self.place.to_facts(), "facts": dict(self.facts)})

    @classmethod
    def read(cls, header: str, payload: bytes) -> Request:
        """Read a request; whatever does not follow the protocol is a :class:`ProtocolError`."""
        values = _read(header, {"kind": str, "run": str, "place": list, "facts": dict})
        if values["kind"] not in KINDS:
            raise ProtocolError(f"A request of the unknown kind {values['kind'][:40]!r} came.")
        return cls(values["kind"], values["run"], Place.read(values["place"]), values["facts"], payload)


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
        reason = self.facts.get("reason")
        return clean(reason) if isinstance(reason, str) else "no reason was given"


def digest(payload: bytes) -> str:
    """Name a payload by its content."""
    return blake2b(payload, digest_size=16).hexdigest()


def _write(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def _read(header: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    if len(header) > LONGEST_FACTS:
        raise ProtocolError(f"A message with {len(header)} characters of facts came; {LONGEST_FACTS} are the most.")
    try:
        values = json.loads(header, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise ProtocolError("A message came whose facts are not JSON, or hold numbers that are not finite.") from None
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ProtocolError(f"A message came that does not hold just {', '.join(kinds)}.")
    for name, kind in kinds.items():
        if not isinstance(values[name], kind):
            raise ProtocolError(f"In a message, {name} is not what it should be.")
    return values


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(digits)
    return number
