"""A server and some sites as real processes, with keys of their own, and the simulation that they must equal."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from forking import Forked
from replaying import with_participants

from fedstrata.deployment.keys import make_keys
from fedstrata.engines.planning import Plan
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder

LONGEST = 240
EXPERIMENT = Experiment(
    partition="dirichlet(alpha=0.5, samples=60)",
    method="fedbn+fedprox",
    epochs=1,
    batch_size=16,
    optimiser="sgd(learning_rate=0.05, momentum=0.9, keep=true)",
    seed=5,
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fedstrata", *arguments]


def experiment(rounds: int, **changes: Any) -> Experiment:
    return EXPERIMENT.with_changes({"rounds": rounds, **changes})


def written(folder: Path, experiment: Experiment) -> str:
    path = folder / "experiment.toml"
    path.write_text(experiment.to_toml())
    return str(path)


def simulated(experiment: Experiment, sites: int, merged: dict[int, list[int]] | None = None) -> Driver:
    """Run the loop engine here, with one thread, as the sites do; with the participants of each round, where given."""
    simulation = Driver.prepare(experiment.with_changes({"clients": sites}), plan=Plan("loop", 1, threads=1))
    if merged is not None:
        with_participants(simulation, merged)
    simulation.run()
    return simulation


def assert_same_model(out: Path, simulation: Driver) -> None:
    model = RunFolder.open(out).model()
    for name, tensor in simulation.model.items():
        assert model[name].equal(tensor), name


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(path: Path, *processes: subprocess.Popen[bytes] | Forked) -> None:
    began = time.monotonic()
    while not path.exists():
        assert time.monotonic() - began < LONGEST, f"{path} does not come"
        for process in processes:
            assert process.poll() is None, f"a process ended with {process.returncode}"
        time.sleep(0.02)


@contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command(*arguments), stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Consortium:
    """A server and some sites with keys, each started by its own command."""

    def __init__(self, folder: Path, names: list[str], experiment: Experiment) -> None:
        self.folder, self.names, self.out = folder, names, folder / "run"
        self.keys, self.address = folder / "keys", f"127.0.0.1:{free_port()}"
        self.experiment = written(folder, experiment)
        self.addresses = dict.fromkeys(names, self.address)
        self.rules: list[str] = []
        make_keys(self.keys, ["127.0.0.1"], names)

    def start(self, name: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return started(self.folder, name, *self.arguments(name))

    @contextmanager
    def fork(self, name: str) -> Iterator[Forked]:
        """Start somebody in a process that need not import everything first."""
        process = Forked(self.folder / f"{name}.log", *self.arguments(name))
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def arguments(self, name: str) -> list[str]:
        return self.server() if name == "server" else self.client(name)

    @property
    def log(self) -> str:
        """What the server has told so far."""
        path = self.out / "deployment.log"
        return path.read_text() if path.exists() else ""

    def await_line(self, pattern: str, told: int) -> None:
        """Wait until the server tells something, after so many characters of its log."""
        began = time.monotonic()
        while not re.search(pattern, self.log[told:]):
            assert time.monotonic() - began < LONGEST, f"'{pattern}' is not told"
            assert not (self.out / "summary.json").exists(), "the run is over too early"
            time.sleep(0.02)

    def server(self) -> list[str]:
        sites = self.keys / "server" / "sites.toml"
        return ["server", self.experiment, "--tls", str(self.keys / "server"), "--sites", str(sites),
                "--address", self.address, "--out", str(self.out), "--no-report", *self.rules]  # fmt: skip

    def client(self, name: str) -> list[str]:
        return ["client", "--server", self.addresses[name], "--site", name, "--keys", str(self.keys / "sites" / name),
                "--state", str(self.folder / name), "--part", str(self.names.index(name)), "--poll", "0.2"]  # fmt: skip

    def checkpoint(self, round: int) -> Path:
        return self.out / "checkpoints" / f"round-{round:06d}"
