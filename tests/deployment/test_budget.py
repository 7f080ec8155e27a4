"""What a site spends of its privacy: no noise is taken off, no round answered twice, no budget overdrawn."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_world import hello, ingredients, request, simulated

from fedstrata.deployment.budget import LEDGER_FILE, Budget
from fedstrata.deployment.protocol import OK, REFUSED, Place, Reply, Request
from fedstrata.deployment.rules import SiteRules
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.engines.loop import LoopEngine
from fedstrata.functional import gaussian_epsilon
from fedstrata.methods.contract.views import Message
from fedstrata.wire import decode, encode

METHOD = "fedbn+local-dp(clip=0.1, noise=2)"


def start(folder: Path, rules: SiteRules | None = None, log: Callable[[str], None] = print) -> Site:
    """Start a site that draws its noise as real ones do."""
    return Site(folder, SiteData(part=0, ingredients=replace(ingredients(), secret=None)), log, rules=rules)


def greeting(method: str = METHOD, run: str = "run", session: str = "one", **changes: Any) -> Request:
    known = hello(run, method=method, session=session)
    return replace(known, facts={**known.facts, "experiment": {**known.facts["experiment"], **changes}})


def model(round: int = 1) -> bytes:
    engine = simulated("fedbn").engine
    assert isinstance(engine, LoopEngine)
    return engine.central.messages([0], round)[0]


def zeros(round: int = 1) -> bytes:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in decode(model(round)).tensors.items()}
    return encode(Message(tensors), round=round)


def train(payload: bytes, round: int = 1, run: str = "run") -> Request:
    return request("train", Place.training(round), payload, run)


def refusal(reply: Reply) -> str:
    assert reply.status == REFUSED
    assert not reply.payload
    return reply.reason


def moved(reply: bytes, sent: bytes) -> torch.Tensor:
    """Tell by how much an upload differs from the model that was sent."""
    before = decode(sent).tensors
    return torch.cat(
        [(tensor - before[name]).flatten() for name, tensor in decode(reply).tensors.items() if name in before]
    )


# No noise is taken off ------------------------------------------------------------------------------------------------


def answers(folder: Path, method: str, models: list[bytes], secret: bool | None) -> list[torch.Tensor]:
    """Have a site train a round for several models, each time as if it had never been asked: what it tells of each."""
    site = Site(folder, SiteData(part=0, ingredients=replace(ingredients(), secret=secret)))
    told = []
    for payload in models:
        assert site.answer(greeting(method)).status == OK
        reply = site.answer(train(payload))
        assert reply.status == OK, reply.facts
        told.append(moved(reply.payload, payload))
        (folder / LEDGER_FILE).unlink()
    return told


@pytest.mark.attack(
    "A server asks a site under local-dp for a round twice, with the model and with a model of zeros, which hardly "
    "trains, and subtracts the second answer from the first to take the noise off.",
    "The second question is refused. Even where the site is made to forget that it has answered, its noise is another "
    "one, and the difference tells nothing.",
)
def test_the_noise_of_an_update_cannot_be_asked_for(tmp_path, record_property):
    """The update itself is what is sent with a noise of 1e-15: of norm 0.1, to which it is clipped.

    Of a model of zeros only the last bias, the last ten numbers, has a gradient. Noise of the seed, as in a simulation,
    can be asked for again; that of real sites has a deviation of 2 z C = 0.4, and the difference of two has more.
    """
    sent, nothing = model(), zeros()
    [update] = answers(tmp_path / "quiet", METHOD.replace("noise=2", "noise=1e-15"), [sent], secret=False)
    assert float(update.norm()) == pytest.approx(0.1, abs=1e-4)
    first, second = answers(tmp_path / "old", METHOD, [sent, nothing], secret=False)
    assert float((first - second - update)[:-10].abs().max()) < 1e-5, "with noise of the seed, the update comes out"
    first, second = answers(tmp_path / "new", METHOD, [sent, nothing], secret=None)
    left = float((first - second - update)[:-10].std())
    assert left == pytest.approx(math.sqrt(2) * 0.4, rel=0.2)
    record_property("measured", f"an update of {float(update.std()):.4f} a weight, under a rest of noise of {left:.2f}")
    site = start(tmp_path / "site")
    assert site.answer(greeting()).status == OK
    assert site.answer(train(sent)).status == OK
    assert "has answered round 1 for another model" in refusal(site.answer(train(nothing)))


Way = Callable[[Site, Path, Request], Site]


def ask_again(site: Site, folder: Path, anew: Request) -> Site:
    return site


def restart(site: Site, folder: Path, anew: Request) -> Site:
    return start(folder)


def begin_anew(site: Site, folder: Path, anew: Request) -> Site:
    """Let the server say that no round is committed, in another session."""
    assert site.answer(anew).status == OK
    return site


def go_on(site: Site, folder: Path, anew: Request) -> Site:
    """Go on until the first round is dropped, and begin anew."""
    for round in (2, 3, 4):
        assert site.answer(train(model(round), round)).status == OK
    return begin_anew(site, folder, anew)


def delete_step(site: Site, folder: Path, anew: Request) -> Site:
    shutil.rmtree(folder / "run" / "step-000001-training-0000")
    return site


def delete_run(site: Site, folder: Path, anew: Request) -> Site:
    shutil.rmtree(folder / "run")
    return begin_anew(start(folder), folder, anew)


@pytest.mark.parametrize("way", [ask_again, restart, begin_anew, go_on, delete_step, delete_run])
@pytest.mark.parametrize("method", [METHOD, "fedbn+central-dp(noise=2)"])
@pytest.mark.attack(
    "Under local-dp or central-dp, a server asks for a round that a site has answered: after the site's restart, in "
    "another session in which nothing is committed, after the answer was dropped, or after its folder was deleted.",
    "For another model it is refused with a sentence. For the same one the site sends the same bytes again or, where "
    "these are gone, nothing.",
)
def test_a_round_is_answered_once_whatever_is_said_or_lost(way: Way, method, tmp_path):
    site = start(tmp_path)
    assert site.answer(greeting(method, rounds=4)).status == OK
    answered = site.answer(train(model()))
    assert answered.status == OK
    site = way(site, tmp_path, greeting(method, session="two", rounds=4))
    assert "for another model" in refusal(site.answer(train(zeros())))
    again = site.answer(train(model()))
    if way in (ask_again, restart, begin_anew):
        assert (again.status, again.payload) == (OK, answered.payload)
    else:
        assert "no longer here" in refusal(again)
    assert list(Budget(tmp_path, SiteRules()).accounts()["run"].releases) == ([1, 2, 3, 4] if way is go_on else [1])


def test_a_site_killed_before_its_release_was_written_down_answers_after_its_restart(tmp_path, monkeypatch):
    """Nothing had left: the answer that lies on its disk is counted when it leaves, for this model or another."""

    class Killed(BaseException):
        pass

    def kill(*content: Any) -> None:
        raise Killed

    for payload in (model(), zeros()):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        site = start(folder)
        assert site.answer(greeting()).status == OK
        with monkeypatch.context() as patched:
            patched.setattr(Budget, "write", kill)
            with pytest.raises(Killed):
                site.answer(train(model()))
        site = start(folder)
        assert site.answer(train(payload)).status == OK
        assert len(site.budget.accounts()["run"].releases) == 1


@pytest.mark.parametrize("method", [METHOD, "fedbn+central-dp"])
@pytest.mark.attack(
    "Under local-dp or central-dp, a server asks a site for the exact sums of its samples, as for 'normalise'.",
    "The site refuses, whatever the server's own checks say.",
)
def test_no_exact_sums_leave_under_a_promise_of_privacy(method, tmp_path):
    site, asked = start(tmp_path), greeting(method)
    assert site.answer(replace(asked, facts={**asked.facts, "statistics": None})).status == OK
    assert "gives no exact sums" in refusal(site.answer(Request("statistics", "run")))


# No budget is overdrawn -----------------------------------------------------------------------------------------------


def spend_all(site: Site, run: str = "run", method: str = METHOD) -> tuple[int, str]:
    """Have a site take part in rounds until it refuses: which one, and what it says."""
    assert site.answer(greeting(method, run)).status == OK
    for round in range(1, 10):
        reply = site.answer(train(model(round), round, run))
        if reply.status != OK:
            return round, refusal(reply)
    raise AssertionError("it never refuses")


@pytest.mark.attack(
    "A server asks a site for more rounds than the epsilon of the experiment allows.",
    "The site refuses, and says what is spent, what it would be, and what is allowed.",
)
def test_a_run_gets_the_rounds_that_it_was_granted(tmp_path):
    """Four rounds with a noise multiplier of 2 are one with 1, which spends 4.377 at a delta of 1e-5; it has three."""
    lines: list[str] = []
    round, reason = spend_all(start(tmp_path, log=lines.append))
    assert round == 4
    spent = [gaussian_epsilon(2.0, releases, 1e-5) for releases in range(5)]
    assert spent[4] == pytest.approx(4.377, abs=1e-3)
    assert f"has spent an epsilon of {spent[3]:.4g} in 3 rounds" in reason
    assert f"it would be {spent[4]:.4g}" in reason
    assert f"allows {spent[3]:.4g}" in reason
    told = [line for line in lines if line.startswith("privacy: ")]
    assert [line.split()[2] for line in told] == [f"{epsilon:.4g}" for epsilon in spent[1:4]]
    assert "all runs together" in told[0]


@pytest.mark.parametrize(
    "change", [{"rounds": 300}, {"method": METHOD.replace("noise=2", "noise=0.1")}, {"method": "fedbn"}]
)
@pytest.mark.attack(
    "In the middle of a run a server says that it has more rounds, less noise, or no privacy at all.",
    "The site refuses to take part: what a run promises cannot change.",
)
def test_the_terms_of_a_run_stay(change, tmp_path):
    site = start(tmp_path)
    assert site.answer(greeting()).status == OK
    assert site.answer(train(model())).status == OK
    for here in (site, start(tmp_path)):
        assert "cannot change" in refusal(here.answer(greeting(session="two", **change)))
        assert here.answer(train(model(2), 2)).status == OK, "the run itself goes on"


@pytest.mark.attack(
    "A server begins one run after the other, each within its own epsilon.",
    "The site adds them up on its disk, over restarts, and stops at the lifetime_epsilon of its operator.",
)
def test_all_runs_together_spend_what_the_operator_allows(tmp_path):
    """Rounds with multipliers of 2 and 1 cost 1/4 and 1: three of the first and one of the second are mu^2 = 7/4."""
    allowed = gaussian_epsilon(1 / math.sqrt(7 / 4), 1, 1e-6)
    rules = SiteRules(lifetime_epsilon=allowed, lifetime_delta=1e-6)
    assert spend_all(start(tmp_path, rules))[0] == 4
    assert (tmp_path / LEDGER_FILE).stat().st_mode & 0o777 == 0o600
    site = start(tmp_path, rules)
    assert site.budget.epsilon() == pytest.approx(gaussian_epsilon(2.0, 3, 1e-6))
    round, reason = spend_all(site, "another", "fedbn+local-dp(noise=1)")
    assert round == 2
    assert f"has spent an epsilon of {allowed:.4g}" in reason
    assert f"it would be {gaussian_epsilon(1 / math.sqrt(11 / 4), 1, 1e-6):.4g}" in reason
    assert f"allows {allowed:g} (lifetime_epsilon)" in reason
    site = start(tmp_path, rules)
    assert "lifetime_epsilon" in refusal(site.answer(greeting(run="third"))), "before anybody trains"
    assert start(tmp_path, rules).answer(train(model(), run="another")).status == OK, "what has left may be sent again"


def test_where_a_lifetime_is_bounded_nothing_leaves_uncounted(tmp_path):
    site = start(tmp_path, SiteRules(lifetime_epsilon=8))
    assert "without noise" in refusal(site.answer(hello()))
    assert start(tmp_path).answer(hello()).status == OK


@pytest.mark.parametrize("content", ["", "[]", '{"runs": 3}', '{"runs": {"run": {"part": "local-dp"}}}'])
def test_without_a_whole_account_nothing_leaves(content, tmp_path):
    site = start(tmp_path)
    assert site.answer(greeting()).status == OK
    assert site.answer(train(model())).status == OK
    (tmp_path / LEDGER_FILE).write_text(content)
    for asked in (greeting(session="two"), train(model(2), 2)):
        assert "is damaged" in refusal(start(tmp_path).answer(asked))


def test_no_server_can_put_a_run_in_the_place_of_the_account(tmp_path):
    assert "cannot be the name of a run" in refusal(start(tmp_path).answer(greeting(run=LEDGER_FILE)))
