"""How far one or more runs have come: a live display in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from fedstrata.report.formats import duration
from fedstrata.runs.driver import Update

ACCURACIES = ("client_adapted.accuracy.mean", "client_after.accuracy.mean")
"""What is shown: the first of these that a round has."""
SECONDS_BETWEEN_LINES = 10.0


class TimeLeft:
    """Guess the seconds left from the rounds so far: those to do, times the mean time of those done.

    The first round warms everything up, so it counts only as long as there is no other.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._seconds: list[float] = []

    def note(self, seconds: float) -> None:
        """Count one round as done."""
        self._seconds.append(seconds)
        self.rounds -= 1

    @property
    def seconds(self) -> float | None:
        """The guess; none before the first round."""
        measured = self._seconds[1:] or self._seconds
        return max(self.rounds, 0) * sum(measured) / len(measured) if measured else None


class Progress(ABC):
    """Shows the progress of one or more runs; :meth:`note` is their listener."""

    def __init__(self, runs: int, rounds: int) -> None:
        self.runs = runs
        self.left = TimeLeft(rounds)
        self.done = 0
        self.name = ""
        self.accuracy = math.nan
        self.seconds = 0.0

    def begin(self, name: str) -> None:
        """Tell which run comes next."""
        self.name, self.accuracy, self.seconds = name, math.nan, 0.0
        self.show_beginning()

    def note(self, update: Update) -> None:
        """Take note of a round."""
        self.left.note(update.seconds)
        self.seconds += update.seconds
        self.accuracy = next((update.metrics[name] for name in ACCURACIES if name in update.metrics), self.accuracy)
        self.show_round(update)
        if update.round == update.rounds:
            self.done += 1
            self.show_end(update)

    @abstractmethod
    def show_beginning(self) -> None:
        """Show that a run is being prepared."""

    @abstractmethod
    def show_round(self, update: Update) -> None:
        """Show a round."""

    @abstractmethod
    def show_end(self, update: Update) -> None:
        """Show that a run has ended."""

    def outcome(self) -> str:
        """Tell in a line how a run ended."""
        return f"{self.name}: accuracy {_percent(self.accuracy)}, {duration(self.seconds)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Silence(Progress):
    """Shows nothing."""

    def show_beginning(self) -> None:
        """Show nothing."""

    def show_round(self, update: Update) -> None:
        """Show nothing."""

    def show_end(self, update: Update) -> None:
        """Show nothing."""


class Lines(Progress):
    """Writes a line when a run ends, and every ten seconds on the way there: for log files and pipes."""

    def __init__(self, runs: int, rounds: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(runs, rounds)
        self._console = console
        self._clock = clock
        self._last_line = clock()

    def show_beginning(self) -> None:
        """Write nothing yet."""

    def show_round(self, update: Update) -> None:
        """Write a line if the last one is long ago."""
        if self._clock() - self._last_line >= SECONDS_BETWEEN_LINES and update.round < update.rounds:
            self._write(f"{self.name}: round {update.round}/{update.rounds}, {_state(self.accuracy, self.left)}")

    def show_end(self, update: Update) -> None:
        """Write how the run ended."""
        self._write(self.outcome())

    def _write(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._last_line = self._clock()


class Live(Progress):
    """Draws a bar for the current run and, where there are several, one for all of them."""

    def __init__(self, runs: int, rounds: int, console: Console) -> None:
        super().__init__(runs, rounds)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TextColumn("{task.fields[state]}", markup=False),
        )
        self._bars = Bars(*columns, console=console, transient=True, refresh_per_second=5)
        self._run = self._bars.add_task("", total=None, state="preparing")
        self._all = self._bars.add_task(f"run 1 of {runs}", total=rounds, state="", visible=runs > 1)

    def show_beginning(self) -> None:
        """Name the run."""
        self._bars.reset(self._run, description=self.name, total=None, state="preparing")
        self._bars.update(self._all, description=f"run {self.done + 1} of {self.runs}")

    def show_round(self, update: Update) -> None:
        """Move the bars."""
        state = f"round {update.round}/{update.rounds}, accuracy {_percent(self.accuracy)}"
        if self.runs == 1:
            state = f"round {update.round}/{update.rounds}, {_state(self.accuracy, self.left)}"
        self._bars.update(self._run, total=update.rounds, completed=update.round, state=state)
        self._bars.update(self._all, advance=1, state=_left(self.left))

    def show_end(self, update: Update) -> None:
        """Leave a line for each of several runs."""
        if self.runs > 1:
            self._bars.console.print(Text.assemble(("✓ ", "green"), self.outcome()), soft_wrap=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def show_progress(console: Console, runs: int, rounds: int, quiet: bool = False) -> Progress:
    """Choose the display: live in a terminal, lines elsewhere, or nothing. ``rounds`` are those of all runs."""
    if quiet:
        return Silence(runs, rounds)
    return Live(runs, rounds, console) if console.is_terminal else Lines(runs, rounds, console)


def _state(accuracy: float, left: TimeLeft) -> str:
    return f"accuracy {_percent(accuracy)}, {_left(left)}"


def _left(left: TimeLeft) -> str:
    return "" if left.seconds is None else f"{duration(left.seconds)} left"


def _percent(fraction: float) -> str:
    return "–" if math.isnan(fraction) else f"{100 * fraction:.1f} %"
