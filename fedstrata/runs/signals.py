"""Ending a run at a signal: after a whole round, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstrata.errors import FedStrataWarning


class Interrupted(Exception):  # noqa: N818 - not an error
    """A run stopped after a round because it was asked to; its checkpoint is saved."""

    def __init__(self, signal_number: int, round: int, out: Path | None) -> None:
        super().__init__(f"stopped after round {round}")
        self.signal_number = signal_number
        self.round = round
        self.out = out


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that a run ends after a whole round; a second SIGINT interrupts at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
        warnings.warn(f"Stopping after this round{again}.", FedStrataWarning, stacklevel=1)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
