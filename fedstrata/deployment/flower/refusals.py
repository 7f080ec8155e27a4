"""Who was refused at the door, and which of it is told: each stranger now and then, however often he knocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_SECONDS_BETWEEN = 600.0
"""The same refusal is told again only after so long."""
_MOST_A_MINUTE = 30
_MOST_REMEMBERED = 1000


@dataclass(frozen=True)
class Refused:
    """A request that was refused: from which address, with which key (its fingerprint), and why."""

    address: str
    fingerprint: str
    reason: str


class Refusals:
    """Gathers refusals in the thread that serves, for the one that tells them; a flood of them does not pile up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, bytes, str], float] = {}
        self._told: deque[float] = deque(maxlen=_MOST_A_MINUTE)
        self._waiting: deque[Refused] = deque(maxlen=_MOST_REMEMBERED)

    def note(self, address: str, key: bytes, kind: str, describe: Callable[[], Refused]) -> None:
        """Note a refusal, unless the same was noted lately or too many were; only then it is described."""
        now, seen = self._clock(), (address, key, kind)
        if now - self._seen.get(seen, -_SECONDS_BETWEEN) < _SECONDS_BETWEEN:
            return
        if len(self._told) == _MOST_A_MINUTE and now - self._told[0] < 60:
            return
        self._seen.pop(seen, None)
        self._seen[seen] = now
        if len(self._seen) > _MOST_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._told.append(now)
        self._waiting.append(describe())

    def take(self) -> Iterator[Refused]:
        """Give what was noted, each once."""
        while self._waiting:
            yield self._waiting.popleft()
