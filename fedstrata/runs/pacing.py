"""When a run saves a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

ROUNDS = 10
"""The rounds from one checkpoint to the next, where nothing is said and saving is cheap."""
SHARE = 0.05
"""The part of its time that a run spends on saving, where nothing is said."""
BYTES_PER_SECOND = 4e8
"""What is expected of the first saving, before any was timed."""


@dataclass
class Pace:
    """Decides when to save: every so many rounds; or where nothing is said every ten, but so seldom that saving takes
    no more than a twentieth of the time: methods that keep much at every client have large checkpoints.

    How long the first one will take is told from the ``size`` of what is to be saved.

    >>> clock = iter([0.0, 10.0, 13.0, 20.0, 80.0]).__next__  # begins; saves from 10 s to 13 s; asks at 20 s, at 80 s
    >>> pace = Pace(None, clock=clock)
    >>> with pace.saving():
    ...     pass
    >>> pace.due(20), pace.due(21), pace.due(80)
    (False, False, True)
    """

    every: int | None = None
    size: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = time.perf_counter
    took: float | None = None
    """How long the last saving took, in seconds, or the first is expected to; none before anybody asked."""
    since: float = field(init=False)
    """When it ended."""

    def __post_init__(self) -> None:
        self.since = self.clock()

    def due(self, round: int) -> bool:
        """Tell whether to save after a round."""
        if self.every is not None:
            return round % self.every == 0
        if round % ROUNDS:
            return False
        if self.took is None:
            self.took = self.size() / BYTES_PER_SECOND
        return self.took <= SHARE * (self.clock() - self.since)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Note how long it takes to save."""
        began = self.clock()
        yield
        self.since = self.clock()
        self.took = self.since - began
