"""Where the time goes from the shell's prompt to the first round, phase by phase, on a CPU or a GPU.

    python benchmarks/starting.py                                    digits, a small network
    python benchmarks/starting.py --data cifar100 --data-root DATA --model resnet8 --clients 100 --batch-size 100 \
        --method lips --precision tf32
    python benchmarks/starting.py ... --twice                        a second process, with what the first has cached

What is not named here is named as for ``fedstrata run``. One process is measured from its very beginning, once: most of
what is slow is slow only the first time. Each phase ends when the device is done with it. ``wall`` is time on the
clock, ``cpu`` that of all threads: where it is far more than wall, many threads waited for each other, and where it is
far less, the disk or the device was waited for. ``calls`` is how often a phase came; what is within another stands
under it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass
class Phase:
    """A stretch of the way, and what stands within it."""

    name: str
    depth: int
    wall: float = 0.0
    cpu: float = 0.0
    calls: int = 0


class Clock:
    """Takes the time of phases, which may stand within each other."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._open: list[str] = []
        self.wait: Callable[[], None] = lambda: None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of one phase, until the device has done it."""
        path = [*self._open, name]
        known = next((phase for phase in self.phases if phase.name == "/".join(path)), None)
        if known is None:
            known = Phase("/".join(path), len(path) - 1)
            self.phases.append(known)
        self._open.append(name)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wait()
            known.wall += time.perf_counter() - wall
            known.cpu += time.process_time() - cpu
            known.calls += 1
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Take the time of a function whenever it is called."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **options)

        return call


def seconds_since_the_process_began() -> float:
    """Tell how long the interpreter has been there, where the system tells; it counts in hundredths."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return 0.0


def measure(keys: dict[str, Any]) -> dict[str, Any]:
    """Go the way of ``fedstrata run``, without a folder, up to the second round."""
    clock = Clock()
    interpreter = seconds_since_the_process_began()
    began = time.perf_counter() - interpreter
    clock.phases.append(Phase("interpreter", 0, interpreter, time.process_time(), 1))
    with clock.phase("imports"):
        with clock.phase("command line"):
            import fedstrata.cli
        with clock.phase("torch"):
            import torch
        with clock.phase("everything else"):
            import fedstrata.comparing  # noqa: F401
            from fedstrata.experiment import Experiment
            from fedstrata.runs import driver, preparing
    experiment = Experiment().with_changes(keys)
    device = preparing.choose_device(experiment.device)
    if device.type == "cuda":
        clock.wait = torch.cuda.synchronize
        with clock.phase("device"):
            with clock.phase("context"):
                torch.zeros(1, device=device)
            with clock.phase("matrix product"):
                square = torch.ones(8, 8, device=device)
                square @ square
    watch(clock, preparing, driver)
    with clock.phase("prepare"):
        simulation = driver.Driver.prepare(experiment)
    with clock.phase("fingerprint of the samples"):
        from fedstrata.data.contents import fingerprint

        fingerprint(simulation.dataset)
    with clock.phase("first round"):
        simulation.step()
    first = time.perf_counter() - began
    with clock.phase("second round"):
        simulation.step()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "engine": f"{simulation.plan.engine}, {simulation.plan.chunk} clients at once",
        "seconds_to_the_end_of_the_first_round": first,
        "phases": [asdict(phase) for phase in clock.phases],
        "compiler_imported": "torch._dynamo" in sys.modules,
    }


def watch(clock: Clock, preparing: Any, driver: Any) -> None:
    """Take the time of the steps within preparing and within a round."""
    for name, words in {
        "load_data": "data", "divide": "split", "make_setting": "model and method", "device_data": "data to the device",
        "build_model": "build and check", "statistics_of_clients": "statistics", "with_statistics_of_all": "statistics",
    }.items():  # fmt: skip
        setattr(preparing, name, clock.timed(words, getattr(preparing, name)))
    for name, words in {"LayerMap": "layers", "Flops": "operations"}.items():
        setattr(preparing, name, SimpleNamespace(read=clock.timed(words, getattr(preparing, name).read)))
    for name, words in {"make_plan": "choose an engine", "build_engine": "build the engine"}.items():
        setattr(driver, name, clock.timed(words, getattr(driver, name)))
    driver.Driver._evaluate = clock.timed("evaluation", driver.Driver._evaluate)


def show(measured: dict[str, Any]) -> None:
    """Print the phases as a table."""
    print(f"{measured['device']}, {measured['threads']} threads, {measured['engine']}\n")
    print(f"{'':34}{'wall':>9}{'cpu':>9}{'calls':>7}")
    for phase in measured["phases"]:
        name = "  " * phase["depth"] + phase["name"].rpartition("/")[2]
        print(f"{name:34}{phase['wall']:8.2f}s{phase['cpu']:8.2f}s{phase['calls']:7}")
    print(f"\nto the end of the first round {measured['seconds_to_the_end_of_the_first_round']:.2f} s")
    if measured["compiler_imported"]:
        print("PyTorch's compiler was imported, which takes seconds")


def main() -> None:
    """Measure in this process, or in two new ones."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--twice", action="store_true", help="measure two processes, one after another")
    options, rest = parser.parse_known_args()
    if options.twice:
        for _ in range(2):
            flags = ["--json"] if options.json else []
            subprocess.run([sys.executable, __file__, *flags, *rest], check=True)
        return
    if len(rest) % 2 or any(not key.startswith("--") for key in rest[::2]):
        parser.error("give keys of an experiment as --key value")
    keys = {key[2:].replace("-", "_"): _value(value) for key, value in zip(rest[::2], rest[1::2], strict=True)}
    measured = measure(keys)
    if options.json:
        print(json.dumps(measured))
    else:
        show(measured)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
