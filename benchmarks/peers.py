"""The same work in FedStrata and in other libraries: ratios of the fastest rounds, side by side.

    python benchmarks/peers.py                                 what is installed beside FedStrata
    python benchmarks/peers.py --python /tmp/peers/bin/python  peers in an environment of their own (may be repeated)
    python benchmarks/peers.py --pfllib ../PFLlib              also PFLlib, of a checkout of its repository
    python benchmarks/peers.py --threads 2 --rounds 8          two cores; each system with one thread and with two

The work is FedAvg with 100 clients of 40 digits each, 5 local epochs of batches of 10, plain SGD, from the same initial
weights: an MLP 64-64-10 and a CNN with two convolutions. Every system is a process of its own, pinned to the same
cores; rounds alternate between them, so that a busy moment meets everybody. Each counts with the number of threads at
which it is fastest, the plain loop too. At the end the loss of every system's model on all training samples is compared
with that of the plain loop: systems that do the same work reach about the same one. A peer that is not installed is
left out with a word.

On a busy machine a short round finds a quiet moment sooner than a long one. There the time of the processor is the
fairer one, which is told for systems that compute in one thread of their own process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_adapters import ADAPTERS
from peer_work import MODELS, LocalWork

_SAME_LOSS = 0.1
"""Losses that differ by more, relative to the plain loop's, are not the result of the same work."""
_IN_OTHER_PROCESSES = ("Flower, simulation",)


@dataclass
class Worker:
    """A process that runs one system, and runs a round whenever it is told to."""

    system: str
    threads: int
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    loss: float = float("nan")

    @classmethod
    def start(cls, python: str, system: str, model: str, cores: list[int]) -> Worker | str:
        """Start a system on some cores; a system that cannot run is the sentence that says why."""
        here = Path(__file__).parent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
            "OMP_NUM_THREADS": str(len(cores)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [python, str(here / "peer_adapters.py"), system, model, ",".join(map(str, cores))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,  # who interrupts does not mean it
        )
        worker = cls(system, len(cores), process)
        answer = worker._answer()
        if answer.get("ready"):
            return worker
        worker.stop()
        return str(answer.get("missing", "it ended without a word"))

    def round(self) -> bool:
        """Run one round, the first one to warm up, which does not count; tell whether it did."""
        taken = self._ask("round")
        if taken:
            self.seconds.append(taken["seconds"])
            self.processor.append(taken["processor"])
        return bool(taken)

    def measure_loss(self, folder: Path, work: LocalWork) -> None:
        """Compare what it reached: the loss of its model on the samples of all clients."""
        path = folder / f"{self.system}-{self.threads}.npz"
        answer = self._ask(f"weights {path}")
        while answer and "saved" not in answer:  # a round that was under way when somebody interrupted
            answer = self._answer()
        self.loss = work.loss_of(path)

    @property
    def fastest(self) -> float:
        """Its fastest round, without the first."""
        return min(self.seconds[1:])

    @property
    def processor_seconds(self) -> float | None:
        """The least time of a processor that a round took; none where several computed, or other processes did."""
        return min(self.processor[1:]) if self.threads == 1 and self.system not in _IN_OTHER_PROCESSES else None

    @property
    def unrest(self) -> float:
        """How many times longer its median round took than its fastest: what others did to the machine meanwhile."""
        return statistics.median(self.seconds[1:]) / self.fastest

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _ask(self, question: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(question + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {}
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer


def start_all(pythons: list[str], systems: list[str], model: str, cores: list[int]) -> list[Worker]:
    """Start every system with one thread and with all, in the first environment that has it."""
    workers = []
    for system in systems:
        reasons = []
        for python in pythons:
            started = Worker.start(python, system, model, cores[:1])
            if isinstance(started, Worker):
                workers.append(started)
                if len(cores) > 1:
                    more = Worker.start(python, system, model, cores)
                    workers += [more] if isinstance(more, Worker) else []
                break
            reasons.append(started)
        else:
            print(f"{system} is left out: {reasons[0]}", file=sys.stderr)
    return workers


def alternate(workers: list[Worker], rounds: int) -> None:
    """Run rounds of all in turns, until they are done or somebody interrupts; who ends before is left out."""
    try:
        for number in range(rounds + 1):
            for worker in list(workers):
                if not worker.round():
                    print(f"{worker.system} is left out: it ended in round {number}", file=sys.stderr)
                    worker.stop()
                    workers.remove(worker)
    except KeyboardInterrupt:
        print(f"interrupted after {min(len(worker.seconds) for worker in workers) - 1} rounds", file=sys.stderr)


def table(model: str, workers: list[Worker]) -> str:
    """Write the ratios of the fastest rounds as a table; each system with its best number of threads."""
    best = {
        system: min((one for one in workers if one.system == system), key=lambda one: one.fastest)
        for system in dict.fromkeys(worker.system for worker in workers)
    }
    ours, plain = best.get("FedStrata, stacked"), best["plain loop"]
    rows = [
        f"| {model} | threads | seconds a round | times the plain loop | times FedStrata, stacked "
        "| median / fastest | processor seconds | times FedStrata, stacked | training loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for system, one in sorted(best.items(), key=lambda item: item[1].fastest):
        alike = abs(one.loss - plain.loss) <= _SAME_LOSS * plain.loss
        rows.append(
            f"| {system} | {one.threads} | {one.fastest:.3f} | {one.fastest / plain.fastest:.2f} "
            f"| {_ratio(one.fastest, ours.fastest if ours else None)} | {one.unrest:.2f} "
            f"| {_number(one.processor_seconds, 3)} "
            f"| {_ratio(one.processor_seconds, ours.processor_seconds if ours else None)} "
            f"| {one.loss:.4f}{'' if alike else ' (not the same work)'} |"
        )
    return "\n".join(rows)


def _ratio(taken: float | None, ours: float | None) -> str:
    return _number(None if taken is None or ours is None else taken / ours, 2)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="how many cores, and threads at the most")
    parser.add_argument("--rounds", type=int, default=6, help="how many rounds of each, beside a first one")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--systems", nargs="+", choices=tuple(ADAPTERS), default=list(ADAPTERS))
    parser.add_argument("--python", action="append", default=[], help="a Python that has some of the peers")
    parser.add_argument("--pfllib", help="a checkout of github.com/TsingZ0/PFLlib, which is in no package index")
    arguments = parser.parse_args()
    if arguments.pfllib:
        os.environ["PFLLIB"] = str(Path(arguments.pfllib).resolve())
    cores = sorted(os.sched_getaffinity(0))[-arguments.threads :]
    systems = list(dict.fromkeys(["plain loop", *arguments.systems]))
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            work = LocalWork(model)
            workers = start_all([sys.executable, *arguments.python], systems, model, cores)
            try:
                alternate(workers, arguments.rounds)
                for worker in workers:
                    worker.measure_loss(Path(folder), work)
            finally:
                for worker in workers:
                    worker.stop()
            print(f"{table(model, workers)}\n", flush=True)


if __name__ == "__main__":
    main()
