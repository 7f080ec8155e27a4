"""A site's own policy: what a server may ask of it, whatever the server says, and what is told beforehand."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from direct_network import DirectNetwork
from small_world import EXPERIMENT, SITES, hello, ingredients, request, simulated

from fedstrata.cli import main
from fedstrata.deployment.allowance import Allowance
from fedstrata.deployment.audit import records_in
from fedstrata.deployment.policy import Policy, foreseen, objections, read_rules, unknown
from fedstrata.deployment.protocol import OK, REFUSED, Place, Reply, Request
from fedstrata.deployment.rules import Rules, SiteRules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Method

DOCS = Path(__file__).parents[2] / "docs" / "trust.md"


def against(policy: SiteRules, sites: int | None = 4, rules: Rules | None = None, **changes: Any) -> list[str]:
    experiment = Experiment().with_changes(changes)
    return objections(policy, experiment, Method.make(experiment.method), rules or Rules(), sites)


def site(folder: Path, **policy: Any) -> Site:
    return Site(folder, SiteData(part=0, ingredients=ingredients()), rules=SiteRules(**policy))


def greeting(secure: bool = False, sites: int = SITES, min_sites: int | None = None, **changes: Any) -> Request:
    facts = hello().facts
    rules = Rules(secure=secure).secure_facts()
    experiment = {**facts["experiment"], **changes}
    more = {"experiment": experiment, "secure": rules, "sites": sites, "min_sites": min_sites}
    return replace(hello(), facts={**facts, **more})


def model_of(round: int, times: int = 1) -> list[bytes]:
    """Make models that differ, as of a server that asks for the same round again and again."""
    engine, made = simulated("fedbn").engine, []
    assert isinstance(engine, LoopEngine)
    for _ in range(times):
        engine.central.state.model["head.bias"] += 1
        made += engine.central.messages([0], round)
    return made


# A server that asks for what it may not ask ---------------------------------------------------------------------------

BROKEN = {
    "another method": ({"methods": ["fedavg", "fedprox"]}, {}, "the method 'fedbn' is not among .*fedavg, fedprox"),
    "a part of a method": ({"methods": ["fedbn"]}, {"method": "fedbn+lips"}, "the method 'lips'"),
    "other parameters": (
        {"methods": ["fedprox(mu=0.1)"]}, {"method": "fedprox(mu=0.2)"}, r"the method 'fedprox\(mu=0.2\)'"),
    "another model": ({"models": ["mlp", "vit*"]}, {}, "the model 'cnn' is not among those"),
    "another metric": ({"metrics": []}, {"metrics": "f1"}, "the metric 'f1' is not among those .*none"),
    "more rounds": ({"max_rounds": 2}, {}, "3 rounds are more than max_rounds = 2"),
    "more epochs": ({"max_epochs": 1}, {"epochs": 2}, "2 local epochs are more"),
    "more steps": ({"max_steps": 10}, {"steps": 11}, "11 local steps are more"),
    "steps instead of epochs": ({"max_epochs": 1}, {"steps": 11}, "says nothing"),
    "epochs instead of steps": ({"max_steps": 1}, {}, "says nothing"),
    "no secure aggregation": ({"secure_only": True}, {}, "takes part only in secure aggregation"),
    "surveys": ({"surveys": False}, {"method": "ssfl"}, "answers no surveys"),
    "fewer sites": ({"least_sites": 5}, {}, "4 of 4 sites take part in a round, fewer than least_sites = 5"),
    "fewer sites in a round": ({"least_sites": 3}, {"participation": 0.5}, "2 of 4 sites take part"),
    "fewer sites after the timeout": ({"least_sites": 3}, {"min_sites": 2}, r"2 of 4 sites are enough .*\(min_sites\)"),
    "no privacy": ({"require_dp": "any"}, {}, "only with central-dp or local-dp"),
    "other privacy": ({"require_dp": "local-dp"}, {"method": "fedbn+central-dp"}, "only with local-dp"),
    "less privacy": (
        {"max_epsilon": 1.0}, {"method": "fedbn+local-dp(epsilon=2)"}, "epsilon of 2, and max_epsilon = 1"),
    "no bound of epsilon": ({"max_epsilon": 1.0}, {}, "nothing bounds its epsilon, and max_epsilon = 1"),
    "a larger delta": (
        {"max_delta": 1e-6}, {"method": "fedbn+local-dp"}, "delta = 1e-05 is more than max_delta = 1e-06"),
}  # fmt: skip


@pytest.mark.attack(
    "A server asks a site for another method, model or metric, for more rounds, epochs or steps, among fewer sites, "
    "without secure aggregation or differential privacy, or with more epsilon than the site's policy allows.",
    "The site refuses the run with the reason, before it has looked at its data; the reason is in its audit log too.",
)
@pytest.mark.parametrize("broken", BROKEN)
def test_what_breaks_the_policy_is_refused_at_the_site(broken, tmp_path):
    policy, changes, words = BROKEN[broken]
    here = site(tmp_path, **policy)
    here.data = replace(here.data, part=7)  # whoever comes so far as to prepare the data fails otherwise
    answer = here.answer(greeting(**{"transforms": "normalise:site", **changes}))
    assert answer.status == REFUSED
    assert re.search(f"This site's policy refuses the run: .*{words}", answer.reason)
    assert [record.facts["reason"] for record in records_in(tmp_path) if record.event == "refused"] == [answer.reason]
    assert {path.name for path in tmp_path.iterdir()} == {"audit.jsonl"}


def test_all_reasons_are_told_at_once(tmp_path):
    reason = site(tmp_path, methods=["fedavg"], max_rounds=1, secure_only=True).answer(greeting()).reason
    assert "'fedbn'" in reason
    assert "3 rounds" in reason
    assert "secure" in reason


def test_a_site_takes_part_in_what_its_policy_allows(tmp_path):
    policy = {"methods": ["fedbn"], "models": ["cnn"], "max_rounds": 3, "max_epochs": 1, "least_sites": 4}
    assert site(tmp_path, **policy).answer(greeting()).status == OK


@pytest.mark.attack(
    "A server asks a site to train in one more round than the run has, of which nobody was told.",
    "The site refuses: rounds are those of the experiment that it was greeted with.",
)
def test_a_round_too_many_is_refused(tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    [last, more] = [request("train", Place.training(round), *model_of(round)) for round in (3, 4)]
    assert here.answer(last).status == OK
    answer = here.answer(more)
    assert (answer.status, answer.payload) == (REFUSED, b"")
    assert "Round 4 is none of this run, which has 3" in answer.reason


@pytest.mark.attack(
    "A server asks for the same round again and again, each time with another model, to get more uploads than "
    "max_rounds of the site's policy.",
    "Every training counts, also over restarts of the site; an answer that was lost is sent again, and counts once.",
)
def test_trainings_are_counted_and_not_only_rounds(tmp_path):
    asked = [request("train", Place.training(1), one) for one in model_of(1, times=4)]
    for one in asked[:3]:
        here = site(tmp_path, max_rounds=3)
        here.answer(hello())
        assert here.answer(one).status == OK
    assert here.answer(asked[2]).status == OK, "the stored answer, once more"
    answer = here.answer(asked[3])
    assert (answer.status, answer.payload) == (REFUSED, b"")
    assert "it would make 4 trainings in this run, more than max_rounds = 3" in answer.reason


@pytest.mark.attack(
    "A server asks a site for more bytes than its policy allows, in a round or in all of a run, and restarts it.",
    "What would go beyond the limit does not leave; what has left is counted on the site's disk before it leaves.",
)
@pytest.mark.parametrize("key", ["max_bytes_up", "max_bytes_up_run"])
def test_bytes_are_counted_before_they_leave(key, tmp_path):
    payloads = model_of(1, times=2)
    free = site(tmp_path / "free", max_rounds=3)
    declared = free.answer(hello())
    first = free.answer(request("train", Place.training(1), payloads[0]))
    sizes = [len(reply.header()) + len(reply.payload) for reply in (replace(declared, facts={
        name: value for name, value in declared.facts.items() if name != "head"}), first)]  # fmt: skip
    assert Allowance(tmp_path / "free" / "run", SiteRules()).bytes == sum(sizes)
    limit = sizes[1] + (sizes[0] if key == "max_bytes_up_run" else 0)
    for allowed in (limit, limit - 1):
        folder = tmp_path / str(allowed)
        for _ in range(2):  # the second time restarted
            here = site(folder, **{key: allowed})
            assert here.answer(hello()).status == OK
            answer = here.answer(request("train", Place.training(1), payloads[0]))
            assert answer.status == (OK if allowed == limit else REFUSED)
    assert answer.payload == b""
    assert f"more than {key} = {limit - 1}" in answer.reason
    again = site(tmp_path / str(limit), **{key: limit})
    again.answer(hello())
    assert again.answer(request("train", Place.training(1), payloads[1])).status == REFUSED


def test_rounds_that_are_long_over_count_for_the_newest(tmp_path):
    allowance = Allowance(tmp_path, SiteRules(max_bytes_up=1000))
    for round in (1, 2, 3, 4):
        allowance.charge(Request("test", "run", Place(round)), Reply(f"test {round}.0", payload=bytes(400)))
    old = Request("test", "run", Place(1))
    allowance.charge(old, Reply(old.ticket, payload=bytes(401)))
    with pytest.raises(FedStrataError, match="bytes in round 4"):
        allowance.charge(old, Reply(old.ticket, payload=bytes(402)))


@pytest.mark.attack(
    "A server adds up securely, but over fewer sites than the policy of a site says.",
    "The site shares no secrets for such a sum, so that it neither uploads nor helps to open it.",
)
def test_small_sums_are_refused(tmp_path):
    pytest.importorskip("cryptography")
    place, facts, keys = Place.secure_sum(1, 1), {"attempt": "0" * 16}, {}
    sites = [Site(tmp_path / str(number), SiteData(part=number, ingredients=ingredients())) for number in range(SITES)]
    for number, one in enumerate(sites):
        one.rules = SiteRules(least_sites=4)
        greeted = greeting(secure=True)
        assert one.answer(replace(greeted, facts={**greeted.facts, "number": number})).status == OK
        keys[str(number)] = one.answer(Request("keys", "run", place, facts)).facts["keys"]
    few = {number: keys[number] for number in ("0", "1", "2")}
    answer = sites[0].answer(Request("shares", "run", place, {**facts, "keys": few}))
    assert answer.status == REFUSED
    assert "3" in answer.reason
    assert sites[0].answer(Request("shares", "run", place, {**facts, "keys": keys})).status == OK


def test_a_run_goes_on_without_a_site_whose_policy_refuses_it(tmp_path):
    network = DirectNetwork(tmp_path, SITES)
    network.sites[2].rules = SiteRules(methods=("fedavg",))
    names = [f"site-{number}" for number in range(SITES)]
    experiment = EXPERIMENT.with_changes({"method": "fedbn", "rounds": 1})
    rules, lines = Rules(min_sites=2, round_timeout=30), []
    Deployment(experiment, names, tmp_path / "run", rules, True, ingredients()).run(network, log=lines.append)
    assert any("site-2 refuses" in line and "its policy" not in line and "'fedbn'" in line for line in lines)


# Beforehand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ({"methods": ["fed*"]}, {"method": "fedbn+fedprox(mu=0.5)"}),
        ({"methods": ["fedprox(mu=0.01)"]}, {"method": "fedprox"}),
        ({"models": ["resnet(depth=8)", "cnn"]}, {"model": "cnn"}),
        ({"metrics": ["recall"]}, {"metrics": "recall:each"}),
        ({"metrics": []}, {}),
        ({"require_dp": "any"}, {"method": "fedbn+local-dp"}),
        ({"max_epsilon": 8.0, "lifetime_epsilon": 8.0}, {"method": "fedbn+central-dp(epsilon=8)"}),
        ({"least_sites": 4}, {}),
        ({"least_sites": 99, "sites": None}, {}),
        ({"max_epochs": 5, "max_steps": 5}, {"steps": 5}),
    ],
)
def test_what_a_policy_allows(policy, changes):
    sites = policy.pop("sites", 4)
    assert against(SiteRules(**policy), sites, **changes) == []


def test_a_site_must_be_able_to_see_as_many_sites_as_it_asks_for():
    rules = Rules(secure=True, secure_neighbours=8)
    assert against(SiteRules(least_sites=9), sites=20, rules=rules) == []
    assert "it would know 9 sites" in against(SiteRules(least_sites=10), sites=20, rules=rules)[0]


def test_a_run_that_would_spend_more_than_a_lifetime_is_foreseen():
    policy = SiteRules(lifetime_epsilon=2.0)
    for method, told in {
        "fedbn": ["nothing bounds its epsilon, and lifetime_epsilon = 2"],
        "fedbn+local-dp(epsilon=3)": ["it would spend an epsilon of 3, and lifetime_epsilon = 2"],
        "fedbn+local-dp(epsilon=2)": [],
    }.items():
        assert foreseen(policy, Experiment(method=method), Method.make(method)) == told
    assert foreseen(SiteRules(), Experiment(), Method.make("fedavg")) == []


def test_what_can_only_be_told_later_is_said():
    assert unknown(SiteRules(max_bytes_up=1000), 4) == ["max_bytes_up = 1000 is held to while the run goes on"]
    assert "give --sites" in unknown(SiteRules(least_sites=3), None)[0]
    assert unknown(SiteRules(least_sites=3), 3) == []


def test_a_policy_is_read_with_its_hash_and_a_wrong_key_is_told(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('methods = ["fedbn"]\nmin_samples = 20\n')
    policy = Policy.read(path)
    assert policy.rules == SiteRules(methods=("fedbn",), min_samples=20)
    assert re.fullmatch("[0-9a-f]{64}", policy.sha256)
    for text, words in {
        "max_round = 3": "no key in the policy .*'max_round'. Did you mean 'max_rounds'",
        "max_rounds = 0": "cannot be used: 0 is outside what the parameter 'max_rounds'",
        'methods = "fedbn"': "it takes a list, such as methods = ",
        'require_dp = "some"': "no value for the parameter 'require_dp'",
        "max_rounds": "is not a TOML file",
    }.items():
        path.write_text(text)
        with pytest.raises(FedStrataError, match=words):
            Policy.read(path)


def test_flags_only_tighten_a_policy(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("secure_only = true\nmin_samples = 20\n")
    policy = Policy.read(path)
    assert policy.tightened({}) == SiteRules(secure_only=True, min_samples=20)
    rules, named = read_rules(path, secure_only=None, statistics=False, min_samples=30, lifetime_epsilon=2.0)
    assert rules == SiteRules(secure_only=True, min_samples=30, statistics=False, lifetime_epsilon=2.0)
    assert named == policy.sha256
    assert read_rules(None, min_samples=1) == (SiteRules(min_samples=1), None)
    with pytest.raises(FedStrataError, match=r"--min-samples 10 would loosen the policy .*, which says 20"):
        read_rules(path, min_samples=10)
    path.write_text("lifetime_epsilon = 3\n")
    with pytest.raises(FedStrataError, match="--lifetime-epsilon 4 would loosen the policy"):
        read_rules(path, lifetime_epsilon=4.0)


def command(text: str) -> int:
    try:
        return main(shlex.split(text)[1:])
    except SystemExit as end:
        return int(end.code or 0)


def test_the_page_is_followed(tmp_path, monkeypatch, capsys):
    """What the documents show: a policy, an experiment that it allows, one that it does not, and a log."""
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    section = DOCS.read_text().partition("## A site's own policy")[2].partition("\n## ")[0]
    [policy] = re.findall(r"(?ms)^```toml\n(.*?)^```", section)
    Path("berlin.toml").write_text(policy)
    Path("paris.toml").write_text("max_rounds = 20\n")
    Path("experiment.toml").write_text('method = "fedbn"\nrounds = 30\nmodel = "cnn"\nepochs = 2\n')
    shown = re.findall(r"(?m)^(?:# )?(\w+) =", policy)
    assert set(shown) == {field.name for field in fields(SiteRules)}, "the example shows every key"
    Path("all.toml").write_text(re.sub(r"(?m)^# ", "", policy))
    assert Policy.read(Path("all.toml")).rules.require_dp == "local-dp"
    keys = "fedstrata keys --host here " + " ".join(f"--site {name}" for name in ("berlin", "paris", "rome"))
    assert command(keys) == 0
    capsys.readouterr()
    checks = [line for line in re.findall(r"(?m)^fedstrata .*", section) if " check " in line]
    assert len(checks) == 2
    assert command(f"{checks[0]} --sites keys/server/sites.toml --secure") == 0
    assert capsys.readouterr().out.startswith("berlin.toml: allowed")
    assert command(f"{checks[1]} --secure") == 2
    told = capsys.readouterr()
    assert "paris.toml: refused\n  - 30 rounds are more than max_rounds = 20" in told.out
    assert "1 of 2 policies refuse this experiment: paris.toml." in " ".join(told.err.split())
    assert command(f"{checks[1]} --json") == 2
    assert json.loads(capsys.readouterr().out)["allowed"] is False
