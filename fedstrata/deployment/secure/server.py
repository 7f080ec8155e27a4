"""The server's part in secure aggregation: it relays keys and shares, adds masked uploads up, and has the sum unmasked.

Sites may drop out between any two steps. As long as enough neighbours of every site are left, the sum of the others
comes out; if not, or if it would be of fewer than three, and nothing was unmasked yet, the round begins anew with other
keys. Before the sites are asked to
unmask, the masked sum and all that belongs to it is on disk: they do that only once in a round, so that a server that
was killed meanwhile has to go on with the same question.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata import files
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.federation import Federation, TooFewAnswers
from fedstrata.deployment.protocol import SMALL_ANSWER, Place, ProtocolError, Reply, Request, digest
from fedstrata.deployment.rules import FEWEST_SITES
from fedstrata.deployment.secure.masking import (
    PublicKeys,
    context_of,
    neighbourhoods,
    read_public_keys,
    read_sealed,
    read_shares,
    remove_masks,
)
from fedstrata.deployment.secure.primitives import Vector, public_key, read_hex, restore_secret
from fedstrata.deployment.secure.sums import Scale
from fedstrata.errors import FedStrataError

ATTEMPTS = 3
"""So often the uploads of a round are collected before it is given up."""


@dataclass(frozen=True)
class Asked:
    """What the sites of a round are asked to add up.

    ``facts`` are what each of them said after training, ``weights`` what they count, ``ranges`` to what their numbers
    are clipped, and ``length`` how many numbers each sends.
    """

    round: int
    facts: Mapping[int, Mapping[str, Any]]
    weights: Mapping[int, float]
    ranges: Mapping[str, float]
    length: int

    @property
    def sites(self) -> int:
        """How many sites there are."""
        return len(self.weights)

    @property
    def heaviest(self) -> float:
        """The largest weight, which the others are measured by."""
        return max(self.weights.values())


@dataclass(frozen=True)
class Gathered:
    """The sum of a round's uploads, masked, or when it is ``opened`` without masks, and what belongs to it.

    ``public`` are the keys of all sites that took part, ``holders`` those among whom each has shared its secrets, and
    ``seed_hashes`` tell the seeds of those who have. Of these, those who are ``present`` are in the sum.
    """

    asked: Asked
    attempt: str
    place: Place
    public: Mapping[int, PublicKeys]
    holders: Mapping[int, frozenset[int]]
    seed_hashes: Mapping[int, str]
    present: tuple[int, ...]
    total: Vector
    opened: bool = False

    @property
    def dropped(self) -> frozenset[int]:
        """The sites that shared their secrets, and then sent no upload."""
        return frozenset(self.seed_hashes) - set(self.present)

    @property
    def weight(self) -> float:
        """The weights of the uploads in the sum, in units of the heaviest of all."""
        return sum(self.asked.weights[site] for site in self.present) / self.asked.heaviest

    def to_bytes(self) -> bytes:
        """Write everything down, for the server's own disk; there is no secret in it."""
        body = self.total.tobytes()
        described = {
            "round": self.asked.round,
            "facts": _by_name(self.asked.facts),
            "weights": _by_name(self.asked.weights),
            "ranges": dict(self.asked.ranges),
            "attempt": self.attempt,
            "place": self.place.to_facts(),
            "public": _by_name(self.public),
            "holders": {str(site): sorted(others) for site, others in self.holders.items()},
            "seed_hashes": _by_name(self.seed_hashes),
            "present": list(self.present),
            "opened": self.opened,
            "bits": 8 * self.total.itemsize,
            "digest": digest(body),
        }
        return json.dumps(described).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, content: bytes, source: Path) -> Gathered:
        """Read what :meth:`to_bytes` wrote; ``source`` is named when it is damaged."""
        header, _, body = content.partition(b"\n")
        described = files.from_json(header, source)
        if described.get("digest") != digest(body):
            raise FedStrataError(f"'{source}' is damaged: its checksum is wrong, so that its round cannot be finished.")
        total = np.frombuffer(body, dtype=f"<u{described['bits'] // 8}").copy()
        facts, weights = (_by_number(described[key]) for key in ("facts", "weights"))
        return cls(
            Asked(described["round"], facts, weights, described["ranges"], len(total)),
            described["attempt"],
            Place.read(described["place"]),
            {site: (keys[0], keys[1]) for site, keys in _by_number(described["public"]).items()},
            {site: frozenset(others) for site, others in _by_number(described["holders"]).items()},
            _by_number(described["seed_hashes"]),
            tuple(described["present"]),
            total,
            described["opened"],
        )


@dataclass
class SecureAggregation:
    """Has the uploads of sites added up so that the server sees only their sum; ``path`` is where it keeps that."""

    federation: Federation
    path: Path | None = None
    bytes_up: int = 0
    bytes_down: int = 0

    def saved(self, round: int) -> Gathered | None:
        """Find a sum of this round that was collected before the server was stopped."""
        if self.path is None or not self.path.exists():
            return None
        gathered = Gathered.from_bytes(files.read_bytes(self.path), self.path)
        return gathered if gathered.asked.round == round else None

    def gather(self, asked: Asked) -> Gathered:
        """Collect masked uploads, with other keys again where too many sites drop out on the way."""
        self._refuse_few(asked.round, asked.sites)
        for number in range(1, ATTEMPTS + 1):
            try:
                gathered = self._attempt(asked, number)
            except TooFewAnswers as short:
                self.federation.log(
                    f"attempt {number} of {ATTEMPTS} to add up the uploads of round {asked.round}: {short}"
                )
            else:
                self._keep(gathered)
                return gathered
        raise FedStrataError(
            f"In round {asked.round} too many sites dropped out {ATTEMPTS} times, so that the sum of the others could "
            "not be unmasked. The rounds so far are saved: look into the log, and start the server again."
        )

    def open(self, gathered: Gathered) -> Gathered:
        """Have the masks of a sum removed by the sites that are in it."""
        if gathered.opened:
            return gathered
        self._refuse_few(gathered.asked.round, len(gathered.present))
        context = context_of(self.federation.run, gathered.asked.round, gathered.attempt)
        present, dropped, sharing = set(gathered.present), gathered.dropped, gathered.seed_hashes.keys()

        def request(around: frozenset[int]) -> Request:
            concerned = {"present": sorted(around & present), "dropped": sorted(around & dropped)}
            return self._request("unmask", gathered.place, gathered.attempt, concerned)

        shares = self._ask(
            {site: request(gathered.holders[site]) for site in gathered.present},
            lambda site, reply: read_shares(reply.facts.get("shares"), gathered.holders[site] & sharing),
        )
        secret = self._restored(gathered, shares)
        remove_masks(
            gathered.total,
            context,
            {site: secret[site] for site in present},
            {site: secret[site] for site in dropped},
            gathered.public,
            gathered.holders,
        )
        opened = replace(gathered, opened=True)
        self._keep(opened)
        return opened

    def _refuse_few(self, round: int, sites: int) -> None:
        """Refuse to have a sum opened that hides too little."""
        if sites < FEWEST_SITES:
            raise FedStrataError(
                f"In round {round} there are uploads of {sites} sites to add up, and a sum of fewer than "
                f"{FEWEST_SITES} hides too little, so that it is not opened. The rounds so far are saved: look into "
                "the log, and start the server again when more sites are there."
            )

    def _keep(self, gathered: Gathered) -> None:
        if self.path is not None:
            files.write_atomically(self.path, gathered.to_bytes(), private=True)

    def _attempt(self, asked: Asked, number: int) -> Gathered:
        """Take the steps from the keys to the masked sum."""
        place, attempt = Place.secure_sum(asked.round, number), secrets.token_hex(8)

        def request(kind: str, most_bytes: int = SMALL_ANSWER, **facts: Any) -> Request:
            return replace(self._request(kind, place, attempt, facts), most_bytes=most_bytes)

        public = self._ask(
            dict.fromkeys(asked.weights, request("keys")), lambda site, reply: read_public_keys(reply.facts.get("keys"))
        )
        ring = secrets.SystemRandom().sample(sorted(public), len(public))
        holders = neighbourhoods(ring, self.federation.rules.secure_neighbours)
        self._require(holders, public, public, "sent keys")
        sealed = self._ask(
            {
                site: request("shares", keys={str(other): list(public[other]) for other in sorted(holders[site])})
                for site in public
            },
            lambda site, reply: (
                read_sealed(reply.facts.get("sealed"), holders[site] - {site}, all_of_them=True),
                read_hex(reply.facts.get("seed_hash")).hex(),
            ),
        )
        self._require(holders, sealed, sealed, "shared their secrets")
        total = np.zeros(asked.length, self.scale(asked).dtype)
        requests = {
            site: request(
                "masked",
                total.nbytes,
                sealed={str(other): sealed[other][0][site] for other in sealed if other in holders[site] - {site}},
                sites=asked.sites,
                heaviest=asked.heaviest,
                ranges=dict(asked.ranges),
            )
            for site in sealed
        }
        present = self._ask(requests, lambda site, reply: self._add(total, reply))
        self._require(holders, present, sealed, "sent an upload")
        hashes = {site: seed_hash for site, (_, seed_hash) in sealed.items()}
        return Gathered(asked, attempt, place, public, holders, hashes, tuple(sorted(present)), total)

    def _add(self, total: Vector, reply: Reply) -> None:
        if len(reply.payload) != total.nbytes:
            raise RefusedReply(f"its masked upload has {len(reply.payload)} bytes instead of {total.nbytes}")
        np.add(total, np.frombuffer(reply.payload, dtype=total.dtype), out=total)

    def scale(self, asked: Asked) -> Scale:
        """Tell how the numbers of a round became whole ones."""
        return Scale.of(self.federation.rules, asked.sites, asked.ranges)

    def _require(
        self, holders: Mapping[int, frozenset[int]], left: Iterable[int], concerned: Iterable[int], did: str
    ) -> None:
        """Insist that the secrets of all concerned could be restored by those who are left, and that these are enough
        to hide each other.
        """
        here = set(left)
        for site in concerned:
            needed = max(FEWEST_SITES, self.federation.rules.shares_needed(len(holders[site])))
            if len(holders[site] & here) < needed:
                raise TooFewAnswers(
                    f"Only {len(holders[site] & here)} of the {len(holders[site])} sites around "
                    f"{self.federation.names[site]} {did}, and {needed} are needed."
                )

    def _restored(self, gathered: Gathered, shares: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
        """Restore the seeds of those who are present, and the keys of those who are not."""
        restored, wrong = {}, set()
        for site, seed_hash in gathered.seed_hashes.items():
            own = {holder: given[site] for holder, given in shares.items() if site in given}
            expected = seed_hash if site in gathered.present else gathered.public[site][0]
            recognise = _is_seed if site in gathered.present else _is_key
            try:
                needed = self.federation.rules.shares_needed(len(gathered.holders[site]))
                restored[site], liars = restore_secret(own, needed, recognise(expected))
            except ProtocolError as error:
                raise FedStrataError(
                    f"The sum of round {gathered.asked.round} cannot be unmasked for {self.federation.names[site]}: "
                    f"{error} The sites are asked once more when the server is started again."
                ) from None
            wrong.update(liars)
        for site in sorted(wrong):
            self.federation.refuse(site, "its shares of others' secrets are wrong")
        return restored

    def _request(self, kind: str, place: Place, attempt: str, facts: Mapping[str, Any]) -> Request:
        return Request(kind, self.federation.run, place, {"attempt": attempt, **facts})

    def _ask(self, requests: Mapping[int, Request], check: Callable[[int, Reply], Any]) -> dict[int, Any]:
        """Put a question to sites, and count its bytes both ways."""

        def counted(site: int, reply: Reply) -> Any:
            self.bytes_up += len(reply.header()) + len(reply.payload)
            return check(site, reply)

        self.bytes_down += sum(len(request.header()) for request in requests.values())
        return self.federation.ask(requests, counted, majority=False)


def _is_seed(expected: str) -> Callable[[bytes], bool]:
    return lambda secret: sha256(secret).hexdigest() == expected


def _is_key(expected: str) -> Callable[[bytes], bool]:
    return lambda secret: public_key(secret) == expected


def _by_name(values: Mapping[int, Any]) -> dict[str, Any]:
    return {str(site): value for site, value in values.items()}


def _by_number(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(site): value for site, value in values.items()}
