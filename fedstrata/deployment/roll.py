"""Who takes part in a run, by number: the sites that it was begun with, and who of them is still on the list.

A run keeps the numbers of its sites from its first round to its last. Who goes, because its table in the sites file is
marked as removed or has gone, is left out, and the others go on under the numbers that they have.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstrata.deployment.sites_file import PublicKey, SitesFile
from fedstrata.errors import FedStrataError


@dataclass(frozen=True)
class Roll:
    """The names of a run's sites, in the order of their numbers, and what the list says of them now."""

    names: tuple[str, ...]
    file: SitesFile

    @classmethod
    def of(cls, file: SitesFile, begun: Sequence[str] | None, out: Path) -> Roll:
        """Number the sites: as the run in ``out`` was ``begun``, or else in the order of the list."""
        if begun is None:
            return cls(tuple(file.names), file)
        roll = cls(tuple(begun), file)
        if roll.strangers:
            raise FedStrataError(
                f"The run in '{out}' was begun with the sites {', '.join(begun)}, without {', '.join(roll.strangers)}. "
                "Sites can leave a run, but not join it: go on with the same ones, or choose another --out."
            )
        return roll

    @property
    def removed(self) -> tuple[str, ...]:
        """The sites that take part no more."""
        here = set(self.file.names)
        return tuple(name for name in self.names if name not in here)

    @property
    def strangers(self) -> tuple[str, ...]:
        """The sites on the list that the run was begun without."""
        return tuple(name for name in self.file.names if name not in self.names)

    @property
    def first_keys(self) -> list[PublicKey | None]:
        """The newest key of each number; None for those who take part no more."""
        members = map(self.file.find, self.names)
        return [None if member is None or member.removed else member.public_key for member in members]

    def keys(self, now: datetime.datetime) -> list[tuple[PublicKey, ...]]:
        """List the keys that are accepted at a time, for each number; none for those who take part no more."""
        members = map(self.file.find, self.names)
        return [() if member is None else member.keys(now) for member in members]
