"""What a site tells its operator: a line for every round, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedstrata.deployment.protocol import Reply, Request

LONG_WAIT = 5.0
"""After so many seconds without work a site says what it waits for."""


@dataclass
class Teller:
    """Puts the line of a round together from its training, and its test where there is one."""

    log: Callable[[str], None]
    waits_for: str = "the server to begin"
    _words: list[str] = field(default_factory=list)
    _cost: str = ""
    _up: int = 0
    _down: int = 0
    _told: str = ""

    def count(self, request: Request, reply: Reply) -> None:
        """Count the encoded bytes that came and that go."""
        self._down += len(request.payload)
        self._up += len(reply.payload)

    def trained(self, round: int, rounds: int, facts: dict[str, Any], seconds: float, tested: bool) -> None:
        """Note a round of training; where a test follows, its line waits for that."""
        self.flush()
        loss, accuracy = facts.get("loss"), (facts.get("scores") or {}).get("accuracy")
        self._words = [f"round {round} of {rounds}", f"loss {'is no number' if loss is None else format(loss, '.4g')}"]
        if accuracy is not None:
            self._words.append(f"accuracy {_percent(accuracy)} when trained")
        self._cost = f"{seconds:.1f} s"
        self.waits_for = f"the other sites to finish round {round}"
        if not tested:
            self.flush()

    def tested(self, round: int, rounds: int, scores: dict[str, Any], adapted: bool) -> None:
        """Note the test of the site's own model after a round."""
        self._words = self._words or [f"round {round} of {rounds}"]
        if "accuracy" in scores:
            self._words.append(f"accuracy {_percent(scores['accuracy'])} {'adapted' if adapted else 'merged'}")
        self.flush()
        self.waits_for = f"round {round + 1} to begin" if round < rounds else "the run to end"

    def flush(self) -> None:
        """Tell the line of a round, if there is one that was not told yet."""
        if self._words:
            travelled = f"{_size(self._down)} down, {_size(self._up)} up"
            first, *rest = self._words
            self.log(f"{first}: {', '.join([*rest, *([self._cost] if self._cost else []), travelled])}")
            self._words, self._cost, self._up, self._down = [], "", 0, 0

    def idle(self, seconds: float) -> None:
        """Tell once what is waited for, when that takes long."""
        if seconds >= LONG_WAIT and self._told != self.waits_for:
            self._told = self.waits_for
            self.flush()
            self.log(f"waits for {self.waits_for}")


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
