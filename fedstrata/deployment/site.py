"""A site: it holds its own data and state, and answers the server's requests, each once.

Whatever comes is checked as hostile input. A request that was answered before gets the stored answer; one for a round
that is over is refused; nothing is kept of a request that fails half-way. In a run with secure aggregation an upload
leaves the site only under masks, whatever the server asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedstrata.data.channels import ChannelSums, Statistics
from fedstrata.data.contents import fingerprint
from fedstrata.deployment.allowance import Allowance
from fedstrata.deployment.audit import AUDIT_FILE, AuditLog
from fedstrata.deployment.budget import Budget, RunBudget
from fedstrata.deployment.facts import cost_to_facts, finite_or_none, statistics_from_facts
from fedstrata.deployment.foreign_text import clean, cleaned
from fedstrata.deployment.last_steps import Step, what_is_missing
from fedstrata.deployment.member import Member
from fedstrata.deployment.policy import refuse_by_policy
from fedstrata.deployment.protocol import (
    BEGINNING,
    BEHIND,
    LOST,
    MISSING,
    REFUSED,
    SECURE_KINDS,
    UNREADY,
    Place,
    ProtocolError,
    Reply,
    Request,
    Stage,
    digest,
)
from fedstrata.deployment.rules import FEWEST_OF_A_CLASS, FEWEST_SITES, Rules, SecureRules, SiteRules
from fedstrata.deployment.saving import save_model
from fedstrata.deployment.secure.sums import entries_of, refuse_infinite
from fedstrata.deployment.site_audit import SiteAudit
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.statistics import sums_to_facts, to_pieces
from fedstrata.deployment.store import Record, SiteStore
from fedstrata.deployment.telling import Teller
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods.contract.views import Message
from fedstrata.stack import Stack, Tensors, take_first
from fedstrata.wire import AS_IS, decode, encode, quantisation_error

if TYPE_CHECKING:
    from fedstrata.deployment.secure.site import SecureSteps


@dataclass(frozen=True)
class End:
    """How a run came to its end: ``finished`` or ``failed``, and in words."""

    state: str
    words: str


class Site:
    """Answers requests by its own rules; its state is on disk, so that it may be stopped at any moment.

    Its own model of the end of the run goes to ``out``, by default into its state folder. ``end`` is how the run ended,
    once the server has told.
    """

    def __init__(
        self,
        root: Path,
        data: SiteData,
        log: Callable[[str], None] = lambda line: None,
        number: int = 0,
        rules: SiteRules | None = None,
        out: Path | None = None,
        audit: SiteAudit | None = None,
    ) -> None:
        self.root = root
        self.audit = audit or SiteAudit(AuditLog(root / AUDIT_FILE), self._spent)
        self.number = number
        self.rules = rules or SiteRules()
        self.data = data
        self.log = cleaned(log)
        self.out = out
        self.end: End | None = None
        self.teller = Teller(self.log)
        self.run = ""
        self._greeting = Request("hello")
        self._floor = 0
        self._member: Member | None = None
        self._store: SiteStore | None = None
        self._newest: Record | None = None
        self._secure: SecureSteps | None = None
        self._allowance: Allowance | None = None
        self.budget = Budget(root, self.rules)
        self._spending: RunBudget | None = None
        self._payload = b""
        self._model: tuple[int, Tensors, dict[str, Any]] | None = None

    def answer(self, request: Request) -> Reply:
        """Answer a request; what cannot be done is refused with a sentence."""
        try:
            self.audit.asked(request)
            reply = self.audit.answered(request, self._answer(request))
        except FedStrataError as error:  # what cannot be written down does not leave
            reply = self._refusal(request, str(error))
        self.teller.count(request, reply)
        return reply

    def _answer(self, request: Request) -> Reply:
        try:
            reply = self._answers()[request.kind](request)
            if self._allowance is not None and request.run == self.run:
                self._allowance.charge(request, reply)
            return reply
        except FedStrataError as error:
            return self._refusal(request, str(error))
        except Exception as error:  # a message that can be read may still lead anywhere; the site goes on
            return self._refusal(request, f"It does not fit this run ({type(error).__name__}: {error})")

    def _refusal(self, request: Request, reason: str) -> Reply:
        self.log(f"refused '{request.ticket}': {reason}")
        return Reply(request.ticket, REFUSED, {"reason": clean(reason)})

    def _answers(self) -> dict[str, Callable[[Request], Reply]]:
        return {
            "who": lambda request: Reply(request.ticket, facts={"number": self.number}),
            "hello": self._hello,
            "notice": self._notice,
            "statistics": self._statistics,
            "survey": self._do,
            "adopt": self._do,
            "train": self._do,
            **dict.fromkeys(SECURE_KINDS, self._aggregate),
            "test": self._look,
            "adapt": self._look,
            "end": self._end,
        }

    def _notice(self, request: Request) -> Reply:
        self.log(clean(str(request.facts.get("text", ""))))
        return Reply(request.ticket)

    def _end(self, request: Request) -> Reply:
        """Hear that the run is over, or that the server was stopped, and save the model as it is by now."""
        if self.run == request.run:
            self.teller.flush()
            state, words = (clean(str(request.facts.get(key, "")), 1000) for key in ("state", "text"))
            self.log(words)
            if self._model is not None and state != "finished":
                self._save()
            if state in ("finished", "failed"):
                self.end = End(state, words)
            else:
                self.teller.waits_for = "the server to come back"
        return Reply(request.ticket)

    @property
    def model_folder(self) -> Path | None:
        """Where the site's own model is, or will be."""
        return self.out or (None if self._store is None else self._store.path / "model")

    def _save(self) -> None:
        member, folder = self._member, self.model_folder
        assert member is not None
        assert folder is not None
        assert self._model is not None
        round, model, scores = self._model
        save_model(folder, member.ready, member.number, round, model, scores)
        self.log(f"this site's own model after round {round} is saved in '{folder}'")
        self.audit.saved(folder, round)

    def _hello(self, request: Request) -> Reply:
        facts = request.facts
        for key, kind in {"experiment": dict, "number": int, "sites": int, "session": str, "committed": int}.items():
            if type(facts.get(key)) is not kind:
                raise ProtocolError(f"A hello came without a proper {key}.")
        number, sites = facts["number"], facts["sites"]
        if not 0 <= number < sites <= 10_000:
            raise ProtocolError(f"A hello came for site {number} of {sites}.")
        experiment = Experiment.from_mapping(dict(facts["experiment"]))
        rules = Rules(**{**(facts.get("secure") or {}), "min_sites": facts.get("min_sites")})
        refuse_by_policy(self.rules, experiment, self.data.make_method(experiment), rules, sites)
        store = SiteStore(self.root, request.run)
        secure = self._secure_steps(store, facts)
        statistics = _agreed_statistics(store, facts)
        member = self._member
        if member is None or self.run != request.run or _role(self._greeting) != _role(request):
            ready = self.data.prepare(experiment, number, sites)
            samples_now = fingerprint(ready.dataset)
            store.require_samples(samples_now)
            self.audit.note("data", sha256=samples_now)
            member = Member(ready, number, statistics)
            self.end = self._model = None
            samples = len(ready.data.split.train[number])
            self.log(
                f"takes part in the run {request.run} as site {number + 1} of {sites}: {ready.experiment.method}, "
                f"{ready.experiment.rounds} rounds, with {samples} training samples"
            )
            kept = [str(metric) for metric in ready.setting.metrics if metric.tells_of_classes]
            if kept and not member.tells_of_classes:
                self.log(
                    f"keeps {', '.join(kept)} to itself: of some class it has fewer than {FEWEST_OF_A_CLASS} test "
                    "samples"
                )
            self.teller.waits_for = "the other sites to come"
        elif not member.knows_statistics:
            member = Member(member.ready, number, statistics)
        spending = self.budget.open(request.run, member.ready.setting.method, member.ready.setting.rounds)
        self._floor = max(facts["committed"] + 1, store.newest_round(facts["session"]))
        store.write_greeting(facts)
        self._member, self._store, self._newest, self._secure = member, store, None, secure
        self._allowance = Allowance(store.path, self.rules)
        self._spending = spending
        self.run, self._greeting = request.run, request
        return Reply(request.ticket, facts=member.declaration())

    def _secure_steps(self, store: SiteStore, facts: Mapping[str, Any]) -> SecureSteps | None:
        """Read the rules of secure aggregation; they stay as they were when the run began."""
        rules, known = facts.get("secure"), store.greeting()
        if known is not None and known.get("secure") != rules:
            raise ProtocolError("The rules of secure aggregation cannot change during a run; begin another one.")
        if rules is None:
            return None
        from fedstrata.deployment.secure.site import SecureSteps

        fewest = max(FEWEST_SITES, self.rules.least_sites or 0)
        return SecureSteps(store, SecureRules(**rules), facts["number"], facts["sites"], fewest=fewest)

    def _statistics(self, request: Request) -> Reply:
        """Give the sums of the training samples away or, under secure aggregation, say that they can be had."""
        if not self._is_greeted(request):
            return Reply(request.ticket, UNREADY)
        sums = self._sums()
        return Reply(request.ticket, facts={} if self._secure is not None else sums_to_facts(sums))

    def _sums(self) -> ChannelSums:
        assert self._member is not None
        if self._member.knows_statistics:
            raise ProtocolError("Mean and deviation are known already; sums are given away once in a run.")
        if self._spending is not None:
            raise FedStrataError(
                f"Under '{self._spending.terms.part}' this site gives no exact sums of its samples away."
            )
        return self._member.sums(self.rules)

    def _is_ready(self, request: Request) -> bool:
        """Tell whether the site takes part in a request's run, and knows all that it needs for that."""
        ready = self._is_greeted(request)
        return ready and self._member is not None and self._member.knows_statistics

    def _is_greeted(self, request: Request) -> bool:
        """Tell whether the site takes part in a request's run; one that was restarted remembers its last hello."""
        if self._member is None and (self.root / request.run).is_dir():
            known = SiteStore(self.root, request.run).greeting()
            if known is not None:
                self._hello(Request("hello", request.run, facts=known))
        ready = self._member is not None and self.run == request.run
        if ready and self._secure is not None:
            self._secure.forget_before(request.round)
        return ready

    def _aggregate(self, request: Request) -> Reply:
        """Take part in the secure aggregation of a round or, before the first, of the sums of all samples."""
        if not self._is_greeted(request):
            return Reply(request.ticket, UNREADY)
        if self._secure is None:
            raise ProtocolError("This run has no secure aggregation.")
        return self._secure.answer(request, self._trained)

    def _trained(self, round: int) -> tuple[Message, float]:
        """Read what the site learned in a round from its disk, and tell its weight."""
        member, store = self._member, self._store
        assert member is not None
        assert store is not None
        if round == BEGINNING.round:
            assert self._secure is not None
            return to_pieces(self._sums(), self._secure.rules, self._secure.sites), 1.0
        place = Place.training(round)
        if place not in store.places():
            raise ProtocolError(f"This site has not trained in round {round}.")
        record = store.read(place)
        self._spend(record)
        return decode(record.reply), float(member.client.side.weights([member.number])[0])

    def _do(self, request: Request) -> Reply:
        """Do a step that belongs to the run's history, unless it is done already."""
        if not self._is_ready(request):
            return Reply(request.ticket, UNREADY)
        member, store = self._member, self._store
        assert member is not None
        assert store is not None
        if not request.is_in_its_place:
            raise ProtocolError(f"'{request.ticket}' came in the place of another step of round {request.round}.")
        asked = str(request.facts.get("payload", ""))
        done = store.read(request.place) if request.place in store.places() else None
        kept = done is not None and done.asked == asked
        if self._spending is not None and request.place.stage == Stage.TRAINING:
            self._spending.check(request.round, asked, kept)
        if done is not None and kept:
            return self._reply(request, done)
        if request.round > member.ready.setting.rounds:
            raise ProtocolError(f"Round {request.round} is none of this run, which has {member.ready.setting.rounds}.")
        if request.round < self._floor and not self._catches_up(request, store):
            raise ProtocolError(f"Round {request.round} is over; this site is at round {self._floor}.")
        payload = self._received(request, asked)
        if payload is None:
            return Reply(request.ticket, MISSING)
        if (lost := self._lost(request)) is not None:
            return lost
        before = self._before(request.place)
        adopted = BEGINNING if before is None else before.adopted
        if request.kind != "adopt" and adopted < self._required(request):
            return Reply(request.ticket, BEHIND)
        member.client.state = self._state(before)
        record = self._perform(member, request, payload, asked, adopted)
        store.write(record)
        self._newest = record
        self._floor = max(self._floor, request.round if request.kind != "adopt" else 0)
        return self._reply(request, record)

    def _reply(self, request: Request, record: Record) -> Reply:
        """Answer with what was done; under secure aggregation the upload stays here."""
        self._spend(record)
        withheld = self._secure is not None and record.place.stage == Stage.TRAINING
        return Reply(request.ticket, facts=record.facts, payload=b"" if withheld else record.reply)

    def _spent(self) -> float | None:
        """Tell what the site has spent in all runs, in one that keeps an account of it."""
        return None if self._spending is None else self.budget.epsilon()

    def _spend(self, record: Record) -> None:
        """Write down what an upload costs in privacy, where it does, before it leaves."""
        if self._spending is not None and record.place.stage == Stage.TRAINING:
            words = self._spending.spend(record.place.round, record.asked)
            if words is not None:
                self.log(words)

    def _perform(self, member: Member, request: Request, payload: bytes, asked: str, adopted: Place) -> Record:
        facts: dict[str, Any] = {}
        reply = b""
        round = request.round
        with torch.no_grad() if request.kind == "adopt" else torch.enable_grad():
            if request.kind == "survey":
                reply = member.client.answer_survey(member.exchange(request.place), payload, round)
            elif request.kind == "adopt":
                member.client.adopt(member.exchange(request.place), payload, round)
                adopted = request.place
            else:
                began = time.perf_counter()
                reply, outcome = member.client.answer(payload, round, _losses(request))
                seconds = time.perf_counter() - began
                if self._secure is not None:
                    upload = member.summed(outcome.reply)
                    refuse_infinite(upload)
                    facts["entries"] = [entry.to_facts() for entry in entries_of(upload)]
                    reply = encode(upload)
                if member.ready.setting.upload_values != AS_IS:
                    [lost] = quantisation_error(outcome.reply, member.ready.setting.upload_values)
                    facts["error"] = finite_or_none(float(lost))
                facts["loss"] = finite_or_none(float(outcome.loss))
                facts |= cost_to_facts(outcome.cost)
                if request.facts.get("evaluate") is True:
                    facts["scores"] = member.scores(outcome.trained)
                tested = "scores" in facts
                self.teller.trained(round, member.ready.setting.rounds, facts, seconds, tested)
        session = str(self._greeting.facts["session"])
        after = Step.read(request.facts.get("after"))
        return Record(request.place, asked, facts, reply, adopted, session, member.client.state, after)

    def _look(self, request: Request) -> Reply:
        """Test the site's own model with what the server sent; nothing of the run's history changes."""
        if not self._is_ready(request):
            return Reply(request.ticket, UNREADY)
        member, store = self._member, self._store
        assert member is not None
        assert store is not None
        payload = self._received(request, str(request.facts.get("payload", "")))
        if payload is None:
            return Reply(request.ticket, MISSING)
        if (lost := self._lost(request)) is not None:
            return lost
        before = self._before(request.place)
        if (BEGINNING if before is None else before.adopted) < self._required(request):
            return Reply(request.ticket, BEHIND)
        member.client.state = self._state(before)
        if request.kind == "adapt":
            model = member.client.adapted_model(payload, request.round - 1)
        else:
            model = member.client.model(payload, request.round - 1)
        scores, rounds = member.scores(model), member.ready.setting.rounds
        self._model = request.round - 1, take_first(model), scores
        self.teller.tested(request.round - 1, rounds, scores, request.kind == "adapt")
        if request.round > rounds:
            self._save()
        return Reply(request.ticket, facts={"scores": scores})

    def _received(self, request: Request, asked: str) -> bytes | None:
        """Take the payload of a request, or the one that it names and that came before."""
        if request.payload:
            if digest(request.payload) != asked:
                raise ProtocolError("The digest of a payload does not fit: it was altered on its way.")
            self._payload = request.payload
        return self._payload if digest(self._payload) == asked else None

    def _required(self, request: Request) -> Place:
        """Tell which announcement the site must have taken in."""
        return Place.read(request.facts.get("adopted", BEGINNING.to_facts()))

    def _catches_up(self, request: Request, store: SiteStore) -> bool:
        """Tell whether a request announces something old to a site that has done nothing since."""
        return request.kind == "adopt" and all(place < request.place for place in store.places())

    def _lost(self, request: Request) -> Reply | None:
        """Say so where the state from which a request goes on is not here any more, and something was kept in it."""
        needed, member, store = Step.read(request.facts.get("after")), self._member, self._store
        assert member is not None
        assert store is not None
        if needed is None or store.holds(needed):
            return None
        missing = what_is_missing(needed, store.places())
        if not member.first_state:
            self.log(f"goes on, although {missing}: with {member.ready.experiment.method} nothing was kept in it")
            return None
        self.log(
            f"cannot do '{request.ticket}': {missing}. Put the right copy of '{store.path}' back and start again, or "
            "let the server's operator go on without it (--accept-lost-state)"
        )
        return Reply(request.ticket, LOST, {"reason": missing})

    def _before(self, place: Place) -> Record | None:
        """Find the site's state before a place."""
        assert self._store is not None
        newest = self._store.newest(place)
        if newest is None:
            return None
        if self._newest is None or self._newest.place != newest:
            self._newest = self._store.read(newest)
        return self._newest

    def _state(self, record: Record | None) -> Stack:
        assert self._member is not None
        if record is None:
            return self._member.first_state
        device = self._member.ready.setting.device
        return Stack({name: tensor.to(device) for name, tensor in record.state.items()})


def _role(greeting: Request) -> tuple[Any, ...]:
    """Tell what a hello makes of a site; another session of the server changes nothing of that."""
    return tuple(greeting.facts.get(key) for key in ("experiment", "number", "sites"))


def _agreed_statistics(store: SiteStore, facts: Mapping[str, Any]) -> Statistics | None:
    """Read mean and deviation of all sites' samples; once they are known they stay as they are."""
    given, known = facts.get("statistics"), store.greeting()
    before = None if known is None else known.get("statistics")
    if before is not None and given != before:
        raise ProtocolError("Mean and deviation of the samples cannot change during a run; begin another one.")
    return statistics_from_facts(given)


def _losses(request: Request) -> list[float]:
    """Read the losses of the rounds so far, which some schedules go by."""
    losses = request.facts.get("losses", [])
    if not isinstance(losses, list) or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        raise ProtocolError("A request came with losses that are no numbers.")
    return losses
