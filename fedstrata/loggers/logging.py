"""Loggers in a run: called after every round, never twice for the same round, and off once they have failed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.callbacks import Callback, RoundView
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.loggers.logger import LoggedRun, Logger, Writer, logged_names, loggers
from fedstrata.spec import split_outside

LOG_FILE = "log.json"
"""Where a run folder notes its loggers and how far each has come."""

Given = str | Logger | Sequence[str | Logger]
"""Loggers as a call may give them: a text such as ``tensorboard, wandb(project=a)``, a logger, or several of these."""
Past = Iterable[tuple[int, Mapping[str, float], Mapping[str, Mapping[str, float]]]]
"""Rounds that are done already: their number, their metrics, and those of the layers."""


def make_loggers(given: Given | None) -> list[Logger]:
    """Make loggers of texts, each once; unknown ones are refused, and those whose package is not installed.

    >>> [str(one) for one in make_loggers(None)]
    []
    """
    listed: Sequence[str | Logger] = [given] if isinstance(given, str | Logger) else list(given or ())
    texts = [one for piece in listed for one in (split_outside(piece, ",") if isinstance(piece, str) else [piece])]
    made = [loggers.make(one.strip() if isinstance(one, str) else one) for one in texts if one != ""]
    for logger in made:
        logger.require()
    return list({str(logger): logger for logger in made}.values())


@contextmanager
def keep_log(asked: Sequence[Logger], run: LoggedRun, past: Past = ()) -> Iterator[list[Callback]]:
    """Open the loggers of a run: those that are asked for, and those that it was begun with, which its folder notes.

    What they are to be called with comes back as callbacks. Rounds that are done, and that a logger has not heard of,
    are told to it first; of rounds that are done again since an interruption it does not hear twice.
    """
    memory = _Memory.read(run.folder)
    wanted = {str(logger): logger for logger in (*memory.loggers(), *asked)}
    kept = [_Kept(logger, replace(run, identity=memory.identity), memory) for logger in wanted.values()]
    earlier = [(round, logged_names(metrics, layers)) for round, metrics, layers in past] if kept else []
    try:
        for one in kept:
            one.catch_up(earlier)
        yield list(kept)
    finally:
        for one in kept:
            one.close()


class _Memory:
    """What a run folder notes of its loggers; without a folder, nothing is kept."""

    def __init__(self, path: Path | None, identity: str, through: dict[str, int]) -> None:
        self._path = path
        self.identity = identity
        self._through = through

    @classmethod
    def read(cls, folder: Path | None) -> _Memory:
        path = None if folder is None else folder / LOG_FILE
        if path is None or not path.exists():
            return cls(path, LoggedRun.new_identity(), {})
        noted = files.from_json(files.read_bytes(path), path)
        return cls(path, str(noted["identity"]), {str(text): int(at) for text, at in noted["loggers"].items()})

    def loggers(self) -> list[Logger]:
        """Make the loggers that are noted; one that cannot be had here is left out, with a word."""
        made = []
        for text in self._through:
            try:
                made += make_loggers([text])
            except FedStrataError as error:
                _warn_of(text, str(error))
        return made

    def through(self, text: str) -> int:
        """Tell up to which round a logger has heard."""
        return self._through.get(text, 0)

    def note(self, text: str, round: int) -> None:
        """Note that a logger has heard of a round."""
        self._through[text] = round
        if self._path is not None:
            files.write_atomically(self._path, files.to_json({"identity": self.identity, "loggers": self._through}))


class _Kept(Callback):
    """A logger in a run. What it does wrong is told once, and then it is left alone."""

    only_numbers = True

    def __init__(self, logger: Logger, run: LoggedRun, memory: _Memory) -> None:
        self._text, self._memory = str(logger), memory
        self._writer: Writer | None = None
        self._last: tuple[int, frozenset[str]] = (0, frozenset())
        self._guarded("begin", lambda: setattr(self, "_writer", logger.open(run)))

    def catch_up(self, rounds: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Tell of rounds that are done already."""
        for round, values in rounds:
            self._write(round, values)

    def on_round(self, view: RoundView) -> None:
        """Write the numbers of a round."""
        self._write(view.round, logged_names(view.metrics, view.layers))

    def on_end(self, view: RoundView, summary: Mapping[str, Any]) -> None:
        """Write what was measured after the last round, and the end."""
        round, names = self._last
        values = logged_names(view.metrics, {})
        late = {name: value for name, value in values.items() if round == view.round and name not in names}
        if late:
            self._guarded("write", lambda: self._open.write(view.round, late))
        self._guarded("end", lambda: self._open.end(summary))

    def close(self) -> None:
        """Let the writer go."""
        self._guarded("close", lambda: self._open.close())
        self._writer = None

    @property
    def _open(self) -> Writer:
        assert self._writer is not None
        return self._writer

    def _write(self, round: int, values: Mapping[str, float]) -> None:
        if self._writer is None or round <= self._memory.through(self._text):
            return
        self._guarded("write", lambda: self._open.write(round, values))
        if self._writer is not None:
            self._guarded("note", lambda: self._memory.note(self._text, round))
        self._last = (round, frozenset(values))

    def _guarded(self, what: str, do: Callable[[], object]) -> None:
        if self._writer is None and what != "begin":
            return
        try:
            with redirect_stdout(sys.stderr):  # what a command prints there are its own results
                do()
        except Exception as error:
            self._writer = None
            _warn_of(self._text, f"{type(error).__name__}: {error}")


def _warn_of(text: str, reason: str) -> None:
    warnings.warn(
        f"The logger '{text}' is off from now on, and the run goes on without it: {reason}", FedStrataWarning, 3
    )
