"""A worker: does the runs that it is given, one after another, and tells how far it has come."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from fedstrata import api
from fedstrata.callbacks import RoundView
from fedstrata.engines.planning import Plan, SharedMemory
from fedstrata.errors import FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.loggers import make_loggers
from fedstrata.plugins import load_imports, loaded_packages
from fedstrata.progress import ACCURACIES, Progress
from fedstrata.runs.preparing import Ingredients, NamedData
from fedstrata.runs.signals import Interrupted, ask_to_stop, noted_stops
from fedstrata.side_by_side.failures import describe
from fedstrata.side_by_side.travelling import COMPONENTS

Message = dict[str, Any]

_ROUNDS_TO_SETTLE = 6
"""After so many rounds, one of them with tests, a run holds what it is going to: its steps are recorded by then."""


class Connection:
    """To who has started this process: messages both ways, one line of JSON each.

    Where nobody is there any more, the run that is under way is asked to stop, and what is told goes nowhere.
    """

    def __init__(self) -> None:
        self.given: SimpleQueue[Message | None] = SimpleQueue()
        self.granted: SimpleQueue[None] = SimpleQueue()
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no message
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **message: Any) -> None:
        """Send a message."""
        with suppress(OSError, ValueError):
            self._out.write(f"{json.dumps(message)}\n")
            self._out.flush()

    def _listen(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "run" in message:
                self.given.put(message)
            elif "granted" in message:
                self.granted.put(None)
            else:
                ask_to_stop(message["stop"])
        ask_to_stop(signal.SIGTERM)
        self.given.put(None)


class Told(Progress):
    """Tells of each round over a connection; a run that is asked to stop before its first one does not begin."""

    def __init__(self, connection: Connection, stop: list[int]) -> None:
        super().__init__(1, 1)
        self._connection = connection
        self._stop = stop
        self._rounds = 0
        self._tested = self._settled = False

    def show_doing(self, words: str) -> None:
        """Tell what is being done."""
        refuse_to_begin(self._stop)
        self._connection.tell(doing=words)

    def show_round(self, view: RoundView) -> None:
        """Tell of a round."""
        self._connection.tell(round=as_message(view))
        self._rounds += 1
        self._tested |= view.evaluated
        if not self._settled and self._tested and self._rounds >= _ROUNDS_TO_SETTLE:
            self._settled = True
            if held := memory_held():
                self._connection.tell(held=held)

    def show_end(self, view: RoundView) -> None:
        """Tell of the end."""
        self._connection.tell(end=as_message(view))


def memory_held() -> int:
    """Measure how many bytes of a GPU this process holds, for tensors and for more of them; zero without a GPU."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def as_message(view: RoundView) -> Message:
    """Write down what displays show of a round."""
    return {
        "method": view.method,
        "seed": view.seed,
        "round": view.round,
        "rounds": view.rounds,
        "seconds": view.seconds,
        "metrics": {name: view.metrics[name] for name in ACCURACIES if name in view.metrics},
        "evaluated": view.evaluated,
    }


def refuse_to_begin(stop: list[int]) -> None:
    """Stop before the first round, where that was asked for."""
    if stop:
        raise Interrupted(stop[0], 0, None)


def work() -> None:
    """Do what is asked for, until there is nothing more to do or nobody who asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who has started this process hears it, and says what to do
    signal.signal(signal.SIGTERM, lambda number, frame: ask_to_stop(number))
    gc.freeze()  # what was imported stays: nobody has to look through it for garbage
    data = NamedData()
    with noted_stops() as stop:
        connection = Connection()
        for message in iter(connection.given.get, None):
            with _telling(connection):
                connection.tell(**_outcome(message, data, connection, stop))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _outcome(message: Message, data: NamedData, connection: Connection, stop: list[int]) -> Message:
    """Do a run, and tell what became of it."""
    try:
        _do(message, data, connection, stop)
    except Interrupted as interrupted:
        return {"interrupted": interrupted.round, "signal": interrupted.signal_number}
    except Exception as error:
        return {"failed": describe(error)}
    return {"done": True}


def _do(message: Message, data: NamedData, connection: Connection, stop: list[int]) -> None:
    def take(needed: float) -> None:
        connection.tell(needed=needed)
        while True:
            refuse_to_begin(stop)
            with suppress(Empty):
                return connection.granted.get(timeout=0.1)

    given, out, shown = Ingredients(named=data), Path(message["out"]), Told(connection, stop)
    shared = SharedMemory(message["free"], take)
    refuse_to_begin(stop)
    load_packages_of(message["packages"])
    log = make_loggers(message["log"])
    if not message["new"]:
        api.carry_on(out, given, (), shown, shared, log)
        return
    experiment = load_imports(Experiment.from_mapping(message["experiment"]), *map(Path, message["places"]))
    plan = None if message["plan"] is None else Plan(**message["plan"])
    api.carry_out(experiment, given, out, (), shown, plan, shared, log)


def load_packages_of(wanted: Sequence[str]) -> None:
    """Look through the installed packages for components, where who has started this process has done so."""
    for registry in COMPONENTS.values():
        if not set(wanted) <= set(loaded_packages()):
            registry.names()


@contextmanager
def _telling(connection: Connection) -> Iterator[None]:
    """Tell what is printed and warned about."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, FedStrataWarning):
            connection.tell(warning=str(message))

    printed = _Printed(connection)
    with warnings.catch_warnings(), redirect_stdout(printed), redirect_stderr(printed):
        warnings.simplefilter("always", FedStrataWarning)
        warnings.showwarning = show
        yield


class _Printed(io.TextIOBase):
    """Where what is printed goes, line by line."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begun = ""

    def write(self, text: str) -> int:
        """Tell each line once it is whole."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._connection.tell(printed=line)
        return len(text)
