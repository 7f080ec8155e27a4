"""Federations with secure aggregation: the same result as in the clear, whoever drops out or is killed on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from direct_network import Delivery, DirectNetwork, honest
from in_process import InProcessGrid
from replaying import merged_sites, replayed
from small_world import ACTING, EXPERIMENT, SITES, ingredients, simulated

from fedstrata.cli import main
from fedstrata.deployment.flower import AskedNodes, GridNetwork, client_app
from fedstrata.deployment.protocol import SECURE_KINDS, Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.secure.sums import Scale
from fedstrata.deployment.server import MASKED_SUM_FILE, Deployment
from fedstrata.errors import FedStrataError
from fedstrata.methods import Method, methods
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder

NAMES = ["berlin", "paris", "rome", "oslo"]
SECURE = Rules(secure=True)
GOING_ON = Rules(secure=True, min_sites=3, round_timeout=60)
PLAIN_SGD = {"optimiser": "sgd(learning_rate=0.05)"}
"""Without state between rounds, a site that trained in vain does not differ from one that did not."""


def deployment(folder: Path, method: str = "fedavg", rules: Rules = SECURE, **changes: Any) -> Deployment:
    experiment = EXPERIMENT.with_changes({"method": method, **changes})
    return Deployment(experiment, NAMES, folder / "run", rules, rehearsal=True, ingredients=ingredients())


def run(
    folder: Path, network: DirectNetwork, method: str = "fedavg", rules: Rules = SECURE, **changes: Any
) -> tuple[RunFolder, list[str]]:
    lines: list[str] = []
    deployment(folder, method, rules, **changes).run(network, log=lines.append)
    return RunFolder.open(folder / "run"), lines


def assert_close(folder: RunFolder, simulation: Driver, within: float = 1e-5) -> None:
    model = folder.model()
    assert model.keys() == simulation.model.keys()
    for name, tensor in model.items():
        expected = simulation.model[name]
        assert tensor.dtype == expected.dtype
        assert torch.allclose(tensor.double(), expected.double(), rtol=1e-6, atol=within), name


def done(simulation: Driver) -> Driver:
    simulation.run()
    return simulation


# The same as in the clear ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "ssfl(sparsity=0.8)", "feddyn+fedbn"])
def test_three_rounds_end_as_in_the_clear(method, tmp_path):
    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES), method)
    simulation = done(simulated(method))
    assert_close(folder, simulation)
    losses, expected = (metrics.series("train.loss")[1] for metrics in (folder.metrics(), simulation.metrics))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert not any("clipped" in line or "refuse" in line for line in lines)
    surveyed = any("surveys" in line for line in lines)
    assert surveyed == (method.startswith("ssfl")), "what stays in the clear is said"


def test_one_round_differs_from_the_clear_mean_by_the_quantisation_only(tmp_path):
    """In 16 bits a step of the weights is 8 / (2 ** 14 / 4) = 1 / 512, and the sites weigh 9, 16, 12 and 23."""
    rules = Rules(secure=True, secure_bits=16)
    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES), rules=rules, rounds=1)
    exact = done(simulated("fedavg", rounds=1)).engine.server.model
    bound = Scale.of(rules, SITES, {}).step("stem.weight") * SITES / (2 * (9 + 16 + 12 + 23) / 23)
    differences = [
        float((tensor - exact[name]).abs().max()) for name, tensor in folder.model().items() if "norm" not in name
    ]
    assert bound / 10 < max(differences) <= bound + 1e-6


SUMMED = [
    ACTING.get(name, name)
    for name in methods.names()
    if Method.make(name).objection_to_secure_aggregation is None
    and all(part.facts.not_on_network is None for part in Method.make(name).parts)
]


@pytest.mark.slow
@pytest.mark.parametrize("method", SUMMED)
@pytest.mark.filterwarnings("ignore::fedstrata.errors.FedStrataWarning")  # that three rounds are too few for some
def test_every_method_whose_uploads_are_only_added_up_ends_as_in_the_clear(method, tmp_path):
    private = Method.make(method).answering_for_privacy is not None
    own = {"transforms": "normalise:site"} if private else {}
    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES), method, **own)
    assert_close(folder, done(simulated(method, **own)), 1e-3 if method == "fedvc" else 2e-5)


def test_over_flower_the_order_of_answers_does_not_change_a_single_bit(tmp_path):
    models = []
    for seed in (1, 2):
        folder, own = tmp_path / str(seed), ingredients()
        grid = InProcessGrid(client_app(folder / "sites", part_of_partition=True, ingredients=own), SITES, seed)
        deployment(folder, rounds=2).run(GridNetwork(grid, AskedNodes(grid, SITES, 0.0), 0.0))
        models.append(RunFolder.open(folder / "run").model())
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


def test_some_of_the_sites_in_each_round_and_few_neighbours(tmp_path):
    rules = Rules(secure=True, secure_neighbours=2)
    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES), "fedbn", rules, participation=0.75)
    assert_close(folder, done(simulated("fedbn", participation=0.75)))


def test_no_upload_leaves_a_site_but_under_masks_and_nothing_secret_is_logged_or_kept(tmp_path):
    secret: set[str] = set()
    uploads: list[bytes] = []
    kept: list[bytes] = []

    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        [path] = (tmp_path / f"site-{site}").glob("*/secrets.json") if request.kind in SECURE_KINDS else [None]
        if path is not None:
            assert path.stat().st_mode & 0o777 == 0o600
            facts = json.loads(path.read_text())
            secret.update(facts["keys"], *facts["held"].values())
        if request.kind == "train":
            assert reply.payload == b""
        if request.kind == "masked":
            uploads.append(reply.payload)
        if request.kind == "unmask" and request.round:
            kept.append((tmp_path / "run" / MASKED_SUM_FILE).read_bytes())
            assert len(reply.facts["shares"]) == SITES
        return [(0.1, reply)]

    network = DirectNetwork(tmp_path, SITES, tamper)
    folder, lines = run(tmp_path, network, rounds=2)
    assert len(secret) > 2 * SITES * 3
    written = [path.read_bytes() for path in folder.path.rglob("*") if path.is_file()]
    told = [line.encode() for line in (*lines, *(line for own in network.lines for line in own))]
    for text in secret - {""}:
        assert not any(
            bytes.fromhex(text) in content or text.encode() in content for content in (*kept, *written, *told)
        )
    assert len(set(uploads)) == 3 * SITES, "of two rounds, and before them of the statistics"
    assert not (folder.path / MASKED_SUM_FILE).exists()
    for path in tmp_path.glob("site-*/*/secrets.json"):
        assert json.loads(path.read_text())["keys"] == ["", "", ""], "secrets of a round that is over are gone"


# Sites that drop out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", *SECURE_KINDS])
def test_a_site_that_falls_silent_at_any_step_is_left_aside_and_comes_back(kind, tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        silent = site == 2 and request.kind == kind and request.round == 1
        return [] if silent else [(0.1, reply)]

    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), rules=GOING_ON, rounds=2, **PLAIN_SGD)
    rounds = merged_sites(folder)
    assert rounds == {1: [0, 1, 2, 3] if kind == "unmask" else [0, 1, 3], 2: [0, 1, 2, 3]}
    assert any(f"rome is late for '{kind}" in line for line in lines)
    assert_close(folder, replayed(rounds, **PLAIN_SGD))


@pytest.mark.parametrize("kind", SECURE_KINDS)
def test_a_site_that_crashes_at_any_step_and_starts_again_takes_part_to_the_end(kind, tmp_path):
    crashed: list[int] = []

    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        if site == 3 and request.kind == kind and not crashed:
            crashed.append(site)
            network.restart(site, after=10.0)
            return []
        return [(0.1, reply)]

    network = DirectNetwork(tmp_path, SITES, tamper)
    folder, _ = run(tmp_path, network, "fedbn", rounds=1)
    assert crashed
    assert merged_sites(folder) == {1: [0, 1, 2, 3]}
    assert_close(folder, done(simulated("fedbn", rounds=1)))


@pytest.mark.parametrize(("rules", "words"), [(SECURE, "Only 2 of the 4 sites around"), (GOING_ON, "Only 2 of the 3")])
def test_below_the_threshold_the_uploads_are_collected_again_with_other_keys(rules, words, tmp_path):
    failures: list[int] = []

    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        if site in (1, 2) and request.kind == "masked" and request.round and len(failures) < 2:
            failures.append(site)
            return [(0.1, "out of memory")]
        return [(0.1, reply)]

    network = DirectNetwork(tmp_path, SITES, tamper)
    folder, lines = run(tmp_path, network, rules=rules, rounds=1)
    [again] = [line for line in lines if "attempt 1 of 3" in line]
    assert words in again
    attempts = {request.facts["attempt"] for _, request in network.sent if request.kind == "keys" and request.round}
    assert len(attempts) == 2
    assert_close(folder, done(simulated("fedavg", rounds=1)))


THREE = (9, 16, 12)


@pytest.mark.parametrize(("fails", "words"), [("masked", "dropped out 3 times"), ("train", "uploads of 2 sites")])
@pytest.mark.attack(
    "One of three sites drops out again and again, so that two uploads are left.",
    "The server never asks for a sum of two to be opened: it begins the sum anew, and at last stops with a sentence.",
)
def test_a_sum_of_two_is_never_opened(fails, words, tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        dropped = site == 2 and request.kind == fails and request.round == 1
        return [(0.1, "out of memory" if dropped else reply)]

    own = ingredients(THREE)
    network = DirectNetwork(tmp_path, 3, tamper, own)
    experiment = EXPERIMENT.with_changes({"method": "fedavg", "transforms": "normalise:site"})
    of_three = Deployment(experiment, NAMES[:3], tmp_path / "run", SECURE, rehearsal=True, ingredients=own)
    with pytest.raises(FedStrataError, match=words):
        of_three.run(network)
    assert not any(request.kind == "unmask" for _, request in network.sent)
    with pytest.raises(FedStrataError, match="min_sites is 2, but secure aggregation of 3 sites needs 3"):
        replace(of_three, rules=Rules(secure=True, min_sites=2)).check()


def test_a_round_that_cannot_be_collected_stops_the_run_with_a_sentence(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        fails = site in (1, 2) and request.kind == "shares" and request.round == 2
        return [(0.1, "out of memory" if fails else reply)]

    with pytest.raises(FedStrataError, match="dropped out 3 times"):
        run(tmp_path, DirectNetwork(tmp_path, SITES, tamper))
    assert RunFolder.open(tmp_path / "run").load_checkpoint().round == 1


def test_too_few_to_unmask_stop_the_run_and_it_goes_on_with_the_same_question(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        fails = site in (1, 2) and request.kind == "unmask" and request.round
        return [(0.1, "out of memory" if fails else reply)]

    with pytest.raises(FedStrataError, match=r"cannot be unmasked .* Only 2 of 3 needed shares"):
        run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), rounds=1)
    network = DirectNetwork(tmp_path, SITES)
    folder, _ = run(tmp_path, network, rounds=1)
    first = [request.kind for _, request in network.sent if request.round == 1]
    assert set(first) == {"unmask"}
    assert_close(folder, done(simulated("fedavg", rounds=1)))


# Sites that lie -------------------------------------------------------------------------------------------------------


def test_wrong_shares_are_found_and_their_site_is_named(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        if site == 0 and request.kind == "unmask" and request.round == 1:
            wrong = dict.fromkeys(reply.facts["shares"], "00" + 65 * "ab")
            reply = replace(reply, facts={"shares": wrong})
        return [(0.1, reply)]

    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), rounds=1)
    assert [line for line in lines if "refused" in line] == [
        "the reply of berlin is refused: its shares of others' secrets are wrong"
    ]
    assert_close(folder, done(simulated("fedavg", rounds=1)))


TOLD = {"loss": 1.0, "flops": 2.0, "sparse_flops": 1.0, "scores": {}}
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("train", {"facts": {**TOLD, "entries": [["x", "float32", [1], None]]}}),
    ("train", {"facts": {**TOLD, "flops": -1.0}}),
    ("keys", {"facts": {"keys": ["00", "11"]}}),
    ("shares", {"facts": {"sealed": {"0": "00" * 160}, "seed_hash": "00" * 32}}),
    ("masked", {"payload": b""}),
    ("masked", {"payload": bytes(10**6)}),
    ("unmask", {"facts": {"shares": {"0": "00" * 66}}}),
]


@pytest.mark.parametrize(("kind", "change"), HOSTILE)
def test_hostile_answers_are_refused_and_the_round_goes_on_without(kind, change, tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        return [(0.1, replace(reply, **change) if (site, request.kind, request.round) == (2, kind, 1) else reply)]

    folder, lines = run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), rounds=1)
    [refusal] = [line for line in lines if "refused" in line]
    assert "rome" in refusal
    assert merged_sites(folder) == {1: [0, 1, 2, 3] if kind == "unmask" else [0, 1, 3]}


def test_a_sum_with_something_else_in_it_is_not_used_and_the_next_round_goes_on(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        if site == 2 and request.kind == "masked" and request.round == 1:
            reply = replace(reply, payload=bytes(len(reply.payload)))
        return [(0.1, reply)]

    _, lines = run(tmp_path / "a", DirectNetwork(tmp_path / "a", SITES, tamper), rounds=2)
    [refusal] = [line for line in lines if "refused" in line]
    assert "round 1 is refused: it lies outside" in refusal
    assert "the model stays as it was" in refusal


def test_after_several_sums_in_a_row_that_cannot_be_used_the_run_stops(tmp_path):
    rules = Rules(secure=True, norm_limit=0.01, max_refusals=2)
    with pytest.raises(FedStrataError, match=r"uploads of round 2 is refused: its norm .* 2 times in a row"):
        run(tmp_path, DirectNetwork(tmp_path, SITES), rules=rules)
    folder = RunFolder.open(tmp_path / "run")
    checkpoint = folder.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == 1
    initial = simulated("fedavg").engine.server.model
    assert all(torch.equal(checkpoint.state[f"server/model/{name}"], tensor) for name, tensor in initial.items())


# A server that is killed ----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The server is killed, as by SIGKILL: nothing of it but its files remains."""


@pytest.mark.parametrize(
    ("kind", "site"),
    [("keys", 3), ("masked", 3), ("unmask", 0), ("unmask", 3), ("test", 3)],
)
def test_a_server_killed_at_any_step_goes_on_as_if_nothing_had_happened(kind, site, tmp_path):
    round = 2 if kind == "test" else 1  # the test after a round is a step before the next one

    def tamper(asked: int, request: Request, reply: Reply) -> Sequence[Delivery]:
        if (asked, request.kind, request.round) == (site, kind, round):
            raise Killed
        return honest(asked, request, reply)

    with pytest.raises(Killed):
        run(tmp_path, DirectNetwork(tmp_path, SITES, tamper), "fedbn", rounds=2)
    network = DirectNetwork(tmp_path, SITES)
    folder, lines = run(tmp_path, network, "fedbn", rounds=2)
    assert not any("refuse" in line for line in lines)
    assert_close(folder, done(simulated("fedbn", rounds=2)))
    if kind in ("unmask", "test"):
        trained = [request.round for _, request in network.sent if request.kind == "train"]
        assert set(trained) == {2}, "the sum of the first round was kept"


# Refusals at the start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("lws", "looks at the replies of single clients"),
        ("l-dawa", "merges replies in a way of its own"),
        ("fedlp", "lets each client send entries of its own"),
        ("subfedavg", "lets each client send entries of its own"),
        ("feddisco", "weighs a client by who else takes part"),
        ("fedbn+lws", "'lws'"),
    ],
)
def test_a_method_that_cannot_do_with_sums_is_refused_before_anybody_connects(method, words, tmp_path):
    for refuse in (deployment(tmp_path, method).check, deployment(tmp_path, method).describe):
        with pytest.raises(FedStrataError, match="cannot run with secure aggregation") as refusal:
            refuse()
        assert words in str(refusal.value)
    deployment(tmp_path, method, Rules()).check()


def test_uploads_in_a_narrower_type_are_refused(tmp_path):
    with pytest.raises(FedStrataError, match="uploads are masked whole numbers, not int8"):
        deployment(tmp_path, upload_values="int8").check()
    deployment(tmp_path, download_values="int8").check()


def test_coarse_sums_are_refused_where_privacy_relies_on_the_norm(tmp_path):
    with pytest.raises(FedStrataError, match=r"cannot run with secure_bits = 16: .* rounding .* Set it to 32"):
        deployment(tmp_path, "central-dp", Rules(secure=True, secure_bits=16), transforms="normalise:site").check()
    deployment(tmp_path, "central-dp", transforms="normalise:site").check()


def test_too_few_sites_are_refused(tmp_path):
    with pytest.raises(FedStrataError, match="3 sites in a round"):
        deployment(tmp_path, participation=0.5).check()
    with pytest.raises(FedStrataError, match="3 sites in a round"):
        deployment(tmp_path, late_clients=2, join_round=2).check()


def test_the_commands_refuse_and_tell(tmp_path, monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    monkeypatch.chdir(tmp_path)
    sites = [word for name in NAMES for word in ("--site", name)]
    assert call("keys", "--host", "localhost", *sites)[0] == 0
    server = ("server", "--sites", "keys/server/sites.toml", "--tls", "keys/server", "--dry-run")
    code, out, err = call(*server, "--secure", "--method", "fedbn+lws")
    assert (code, out) == (2, "")
    assert "'lws' looks at the replies of single clients" in err
    code, out, err = call("deploy", "--local", "2", "--secure")
    assert (code, out) == (2, "")
    assert "needs 3 sites" in err
    code, out, _ = call(*server, "--secure", "--method", "ssfl", "--json")
    assert code == 0
    assert "surveys of 'ssfl'" in json.loads(out)["secure_aggregation"]
    path = Path("keys/server/sites.toml")
    path.write_text("[rules]\nsecure = true\nsecure_clip = 4\n" + path.read_text())
    code, out, _ = call(*server, "--method", "fedavg", "--json")
    assert any(rule.startswith("secure_clip = 4: ") for rule in json.loads(out)["rules"])
