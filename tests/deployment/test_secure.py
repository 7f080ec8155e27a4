"""Secure aggregation without networks: shares, masks, sums, and what a site refuses."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from fedstrata.deployment.protocol import Place, ProtocolError
from fedstrata.deployment.rules import FEWEST_SITES, Rules, SecureRules
from fedstrata.deployment.secure.masking import (
    RoundSecrets,
    by_site,
    context_of,
    neighbourhoods,
    read_public_keys,
    read_sealed,
    read_shares,
    remove_masks,
)
from fedstrata.deployment.secure.primitives import add_mask, agreed_key, public_key, restore_secret, split_secret
from fedstrata.deployment.secure.server import Asked, Gathered
from fedstrata.errors import FedStrataError

RULES = Rules(secure=True)


def drawing(seed: int = 0) -> Any:
    return random.Random(seed).randbytes


# Shares ---------------------------------------------------------------------------------------------------------------


def test_a_share_is_a_value_of_a_line_through_the_secret():
    """With the coefficient 3 and the secret 7 the line is 7 + 3 x, and holder h stands at h + 1."""
    shares = split_secret((7).to_bytes(32), [0, 4], 2, lambda count: (3).to_bytes(count))
    assert {holder: int.from_bytes(share) for holder, share in shares.items()} == {0: 10, 4: 22}


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.sets(st.integers(0, 99), min_size=2, max_size=9), st.data())
def test_any_shares_that_are_enough_restore_a_secret(secret, holders, data):
    needed = data.draw(st.integers(2, len(holders)))
    shares = split_secret(secret, holders, needed, drawing())
    some = data.draw(st.permutations(sorted(holders)))[:needed]
    assert restore_secret({holder: shares[holder] for holder in some}, needed, secret.__eq__) == (secret, [])
    with pytest.raises(ProtocolError, match="needed"):
        restore_secret({holder: shares[holder] for holder in some[1:]}, needed, secret.__eq__)


def test_fewer_shares_than_needed_fit_every_secret():
    """Two of three needed shares and any other secret lie on one parabola, so they tell nothing."""
    shares = split_secret(bytes(32), [0, 1, 2], 3, drawing())
    other = (5).to_bytes(32)
    forged = {-1: other.rjust(66, b"\0"), 0: shares[0], 1: shares[1]}
    assert restore_secret(forged, 3, other.__eq__)[0] == other


@pytest.mark.parametrize("liars", [[0], [5], [0, 1, 2]])
def test_wrong_shares_are_found_as_long_as_enough_are_right(liars):
    secret = drawing(1)(32)
    shares = split_secret(secret, range(10), 7, drawing())
    for liar in liars:
        shares[liar] = drawing(liar)(65).rjust(66, b"\0")
    assert restore_secret(shares, 7, secret.__eq__) == (secret, liars)
    shares[9] = shares[8] = shares[7] = bytes(66)
    if len(liars) > 1:
        with pytest.raises(ProtocolError, match="do not fit"):
            restore_secret(shares, 7, secret.__eq__)


@pytest.mark.parametrize("threshold", [0.51, 0.66, 1.0])
def test_no_two_groups_of_holders_can_restore_two_secrets_of_a_site(threshold):
    """Who is told that a site is there gives a share of its seed, who is told otherwise one of its key, nobody both."""
    rules = Rules(secure=True, secure_threshold=threshold)
    for holders in range(2, 200):
        needed = rules.shares_needed(holders)
        assert 2 * needed > holders
        assert 2 <= needed <= holders


# Keys and masks -------------------------------------------------------------------------------------------------------


def test_masks_are_aes_in_counter_mode():
    """The first block of the all-zero key is a published test vector: dc95c078 a2408989 ad48a214 92842087."""
    vector = np.zeros(4, dtype="<u4")
    add_mask(vector, bytes(32))
    assert vector.tobytes().hex() == "dc95c078a2408989ad48a21492842087"


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("length", [0, 1, 7, 70_000, 300_001])
def test_a_mask_that_was_added_can_be_subtracted(bits, length):
    plain = np.arange(length).astype(f"<u{bits // 8}")
    vector = plain.copy()
    add_mask(vector, b"k" * 32)
    assert length < 7 or not np.array_equal(vector, plain)
    add_mask(vector, b"k" * 32, -1)
    assert np.array_equal(vector, plain)


def test_two_sites_agree_on_a_key_for_each_purpose():
    one, other = drawing(1)(32), drawing(2)(32)
    assert agreed_key(one, public_key(other), "a") == agreed_key(other, public_key(one), "a")
    assert agreed_key(one, public_key(other), "a") != agreed_key(one, public_key(other), "b")


@pytest.mark.parametrize("public", ["", "00" * 32, "zz" * 32, "00" * 33, None, 5])
def test_what_is_no_public_key_is_refused(public):
    with pytest.raises(ProtocolError):
        agreed_key(drawing()(32), public, "a")


@pytest.mark.parametrize(("sites", "neighbours"), [(3, 32), (10, 4), (10, 5), (100, 32), (34, 32)])
def test_neighbours_are_mutual_and_as_many_as_asked(sites, neighbours):
    order = random.Random(0).sample(range(sites), sites)
    around = neighbourhoods(order, neighbours)
    for site, others in around.items():
        assert site in others
        assert min(neighbours, sites - 1) <= len(others) - 1 <= neighbours + 1
        assert all(site in around[other] for other in others)


# Aggregation ----------------------------------------------------------------------------------------------------------


@dataclass
class Party:
    """Sites that follow the protocol, each in its own state, and a server that relays."""

    vectors: dict[int, Any]
    neighbours: int = 32
    attempt: str = "one"
    seed: int = 0
    rules: SecureRules = RULES
    fewest: int = FEWEST_SITES

    def __post_init__(self) -> None:
        self.context = context_of("run", 1, self.attempt)
        self.random = drawing(self.seed)
        self.secrets = {site: RoundSecrets.begin(1, self.context, site, self.random) for site in self.vectors}
        self.public = {site: own.public_keys for site, own in self.secrets.items()}

    def needed(self, site: int) -> int:
        return self.rules.shares_needed(len(self.holders[site]))

    def share(self, sites: set[int]) -> None:
        self.holders = neighbourhoods(sorted(sites), self.neighbours)
        for site in sites:
            keys = {other: self.public[other] for other in self.holders[site]}
            self.secrets[site] = self.secrets[site].share(keys, self.needed(site), self.random, self.fewest)
            self.secrets[site] = RoundSecrets.from_facts(self.secrets[site].to_facts())

    def relayed(self, site: int, sharing: set[int]) -> dict[int, str]:
        return {other: self.secrets[other].sealed[site] for other in (self.holders[site] & sharing) - {site}}

    def masked(self, sites: set[int], sharing: set[int]) -> dict[int, Any]:
        uploads = {}
        for site in sites:
            relayed = self.relayed(site, sharing)
            self.secrets[site] = self.secrets[site].hold(relayed, self.needed(site), "upload", self.fewest)
            uploads[site] = self.vectors[site].copy()
            self.secrets[site].mask(uploads[site])
        return uploads

    def unmask(
        self, asked: set[int], present: set[int], dropped: set[int], lies: Mapping[int, set[int]] | None = None
    ) -> dict[int, dict[int, bytes]]:
        """Have shares given away; ``lies`` tells some sites of others who dropped out."""
        shares = {}
        for site in asked:
            around, gone = self.holders[site], (lies or {}).get(site, dropped)
            self.secrets[site], given = self.secrets[site].unmask(
                around & (present | dropped) - gone, around & gone, self.needed(site), "unmask", self.fewest
            )
            shares[site] = {other: bytes.fromhex(share) for other, share in given.items()}
        return shares

    def opened(self, total: Any, shares: Mapping[int, Any], present: set[int], dropped: set[int]) -> Any:
        restored = {}
        for site in present | dropped:
            own = {holder: given[site] for holder, given in shares.items() if site in given}
            right = self.secrets[site].seed if site in present else self.secrets[site].mask_key
            restored[site], _ = restore_secret(own, self.needed(site), right.__eq__)
        remove_masks(
            total,
            self.context,
            {site: restored[site] for site in present},
            {site: restored[site] for site in dropped},
            self.public,
            self.holders,
        )
        return total


def vectors(sites: int, length: int = 5, seed: int = 0) -> dict[int, Any]:
    chance = np.random.default_rng(seed)
    return {site: chance.integers(0, 2**32, length).astype("<u4") for site in range(sites)}


def summed(parts: Any) -> Any:
    return np.sum(list(parts), axis=0, dtype="<u4")


STEPS_DONE = st.sampled_from([4] * 8 + [0, 1, 2, 3])


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS_DONE, min_size=3, max_size=12), st.sampled_from([2, 4, 32]))
def test_the_sum_of_those_who_stayed_comes_out_whoever_drops_out_between_two_steps(steps, neighbours):
    party = Party(vectors(len(steps)), neighbours, seed=len(steps))
    with_keys, sharing, present, asked = ({site for site, done in enumerate(steps) if done >= n} for n in (1, 2, 3, 4))
    party.holders = neighbourhoods(sorted(with_keys), neighbours)
    assume(asked)  # where nobody stays there is no sum, and a site alone with its keys rightly refuses to share them
    assume(all(len(party.holders[site] & asked) >= party.needed(site) for site in sharing))
    assume(all(len(party.holders[site] & present) >= FEWEST_SITES for site in sharing))
    party.share(with_keys)
    total = summed(party.masked(present, sharing).values())
    shares = party.unmask(asked, present, sharing - present)
    opened = party.opened(total, shares, present, sharing - present)
    assert np.array_equal(opened, summed(party.vectors[site] for site in present))


# Sums of too few ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lower(Rules):
    """Asks for no more shares than the threshold says, as it was."""

    def shares_needed(self, holders: int) -> int:
        return max(2, math.ceil(self.secure_threshold * holders))


@pytest.mark.attack(
    "Of three sites one drops out after the keys, and a site that gets the sum of the other two subtracts its own "
    "upload from it.",
    "No site gives shares away for a sum of fewer than three, nor takes part in one from the beginning.",
)
def test_a_sum_of_two_tells_each_of_them_the_other_and_is_not_opened():
    old = Party(vectors(3), fewest=2)
    old.share({0, 1, 2})
    total = summed(old.masked({0, 1}, {0, 1, 2}).values())
    opened = old.opened(total, old.unmask({0, 1}, {0, 1}, {2}), {0, 1}, {2})
    assert np.array_equal(opened - old.vectors[0], old.vectors[1]), "as it was: site 0 knows the upload of site 1"
    party = Party(vectors(3))
    party.share({0, 1, 2})
    party.masked({0, 1}, {0, 1, 2})
    with pytest.raises(ProtocolError, match=r"A sum of 2 uploads hides too little: .* at least 3"):
        party.unmask({0, 1}, {0, 1}, {2})
    with pytest.raises(ProtocolError, match="A sum of 2 uploads"):
        Party(vectors(3)).share({0, 1})
    party = Party(vectors(4))
    party.share({0, 1, 2, 3})
    with pytest.raises(ProtocolError, match="not those of enough"):
        party.masked({0, 1}, {0, 1})


@pytest.mark.attack(
    "A server tells each of five sites that others dropped out, so that each sees three who are there, and gathers "
    "enough keys to open the sum of two (secure_threshold = 0.51).",
    "So many shares are needed for a secret that no such lies to sites that all know each other open a sum of two.",
)
def test_lies_about_who_dropped_out_do_not_open_a_sum_of_two():
    """Sites 0 and 1 are left; of 2, 3 and 4 each hears that the other two dropped out, and 0 and 1 what is missing."""
    lies = {0: {2, 3}, 1: {2, 4}, 2: {3, 4}, 3: {2, 4}, 4: {2, 3}}
    everybody, pair = set(range(5)), {0, 1}
    old = Party(vectors(5), rules=Lower(secure=True, secure_threshold=0.51))
    old.share(everybody)
    uploads = old.masked(everybody, everybody)
    shares = old.unmask(everybody, everybody, set(), lies)
    given = {
        site: {other: share for other, share in of.items() if (other in pair) or other in lies[site]}
        for site, of in shares.items()
    }
    total = summed(uploads[site] for site in pair)
    assert np.array_equal(old.opened(total, given, pair, {2, 3, 4}), summed(old.vectors[site] for site in pair))
    party = Party(vectors(5), rules=Rules(secure=True, secure_threshold=0.51))
    party.share(everybody)
    party.masked(everybody, everybody)
    with pytest.raises(ProtocolError, match="3 are left, and 4 are needed"):
        party.unmask(everybody, everybody, set(), lies)


@pytest.mark.parametrize("threshold", [0.51, 0.6, 0.66, 1.0])
def test_for_no_number_of_sites_are_there_lies_enough(threshold):
    """The keys of n - 2 sites take more shares than all n sites together would give away."""
    rules = Rules(secure=True, secure_threshold=threshold)
    for sites in range(FEWEST_SITES, 200):
        needed = rules.shares_needed(sites)
        called_dropped = sites - max(needed, FEWEST_SITES)
        assert (sites - 2) * needed > sites * called_dropped


# Dropping out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [{"shares": {3}}, {"masked": {0}}, {"unmask": {2}}, {"masked": {1}, "unmask": {4}}])
def test_a_site_that_drops_out_at_each_step(lost):
    everybody = set(range(6))
    party = Party(vectors(6))
    party.share(everybody)
    sharing = everybody - lost.get("shares", set())
    present = sharing - lost.get("masked", set())
    total = summed(party.masked(present, sharing).values())
    shares = party.unmask(present - lost.get("unmask", set()), present, sharing - present)
    opened = party.opened(total, shares, present, sharing - present)
    assert np.array_equal(opened, summed(party.vectors[site] for site in present))


def test_below_the_threshold_nothing_is_opened():
    everybody = set(range(6))
    party = Party(vectors(6))
    party.share(everybody)
    total = summed(party.masked(everybody, everybody).values())
    shares = party.unmask({0, 1, 2}, everybody, set())
    with pytest.raises(ProtocolError, match="Only 3 of 4"):
        party.opened(total, shares, everybody, set())


def test_a_masked_upload_looks_random_and_other_keys_make_another_one():
    zeros = {site: np.zeros(100_000, dtype="<u4") for site in range(3)}
    uploads = []
    for seed in (1, 2):
        party = Party(zeros, attempt=f"number {seed}", seed=seed)
        party.share({0, 1, 2})
        uploads.append(party.masked({0, 1, 2}, {0, 1, 2})[0])
    assert not np.array_equal(*uploads)
    for upload in uploads:
        assert abs(upload.astype(float).mean() / 2**32 - 0.5) < 0.005
        assert 0.49 < np.mean(np.unpackbits(upload.view(np.uint8))) < 0.51


def ready_party() -> Party:
    party = Party(vectors(4))
    party.share({0, 1, 2, 3})
    party.masked({0, 1, 2, 3}, {0, 1, 2, 3})
    return party


def test_a_site_never_gives_both_shares_of_another_away():
    """The server asks for the seed of site 2 as one that is present, and for its key as one that dropped out."""
    party = ready_party()
    own = party.secrets[0]
    with pytest.raises(ProtocolError, match="each once"):
        own.unmask({0, 1, 2, 3}, {2}, 3, "asked")
    given, shares = own.unmask({0, 1, 2, 3}, set(), 3, "first")
    assert shares[2] == own.held[2][0].hex()
    with pytest.raises(ProtocolError, match="only once"):
        given.unmask({0, 1, 3}, {2}, 3, "second")
    assert given.unmask({0, 1, 2, 3}, set(), 3, "first") == (given, shares)
    read_again = RoundSecrets.from_facts(given.to_facts())
    with pytest.raises(ProtocolError, match="only once"):
        read_again.unmask({0, 1, 3}, {2}, 3, "second")


@pytest.mark.parametrize(
    ("present", "dropped"),
    [
        ({0, 1, 2}, set()),
        ({1, 2, 3}, {0}),
        ({0, 1, 2, 3, 4}, set()),
        ({0, 1, 2, 3}, {4}),
        ({0, 1}, {2, 3}),
        (set(), {0, 1, 2, 3}),
    ],
)
def test_shares_are_given_away_only_for_exactly_the_sites_of_the_round_and_enough_of_them(present, dropped):
    with pytest.raises(ProtocolError):
        ready_party().secrets[0].unmask(present, dropped, 3, "asked")


def test_a_site_that_sent_no_upload_gives_no_shares_away():
    party = Party(vectors(3))
    party.share({0, 1, 2})
    with pytest.raises(ProtocolError, match="no upload"):
        party.secrets[0].unmask({0, 1, 2}, set(), 2, "asked")


def test_under_the_same_keys_there_is_one_upload():
    party = ready_party()
    again = party.secrets[0].hold(party.relayed(0, {0, 1, 2, 3}), 3, "upload")
    assert again == party.secrets[0]
    with pytest.raises(ProtocolError, match="one upload"):
        party.secrets[0].hold(party.relayed(0, {0, 1, 2, 3}), 3, "another upload")


def test_secrets_are_shared_once_with_the_same_neighbours():
    party = Party(vectors(4))
    party.share({0, 1, 2})
    keys = {site: party.public[site] for site in (0, 1, 2)}
    assert party.secrets[0].share(keys, 2, party.random) is party.secrets[0]
    with pytest.raises(ProtocolError, match="same neighbours"):
        party.secrets[0].share({**keys, 3: party.public[3]}, 3, party.random)


@pytest.mark.parametrize(
    "change",
    [
        lambda keys: {**keys, 0: keys[1]},
        lambda keys: {site: pair for site, pair in keys.items() if site != 0},
        lambda keys: {**keys, 1: keys[2]},
        lambda keys: {**keys, 1: (keys[1][0], keys[1][0])},
        lambda keys: {0: keys[0]},
        lambda keys: {**keys, 1: (keys[1][0], "00" * 32)},
    ],
)
def test_keys_that_the_sites_did_not_make_are_refused(change):
    party = Party(vectors(3))
    keys = change(dict(party.public))
    with pytest.raises(ProtocolError):
        party.secrets[0].share(keys, RULES.shares_needed(len(keys)), party.random)


def test_shares_of_another_attempt_or_for_another_site_are_refused():
    party, other = Party(vectors(3)), Party(vectors(3), attempt="two")
    for one in (party, other):
        one.share({0, 1, 2})
    relayed = party.relayed(0, {0, 1, 2})
    for wrong in (other.secrets[1].sealed[0], party.secrets[1].sealed[2], party.secrets[2].sealed[0]):
        with pytest.raises(ProtocolError, match="not sealed"):
            party.secrets[0].hold({**relayed, 1: wrong}, 2, "upload")
    for hostile in ({}, {**relayed, 0: relayed[1]}, {**relayed, 7: relayed[1]}):
        with pytest.raises(ProtocolError, match="not those"):
            party.secrets[0].hold(hostile, 2, "upload")
    with pytest.raises(ProtocolError, match="before"):
        Party(vectors(3)).secrets[0].hold(relayed, 2, "upload")


def test_secrets_do_not_show_and_are_forgotten():
    own = ready_party().secrets[0]
    shown = repr(own)
    assert not any(secret.hex() in shown or repr(secret) in shown for secret in (own.seed, own.mask_key, own.seal_key))
    assert not any(share.hex() in shown or repr(share) in shown for shares in own.held.values() for share in shares)
    closed = replace(own, unmasked="asked").closed()
    assert closed == RoundSecrets(1, own.context, 0, unmasked="asked")
    assert RoundSecrets.from_facts(own.to_facts()) == own


@pytest.mark.parametrize(
    "value", [None, [], "x", {"0": 5}, {"9": "00" * 66}, {"0": "00" * 65}, {"0": "g" * 132}, {0: ""}]
)
def test_hostile_facts_are_refused(value):
    for read in (lambda v: read_shares(v, [0, 1]), lambda v: read_sealed(v, [0], True), read_public_keys):
        with pytest.raises(ProtocolError):
            read(value)


def test_facts_about_some_or_all_sites():
    assert by_site({"1": "a"}, range(3)) == {1: "a"}
    with pytest.raises(ProtocolError, match="concerned"):
        by_site({"1": "a"}, range(3), all_of_them=True)


# What the server keeps, and the rules ---------------------------------------------------------------------------------


def test_a_masked_sum_is_read_back_and_damage_is_named(tmp_path):
    asked = Asked(2, {0: {"loss": 1.5}, 3: {"loss": 2.0}}, {0: 9.0, 3: 3.0}, {"w": 24.0}, 3)
    total = np.array([1, 2**32 - 1, 10], dtype="<u4")  # the last byte but three is a line feed
    around = frozenset({0, 3})
    gathered = Gathered(
        asked, "ab", Place.secure_sum(2, 1), {0: ("a", "b")}, {0: around, 3: around}, {0: "c", 3: "d"}, (0,), total
    )
    read = Gathered.from_bytes(gathered.to_bytes(), tmp_path)
    assert np.array_equal(read.total, total)
    assert replace(read, total=total) == gathered
    assert (read.dropped, read.weight, read.asked.heaviest) == ({3}, 1.0, 9.0)
    with pytest.raises(FedStrataError, match="damaged"):
        Gathered.from_bytes(gathered.to_bytes()[:-1], tmp_path)


@pytest.mark.parametrize(
    ("rules", "participants", "words"),
    [
        (Rules(secure=True), 2, "3 sites"),
        (Rules(secure=True, min_sites=2), 4, "3 of them"),
        (Rules(secure=True, secure_bits=16), 300, "16 bits"),
    ],
)
def test_rules_that_could_not_hide_or_restore_anything_are_refused(rules, participants, words):
    with pytest.raises(FedStrataError, match=words):
        rules.check_secure(participants)


def test_the_usual_rules_fit_three_to_a_hundred_sites():
    for sites in range(3, 101):
        RULES.check_secure(sites)
        assert sites * RULES.largest_number(sites) <= 2**30
        assert 8 / RULES.largest_number(sites) < 1e-6
    for wrong in ({"secure_threshold": 0.5}, {"secure_bits": 24}, {"secure_neighbours": 1}, {"secure_clip": 0.0}):
        with pytest.raises(FedStrataError):
            Rules(secure=True, **wrong)
