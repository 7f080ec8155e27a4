"""How far one or more runs have come: live in a terminal or a notebook, now and then a line elsewhere."""

from __future__ import annotations

import html
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from fedstrata.callbacks import Callback, RoundView
from fedstrata.report.formats import duration
from fedstrata.waiting import Waiting

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


class Progress(Callback, ABC):
    """Shows the progress of one or more runs, as a callback of each."""

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
        self.show_doing("preparing")

    def on_round(self, view: RoundView) -> None:
        """Take note of a round."""
        self.left.note(view.seconds)
        if self.runs == 1:  # a run that goes on has fewer rounds to do than it has in all
            self.left.rounds = view.rounds - view.round
        self.seconds += view.seconds
        self._note_accuracy(view)
        self.show_round(view)

    def on_end(self, view: RoundView, summary: Mapping[str, Any]) -> None:
        """Take note of the end of a run; rounds that it did not come to are not waited for any more."""
        self._note_accuracy(view)
        self.left.rounds -= view.rounds - view.round if self.runs > 1 else self.left.rounds
        self.done += 1
        self.show_end(view)

    def _note_accuracy(self, view: RoundView) -> None:
        self.accuracy = next((view.metrics[name] for name in ACCURACIES if name in view.metrics), self.accuracy)

    @abstractmethod
    def show_doing(self, words: str) -> None:
        """Show what is being done for the current run, before its first round."""

    @abstractmethod
    def show_round(self, view: RoundView) -> None:
        """Show a round."""

    @abstractmethod
    def show_end(self, view: RoundView) -> None:
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

    def show_doing(self, words: str) -> None:
        """Show nothing."""

    def show_round(self, view: RoundView) -> None:
        """Show nothing."""

    def show_end(self, view: RoundView) -> None:
        """Show nothing."""


class Lines(Progress):
    """Writes a line when a run ends, and now and then on the way there: for log files and pipes.

    What comes before the first round gets a line only where it takes long.
    """

    def __init__(self, runs: int, rounds: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(runs, rounds)
        self._console = console
        self._clock = clock
        self._last_line = clock()
        self._waiting = Waiting(self._write)

    def show_doing(self, words: str) -> None:
        """Write a line if it takes long."""
        self._waiting.begin(f"{self.name}: {words}")

    def show_round(self, view: RoundView) -> None:
        """Write a line if the last one is long ago."""
        self._waiting.end()
        if self._clock() - self._last_line >= SECONDS_BETWEEN_LINES and view.round < view.rounds:
            self._write(f"{self.name}: round {view.round}/{view.rounds}, {_state(self.accuracy, self.left)}")

    def show_end(self, view: RoundView) -> None:
        """Write how the run ended."""
        self._write(self.outcome())

    def _write(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._last_line = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.end()


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

    def show_doing(self, words: str) -> None:
        """Name the run, and what is done for it."""
        self._bars.reset(self._run, description=self.name, total=None, state=words)
        self._bars.update(self._all, description=f"run {self.done + 1} of {self.runs}")

    def show_round(self, view: RoundView) -> None:
        """Move the bars."""
        state = f"round {view.round}/{view.rounds}, accuracy {_percent(self.accuracy)}"
        if self.runs == 1:
            state = f"round {view.round}/{view.rounds}, {_state(self.accuracy, self.left)}"
        self._bars.update(self._run, total=view.rounds, completed=view.round, state=state)
        self._bars.update(self._all, advance=1, state=_left(self.left))

    def show_end(self, view: RoundView) -> None:
        """Leave a line for each of several runs."""
        self._bars.update(self._all, advance=view.rounds - view.round)
        if self.runs > 1:
            self._bars.console.print(Text.assemble(("✓ ", "green"), self.outcome()), soft_wrap=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


class Notebook(Progress):
    """Draws a bar below the cell of a notebook, in plain HTML, which needs no widgets; in the end a line stays.

    ``show`` puts the HTML there, in the place of what it put there before.
    """

    def __init__(
        self, runs: int, rounds: int, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(runs, rounds)
        self._show = show
        self._clock = clock
        self._shown_at = -math.inf
        self._rounds = rounds
        self._seconds = 0.0

    def show_doing(self, words: str) -> None:
        """Name the run, and what is done for it."""
        self._draw(words)

    def show_round(self, view: RoundView) -> None:
        """Move the bar, a few times in a second at most."""
        if self._clock() - self._shown_at >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw(f"round {view.round}/{view.rounds}, {_state(self.accuracy, self.left)}")

    def show_end(self, view: RoundView) -> None:
        """Leave a line."""
        self._seconds += self.seconds
        if self.done == self.runs:
            outcome = self.outcome() if self.runs == 1 else f"{self.runs} runs, {duration(self._seconds)}"
            self._show(html.escape(outcome))

    def _draw(self, words: str) -> None:
        self._shown_at = self._clock()
        which = f"run {self.done + 1} of {self.runs}, " if self.runs > 1 else ""
        done = 1 - self.left.rounds / max(self._rounds, 1)
        self._show(f'<progress value="{done:.3f}"></progress> {html.escape(f"{which}{self.name}: {words}")}')


_SECONDS_BETWEEN_DRAWINGS = 0.2


def show_progress(console: Console, runs: int, rounds: int, quiet: bool = False) -> Progress:
    """Choose the display: live in a terminal, lines elsewhere, or nothing. ``rounds`` are those of all runs."""
    if quiet:
        return Silence(runs, rounds)
    if console.is_jupyter:
        return Notebook(runs, rounds, _below_the_cell())
    return Live(runs, rounds, console) if console.is_terminal else Lines(runs, rounds, console)


def show_if_wanted(wanted: bool | None, runs: int, rounds: int) -> Progress:
    """Show the progress of runs that Python code begins; where that is left open, in notebooks only."""
    console = Console(stderr=True, highlight=False)
    return show_progress(console, runs, rounds, quiet=not (console.is_jupyter if wanted is None else wanted))


def _below_the_cell() -> Callable[[str], None]:
    """Make a place below the current cell of a notebook, which is run by IPython."""
    ipython: Any = import_module("IPython.display")
    handle = ipython.display(ipython.HTML(""), display_id=True)
    return lambda text: handle.update(ipython.HTML(text))


def _state(accuracy: float, left: TimeLeft) -> str:
    return f"accuracy {_percent(accuracy)}, {_left(left)}"


def _left(left: TimeLeft) -> str:
    return "" if left.seconds is None else f"{duration(left.seconds)} left"


def _percent(fraction: float) -> str:
    return "–" if math.isnan(fraction) else f"{100 * fraction:.1f} %"
