"""Runs that go on, as they are seen from outside: which there are, how each fares, and a page that follows them."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from fedstrata import files
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.report.charts import charts_are_possible
from fedstrata.report.document import Contents, chart_data, document
from fedstrata.report.formats import plural
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.page import contents
from fedstrata.report.reading import Run, read_run
from fedstrata.runs.live_log import LIVE_FILE

_DEPTH = 2
"""How many folders deep runs are looked for: ``runs/a``, and ``runs/compare/fedavg-seed0``."""
_SHARE_OF_TIME = 0.2
"""The share of the time that pages may take to build, so that the runs have the rest."""
_LONGEST_PAUSE = 15.0
_SIGNS_OF_LIFE = (LIVE_FILE, "summary.json", "checkpoints", "experiment.toml")


class State(StrEnum):
    """How a run fares."""

    RUNNING = "running"
    DIED = "died"
    STOPPED = "stopped"
    FINISHED = "finished"
    UNREADABLE = "unreadable"


_MEANINGS = {
    State.RUNNING: "a process is at work on it",
    State.DIED: "its process is gone, and had no time to say why",
    State.STOPPED: "it was interrupted after a checkpoint",
    State.FINISHED: "it has come to its end",
    State.UNREADABLE: "its folder cannot be read",
}


@dataclass(frozen=True)
class Watched:
    """A run folder and how it fares; ``at`` is the time of its last sign of life, in seconds since 1970."""

    path: Path
    state: State
    at: float
    marks: tuple[tuple[int, int], ...]
    """Times and sizes of the files that change when the run does."""

    @classmethod
    def look(cls, path: Path) -> Watched:
        """Look at a run folder, without reading any of its numbers."""
        # Who writes comes first: a run that finishes in between is then seen as running, for a moment.
        written = files.is_being_written(path)
        marks = tuple(_mark(path / name) for name in _SIGNS_OF_LIFE)
        live, summary, *_ = marks
        if summary[0]:
            state = State.FINISHED
        elif written or (written is None and live[0]):
            state = State.RUNNING
        else:
            state = State.DIED if live[0] else State.STOPPED
        return cls(path, state, max(time for time, _ in marks) / 1e9, marks)


def _mark(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return 0, 0


def find_runs(places: Sequence[Path]) -> list[Path]:
    """Find the run folders among and in some folders, as they are now."""
    found: dict[Path, None] = {}
    for place in places:
        patterns = ["/".join(["*"] * depth + ["experiment.toml"]) for depth in range(_DEPTH + 1)]
        inside = sorted({file.parent for pattern in patterns for file in place.glob(pattern)})
        # A folder that is being made, or taken away, has a name of its own.
        found |= dict.fromkeys(path for path in inside if files.partial_of(path.name) is None)
    return list(found)


@dataclass(frozen=True)
class Snapshot:
    """The page as it was at one moment."""

    contents: Contents

    @cached_property
    def tag(self) -> str:
        """A name for what the page shows: equal pages have equal ones."""
        return f'"{sha256(self._news).hexdigest()[:32]}"'

    @cached_property
    def news(self) -> bytes:
        """What a page that is open already needs to show the same, as JSON."""
        return self._news

    @cached_property
    def page(self) -> bytes:
        """The whole page, live."""
        title, body, charts, methods = self.contents
        return document(
            title, join((body, element("span", id="tag", data_tag=self.tag))), charts, methods, True
        ).encode()

    @cached_property
    def _news(self) -> bytes:
        title, body, charts, methods = self.contents
        return json.dumps({"title": title, "body": str(body), "data": str(chart_data(charts, methods))}).encode()


@dataclass
class Watcher:
    """Follows all runs in some folders, also those that appear later."""

    places: Sequence[Path]
    title: str | None = None
    clock: Callable[[], float] = time.monotonic
    _runs: dict[Path, tuple[Watched, Run]] = field(default_factory=dict)
    _seen: list[Watched] = field(default_factory=list)
    _snapshot: Snapshot | None = None
    _not_before: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> Snapshot:
        """Build the page anew where something has changed, unless the last time was just now."""
        with self._lock:
            if self._snapshot is not None and self.clock() < self._not_before:
                return self._snapshot
            seen = [Watched.look(path) for path in find_runs(self.places)]
            if self._snapshot is None or seen != self._seen:
                first, began = self._snapshot is None, self.clock()
                self._snapshot, self._seen = Snapshot(self._build(seen)), seen
                self._snapshot.news  # noqa: B018 - built here, once
                ended = self.clock()
                # The first page takes longest, since what draws is loaded for it.
                pause = 0.0 if first else (ended - began) * (1 / _SHARE_OF_TIME - 1)
                self._not_before = ended + min(_LONGEST_PAUSE, pause)
            return self._snapshot

    def _build(self, seen: Sequence[Watched]) -> Contents:
        with warnings.catch_warnings():
            # What is wrong with a folder is said when one works with it, not every second.
            warnings.simplefilter("ignore", FedStrataWarning)
            readable, trouble = self._read(seen)
            panel = _panel(self._named(seen), {run.path: run.rounds_done for run in readable}, readable, trouble)
            begun = [run for run in readable if run.series]
            if not begun:
                return Contents(self.title or "FedStrata", join((panel, self._nothing_yet(seen))), {})
            shown = contents(begun, self.title, charts_are_possible())
        return shown._replace(body=join((panel, shown.body)))

    def _read(self, seen: Sequence[Watched]) -> tuple[list[Run], dict[Path, str]]:
        """Open the runs, those that have not changed since as they were; of others, what is wrong with them."""
        readable, trouble, kept = [], {}, {}
        for one in seen:
            before, run = self._runs.get(one.path, (None, None))
            try:
                if run is None or before != one:
                    run = read_run(one.path)
                    _ = run.rounds_done, run.summary, run.data
            except (FedStrataError, KeyError) as error:
                trouble[one.path] = str(error)
                continue
            kept[one.path] = (one, run)
            readable.append(run)
        self._runs = kept
        return readable, trouble

    def _named(self, seen: Sequence[Watched]) -> list[tuple[str, Watched]]:
        """Name each run by its folder, as seen from the folder that is watched."""
        return [(_name(one.path, self.places), one) for one in seen]

    def _nothing_yet(self, seen: Sequence[Watched]) -> Markup:
        where = ", ".join(str(place) for place in self.places)
        words = "No run has come to the end of its first round." if seen else f"There is no run in {where} yet."
        return element("main", element("h1", self.title or "Waiting"), element("p", f"{words} This page will show it."))


def _name(path: Path, places: Sequence[Path]) -> str:
    for place in places:
        if path != place and path.is_relative_to(place):
            return path.relative_to(place).as_posix()
    return path.resolve().name


def _panel(
    seen: Sequence[tuple[str, Watched]], done: dict[Path, int], readable: Sequence[Run], trouble: dict[Path, str]
) -> Markup:
    """Tell how each run fares, those that need a look first."""
    rounds = {run.path: int(run.experiment["rounds"]) for run in readable}
    states = {one.path: State.UNREADABLE if one.path in trouble else one.state for _, one in seen}
    counted = [f"{count} {state}" for state in State if (count := list(states.values()).count(state))]
    order = (State.UNREADABLE, State.DIED, State.RUNNING, State.STOPPED, State.FINISHED)
    lines = [
        _line(name, one, states[one.path], done.get(one.path, 0), rounds.get(one.path), trouble.get(one.path))
        for name, one in sorted(seen, key=lambda pair: (order.index(states[pair[1].path]), -pair[1].at))
    ]
    return element(
        "div",
        element(
            "details",
            element(
                "summary",
                element("span", "Live", class_="live-word"),
                element("span", ", ".join(counted) or "no runs yet", class_="live-counts"),
                element("span", class_="live-link"),
            ),
            element("ul", *lines),
            open=any(state != State.FINISHED for state in states.values()),
        ),
        id="live",
    )


def _line(name: str, one: Watched, state: State, done: int, rounds: int | None, trouble: str | None) -> Markup:
    if trouble is not None:
        what = trouble
    elif state == State.RUNNING and not done:
        what = f"before its first round, of {rounds}"
    else:
        what = f"round {done} of {rounds}" if state != State.FINISHED else plural(done, "round")
    bar = element("progress", value=str(done), max=str(rounds), aria_label=f"{name}: rounds done") if rounds else None
    return element(
        "li",
        element("span", state, class_=f"state {state}", title=_MEANINGS[state]),
        element("span", name, class_="name"),
        element("span", what, class_="rounds"),
        bar if state != State.FINISHED else None,
        element("time", data_at=f"{one.at:.0f}"),
    )
