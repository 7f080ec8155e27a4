"""Keys and certificates that change while a server runs: it looks at its files about once a second.

A site that is removed from the list is refused from then on, one that has another key is known by that, and a renewed
certificate is shown to whoever connects next. What cannot be read changes nothing, and the log says so.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedstrata.deployment.roll import Roll
from fedstrata.deployment.sites_file import PublicKey, SitesFile, fingerprint, same_keys
from fedstrata.errors import FedStrataError

SECONDS_BETWEEN_LOOKS = 1.0


class Gate(Protocol):
    """What lets sites in."""

    def set_keys(self, site: int, public_keys: Sequence[PublicKey]) -> None:
        """Know a site by other keys from now on; without any it is refused."""
        ...

    def renew_certificate(self) -> None:
        """Show the certificate that lies in the file now."""
        ...


@dataclass
class LiveKeys:
    """Keeps the gate of a running server as its files say; when called, it tells who was revoked since."""

    gate: Gate
    roll: Roll
    sites: Path
    certificate: Path | None
    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
    _seen: dict[Path, bytes] = field(default_factory=dict)
    _next: float = float("-inf")

    def __post_init__(self) -> None:
        self._accepted = self.roll.keys(self.now())
        self._gone = {number for number, name in enumerate(self.roll.names) if name in self.roll.removed}
        for site, keys in enumerate(self._accepted):
            self.gate.set_keys(site, keys)
        for path in (self.sites, self.certificate):
            if path is not None:
                self._changed(path)

    def __call__(self) -> list[int]:
        """Look whether something has changed, if it is time to; return the sites that are refused from now on."""
        if self.clock() < self._next:
            return []
        self._next = self.clock() + SECONDS_BETWEEN_LOOKS
        if self._changed(self.sites):
            self._read_again()
        if self.certificate is not None and self._changed(self.certificate):
            self._renew()
        return self._apply()

    def _changed(self, path: Path) -> bool:
        """Tell whether a file has another content than when it was looked at last; one that is away does not."""
        try:
            content = path.read_bytes()
        except OSError:
            return False
        before = self._seen.get(path)
        self._seen[path] = content
        return content != before

    def _read_again(self) -> None:
        try:
            file = SitesFile.parse(self._seen[self.sites], self.sites)
        except FedStrataError as error:
            self.log(f"'{self.sites}' has changed, but it cannot be used, and all stays as it was: {error}")
            return
        if file.rules != self.roll.file.rules:
            self.log(f"the rules in '{self.sites}' have changed; they hold when the server is started again")
        before, self.roll = self.roll, Roll(self.roll.names, file)
        for name in self.roll.strangers:
            if name not in before.strangers:
                self.log(f"{name} is on the list now, but the run was begun without it; it can join the next run")
        for number in sorted(self._gone):
            name = self.roll.names[number]
            if name in before.removed and name not in self.roll.removed:
                self.log(f"{name} is on the list again; it is let in when the server is started again")

    def _renew(self) -> None:
        try:
            self.gate.renew_certificate()
        except FedStrataError as error:
            self.log(f"'{self.certificate}' has changed, but it cannot be used, and all stays as it was: {error}")
        else:
            self.log(f"'{self.certificate}' was renewed; whoever connects from now on gets the new one")

    def _apply(self) -> list[int]:
        revoked = []
        for site, keys in enumerate(self.roll.keys(self.now())):
            if site in self._gone or same_keys(keys, self._accepted[site]):
                continue
            self.gate.set_keys(site, keys)
            self._accepted[site] = keys
            if keys:
                self.log(f"{self.roll.names[site]} is known by {_in_words(keys)} from now on")
            else:
                self._gone.add(site)
                revoked.append(site)
        return revoked


def _in_words(keys: Sequence[PublicKey]) -> str:
    return " and ".join(f"the key {fingerprint(key)}" for key in keys)
