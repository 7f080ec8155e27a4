"""Real processes over real sockets with TLS and keys: the result of a simulation, through crashes of anybody."""

from __future__ import annotations

import json
import re
import signal
from contextlib import ExitStack

import pytest

pytest.importorskip("flwr")

from consortium import (
    LONGEST,
    Consortium,
    assert_same_model,
    experiment,
    simulated,
    wait_for,
    written,
)
from cutting import CutLine
from forking import finished

from fedstrata.deployment.status import status_of
from fedstrata.trained import TrainedModel


def test_one_command_deploys_and_gives_the_weights_of_the_simulation(tmp_path):
    out = tmp_path / "run"
    asked = ("deploy", "--local", "2", written(tmp_path, experiment(2)), "--out", str(out), "--json")
    done = finished(*asked, folder=tmp_path, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    told, simulation = json.loads(done.stdout), simulated(experiment(2), 2)
    assert told["rounds"] == 2
    assert told["engine"] == "network"
    assert_same_model(out, simulation)
    final, expected = told["final"], simulation.metrics.latest()
    assert final["network.up"] > final["bytes.up"] > 0
    assert {name: final[name] for name in expected} == pytest.approx(expected)
    assert told["network_up"] > told["bytes_up"] > 0
    assert told["network_down"] > told["bytes_down"] > 0
    assert "On the network" in (out / "report.html").read_text()
    for number in (1, 2):
        place = tmp_path / "run-sites" / f"site-{number}" / "model"
        assert told["models"][f"the model of site-{number}"] == str(place)
        assert (place / "model.safetensors").is_file()
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"PRIVATE KEY" not in everything
    assert status_of(out)["state"] == "finished"


def test_sites_and_server_may_be_killed_at_any_time(tmp_path):
    """One site and then the server are killed with SIGKILL; the run ends with the weights of an unbroken simulation."""
    names, rounds = ["berlin", "paris", "rome"], 8
    us = Consortium(tmp_path, names, experiment(rounds))
    with us.fork("berlin") as first, us.fork("paris") as second, us.fork("server") as serving:
        with us.fork("rome") as third:
            wait_for(us.checkpoint(2), serving, first, second, third)
            third.send_signal(signal.SIGKILL)
            third.wait()
        with us.fork("rome") as third:
            wait_for(us.checkpoint(4), serving, first, second, third)
            serving.send_signal(signal.SIGKILL)
            serving.wait()
            assert not (us.out / "summary.json").exists()
            with us.fork("server") as again:
                wait_for(us.out / "summary.json", first, second, third)
                assert again.wait(timeout=LONGEST) == 0
                assert [site.wait(timeout=LONGEST) for site in (first, second, third)] == [0, 0, 0]
    for name in names:
        [folder] = (tmp_path / name).glob("*/model")
        assert TrainedModel.load(folder).card.origin["round"] == rounds
        assert "the run is finished" in (tmp_path / f"{name}.log").read_text()
    assert_same_model(us.out, simulated(experiment(rounds), len(names)))
    log = (us.out / "deployment.log").read_text()
    assert "goes on after round" in log
    assert log.count("rome has connected") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_rounds_go_on_without_sites_that_hang_or_are_cut_off_while_they_upload(killed, tmp_path):
    """One site is stopped and answers late; one is cut off in the middle of an upload, and one perhaps killed there.

    They come back, and every round has the result of the replies that were merged, each of them whole and once.
    """
    names, half_an_upload = ["berlin", "paris", "rome"], 400_000
    asked = experiment(
        20 if killed else 9,
        method="fedavg",
        model="mlp(hidden=400-400)",
        optimiser="sgd(learning_rate=0.05)",
        evaluate_every=20,
        transforms="normalise(mean='0.3', deviation='0.4')",  # whoever comes too late for sums would change them
    )
    us = Consortium(tmp_path, names, asked)
    us.rules = ["--min-sites", "2", "--round-timeout", "2.5"]
    with ExitStack() as stack:
        lines = {name: stack.enter_context(CutLine(us.address)) for name in ("berlin", "rome")}
        us.addresses |= {name: line.address for name, line in lines.items()}
        running = {name: stack.enter_context(us.start(name)) for name in ("server", *names)}
        wait_for(us.checkpoint(1), *running.values())

        told = len(us.log)
        running["paris"].send_signal(signal.SIGSTOP)
        us.await_line("paris is late for 'train", told)
        running["paris"].send_signal(signal.SIGCONT)

        told = len(us.log)
        lines["rome"].cut_after(half_an_upload)
        assert lines["rome"].is_cut.wait(LONGEST)
        us.await_line("rome is late for 'train", told)
        lines["rome"].mend()
        us.await_line("rome has connected", told)

        if killed:
            told = len(us.log)
            lines["berlin"].cut_after(half_an_upload)
            assert lines["berlin"].is_cut.wait(LONGEST)
            running["berlin"].send_signal(signal.SIGKILL)
            running["berlin"].wait()
            lines["berlin"].mend()
            running["berlin"] = stack.enter_context(us.start("berlin"))
            us.await_line("berlin has connected", told)
        assert running["server"].wait(timeout=LONGEST) == 0
        ended = [running[name].wait(timeout=LONGEST) for name in ("paris", "rome")]
        assert ended == [0, 0], "they came back by themselves, and ended when the run did"

    late = {(name, int(round)) for name, round in re.findall(r"(\w+) is late for 'train (\d+)\.", us.log)}
    merged = {
        round: [site for site, name in enumerate(names) if (name, round) not in late]
        for round in range(1, asked.rounds + 1)
    }
    for name in ("paris", "rome"):
        first = min(round for absent, round in late if absent == name)
        assert any((name, round) not in late for round in range(first, asked.rounds + 1)), f"{name} is back"
    assert "refused" not in us.log
    assert_same_model(us.out, simulated(asked, len(names), merged))
