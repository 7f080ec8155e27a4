"""Server and sites killed with SIGKILL at random moments, a hundred times: every run ends with the same bits."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from consortium import ENVIRONMENT, LONGEST, Consortium, command, experiment, simulated, written
from forking import Forked

from fedstrata.runs.folder import RunFolder
from fedstrata.stack import Tensors

NAMES, ROUNDS = ["berlin", "paris", "rome"], 4
RUNS = ("fedbn+fedprox", "ssfl", "scaffold", "fedavg --secure")
"""What is run, in turn: state at the sites, an exchange before the first round, control variates, sums under masks."""


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tensors]:
    """Give the weights that runs have to end with, each computed once."""
    return cache(lambda what: without_kills(what, tmp_path_factory.mktemp("unbroken")))


def without_kills(what: str, folder: Path) -> Tensors:
    """Return the weights that a run has to end with: of the simulation or, for secure sums, of a run without kills."""
    method, _, secure = what.partition(" ")
    if not secure:
        return simulated(experiment(ROUNDS, method=method), len(NAMES)).model
    out = folder / "unbroken"
    asked = command("deploy", "--local", "3", written(folder, experiment(ROUNDS, method=method)), secure)
    done = subprocess.run(
        [*asked, "--out", str(out), "--json", "--no-report"], capture_output=True, env=ENVIRONMENT, timeout=LONGEST
    )
    assert done.returncode == 0, done.stderr
    return RunFolder.open(out).model()


class Killing:
    """Kills anybody of a consortium and starts them again, at moments that a seed decides.

    All are processes of their own that run the command line; they are forked off one that has imported PyTorch already.
    """

    def __init__(self, us: Consortium, chance: random.Random) -> None:
        self.us, self.chance = us, chance
        self.running: dict[str, Forked] = {}
        self.kills = 0

    def __enter__(self) -> Killing:
        for name in ("server", *NAMES):
            self.start(name)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        self.running[name] = Forked(self.us.folder / f"{name}.log", *self.us.arguments(name))

    @property
    def is_over(self) -> bool:
        return (self.us.out / "summary.json").exists()

    def strike(self, after: int) -> None:
        """Wait for a round's checkpoint (0: for the beginning), and a moment more; then kill somebody."""
        awaited = self.us.checkpoint(after) if after else self.us.out / "status.json"
        began = time.monotonic()
        while not awaited.exists() and not self.is_over:
            assert time.monotonic() - began < LONGEST, f"{awaited} does not come"
            time.sleep(0.005)
        time.sleep(self.chance.uniform(0, 1.0))
        if self.is_over:
            return
        victim = self.chance.choice(["server", "server", *NAMES])
        self.running[victim].kill()
        assert self.running[victim].wait() == -signal.SIGKILL
        self.kills += 1
        self.start(victim)

    def wait(self) -> dict[str, int | None]:
        """Wait for everybody's end; whoever was killed in the last moment and missed it still waits for the server."""
        self.running["server"].wait(LONGEST)
        for name in NAMES:
            if f"{name} was not there to hear" not in self.us.log:
                self.running[name].wait(LONGEST)
        heard = [name for name in ("server", *NAMES) if f"{name} was not there to hear" not in self.us.log]
        return {name: self.running[name].returncode for name in heard}


@pytest.mark.slow
@pytest.mark.attack(
    "Server or site is killed with SIGKILL, at random moments of a run.",
    "Started again, it goes on; every run ends with the weights of one that nobody killed, bit for bit.",
)
@pytest.mark.parametrize("seed", range(100))
def test_a_kill_at_a_random_moment(seed, unbroken, tmp_path):
    what, chance = RUNS[seed % len(RUNS)], random.Random(seed)
    method, _, secure = what.partition(" ")
    us = Consortium(tmp_path, NAMES, experiment(ROUNDS, method=method))
    us.rules = [secure] if secure else []
    with Killing(us, chance) as killing:
        for after in sorted(chance.choices(range(ROUNDS), k=chance.randint(1, 3))):
            killing.strike(after)
        ended = killing.wait()
    assert killing.kills, "nobody was killed before the run was over"
    assert set(ended.values()) == {0}, {name: (tmp_path / f"{name}.log").read_text()[-500:] for name in ended}
    expected, model = unbroken(what), RunFolder.open(us.out).model()
    assert model.keys() == expected.keys()
    assert [name for name in model if not model[name].equal(expected[name])] == []
    assert json.loads((us.out / "summary.json").read_text())["rounds"] == ROUNDS
