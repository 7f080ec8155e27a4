"""A word for those who wait: said only where something takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable

PATIENCE = 1.5
"""The seconds after which people want to know what is going on."""


class Waiting:
    """Says what is being done, once it has taken longer than people wait without a word."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._timer: threading.Timer | None = None

    def begin(self, words: str) -> None:
        """Begin something; what was begun before is done."""
        self.end()
        self._timer = threading.Timer(PATIENCE, self._say, [words])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Nothing is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
