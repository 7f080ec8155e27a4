"""Sites that crash, hang, come late, answer twice or lie: the round goes on, and nothing wrong is merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_network import DirectNetwork, honest
from replaying import assert_same_model, merged_sites, replayed
from small_world import EXPERIMENT, SITES, ingredients, simulated

from fedstrata.deployment.federation import Standing
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.status import LogFile, StatusFile, status_of
from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog
from fedstrata.runs.signals import Interrupted
from fedstrata.wire import decode, encode

NAMES = ["berlin", "paris", "rome", "oslo"]
LIAR = 2


def deployment(folder: Path, method: str = "fedavg", rules: Rules | None = None, **changes: Any) -> Deployment:
    experiment = EXPERIMENT.with_changes({"method": method, **changes})
    return Deployment(experiment, NAMES, folder / "run", rules or Rules(), rehearsal=True, ingredients=ingredients())


def run(
    folder: Path, network: DirectNetwork, method: str = "fedavg", rules: Rules | None = None, **changes: Any
) -> tuple[RunFolder, list[str]]:
    lines: list[str] = []
    deployment(folder, method, rules, **changes).run(network, log=lines.append)
    return RunFolder.open(folder / "run"), lines


def lying(change: Callable[[Message], Message | bytes], rounds: tuple[int, ...] = (2,)) -> Any:
    """Let one site alter what it uploads in some rounds."""

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if site == LIAR and request.kind == "train" and request.round in rounds and reply.status == "ok":
            changed = change(decode(reply.payload))
            reply = replace(
                reply, payload=changed if isinstance(changed, bytes) else encode(changed, round=request.round)
            )
        return [(0.1, reply)]

    return tamper


def with_tensor(message: Message, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Message:
    return replace(message, tensors={**message.tensors, name: change(message.tensors[name])})


def with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


def flipped(message: Message) -> bytes:
    content = bytearray(encode(message))
    content[len(content) // 2] ^= 1
    return bytes(content)


LIES: dict[str, tuple[Callable[[Message], Message | bytes], str]] = {
    "nan": (lambda m: with_tensor(m, "body.weight", lambda t: with_one(t, torch.nan)), "NaN"),
    "infinity": (lambda m: with_tensor(m, "head.bias", lambda t: with_one(t, torch.inf)), "infinity"),
    "shape": (lambda m: with_tensor(m, "head.weight", lambda t: t[:, :5]), "shape"),
    "type": (lambda m: with_tensor(m, "head.weight", lambda t: t.to(torch.int32)), "type"),
    "norm": (lambda m: replace(m, tensors={n: t * 1000 for n, t in m.tensors.items() if t.is_floating_point()}
                               | {n: t for n, t in m.tensors.items() if not t.is_floating_point()}), "norm"),
    "missing layer": (lambda m: replace(m, tensors={n: t for n, t in m.tensors.items() if n != "head.bias"}), "lacks"),
    "other layer": (lambda m: replace(m, tensors={**m.tensors, "extra": torch.zeros(1, 2)}), "extra"),
    "checksum": (flipped, "checksum"),
    "cut": (lambda m: encode(m)[:-20], "cut"),
    "empty": (lambda m: b"", "bytes"),
    "too large": (lambda m: bytes(10**7), "most"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_reply_is_refused_by_name_and_the_round_goes_on_without(lie, tmp_path):
    change, words = LIES[lie]
    network = DirectNetwork(tmp_path, SITES, lying(change))
    folder, lines = run(tmp_path, network)
    [refusal] = [line for line in lines if "refused" in line]
    assert NAMES[LIAR] in refusal
    assert words in refusal
    assert any("refused" in line for line in network.lines[LIAR]), "the site is told why"
    rounds = merged_sites(folder)
    assert rounds == {1: [0, 1, 2, 3], 2: [0, 1, 3], 3: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"flops": -1.0}, "its flops is -1, outside 0 to 1e+100"),
        ({"sparse_flops": "many"}, "its sparse_flops is no finite number"),
        ({"loss": None}, "its loss is no finite number"),
    ],
)
def test_facts_that_cannot_be_are_refused(told, words, tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        lies = site == LIAR and request.kind == "train" and reply.status == "ok"
        return [(0.1, replace(reply, facts={**reply.facts, **told}) if lies else reply)]

    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), rounds=1)
    [refusal] = [line for line in lines if "refused" in line]
    assert words in refusal
    assert merged_sites(folder) == {1: [0, 1, 3]}


def test_what_is_merged_without_the_refused_reply_is_right(tmp_path):
    network = DirectNetwork(tmp_path, SITES, lying(LIES["nan"][0]))
    folder, _ = run(tmp_path, network, optimiser="sgd(learning_rate=0.05)")
    assert_same_model(folder, replayed(merged_sites(folder), optimiser="sgd(learning_rate=0.05)"))


def test_the_metrics_of_a_round_are_of_those_who_took_part(tmp_path):
    """pFedLA tells what its participants get from themselves, in the mean: without the site whose reply was refused."""
    network = DirectNetwork(tmp_path, SITES, lying(LIES["nan"][0]))
    plain = "sgd(learning_rate=0.05)"  # the refused site trained, too: a state that it keeps would differ
    folder, _ = run(tmp_path, network, "pfedla(learning_rate=1.0)", optimiser=plain)
    again = replayed(merged_sites(folder), "pfedla(learning_rate=1.0)", optimiser=plain)

    def own_shares(log: MetricLog) -> list[dict[str, Any]]:
        return [row for row in log.to_tables()["layers"].to_pylist() if row["metric"] == "own_share"]

    assert own_shares(folder.metrics()) == own_shares(again.metrics)


def test_a_site_that_lies_again_and_again_is_left_out(tmp_path):
    network = DirectNetwork(tmp_path, SITES, lying(LIES["nan"][0], rounds=(1, 2, 3, 4)))
    folder, lines = run(tmp_path, network, rules=Rules(max_refusals=2), rounds=4)
    assert merged_sites(folder)[4] == [0, 1, 3]
    assert sum("refused" in line for line in lines) == 2
    assert any("left out" in line for line in lines)
    asked = [request.round for site, request in network.sent if site == LIAR and request.kind == "train"]
    assert asked == [1, 2]


def test_when_too_few_usable_replies_are_left_the_run_stops_with_a_sentence(tmp_path):
    network = DirectNetwork(tmp_path, SITES, lying(LIES["nan"][0]))
    with pytest.raises(FedStrataError, match="3 of the 4 needed sites"):
        run(tmp_path, network, rules=Rules(min_sites=4))
    assert RunFolder.open(tmp_path / "run").load_checkpoint().round == 1


def test_a_late_site_is_waited_for_until_the_timeout_and_its_late_reply_is_not_counted(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        late = site == 1 and request.kind == "train" and request.round == 2
        return [(60.5 if late else 0.1, reply)]

    network = DirectNetwork(tmp_path, SITES, tamper)
    folder, lines = run(tmp_path, network, rules=Rules(min_sites=3, round_timeout=60))
    assert merged_sites(folder) == {1: [0, 1, 2, 3], 2: [0, 2, 3], 3: [0, 1, 2, 3]}
    assert any("paris is late" in line for line in lines)
    assert 60 < network.time < 65


def test_without_min_sites_everybody_is_waited_for_however_long_it_takes(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        return [(5000.0 if site == 1 and request.kind == "train" else 0.1, reply)]

    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper))
    assert all(sites == [0, 1, 2, 3] for sites in merged_sites(folder).values())


def test_double_answers_and_answers_of_old_rounds_count_once(tmp_path):
    kept: dict[int, Reply] = {}

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        old = [(0.05, kept[site])] if site in kept else []
        if request.kind == "train":
            kept[site] = reply
        return [*old, (0.1, reply), (0.1, reply), (3.0, reply)]

    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper))
    simulation = simulated("fedavg")
    simulation.run()
    assert_same_model(folder, simulation)


def test_a_site_that_crashes_and_comes_back_takes_part_in_the_same_round(tmp_path):
    crashed: list[int] = []

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if site == 3 and request.kind == "train" and request.round == 2 and not crashed:
            crashed.append(site)
            network.restart(site, after=10.0)
            return []
        return [(0.1, reply)]

    network = DirectNetwork(tmp_path, SITES, tamper)
    folder, _ = run(tmp_path, network, "fedbn")
    assert crashed
    simulation = simulated("fedbn")
    simulation.run()
    assert_same_model(folder, simulation)


@pytest.mark.parametrize("method", ["ssfl(sparsity=0.5)", "player(threshold=1.1)+fedbn"])
def test_a_site_that_missed_an_exchange_gets_the_announcement_when_it_comes(method, tmp_path):
    network = DirectNetwork(tmp_path, SITES, honest, away=(1,))

    def watch(standing: Standing) -> None:
        if standing.question.startswith("train 2") and 1 not in network.connected:
            network.restart(1)

    lines: list[str] = []
    rules = Rules(min_sites=3, round_timeout=10)
    deployment(tmp_path, method, rules).run(network, watch=watch, log=lines.append)
    folder = RunFolder.open(tmp_path / "run")
    assert merged_sites(folder) == {1: [0, 2, 3], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3]}
    assert ("adopt", 1) in [(request.kind, site) for site, request in network.sent if network.time]
    assert not any("refuse" in line for line in lines)


def test_a_site_whose_app_fails_is_left_aside_for_the_round(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply | str]]:
        if site == 0 and request.kind == "train" and request.round == 1:
            return [(0.1, "out of memory")]
        return [(0.1, reply)]

    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper))
    assert merged_sites(folder)[1] == [1, 2, 3]
    assert any("out of memory" in line for line in lines)


@pytest.mark.parametrize(
    ("told", "words"),
    [({"input_shape": [3, 8, 8]}, "[3, 8, 8]"), ({"input_type": "int64"}, "its inputs are whole numbers")],
)
def test_other_samples_than_those_of_the_rest_are_refused(told, words, tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if site == 1 and request.kind == "hello":
            reply = replace(reply, facts={**reply.facts, **told})
        return [(0.1, reply)]

    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), rules=Rules(max_refusals=1))
    assert any("paris" in line and words in line for line in lines)
    assert all(1 not in sites for sites in merged_sites(folder).values())


class Killed(BaseException):
    """The server is killed, as by SIGKILL: nothing of it but its files remains."""


@pytest.mark.parametrize("method", ["fedbn", "ssfl(refresh_every=1)+fedavgm", "fedbn+lips(every=1)"])
@pytest.mark.parametrize("after", [2, 14, 23])
def test_a_server_killed_at_any_moment_goes_on_as_if_nothing_had_happened(method, after, tmp_path):
    answers = 0

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        nonlocal answers
        answers += 1
        if answers == after:
            raise Killed
        return [(0.1, reply)]

    with pytest.raises(Killed):
        run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), method)
    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES), method)
    simulation = simulated(method)
    simulation.run()
    assert_same_model(folder, simulation)
    losses = [tables["rounds"].to_pylist() for tables in (folder.metrics().to_tables(), simulation.metrics.to_tables())]
    assert losses[0] == losses[1]


def test_a_server_that_falls_back_to_an_older_checkpoint_still_gets_the_same_result(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if request.round == 3:
            raise Killed
        return [(0.1, reply)]

    with pytest.raises(Killed):
        run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), "fedbn", evaluate_every=3)
    damaged = tmp_path / "run" / "checkpoints" / "round-000002" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.warns(match="passed over"):
        folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES), "fedbn", evaluate_every=3)
    simulation = simulated("fedbn", evaluate_every=3)
    simulation.run()
    assert_same_model(folder, simulation)


def test_another_experiment_or_other_sites_do_not_go_on_with_a_run(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if request.round == 2:
            raise Killed
        return [(0.1, reply)]

    with pytest.raises(Killed):
        run(tmp_path, DirectNetwork(tmp_path, SITES, tamper))
    with pytest.raises(FedStrataError, match="another method"):
        run(tmp_path, DirectNetwork(tmp_path, SITES), "fedbn")
    other = replace(deployment(tmp_path), names=["berlin", "paris", "rome", "bern"])
    with pytest.raises(FedStrataError, match="oslo"):
        other.run(DirectNetwork(tmp_path, SITES))


def test_the_status_says_who_is_in_and_who_is_waited_for(tmp_path):
    seen: list[dict[str, Any]] = []

    def watch(standing: Standing) -> None:
        status(standing)
        if standing.question == "train 2.0":
            seen.append(status_of(tmp_path / "run"))

    status = StatusFile(tmp_path / "run")
    log = LogFile(tmp_path / "run" / "deployment.log", lambda line: None)
    deployment(tmp_path).run(DirectNetwork(tmp_path, SITES), watch=watch, log=log)
    assert seen[0]["rounds_done"] == 1
    assert seen[0]["waiting"] == sorted(NAMES, key=NAMES.index)
    assert any(told["answered"] and told["waiting"] for told in seen) or seen[-1]["answered"]
    assert status_of(tmp_path / "run")["state"] == "finished"
    assert "begins" in (tmp_path / "run" / "deployment.log").read_text()


def test_what_cannot_run_on_sites_is_refused_before_anybody_connects(tmp_path):
    with pytest.raises(FedStrataError, match="only 4 sites"):
        deployment(tmp_path, rules=Rules(min_sites=5)).check()
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_interrupted_can_be_gone_on_with(tmp_path, monkeypatch):
    original = Driver.read_numbers

    def read_numbers(self: Driver, callbacks: Any, folder: Any) -> None:
        original(self, callbacks, folder)
        if self.round == 2:
            raise Interrupted(2, 2, tmp_path)

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "read_numbers", read_numbers)
        with pytest.raises(Interrupted):
            run(tmp_path, DirectNetwork(tmp_path, SITES))
    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES))
    assert any("goes on after round 1" in line for line in lines)
    simulation = simulated("fedavg")
    simulation.run()
    assert_same_model(folder, simulation)
