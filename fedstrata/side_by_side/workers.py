"""Who starts workers, gives them runs, shows how far they have come, and ends them."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import IO, Any

import fedstrata
from fedstrata import _platform
from fedstrata.callbacks import RoundView
from fedstrata.engines.planning import Plan, SharedMemory, free_memory, threads_of_this_process
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.plugins import loaded_packages, require_imports
from fedstrata.progress import Progress
from fedstrata.runs.devices import choose_device
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.runs.signals import Interrupted, stop_requests
from fedstrata.side_by_side.failures import as_error, warn_of_failure

_SECONDS_TO_END = 10.0
_NO_MEMORY = "there is not enough memory for so many runs at a time"
_KILLED = "its process was ended by the signal 9, as where memory is short"


@dataclass(frozen=True)
class Job:
    """A run to do: a new one, or one to go on with from its folder."""

    name: str
    experiment: Experiment
    out: Path
    new: bool
    rounds_left: int
    plan: Plan | None = None
    log: tuple[str, ...] = ()

    @property
    def kind(self) -> Experiment:
        """What it has in common with those that take as much memory: all but the seed."""
        return self.experiment.with_changes({"seed": 0})

    def message(self, free: float) -> dict[str, Any]:
        """Write down what a worker must know.

        Files to import are looked for where they were found here; packages that were looked through are noted in the
        folder of a run.
        """
        files = require_imports(self.experiment.imports) if self.new else {}
        return {
            "run": self.name,
            "experiment": self.experiment.to_mapping(),
            "out": str(self.out),
            "new": self.new,
            "packages": sorted(loaded_packages()),
            "places": list(dict.fromkeys(str(file.path.resolve().parent) for file in files.values())),
            "plan": None if self.plan is None else asdict(self.plan),
            "free": free,
            "log": list(self.log),
        }


def perform_what_can_be(
    jobs: Sequence[Job], at_a_time: int, shown: Progress, given: Ingredients
) -> dict[Path, Exception]:
    """Do some runs, so many at a time, and return the errors of those that failed, by their folders."""
    with stop_requests() as stop, _workers(jobs, at_a_time, shown, given) as workers:
        workers.work(stop)
        return dict(workers.failed)


def _workers(jobs: Sequence[Job], at_a_time: int, shown: Progress, given: Ingredients) -> Workers:
    free = free_memory(choose_device(jobs[0].experiment.device))
    told: set[str] = set()
    planned = _plan_ahead(jobs, SharedMemory(free, lambda needed: None), shown, given, told)
    return Workers(planned, min(at_a_time, len(jobs)), free, shown, told)


def _plan_ahead(
    jobs: Sequence[Job], shared: SharedMemory, shown: Progress, given: Ingredients, told: set[str]
) -> list[Job]:
    """Choose engines where that takes a measurement, before others keep the machine busy: once for all seeds."""
    plans: dict[Experiment, Plan | None] = {}
    planned = []
    for job in jobs:
        measured = job.experiment.engine == "auto" and choose_device(job.experiment.device).type == "cpu"
        if job.new and measured:
            if job.kind not in plans:
                shown.begin(job.name)
                plans[job.kind] = _plan(job, shared, shown, given, told)
                shown.leave()
            job = replace(job, plan=plans[job.kind])
        planned.append(job)
    return planned


def _plan(job: Job, shared: SharedMemory, shown: Progress, given: Ingredients, told: set[str]) -> Plan | None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FedStrataWarning)
        try:
            plan = Driver.prepare(job.experiment, replace(given, method=None), None, shown.show_doing, shared).plan
        except Exception:
            return None  # the worker meets the same, and tells of it
    for one in caught:
        if issubclass(one.category, FedStrataWarning):
            _warn_once(job.name, str(one.message), told)
    return plan


def _warn_once(name: str, text: str, told: set[str]) -> None:
    if text not in told:
        told.add(text)
        warnings.warn(f"{name}: {text}", FedStrataWarning, stacklevel=3)


class Worker:
    """A process that does one run after another."""

    def __init__(self, events: SimpleQueue[tuple[Worker, dict[str, Any] | None]]) -> None:
        processors = ",".join(map(str, sorted(_platform.PROCESSORS)))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedstrata.side_by_side", processors],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_worker(os.environ),
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C in a terminal is for the one who has started it
        )
        self.job: Job | None = None
        self.rounds_left = 0
        self.needed: float | None = None
        """The memory that its run has, or waits for: as was estimated, and once a run like it was measured, as that."""
        self._events = events
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message; one who is gone is heard of elsewhere."""
        with suppress(OSError, ValueError):
            self._input.write(f"{json.dumps(message)}\n")
            self._input.flush()

    def end(self) -> None:
        """Let it end, since there is nothing more to do."""
        with suppress(OSError):
            self._input.close()

    @property
    def _input(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put((self, json.loads(line)))
        self._events.put((self, None))


def environment_of_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """Prepare the environment of a worker: as many threads as here, on any core, asleep while they wait.

    Threads that spin while they wait would take the time of those of other workers for which they wait, too.
    """
    changed = {
        "OMP_NUM_THREADS": str(threads_of_this_process()),
        "OMP_PROC_BIND": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
        **_path_to_this_package(environment.get("PYTHONPATH")),
    }
    return {name: value for name, value in environment.items() if name != "OMP_PLACES"} | changed


def _path_to_this_package(path: str | None) -> dict[str, str]:
    """Let a worker find the same FedStrata, also where it is not installed."""
    own = Path(fedstrata.__file__).resolve().parents[1]
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if own in [Path(place).resolve() for place in installed]:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(own), *([path] if path else [])])}


class Workers:
    """The workers of some runs, and what is still to do."""

    def __init__(self, jobs: Sequence[Job], at_a_time: int, free: float, shown: Progress, told: set[str]) -> None:
        self.to_do = deque(jobs)
        self.at_a_time = at_a_time
        self.free = free
        self.shown = shown
        self.told = told
        self.workers: list[Worker] = []
        self.waiting: deque[Worker] = deque()
        self.held: dict[Experiment, float] = {}
        """The memory that runs of a kind were seen to hold."""
        self.failed: dict[Path, Exception] = {}
        self.interrupted: list[tuple[int, Path]] = []
        self.stopping: int | None = None
        self._events: SimpleQueue[tuple[Worker, dict[str, Any] | None]] = SimpleQueue()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.end()
            if kind is not None and not issubclass(kind, Interrupted):
                worker.process.kill()
        for worker in self.workers:
            try:
                worker.process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    @property
    def active(self) -> list[Worker]:
        """Those that do a run."""
        return [worker for worker in self.workers if worker.job is not None]

    def work(self, stop: Sequence[int]) -> None:
        """Do all that is to do, unless a signal comes; ``failed`` tells what could not be done."""
        while self.active or (self.to_do and self.stopping is None):
            if self.stopping is None:
                self._give_out()
            with suppress(Empty):
                self._hear(*self._events.get(timeout=0.2))
            if stop:
                self._stop(stop[0])
        if self.stopping is not None and (self.interrupted or self.to_do):
            first = self.interrupted[0] if self.interrupted else (0, None)
            raise Interrupted(self.stopping, *first, *self.interrupted[1:])

    def _give_out(self) -> None:
        while self.to_do and len(self.active) < self.at_a_time:
            idle = [worker for worker in self.workers if worker.job is None]
            worker = idle[0] if idle else Worker(self._events)
            if not idle:
                self.workers.append(worker)
            job = self.to_do.popleft()
            worker.job, worker.rounds_left = job, job.rounds_left
            self.shown.begin(job.name)
            worker.send(**job.message(self.free))

    def _hear(self, worker: Worker, message: Mapping[str, Any] | None) -> None:
        job = worker.job
        if job is None:
            if message is None:
                self.workers.remove(worker)
            return
        if job.name in self.shown.active:
            self.shown.turn_to(job.name)
        match message:
            case None:
                self.workers.remove(worker)
                code = worker.process.wait()
                self._fail(worker, _ended(job.name, code), _KILLED if code == -9 else None)
            case {"doing": words}:
                self.shown.show_doing(words)
            case {"round": values}:
                worker.rounds_left -= 1
                self.shown.on_round(RoundView(**values))
            case {"end": values}:
                self.shown.on_end(RoundView(**values), {})
            case {"warning": text}:
                _warn_once(job.name, text, self.told)
            case {"printed": line}:
                print(f"{job.name}: {line}", file=sys.stderr)
            case {"needed": needed}:
                worker.needed = self.held.get(job.kind, needed)
                self.waiting.append(worker)
            case {"held": held}:
                self._count_as_measured(job.kind, held)
            case {"interrupted": round, "signal": number}:
                if round:
                    self.interrupted.append((round, job.out))
                else:
                    self.to_do.append(job)
                self._leave(worker)
                self._stop(number)
            case {"failed": told}:
                self._fail(worker, as_error(job.name, told), _NO_MEMORY if told["kind"] == "memory" else None)
            case {"done": _}:
                self._free(worker)
        self._grant()

    def _count_as_measured(self, kind: Experiment, held: float) -> None:
        """Count runs of a kind by what one of them was seen to take, no longer by the estimate."""
        self.held[kind] = max(held, self.held.get(kind, 0.0))
        for worker in self.active:
            if worker.job is not None and worker.job.kind == kind and worker.needed is not None:
                worker.needed = self.held[kind]

    def _free(self, worker: Worker) -> None:
        worker.job = worker.needed = None
        if worker in self.waiting:
            self.waiting.remove(worker)

    def _leave(self, worker: Worker) -> None:
        self.shown.leave(worker.rounds_left)
        self._free(worker)

    def _fail(self, worker: Worker, error: Exception, short: str | None) -> None:
        assert worker.job is not None
        others = sum(other is not worker for other in self.active)
        if short is not None and others and self.stopping is None:
            self._put_back(worker, short, others)
            return
        self.failed[worker.job.out] = error
        self._leave(worker)
        text = str(error)
        if (self.active or self.to_do) and text not in self.told:
            self.told.add(text)
            warn_of_failure(error)

    def _put_back(self, worker: Worker, short: str, others: int) -> None:
        """Do a run once more that found too little memory beside others, last of all and beside fewer."""
        job = worker.job
        assert job is not None
        _warn_once(job.name, f"{short}; what did not fit beside other runs is done again, beside fewer.", self.told)
        self.at_a_time = others
        self.to_do.append(replace(job, new=job.new and not (job.out / "experiment.toml").exists()))
        worker.rounds_left -= job.rounds_left  # all of its rounds are to do again, or those since its checkpoint
        self._leave(worker)

    def _grant(self) -> None:
        """Let those begin that wait for memory, in their order, while there is enough, or when nobody else has any."""
        while self.waiting:
            first = self.waiting[0]
            taken = sum(
                worker.needed for worker in self.workers if worker.needed is not None and worker not in self.waiting
            )
            if taken and taken + (first.needed or 0) > self.free:
                return
            self.waiting.popleft().send(granted=True)

    def _stop(self, number: int) -> None:
        if self.stopping is None:
            self.stopping = number
            for worker in self.active:
                worker.send(stop=number)


def _ended(name: str, code: int) -> FedStrataError:
    how = f"by the signal {-code}" if code < 0 else f"with the code {code}"
    return FedStrataError(
        f"{name}: the process that did it has ended {how}, as where memory is short; the same command goes on from the "
        "last checkpoint, with fewer --jobs perhaps."
    )
