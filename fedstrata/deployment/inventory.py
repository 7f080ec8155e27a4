"""What lies in a folder of keys: certificates with their dates, keys with their fingerprints, and the list of sites."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from fedstrata.deployment.certificates import facts_of, read_certificate
from fedstrata.deployment.keys import SITES_FILE, is_protected, read_private_key
from fedstrata.deployment.sites_file import Member, PublicKey, SitesFile, fingerprint
from fedstrata.errors import FedStrataError


@dataclass(frozen=True)
class Item:
    """One thing in a folder of keys."""

    file: str
    what: str
    whose: str
    ends: datetime.datetime | None
    fingerprint: str
    remark: str


def take_inventory(folder: Path, now: datetime.datetime) -> list[Item]:
    """List the certificates, keys and sites in a folder and those below it."""
    if not folder.is_dir():
        raise FedStrataError(f"There is no folder '{folder}'; give one that 'fedstrata keys' has made.")
    found = [
        *(_certificate(path, folder, now) for path in sorted(folder.rglob("*.pem"))),
        *(_private_key(path, folder) for path in sorted(folder.rglob("*.key"))),
        *(item for path in sorted(folder.rglob(SITES_FILE)) for item in _sites(path, folder, now)),
    ]
    if not found:
        raise FedStrataError(f"'{folder}' holds no certificates, keys or sites; give one that 'fedstrata keys' made.")
    return found


def _certificate(path: Path, folder: Path, now: datetime.datetime) -> Item:
    facts = facts_of(read_certificate(path))
    remark = "expired" if facts.ended(now) else "expires soon" if facts.ends_soon(now) else ""
    name = str(path.relative_to(folder))
    return Item(name, f"certificate of the {facts.kind}", facts.whose, facts.ends, facts.fingerprint, remark)


def _private_key(path: Path, folder: Path) -> Item:
    name = str(path.relative_to(folder))
    try:
        protected = is_protected(path)
        print = "" if protected else fingerprint(read_private_key(path).public_key())
        remark = "under a passphrase" if protected else "without a passphrase"
    except FedStrataError as error:
        print, remark = "", str(error)
    return Item(name, "private key", "", None, print, remark)


def _sites(path: Path, folder: Path, now: datetime.datetime) -> list[Item]:
    name = str(path.relative_to(folder))
    return [
        Item(name, what, member.name, ends, fingerprint(key), remark)
        for member in SitesFile.read(path).members
        for what, key, ends, remark in _keys(member, now)
    ]


def _keys(member: Member, now: datetime.datetime) -> list[tuple[str, PublicKey, datetime.datetime | None, str]]:
    keys: list[tuple[str, PublicKey, datetime.datetime | None, str]] = [
        ("public key", member.public_key, None, "removed" if member.removed else "")
    ]
    if member.old_key is not None and member.old_key_until is not None:
        ended = now >= member.old_key_until
        keys.append(("old public key", member.old_key, member.old_key_until, "accepted no more" if ended else ""))
    return keys
