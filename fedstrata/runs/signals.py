"""Ending a run when that is asked for, by a signal or by who has started it: after a whole round, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstrata.errors import FedStrataWarning

_open: list[list[int]] = []
"""The lists of all who collect requests, from the outside in; in the main thread only, where signals come."""


class Interrupted(Exception):  # noqa: N818 - not an error
    """A run stopped after a round because it was asked to; its checkpoint is saved.

    ``others`` are the rounds and folders of those that stopped with it, where several ran at a time.
    """

    def __init__(self, signal_number: int, round: int, out: Path | None, *others: tuple[int, Path | None]) -> None:
        super().__init__(f"stopped after round {round}")
        self.signal_number = signal_number
        self.round = round
        self.out = out
        self.others = others

    @property
    def saved(self) -> str:
        """Tell what is saved where; empty where no run had come to its first round."""
        places = [
            f"round {round} is saved in '{out}'" for round, out in ((self.round, self.out), *self.others) if round
        ]
        return ", ".join(places).replace("round", "Round", 1)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that a run ends after a whole round; a second SIGINT interrupts at once.

    What was asked for before, and is noted further out, counts from the beginning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    received = list(_open[-1]) if _open else []
    with _collecting(received):

        def note(number: int, frame: object) -> None:
            if received and number == signal.SIGINT:
                raise KeyboardInterrupt
            ask_to_stop(number)
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            warnings.warn(f"Stopping after this round{again}.", FedStrataWarning, stacklevel=1)

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield received
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextmanager
def noted_stops() -> Iterator[list[int]]:
    """Collect what the runs inside are asked for: one that is in its last round ends as usual, but none may follow it.

    Between the runs signals do what they did before.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with _collecting(received):
        yield received


def ask_to_stop(number: int) -> None:
    """Ask the run of this process to end after its round, as if a signal had come; from any thread."""
    for received in _open:
        received.append(number)


@contextmanager
def _collecting(received: list[int]) -> Iterator[None]:
    _open.append(received)
    try:
        yield
    finally:
        _open[:] = [one for one in _open if one is not received]
