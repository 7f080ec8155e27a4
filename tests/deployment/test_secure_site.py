"""A site under secure aggregation: what it keeps, what it withholds, and what it never does twice."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from small_world import SITES, hello, ingredients, request, simulated

from fedstrata.deployment.protocol import OK, REFUSED, SECURE_KINDS, UNREADY, Place, Reply, Request
from fedstrata.deployment.rules import Rules, SiteRules
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.store import SiteStore
from fedstrata.engines.loop import LoopEngine
from fedstrata.methods.contract.views import Message
from fedstrata.wire import encode

RULES = Rules(secure=True)
ATTEMPT, ANOTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def broadcast() -> bytes:
    engine = simulated("fedbn").engine
    assert isinstance(engine, LoopEngine)
    return engine.central.messages([0], 1)[0]


def greeting(number: int, rules: Rules = RULES, **facts: Any) -> Request:
    known = hello(number=number)
    return replace(known, facts={**known.facts, "secure": rules.secure_facts(), **facts})


def step(kind: str, attempt: str = ATTEMPT, round: int = 1, **facts: Any) -> Request:
    return Request(kind, "run", Place.secure_sum(round, 1), {"attempt": attempt, **facts})


class Group:
    """Four sites that have trained, and a server that asks them step by step."""

    def __init__(self, folder: Path, broadcast: bytes) -> None:
        self.folder = folder
        self.sites = {number: self.start(number) for number in range(SITES)}
        self.trained = {}
        for number, site in self.sites.items():
            assert site.answer(greeting(number)).status == OK
            self.trained[number] = site.answer(request("train", Place.training(1), broadcast))

    def start(self, number: int) -> Site:
        return Site(self.folder / str(number), SiteData(part=number, ingredients=ingredients()))

    def secrets(self, number: int = 0) -> Path:
        return self.folder / str(number) / "run" / "secrets.json"

    def ask(self, requests: dict[int, Request]) -> dict[int, Reply]:
        replies = {number: self.sites[number].answer(asked) for number, asked in requests.items()}
        assert {reply.status for reply in replies.values()} == {OK}, [reply.facts for reply in replies.values()]
        return replies

    def to_masked(self, attempt: str = ATTEMPT) -> dict[int, Request]:
        """Take all steps before the masked upload, and return the requests for that."""
        answers = self.ask(dict.fromkeys(self.sites, step("keys", attempt)))
        keys = {str(number): reply.facts["keys"] for number, reply in answers.items()}
        sealed = self.ask(dict.fromkeys(self.sites, step("shares", attempt, keys=keys)))
        return {
            number: step(
                "masked",
                attempt,
                sealed={str(o): r.facts["sealed"][str(number)] for o, r in sealed.items() if o != number},
                sites=SITES,
                heaviest=23.0,
                ranges={},
            )
            for number in self.sites
        }

    def unmasking(self, dropped: tuple[int, ...] = (), attempt: str = ATTEMPT) -> Request:
        present = [number for number in self.sites if number not in dropped]
        return step("unmask", attempt, present=present, dropped=list(dropped))


@pytest.fixture
def group(tmp_path: Path, broadcast: bytes) -> Group:
    return Group(tmp_path, broadcast)


def refusal(reply: Reply) -> str:
    assert reply.status == REFUSED
    assert not reply.payload
    return reply.reason


def test_training_is_answered_without_the_upload_again_and_again(group, broadcast):
    asked = request("train", Place.training(1), broadcast)
    for reply in (group.trained[0], group.sites[0].answer(asked), group.start(0).answer(asked)):
        assert reply.payload == b""
        assert reply.facts["entries"][0] == ["stem.weight", "float32", [4, 1, 3, 3], None]
    assert SiteStore(group.folder / "0", "run").read(Place.training(1)).reply, "it lies on the site's own disk"


@pytest.mark.parametrize("kind", ["survey", "adopt", "train"])
def test_no_other_question_gets_the_upload(kind, group, broadcast):
    """Asked about the step of the training, or to train in the place of a survey, it would answer from its disk."""
    wrong = Place.training(1) if kind != "train" else Place.survey(1, 0)
    assert refusal(group.sites[0].answer(request(kind, wrong, broadcast)))
    for other in ("survey", "adopt"):
        assert not group.sites[0].answer(request(other, Place(1), broadcast)).payload


def test_what_is_not_finite_stays_at_the_site(group, broadcast):
    model = {name: tensor[None] for name, tensor in simulated("fedbn").engine.server.model.items()}
    broken = encode(Message({**model, "head.bias": torch.full((1, 10), torch.nan)}), round=2)
    reply = group.sites[0].answer(request("train", Place.training(2), broken))
    assert "NaN" in refusal(reply)
    assert SiteStore(group.folder / "0", "run").places() == [Place.training(1)]


def test_the_same_question_gets_the_same_answer_after_a_restart_too(group):
    masked = group.to_masked()
    first = group.ask(masked)
    unmasked = group.ask(dict.fromkeys((0, 1, 2), group.unmasking((3,))))
    site = group.start(0)
    assert site.answer(masked[0]).payload == first[0].payload
    assert site.answer(group.unmasking((3,))).facts == unmasked[0].facts
    assert len(first[0].payload) == 4 * (sum(len_of(entry) for entry in group.trained[0].facts["entries"]) + 1)


def len_of(entry: list[Any]) -> int:
    return int(torch.Size(entry[2]).numel())


def test_never_both_shares_of_one_site(group):
    """The server says first that site 2 is there, which gives its seed, and then that it dropped out: its key."""
    group.ask(group.to_masked())
    site = group.sites[0]
    assert "each once" in refusal(site.answer(step("unmask", present=[0, 1, 2, 3], dropped=[2])))
    given = site.answer(group.unmasking())
    assert given.status == OK
    for asked in (group.unmasking((2,)), group.unmasking((1, 2)), step("unmask", present=[0, 1, 3], dropped=[])):
        assert refusal(site.answer(asked))
        assert refusal(group.start(0).answer(asked)), "a restart does not help the server"
    assert site.answer(group.unmasking()).facts == given.facts


@pytest.mark.attack(
    "A server asks a site to share its secrets with one other, or for an upload that is one of two, or to open a sum "
    "of two.",
    "The site refuses each of them, before and after a restart.",
)
def test_a_site_takes_part_in_no_sum_of_two(group):
    masked = group.to_masked()
    for site in (group.sites[0], group.start(0)):
        two = replace(masked[0], facts={**masked[0].facts, "sites": 2})
        assert "A sum of 2 uploads hides too little" in refusal(site.answer(two))
    group.ask(masked)
    for site in (group.sites[0], group.start(0)):
        assert "are needed" in refusal(site.answer(group.unmasking((2, 3))))
    answers = group.ask(dict.fromkeys(group.sites, step("keys", ANOTHER)))
    keys = {str(number): answers[number].facts["keys"] for number in (0, 1)}
    assert "A sum of 2 uploads hides too little" in refusal(group.sites[0].answer(step("shares", ANOTHER, keys=keys)))


def test_after_unmasking_a_round_there_is_no_other_sum_of_it(group):
    """Two sums of one round, over different sites, would differ by the upload of a single one."""
    group.ask(group.to_masked())
    group.ask(dict.fromkeys(group.sites, group.unmasking()))
    assert "tell them apart" in refusal(group.sites[0].answer(step("keys", ANOTHER)))
    group.sites[0].answer(greeting(0, committed=1))
    assert group.sites[0].answer(step("keys", ANOTHER, 2)).status == OK
    assert "tell them apart" in refusal(group.sites[0].answer(step("keys", ANOTHER, 1)))


def test_without_unmasking_the_uploads_are_collected_again_under_other_keys(group):
    first = group.ask(group.to_masked())
    again = group.to_masked(ANOTHER)
    second = group.ask(again)
    assert first[0].payload != second[0].payload
    assert "takes no part" in refusal(group.sites[0].answer(group.unmasking()))
    assert group.sites[0].answer(group.unmasking(attempt=ANOTHER)).status == OK


def test_one_upload_under_one_pair_of_keys(group, broadcast):
    masked = group.to_masked()
    group.ask(masked)
    other = replace(masked[0], facts={**masked[0].facts, "heaviest": 46.0})
    assert "one upload" in refusal(group.sites[0].answer(other))
    fewer = {site: sealed for site, sealed in masked[0].facts["sealed"].items() if site != "2"}
    assert "one upload" in refusal(
        group.sites[0].answer(replace(masked[0], facts={**masked[0].facts, "sealed": fewer}))
    )
    changed = {name: tensor[None] + 0.1 for name, tensor in simulated("fedbn").engine.server.model.items()}
    assert group.sites[0].answer(request("train", Place.training(1), encode(Message(changed), round=1))).status == OK
    assert "one upload" in refusal(group.sites[0].answer(masked[0])), "the site has learned something else since"


def test_secrets_are_for_their_owner_only_and_go_when_the_round_is_over(group, broadcast):
    masked = group.to_masked()
    assert group.secrets().stat().st_mode & 0o777 == 0o600
    kept = json.loads(group.secrets().read_text())
    group.ask(masked)
    group.sites[0].answer(request("test", Place(1), broadcast))
    assert json.loads(group.secrets().read_text())["keys"] == kept["keys"], "the round is not over"
    group.sites[0].answer(request("test", Place(2), broadcast))
    text = group.secrets().read_text()
    assert not any(secret in text for secret in (*kept["keys"], *kept["held"]["0"]))
    assert group.secrets().stat().st_mode & 0o777 == 0o600
    assert "takes no part" in refusal(group.sites[0].answer(group.unmasking()))


def test_the_rules_of_a_run_stay(group):
    for changed in (Rules(), Rules(secure=True, secure_threshold=0.6)):
        assert "cannot change" in refusal(group.sites[0].answer(greeting(0, changed)))
        assert "cannot change" in refusal(group.start(0).answer(greeting(0, changed)))


@pytest.mark.parametrize(
    "change", [{"secure_threshold": 0.3}, {"secure_bits": 8}, {"unheard_of": 1}, {"secure_clip": -1}]
)
def test_rules_that_would_protect_nobody_are_refused(change, tmp_path):
    site = Site(tmp_path, SiteData(part=0, ingredients=ingredients()))
    facts = RULES.secure_facts()
    assert facts is not None
    assert refusal(site.answer(greeting(0, secure={**facts, **change})))


def test_a_site_may_insist_on_secure_aggregation(tmp_path):
    site = Site(tmp_path, SiteData(part=0, ingredients=ingredients()), rules=SiteRules(secure_only=True))
    assert "only in secure aggregation" in refusal(site.answer(hello()))
    assert site.answer(greeting(0)).status == OK


def test_without_secure_aggregation_its_steps_are_refused(tmp_path):
    site = Site(tmp_path, SiteData(part=0, ingredients=ingredients()))
    assert site.answer(step("keys")).status == UNREADY
    site.answer(hello())
    assert "no secure aggregation" in refusal(site.answer(step("keys")))


def test_hostile_steps_give_nothing_away_and_do_not_stop_a_site(group):
    """Thousands of altered requests: none gets an upload or a share but the honest ones."""
    masked = group.to_masked()
    honest = [step("keys"), masked[0], group.unmasking(), step("shares", keys={})]
    values = [
        None,
        -1,
        10**30,
        1.5,
        "x" * 1000,
        [],
        {},
        [0],
        {"0": "00"},
        {"0": ["00", "11"]},
        True,
        float("nan"),
        ANOTHER,
    ]
    chance, before = random.Random(0), group.secrets().read_bytes()
    for _ in range(1500):
        asked = chance.choice(honest)
        key = chance.choice([*asked.facts, "attempt"])
        facts = {**asked.facts, key: chance.choice(values)}
        kind = chance.choice(SECURE_KINDS)
        if (kind, facts) == (asked.kind, asked.facts) or (kind == "keys" and facts["attempt"] in (ATTEMPT, ANOTHER)):
            continue
        reply = group.sites[0].answer(Request(kind, "run", Place.secure_sum(1, 1), facts))
        assert refusal(reply)
    assert group.secrets().read_bytes() == before
    assert group.sites[0].answer(masked[0]).status == OK
