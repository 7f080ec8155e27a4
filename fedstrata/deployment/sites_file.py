"""The file that names the sites: who may take part, known by which keys, and by which rules.

::

    [rules]
    min_sites = 2

    [[sites]]
    name = "berlin"
    key = "ecdsa-sha2-nistp384 AAAA..."
    old_key = "ecdsa-sha2-nistp384 AAAA..."     # a key that berlin had before is accepted too,
    old_key_until = 2027-01-31T12:00:00Z        # until then

    [[sites]]
    name = "paris"
    key = "ecdsa-sha2-nistp384 AAAA..."
    removed = true                              # takes no part any more; the numbers of the others stay

People write it with an editor, and ``fedstrata keys`` changes single sites in it; what else stands there is left as it
is.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstrata import files
from fedstrata.deployment.rules import Rules
from fedstrata.errors import FedStrataError, unknown_name

PublicKey = ec.EllipticCurvePublicKey
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEYS_OF_A_SITE = ("name", "key", "old_key", "old_key_until", "removed")


@dataclass(frozen=True)
class Member:
    """A site on the list: its name, the public key by which it is known, and one that it had before."""

    name: str
    public_key: PublicKey
    old_key: PublicKey | None = None
    old_key_until: datetime.datetime | None = None
    removed: bool = False

    def keys(self, now: datetime.datetime) -> tuple[PublicKey, ...]:
        """List the keys that are accepted at a time; a site that was removed has none."""
        if self.removed:
            return ()
        if self.old_key is None or self.old_key_until is None or now >= self.old_key_until:
            return (self.public_key,)
        return self.public_key, self.old_key


@dataclass(frozen=True)
class SitesFile:
    """Who takes part, in an order that stays, and by which rules."""

    members: tuple[Member, ...]
    rules: Rules

    @property
    def names(self) -> list[str]:
        """The names of the sites that take part."""
        return [member.name for member in self.members if not member.removed]

    def find(self, name: str) -> Member | None:
        """Find a site by its name."""
        return next((member for member in self.members if member.name == name), None)

    @classmethod
    def read(cls, path: Path) -> SitesFile:
        """Read a sites file; what does not fit is refused with a sentence."""
        return cls.parse(files.read_bytes(path), path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> SitesFile:
        """Read the content of a sites file; ``path`` is named when something does not fit."""
        try:
            tables = tomllib.loads(content.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FedStrataError(f"'{path}' is not a TOML file: {error}.") from None
        for key in tables:
            if key not in ("rules", "sites"):
                raise unknown_name(f"key in '{path}' called", key, ["rules", "sites"])
        sites = tables.get("sites", [])
        if not isinstance(sites, list) or not sites:
            raise FedStrataError(f"'{path}' names no sites; write a [[sites]] table with name and key for each.")
        members = tuple(_member(site, path) for site in sites)
        names = [member.name for member in members]
        keys = [public_line(key) for one in members for key in (one.public_key, one.old_key) if key is not None]
        for kind, values in (("name", names), ("public key", keys)):
            if len(set(values)) < len(values):
                raise FedStrataError(f"'{path}' gives two sites the same {kind}.")
        if all(member.removed for member in members):
            raise FedStrataError(f"All sites in '{path}' are removed; nobody is left to take part.")
        return cls(members, _rules(tables.get("rules", {}), path))


def check_name(name: str) -> None:
    """Refuse a name that could not be that of a site's folder."""
    if not _NAME.fullmatch(name):
        raise FedStrataError(f"'{name}' cannot be the name of a site; use letters, digits, '-', '_' and '.'.")


def public_line(key: PublicKey) -> str:
    """Write a public key in one line, as OpenSSH does."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def fingerprint(key: PublicKey) -> str:
    """Tell a public key in a few characters, as ``ssh-keygen -l`` does."""
    digest = hashlib.sha256(base64.b64decode(public_line(key).split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def read_public_line(text: str) -> PublicKey | None:
    """Read a public key from its line; None where it is none of an elliptic curve."""
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def site_table(name: str, key: PublicKey) -> str:
    """Write the table of a new site."""
    return f'\n[[sites]]\nname = "{name}"\nkey = "{public_line(key)}"\n'


def add_to_file(path: Path, name: str, key: PublicKey) -> None:
    """Add a site behind the others."""
    before = files.read_bytes(path).decode()
    _write_checked(path, before + ("" if before.endswith("\n") else "\n") + site_table(name, key), name)


def change_in_file(path: Path, name: str, changes: Mapping[str, str | bool | datetime.datetime | None]) -> None:
    """Change what the file says of one site; what is None goes, and everything else in the file stays as it is."""
    tables = re.split(r"(?m)^(?=[ \t]*\[)", files.read_bytes(path).decode())
    edited = [_changed(table, changes) if _names(table, name) else table for table in tables]
    _write_checked(path, "".join(edited), name)


def _names(table: str, name: str) -> bool:
    """Tell whether this is the table of a site."""
    try:
        content = tomllib.loads(table)
    except tomllib.TOMLDecodeError:
        return False
    sites = content.get("sites")
    return isinstance(sites, list) and len(sites) == 1 and sites[0].get("name") == name


def _changed(table: str, changes: Mapping[str, str | bool | datetime.datetime | None]) -> str:
    gone = re.compile(rf"[ \t]*(?:{'|'.join(changes)})[ \t]*=")
    kept = [line for line in table.splitlines(keepends=True) if not gone.match(line)]
    place = 1 + next(number for number, line in enumerate(kept) if re.match(r"[ \t]*name[ \t]*=", line))
    new = [f"{key} = {_value(value)}\n" for key, value in changes.items() if value is not None]
    return "".join((*kept[:place], *new, *kept[place:]))


def _value(value: str | bool | datetime.datetime) -> str:
    if isinstance(value, datetime.datetime):
        return f"{value.astimezone(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else f'"{value}"'


def _write_checked(path: Path, text: str, name: str) -> None:
    """Write an edited file, if really nothing but one site has changed in it."""
    before, after = SitesFile.read(path), SitesFile.parse(text.encode(), path)
    others = [[_plain(member) for member in file.members if member.name != name] for file in (before, after)]
    unchanged = {member.name: _plain(member) for member in before.members} == {
        member.name: _plain(member) for member in after.members
    }
    if others[0] != others[1] or before.rules != after.rules or unchanged:
        raise FedStrataError(f"The table of '{name}' in '{path}' cannot be changed here; change it with an editor.")
    files.write_atomically(path, text)


def _plain(member: Member) -> tuple[Any, ...]:
    values = [getattr(member, field.name) for field in fields(member)]
    return tuple(public_line(value) if isinstance(value, ec.EllipticCurvePublicKey) else value for value in values)


def same_keys(some: Sequence[PublicKey], others: Sequence[PublicKey]) -> bool:
    """Tell whether these are the same public keys, in any order."""
    return sorted(map(public_line, some)) == sorted(map(public_line, others))


def _member(site: Any, path: Path) -> Member:
    if not isinstance(site, dict) or not {"name", "key"} <= site.keys() or not _NAME.fullmatch(str(site["name"])):
        raise FedStrataError(f"A site in '{path}' must have a name, of letters and digits, and a key.")
    name = str(site["name"])
    for key in site:
        if key not in _KEYS_OF_A_SITE:
            raise unknown_name(f"key of the site '{name}' in '{path}' called", key, list(_KEYS_OF_A_SITE))
    removed, until = site.get("removed", False), site.get("old_key_until")
    if not isinstance(removed, bool):
        raise FedStrataError(f"'removed' of the site '{name}' in '{path}' must be true or false.")
    if ("old_key" in site) != (until is not None) or not (until is None or _is_moment(until)):
        raise FedStrataError(
            f"The site '{name}' in '{path}' must have both an old_key and the time old_key_until with its zone, such "
            "as 2027-01-31T12:00:00Z, or neither."
        )
    old = _public_key(site["old_key"], name, path) if "old_key" in site else None
    return Member(name, _public_key(site["key"], name, path), old, until, removed)


def _is_moment(value: Any) -> bool:
    return isinstance(value, datetime.datetime) and value.tzinfo is not None


def _public_key(text: Any, name: str, path: Path) -> PublicKey:
    key = read_public_line(str(text))
    if key is None:
        raise FedStrataError(
            f"The key of the site '{name}' in '{path}' is no public ECDSA key; "
            "take the line that 'fedstrata keys' wrote."
        )
    return key


def _rules(given: Any, path: Path) -> Rules:
    known = list(Rules.__dataclass_fields__)
    if not isinstance(given, dict):
        raise FedStrataError(f"In '{path}', [rules] must be a table.")
    for key in given:
        if key not in known:
            raise unknown_name(f"rule in '{path}' called", key, known)
    return Rules(**given)
