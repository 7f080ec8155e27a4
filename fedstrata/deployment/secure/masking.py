"""The four steps of secure aggregation (:mod:`fedstrata.deployment.secure`) without networks, disks or clocks.

Here is what a site does, as changes of its :class:`RoundSecrets`, and what the server computes. Random bytes are passed
in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from fedstrata.deployment.protocol import ProtocolError
from fedstrata.deployment.rules import FEWEST_SITES
from fedstrata.deployment.secure.primitives import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    RandomBytes,
    Vector,
    add_mask,
    agreed_key,
    pair_sign,
    public_key,
    read_hex,
    seal,
    split_secret,
    unseal,
)

PublicKeys = tuple[str, str]
"""A site's public keys as hexadecimal digits: for masks, and for sealing what is relayed."""


# A site ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundSecrets:
    """What a site must not lose, and not tell, during one aggregation of a round.

    ``context`` is a name of this aggregation that enters into all keys, ``number`` the site's own. ``holders`` are the
    neighbours and the site itself with their public keys, ``sealed`` the shares for the neighbours as they were sent,
    ``held`` the shares of others (and its own) that the site holds: of the seed, and of the key. ``masked`` and
    ``unmasked`` are digests of what was asked when the masked upload was sent and shares were given away: each happens
    for one question only.
    """

    round: int
    context: str
    number: int
    mask_key: bytes = field(default=b"", repr=False)
    seal_key: bytes = field(default=b"", repr=False)
    seed: bytes = field(default=b"", repr=False)
    holders: Mapping[int, PublicKeys] = field(default_factory=dict)
    sealed: Mapping[int, str] = field(default_factory=dict)
    held: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    masked: str = ""
    unmasked: str = ""

    @classmethod
    def begin(cls, round: int, context: str, number: int, random_bytes: RandomBytes) -> RoundSecrets:
        """Draw the keys and the seed of an aggregation."""
        mask_key, seal_key, seed = (random_bytes(KEY_BYTES) for _ in range(3))
        return cls(round, context, number, mask_key, seal_key, seed)

    def closed(self) -> RoundSecrets:
        """Forget all secrets; what stays is whether this round's shares were given away."""
        return RoundSecrets(self.round, self.context, self.number, unmasked=self.unmasked)

    @property
    def public_keys(self) -> PublicKeys:
        """The public halves of both keys."""
        return public_key(self.mask_key), public_key(self.seal_key)

    @property
    def seed_hash(self) -> str:
        """By which the server recognises the seed when it restores it."""
        return sha256(self.seed).hexdigest()

    def share(
        self,
        holders: Mapping[int, PublicKeys],
        needed: int,
        random_bytes: RandomBytes,
        fewest: int = FEWEST_SITES,
    ) -> RoundSecrets:
        """Divide seed and key among the holders; the same question again changes nothing, another one is refused."""
        if self.holders:
            if self.holders != holders:
                raise ProtocolError("In one round this site shares its secrets with the same neighbours only.")
            return self
        keys = [key for pair in holders.values() for key in pair]
        if holders.get(self.number) != self.public_keys or len(set(keys)) < len(keys):
            raise ProtocolError("The public keys of a round are not those that the sites made.")
        refuse_few(len(holders), fewest)
        if not 2 <= needed <= len(holders):
            raise ProtocolError(f"{len(holders)} sites are too few to share secrets among.")
        seeds, masks = (split_secret(part, holders, needed, random_bytes) for part in (self.seed, self.mask_key))
        sealed = {
            other: seal(
                agreed_key(self.seal_key, public, _purpose("seal", self.context)),
                (seeds[other], masks[other]),
                _about(self.context, self.number, other),
                random_bytes,
            )
            for other, (_, public) in holders.items()
            if other != self.number
        }
        own = {self.number: (seeds[self.number], masks[self.number])}
        return replace(self, holders=dict(holders), sealed=sealed, held=own)

    def hold(self, relayed: Mapping[int, str], needed: int, asked: str, fewest: int = FEWEST_SITES) -> RoundSecrets:
        """Take the shares of the neighbours in, before the masked upload; only once, for one question."""
        if not self.holders:
            raise ProtocolError("Shares came before the keys of the round.")
        if self.masked:
            if self.masked != asked:
                raise ProtocolError("Under the keys of a round this site sends one upload, once.")
            return self
        if self.number in relayed or not relayed.keys() <= self.holders.keys() or len(relayed) + 1 < needed:
            raise ProtocolError("The shares that came are not those of enough neighbours.")
        refuse_few(len(relayed) + 1, fewest)
        held = {
            other: unseal(
                agreed_key(self.seal_key, self.holders[other][1], _purpose("seal", self.context)),
                sealed,
                _about(self.context, other, self.number),
            )
            for other, sealed in relayed.items()
        }
        return replace(self, held={**self.held, **held}, masked=asked)

    def mask(self, vector: Vector) -> None:
        """Hide an upload, in place, under the site's own mask and those that it shares with its neighbours."""
        add_mask(vector, self.seed)
        for other in sorted(self.held.keys() - {self.number}):
            key = agreed_key(self.mask_key, self.holders[other][0], _purpose("mask", self.context))
            add_mask(vector, key, pair_sign(self.number, other))

    def unmask(
        self,
        present: Collection[int],
        dropped: Collection[int],
        needed: int,
        asked: str,
        fewest: int = FEWEST_SITES,
    ) -> tuple[RoundSecrets, dict[int, str]]:
        """Give away shares: of the seeds of those who sent an upload, of the keys of those who did not.

        Both of one site would open its upload, so there is only one answer in a round.
        """
        if self.unmasked and self.unmasked != asked:
            raise ProtocolError("This site has given its shares of this round away, and does that only once.")
        if not self.masked:
            raise ProtocolError("A site that sent no upload gives no shares away.")
        if set(present) & set(dropped) or {*present, *dropped} != self.held.keys() or self.number not in present:
            raise ProtocolError("The sites that are to be unmasked are not the neighbours of this round, each once.")
        if len(present) < needed:
            raise ProtocolError(f"Of the neighbours of this round {len(present)} are left, and {needed} are needed.")
        refuse_few(len(present), fewest)
        shares = {
            **{other: self.held[other][0].hex() for other in present},
            **{other: self.held[other][1].hex() for other in dropped},
        }
        return replace(self, unmasked=asked), shares

    def to_facts(self) -> dict[str, Any]:
        """Write everything as plain data, for the site's own disk."""
        return {
            "round": self.round,
            "context": self.context,
            "number": self.number,
            "keys": [key.hex() for key in (self.mask_key, self.seal_key, self.seed)],
            "holders": {str(site): list(keys) for site, keys in self.holders.items()},
            "sealed": {str(site): sealed for site, sealed in self.sealed.items()},
            "held": {str(site): [share.hex() for share in shares] for site, shares in self.held.items()},
            "masked": self.masked,
            "unmasked": self.unmasked,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> RoundSecrets:
        """Read what :meth:`to_facts` wrote."""
        mask_key, seal_key, seed = (bytes.fromhex(key) for key in facts["keys"])
        return cls(
            facts["round"],
            facts["context"],
            facts["number"],
            mask_key,
            seal_key,
            seed,
            holders={int(site): (keys[0], keys[1]) for site, keys in facts["holders"].items()},
            sealed={int(site): sealed for site, sealed in facts["sealed"].items()},
            held={int(site): (bytes.fromhex(seed), bytes.fromhex(key)) for site, (seed, key) in facts["held"].items()},
            masked=facts["masked"],
            unmasked=facts["unmasked"],
        )


def refuse_few(sites: int, fewest: int) -> None:
    """Refuse to take part in a sum of so few uploads that it would hide too little.

    A site counts those with whom it shares masks, itself among them: without the uploads of all of these who are there
    the sum cannot be opened.
    """
    if sites < fewest:
        raise ProtocolError(
            f"A sum of {sites} uploads hides too little: this site helps to add up at least {fewest}, its own and "
            "those of its neighbours."
        )


def context_of(run: str, round: int, attempt: str) -> str:
    """Name an aggregation; no two have the same name."""
    return f"{run} {round} {attempt}"


def _purpose(what: str, context: str) -> str:
    """Name what a key is for."""
    return f"{what} {context}"


def _about(context: str, sender: int, receiver: int) -> str:
    """Say what is sealed, so that it cannot be passed off as something else."""
    return f"{context} {sender} {receiver}"


def read_public_keys(value: Any) -> PublicKeys:
    """Read a site's two public keys from a message."""
    if not isinstance(value, list) or len(value) != 2:
        raise ProtocolError("Something came in the place of two public keys.")
    mask, seal = (read_hex(key).hex() for key in value)
    return mask, seal


def read_sealed(value: Any, places: Collection[int], all_of_them: bool = False) -> dict[int, str]:
    """Read sealed shares for, or from, some of these places, or all of them."""
    return {site: read_hex(text, SEALED_BYTES).hex() for site, text in by_site(value, places, all_of_them).items()}


def read_shares(value: Any, places: Collection[int]) -> dict[int, bytes]:
    """Read shares of the secrets of all of these places."""
    return {site: read_hex(text, SHARE_BYTES) for site, text in by_site(value, places, all_of_them=True).items()}


def by_site(value: Any, places: Collection[int], all_of_them: bool = False) -> dict[int, Any]:
    """Read facts by the numbers of sites, which must be among these places, or be all of them."""
    known = {str(site): site for site in places}
    if not isinstance(value, dict) or not value.keys() <= known.keys() or (all_of_them and len(value) < len(known)):
        raise ProtocolError("Something came about other sites than those that are concerned.")
    return {known[site]: item for site, item in value.items()}


# The server -----------------------------------------------------------------------------------------------------------


def neighbourhoods(sites: Sequence[int], neighbours: int) -> dict[int, frozenset[int]]:
    """Give each site its neighbours, and itself: all, or the nearest on a ring in the order of ``sites``.

    The order should be random: then, with neighbours of a small multiple of the logarithm of the sites, those that
    follow the protocol stay connected whoever drops out (Bell et al., 2020).
    """
    if neighbours >= len(sites) - 1:
        return {site: frozenset(sites) for site in sites}
    reach = -(-neighbours // 2)
    return {
        site: frozenset(sites[(position + step) % len(sites)] for step in range(-reach, reach + 1))
        for position, site in enumerate(sites)
    }


def remove_masks(
    total: Vector,
    context: str,
    seeds: Mapping[int, bytes],
    keys: Mapping[int, bytes],
    public: Mapping[int, PublicKeys],
    neighbours: Mapping[int, frozenset[int]],
) -> None:
    """Take the masks that are left out of a sum of masked uploads, in place.

    ``seeds`` are those of the sites in the sum, ``keys`` the private ones of those that dropped out after they had
    shared their secrets; with each of their neighbours in the sum they have a mask in common.
    """
    for seed in seeds.values():
        add_mask(total, seed, -1)
    for dropped, key in keys.items():
        for site in neighbours[dropped] & seeds.keys():
            common = agreed_key(key, public[site][0], _purpose("mask", context))
            add_mask(total, common, -pair_sign(site, dropped))
