"""A site's part in secure aggregation: secrets are on its disk before it answers, and nothing is given away twice."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedstrata.deployment.protocol import ProtocolError, Reply, Request, digest
from fedstrata.deployment.rules import FEWEST_SITES, SecureRules
from fedstrata.deployment.secure.masking import (
    RoundSecrets,
    by_site,
    context_of,
    read_public_keys,
    read_sealed,
    refuse_few,
)
from fedstrata.deployment.secure.primitives import RandomBytes
from fedstrata.deployment.secure.sums import Scale, read_ranges, to_numbers
from fedstrata.deployment.store import SiteStore
from fedstrata.methods.contract.views import Message

Upload = Callable[[int], tuple[Message, float]]
"""What a site learned in a round, and its weight."""
_ATTEMPT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class SecureSteps:
    """Answers what is asked of a site after it has trained: for its keys, shares, masked upload, and unmasking.

    It takes part in no sum of fewer than ``fewest`` uploads.
    """

    store: SiteStore
    rules: SecureRules
    number: int
    sites: int
    random_bytes: RandomBytes = secrets.token_bytes
    fewest: int = FEWEST_SITES

    def answer(self, request: Request, upload: Upload) -> Reply:
        """Answer one of the four steps."""
        if request.kind == "keys":
            return self._keys(request)
        current = self._open(request)
        if request.kind == "shares":
            return self._shares(request, current)
        if request.kind == "masked":
            return self._masked(request, current, upload)
        return self._unmask(request, current)

    def forget_before(self, round: int) -> None:
        """Delete the secrets of a round that is over; that its shares were given away is remembered."""
        current = self._current()
        if current is not None and current.seed and current.round < round:
            self._keep(current.closed())

    def _keys(self, request: Request) -> Reply:
        current, context = self._current(), _context(request)
        if current is None or current.context != context:
            if current is not None and request.round < current.round + bool(current.unmasked):
                raise ProtocolError(
                    f"Round {request.round} is over for this site, which has helped to open sums up to round "
                    f"{current.round}; another sum of the same uploads could tell them apart."
                )
            current = RoundSecrets.begin(request.round, context, self.number, self.random_bytes)
            self._keep(current)
        return Reply(request.ticket, facts={"keys": list(self._open(request).public_keys)})

    def _shares(self, request: Request, current: RoundSecrets) -> Reply:
        keys = by_site(request.facts.get("keys"), range(self.sites))
        holders = {site: read_public_keys(pair) for site, pair in keys.items()}
        shared = current.share(holders, self.rules.shares_needed(len(holders)), self.random_bytes, self.fewest)
        self._keep(shared)
        sealed = {str(site): text for site, text in shared.sealed.items()}
        return Reply(request.ticket, facts={"sealed": sealed, "seed_hash": shared.seed_hash})

    def _masked(self, request: Request, current: RoundSecrets, upload: Upload) -> Reply:
        facts = request.facts
        relayed = read_sealed(facts.get("sealed"), current.holders)
        sites, heaviest = facts.get("sites"), facts.get("heaviest")
        if type(sites) is not int or not 0 < sites <= self.sites:
            raise ProtocolError("A request for an upload came for an impossible number of sites.")
        refuse_few(sites, self.fewest)
        if type(heaviest) is not float or not 0 < heaviest < math.inf:
            raise ProtocolError("A request for an upload came without the largest weight.")
        message, weight = upload(request.round)
        vector = to_numbers(message, weight / heaviest, Scale.of(self.rules, sites, read_ranges(facts.get("ranges"))))
        asked = digest(_canonical([relayed, sites, heaviest, facts["ranges"]]) + vector.tobytes())
        holding = current.hold(relayed, self.rules.shares_needed(len(current.holders)), asked, self.fewest)
        self._keep(holding)
        holding.mask(vector)
        return Reply(request.ticket, payload=vector.tobytes())

    def _unmask(self, request: Request, current: RoundSecrets) -> Reply:
        present, dropped = (_numbers(request.facts.get(key)) for key in ("present", "dropped"))
        needed = self.rules.shares_needed(len(current.holders))
        given, shares = current.unmask(present, dropped, needed, digest(_canonical([present, dropped])), self.fewest)
        self._keep(given)
        return Reply(request.ticket, facts={"shares": {str(site): share for site, share in shares.items()}})

    def _open(self, request: Request) -> RoundSecrets:
        """Find the secrets of the aggregation that a request belongs to."""
        current = self._current()
        if current is None or not current.seed or current.context != _context(request):
            raise ProtocolError(f"This site takes no part in this aggregation of round {request.round}.")
        return current

    def _current(self) -> RoundSecrets | None:
        facts = self.store.secrets()
        return None if facts is None else RoundSecrets.from_facts(facts)

    def _keep(self, current: RoundSecrets) -> None:
        """Write secrets down; what has not changed is not written again."""
        if current.to_facts() != self.store.secrets():
            self.store.write_secrets(current.to_facts())


def _context(request: Request) -> str:
    """Name the aggregation that a request belongs to: a round may need several attempts."""
    attempt = request.facts.get("attempt")
    if not isinstance(attempt, str) or not _ATTEMPT.fullmatch(attempt):
        raise ProtocolError("A step of an aggregation came without its name.")
    return context_of(request.run, request.round, attempt)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise ProtocolError("A list of sites came that is none.")
    return sorted(set(value))
