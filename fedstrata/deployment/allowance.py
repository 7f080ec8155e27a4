"""How much of a run has left a site, counted on its disk before it leaves, and held to the site's policy.

What was sent before and is sent again, to a server that has lost it, counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.deployment.protocol import OK, Reply, Request, digest
from fedstrata.deployment.rules import SiteRules
from fedstrata.errors import FedStrataError

ALLOWANCE_FILE = "left.json"
_ROUNDS_KEPT = 2


class Allowance:
    """What has left a site in one run; nothing is counted where its policy sets no limit."""

    def __init__(self, folder: Path, policy: SiteRules) -> None:
        self.path = folder / ALLOWANCE_FILE
        self.policy = policy
        self.limited = any(
            limit is not None for limit in (policy.max_rounds, policy.max_bytes_up, policy.max_bytes_up_run)
        )
        known = files.from_json(files.read_bytes(self.path), self.path) if self.path.exists() else {}
        self.trainings: int = known.get("trainings", 0)
        self.bytes: int = known.get("bytes", 0)
        self.rounds: dict[str, dict[str, Any]] = known.get("rounds", {})

    def charge(self, request: Request, reply: Reply) -> None:
        """Count a reply that is about to leave; one that would go beyond a limit is refused, and not counted."""
        if not self.limited or reply.status != OK:
            return
        content = f"{request.kind} {reply.header()}".encode()
        name, size = digest(content + reply.payload), len(reply.header()) + len(reply.payload)
        key = self._counted_as(request.round)
        of_round = self.rounds.get(key, {"bytes": 0, "seen": []})
        if name in of_round["seen"]:
            return
        trainings = self.trainings + (request.kind == "train")
        self._refuse("trainings in this run", trainings, "max_rounds")
        self._refuse(f"bytes in round {key}", of_round["bytes"] + size, "max_bytes_up")
        self._refuse("bytes in this run", self.bytes + size, "max_bytes_up_run")
        self.trainings, self.bytes = trainings, self.bytes + size
        self.rounds[key] = {"bytes": of_round["bytes"] + size, "seen": [*of_round["seen"], name]}
        self._write()

    def _counted_as(self, round: int) -> str:
        """Name the round that a reply counts for: of those that are long over the newest, or they would be free."""
        newest = max(map(int, self.rounds), default=0)
        return str(newest if 0 < round <= newest - _ROUNDS_KEPT else round)

    def _refuse(self, what: str, count: int, key: str) -> None:
        limit: int | None = getattr(self.policy, key)
        if limit is not None and count > limit:
            raise FedStrataError(
                f"This site's policy refuses the answer: it would make {count} {what}, more than {key} = {limit}."
            )

    def _write(self) -> None:
        newest = sorted(map(int, self.rounds))[-_ROUNDS_KEPT:]
        self.rounds = {key: value for key, value in self.rounds.items() if int(key) in (0, *newest)}
        facts: Mapping[str, Any] = {"trainings": self.trainings, "bytes": self.bytes, "rounds": self.rounds}
        files.write_atomically(self.path, files.to_json(facts))
