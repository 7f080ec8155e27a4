"""Real processes over real sockets with TLS and keys: the result of a simulation, through crashes of anybody."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedstrata.deployment.keys import make_keys
from fedstrata.deployment.server import status_of
from fedstrata.engines.planning import Plan
from fedstrata.experiment import Experiment
from fedstrata.runs import RunFolder
from fedstrata.simulation import Simulation

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


def written(folder: Path, rounds: int) -> str:
    path = folder / "experiment.toml"
    path.write_text(EXPERIMENT.with_changes({"rounds": rounds}).to_toml())
    return str(path)


def simulated(sites: int, rounds: int) -> Simulation:
    """Run the loop engine here, with one thread, as the sites do."""
    simulation = Simulation.prepare(
        EXPERIMENT.with_changes({"rounds": rounds, "clients": sites}), plan=Plan("loop", 1, threads=1)
    )
    simulation.run()
    return simulation


def assert_same_model(out: Path, simulation: Simulation) -> None:
    model = RunFolder.open(out).model()
    for name, tensor in simulation.engine.server.model.items():
        assert model[name].equal(tensor), name


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(path: Path, *processes: subprocess.Popen[bytes]) -> None:
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


def test_one_command_deploys_and_gives_the_weights_of_the_simulation(tmp_path):
    out = tmp_path / "run"
    asked = command("deploy", "--local", "3", written(tmp_path, 2), "--out", str(out), "--json")
    done = subprocess.run(asked, capture_output=True, text=True, env=ENVIRONMENT, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    told, simulation = json.loads(done.stdout), simulated(3, 2)
    assert told["rounds"] == 2
    assert told["engine"] == "flower"
    assert_same_model(out, simulation)
    final, expected = told["final"], simulation.metrics.latest()
    assert final["network.up"] > final["bytes.up"] > 0
    assert {name: final[name] for name in expected} == pytest.approx(expected)
    assert (out / "report.html").exists()
    assert all((tmp_path / "run-sites" / f"site-{number}").is_dir() for number in (1, 2, 3))
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"PRIVATE KEY" not in everything
    assert status_of(out)["state"] == "finished"


def test_sites_and_server_may_be_killed_at_any_time(tmp_path):
    """One site and then the server are killed with SIGKILL; the run ends with the weights of an unbroken simulation."""
    names, rounds = ["berlin", "paris", "rome"], 8
    keys, out, port = tmp_path / "keys", tmp_path / "run", free_port()
    make_keys(keys, ["127.0.0.1"], names)
    server = [
        "server", written(tmp_path, rounds), "--tls", str(keys / "server"), "--out", str(out),
        "--sites", str(keys / "server" / "sites.toml"), "--address", f"127.0.0.1:{port}", "--no-report",
    ]  # fmt: skip

    def client(number: int) -> list[str]:
        name = names[number]
        return ["client", "--server", f"127.0.0.1:{port}", "--site", name, "--keys", str(keys / "sites" / name),
                "--state", str(tmp_path / name), "--part", str(number), "--poll", "0.2"]  # fmt: skip

    def checkpoint(round: int) -> Path:
        return out / "checkpoints" / f"round-{round:06d}"

    with (
        started(tmp_path, "berlin", *client(0)) as first,
        started(tmp_path, "paris", *client(1)) as second,
        started(tmp_path, "server", *server) as serving,
    ):
        with started(tmp_path, "rome", *client(2)) as third:
            wait_for(checkpoint(2), serving, first, second, third)
            third.send_signal(signal.SIGKILL)
            third.wait()
        with started(tmp_path, "rome", *client(2)) as third:
            wait_for(checkpoint(4), serving, first, second, third)
            serving.send_signal(signal.SIGKILL)
            serving.wait()
            assert not (out / "summary.json").exists()
            with started(tmp_path, "server", *server) as again:
                wait_for(out / "summary.json", first, second, third)
                assert again.wait(timeout=LONGEST) == 0
    assert_same_model(out, simulated(len(names), rounds))
    log = (out / "deployment.log").read_text()
    assert "goes on after round" in log
    assert log.count("rome has connected") >= 2
