"""How far one or more runs have come: live in a terminal or a notebook, now and then a line elsewhere."""

from __future__ import annotations

import html
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from fedstrata.callbacks import Callback, RoundView
from fedstrata.report.formats import duration
from fedstrata.report.sparklines import LayerTrails
from fedstrata.waiting import Waiting

ACCURACIES = ("client_adapted.accuracy.mean", "client_after.accuracy.mean")
"""What is shown: the first of these that a round has."""
SECONDS_BETWEEN_LINES = 10.0
_LINES_KEPT_FREE = 5
"""Of a terminal, for the bars and for what stood there before."""


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


class Shown:
    """A run that is under way, as far as it is shown."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.accuracy = math.nan
        self.seconds = 0.0
        self.left: TimeLeft | None = None
        self.words = ""
        self.layers = LayerTrails()

    def note(self, view: RoundView) -> None:
        """Take note of a round."""
        self.left = self.left or TimeLeft(view.rounds - view.round + 1)
        self.left.note(view.seconds)
        self.seconds += view.seconds
        self.layers.note(view.layers)
        self.note_accuracy(view)

    def note_accuracy(self, view: RoundView) -> None:
        """Take note of the accuracy; in rounds without one the last one stays."""
        self.accuracy = next((view.metrics[name] for name in ACCURACIES if name in view.metrics), self.accuracy)


class Progress(Callback, ABC):
    """Shows the progress of one or more runs, as a callback of each.

    Where several run at a time, :meth:`turn_to` says of which of them the next words are.
    """

    only_numbers = True

    def __init__(self, runs: int, rounds: int, at_a_time: int = 1) -> None:
        self.runs = runs
        self.at_a_time = at_a_time
        self.left = TimeLeft(rounds)
        self.done = 0
        self.current = Shown("")
        self.active: dict[str, Shown] = {}

    def begin(self, name: str) -> None:
        """Tell which run comes next, or is now also under way."""
        if self.at_a_time == 1:
            self.active.clear()
        self.current = self.active[name] = Shown(name)
        self.show_doing("preparing")

    def turn_to(self, name: str) -> None:
        """Tell of which of the runs that are under way the next words are."""
        self.current = self.active[name]

    def leave(self, rounds: int = 0) -> None:
        """Show the current run no more; so many rounds of it are not waited for."""
        self.left.rounds -= rounds
        self.active.pop(self.current.name, None)
        self.show_leaving()

    def on_round(self, view: RoundView) -> None:
        """Take note of a round."""
        self.left.note(view.seconds)
        if self.runs == 1:  # a run that goes on has fewer rounds to do than it has in all
            self.left.rounds = view.rounds - view.round
        self.current.note(view)
        self.show_round(view)

    def on_end(self, view: RoundView, summary: Mapping[str, Any]) -> None:
        """Take note of the end of a run; rounds that it did not come to are not waited for any more."""
        self.current.note_accuracy(view)
        self.left.rounds -= view.rounds - view.round if self.runs > 1 else self.left.rounds
        self.done += 1
        if self.at_a_time > 1:
            self.active.pop(self.current.name, None)
        self.show_end(view)

    @abstractmethod
    def show_doing(self, words: str) -> None:
        """Show what is being done for the current run, before its first round."""

    @abstractmethod
    def show_round(self, view: RoundView) -> None:
        """Show a round."""

    @abstractmethod
    def show_end(self, view: RoundView) -> None:
        """Show that a run has ended."""

    def show_leaving(self) -> None:
        """Give up the place where the current run was shown."""

    def outcome(self) -> str:
        """Tell in a line how a run ended."""
        return f"{self.current.name}: accuracy {_percent(self.current.accuracy)}, {duration(self.current.seconds)}"

    def seconds_left(self) -> float | None:
        """Guess the seconds until all runs are done."""
        seconds = self.left.seconds
        return None if seconds is None else seconds / max(1, min(self.at_a_time, self.runs - self.done))

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

    What comes before the first round gets a line only where it takes long. A line on the way tells of all runs that are
    under way.
    """

    def __init__(
        self,
        runs: int,
        rounds: int,
        console: Console,
        at_a_time: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(runs, rounds, at_a_time)
        self._console = console
        self._clock = clock
        self._last_line = clock()
        self._waiting: dict[str, Waiting] = {}

    def show_doing(self, words: str) -> None:
        """Write a line if it takes long."""
        self._waiting.setdefault(self.current.name, Waiting(self._write)).begin(f"{self.current.name}: {words}")

    def show_round(self, view: RoundView) -> None:
        """Write a line if the last one is long ago."""
        self.show_leaving()
        self.current.words = f"round {view.round}/{view.rounds}, accuracy {_percent(self.current.accuracy)}"
        if self._clock() - self._last_line >= SECONDS_BETWEEN_LINES and view.round < view.rounds:
            told = [f"{run.name}: {run.words}" for run in self.active.values() if run.words]
            self._write(f"{'; '.join(told)}, {_left(self.seconds_left())}")

    def show_end(self, view: RoundView) -> None:
        """Write how the run ended."""
        self._write(self.outcome())

    def show_leaving(self) -> None:
        """Wait for nothing of the run any more."""
        waiting = self._waiting.pop(self.current.name, None)
        if waiting is not None:
            waiting.end()

    def _write(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._last_line = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for waiting in self._waiting.values():
            waiting.end()


class _BarsAndLayers(Bars):
    """Bars, and below them some lines."""

    lines: Callable[[], list[str]] = staticmethod(list)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Draw the bars, and then the lines."""
        yield from super().get_renderables()
        for line in self.lines():
            yield Text(line, style="dim", no_wrap=True, overflow="crop")


class Live(Progress):
    """Draws a bar for each run that is under way and, where there are several, one for all of them.

    Below it the layers of the run that goes on, if there is one alone and the terminal is high enough.
    """

    def __init__(self, runs: int, rounds: int, console: Console, at_a_time: int = 1) -> None:
        super().__init__(runs, rounds, at_a_time)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TextColumn("{task.fields[state]}", markup=False),
        )
        self._bars = _BarsAndLayers(*columns, console=console, transient=True, refresh_per_second=5)
        if at_a_time == 1 and console.is_interactive and console.encoding.lower().startswith("utf"):
            self._bars.lines = lambda: self.current.layers.lines(console.height - _LINES_KEPT_FREE)
        # Bars stand in the order in which they are made, and that of all runs stands below the others.
        self._free = [
            self._bars.add_task("", total=None, state="preparing", visible=place == 0) for place in range(at_a_time)
        ]
        self._places: dict[str, TaskID] = {}
        self._all = self._bars.add_task(self._which(), total=rounds, state="", visible=runs > 1)

    def show_doing(self, words: str) -> None:
        """Name the run, and what is done for it."""
        name = self.current.name
        if self.at_a_time == 1 and name not in self._places:
            self._free.extend(self._places.values())
            self._places.clear()
        if name not in self._places:
            self._places[name] = self._free.pop(0)
        self._bars.reset(self._places[name], description=name, total=None, state=words, visible=True)
        self._bars.update(self._all, description=self._which())

    def show_round(self, view: RoundView) -> None:
        """Move the bars."""
        state = f"round {view.round}/{view.rounds}, accuracy {_percent(self.current.accuracy)}"
        if (self.runs == 1 or self.at_a_time > 1) and self.current.left is not None:
            state = f"{state}, {_left(self.current.left.seconds)}"
        place = self._places[self.current.name]
        self._bars.update(place, total=view.rounds, completed=view.round, state=state)
        self._bars.update(self._all, advance=1, state=_left(self.seconds_left()))

    def show_end(self, view: RoundView) -> None:
        """Leave a line for each of several runs."""
        self._bars.update(self._all, advance=view.rounds - view.round)
        if self.runs > 1:
            self._bars.console.print(Text.assemble(("✓ ", "green"), self.outcome()), soft_wrap=True)
        if self.at_a_time > 1:
            self.show_leaving()

    def show_leaving(self) -> None:
        """Make the place free for another run."""
        place = self._places.pop(self.current.name, None)
        if place is not None:
            self._bars.update(place, visible=False)
            self._free.insert(0, place)
        self._bars.update(self._all, description=self._which())

    def _which(self) -> str:
        if self.at_a_time > 1:
            return f"{self.done} of {self.runs} runs done"
        return f"run {min(self.done + 1, self.runs)} of {self.runs}"

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
        self,
        runs: int,
        rounds: int,
        show: Callable[[str], None],
        at_a_time: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(runs, rounds, at_a_time)
        self._show = show
        self._clock = clock
        self._shown_at = -math.inf
        self._rounds = rounds
        self._seconds = 0.0

    def show_doing(self, words: str) -> None:
        """Name the run, and what is done for it."""
        self.current.words = words
        self._draw()

    def show_round(self, view: RoundView) -> None:
        """Move the bar, a few times in a second at most."""
        state = f"accuracy {_percent(self.current.accuracy)}, {_left(self.seconds_left())}"
        self.current.words = f"round {view.round}/{view.rounds}, {state}"
        if self._clock() - self._shown_at >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw()

    def show_end(self, view: RoundView) -> None:
        """Leave a line."""
        self._seconds += self.current.seconds
        if self.done == self.runs:
            outcome = self.outcome() if self.runs == 1 else f"{self.runs} runs, {duration(self._seconds)}"
            self._show(html.escape(outcome))

    def _draw(self) -> None:
        self._shown_at = self._clock()
        which = f"run {self.done + 1} of {self.runs}, " if self.runs > 1 else ""
        told = [f"{run.name}: {run.words}" for run in self.active.values() or [self.current]]
        lines = [f"{which}{told[0]}"] if self.at_a_time == 1 else [f"{self.done} of {self.runs} runs done", *told]
        done = 1 - self.left.rounds / max(self._rounds, 1)
        self._show(f'<progress value="{done:.3f}"></progress> {"<br>".join(map(html.escape, lines))}')


_SECONDS_BETWEEN_DRAWINGS = 0.2


def show_progress(console: Console, runs: int, rounds: int, quiet: bool = False, at_a_time: int = 1) -> Progress:
    """Choose the display: live in a terminal, lines elsewhere, or nothing. ``rounds`` are those of all runs."""
    if quiet:
        return Silence(runs, rounds, at_a_time)
    if console.is_jupyter:
        return Notebook(runs, rounds, _below_the_cell(), at_a_time)
    if console.is_terminal:
        return Live(runs, rounds, console, at_a_time)
    return Lines(runs, rounds, console, at_a_time)


def show_if_wanted(wanted: bool | None, runs: int, rounds: int, at_a_time: int = 1) -> Progress:
    """Show the progress of runs that Python code begins; where that is left open, in notebooks only."""
    console = Console(stderr=True, highlight=False)
    quiet = not (console.is_jupyter if wanted is None else wanted)
    return show_progress(console, runs, rounds, quiet, at_a_time)


def _below_the_cell() -> Callable[[str], None]:
    """Make a place below the current cell of a notebook, which is run by IPython."""
    ipython: Any = import_module("IPython.display")
    handle = ipython.display(ipython.HTML(""), display_id=True)
    return lambda text: handle.update(ipython.HTML(text))


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{duration(seconds)} left"


def _percent(fraction: float) -> str:
    return "–" if math.isnan(fraction) else f"{100 * fraction:.1f} %"
