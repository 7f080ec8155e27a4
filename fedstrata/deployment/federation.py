"""The sites as the server sees them: asked, waited for, and where need be refused.

A question goes to some sites; their answers are collected until all are in, or the time is over and enough are. A site
that comes back meanwhile is asked again, and first given what it missed. Late, double and old answers are known by
their ticket and counted, not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fedstrata.data.channels import Statistics
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.declarations import SUMS, Declaration, Schema
from fedstrata.deployment.facts import statistics_to_facts
from fedstrata.deployment.last_steps import LastSteps
from fedstrata.deployment.protocol import BEHIND, LOST, MISSING, OK, UNREADY, Reply, Request, digest
from fedstrata.deployment.rules import Rules
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment

T = TypeVar("T")
_DETOURS = 8
"""So often in one question a site may ask for something that it misses."""
_IDLE_SECONDS = 1.0
_SECONDS_TO_HEAR = 15.0
"""So long the server stays to tell sites that the run is over."""
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""How a run ends; one that was stopped can go on, and its sites wait for that."""


class TooFewAnswers(FedStrataError):  # noqa: N818 - a verdict
    """So few usable answers to a question that nobody can go on with them."""


class LostState(FedStrataError):  # noqa: N818 - a verdict
    """A site has lost the state from which it should go on, and nobody said that it may go on without."""


@dataclass(frozen=True)
class Event:
    """What came from the network: an answer; or a site that has connected; or one that failed, and why."""

    site: int
    reply: Reply | None = None
    joined: bool = False
    failure: str | None = None


class Network(Protocol):
    """Carries requests to sites, and answers back."""

    def send(self, site: int, request: Request) -> None:
        """Send a request; to a site that is not connected nothing is sent, and it is asked again when it joins."""
        ...

    def receive(self, seconds: float) -> list[Event]:
        """Return what has come, after waiting at most so long for the first of it."""
        ...

    def now(self) -> float:
        """Return the time in seconds, from any beginning."""
        ...


@dataclass(frozen=True)
class Standing:
    """How a question stands, for displays: who is in, who is late, who is left out."""

    question: str
    answered: tuple[str, ...]
    waiting: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass
class _Open:
    """What a site still has to answer: what it misses first, the question itself last."""

    todo: list[Request]
    detours: int = 0


@dataclass
class Federation:
    """Some sites, by their numbers, and what became of them in a run."""

    network: Network
    names: Sequence[str]
    rules: Rules
    run: str
    session: str
    experiment: Experiment
    committed: int = 0
    schema: Schema | None = None
    statistics: Statistics | None = None
    """Mean and deviation of all sites' training samples, once they are known."""
    log: Callable[[str], None] = lambda line: None
    watch: Callable[[Standing], None] = lambda standing: None
    missed: Callable[[int, int], list[Request]] = lambda site, round: []
    """The announcements that a site must have taken in before a round."""
    declarations: dict[int, Declaration] = field(default_factory=dict)
    refusals: Counter[int] = field(default_factory=Counter)
    left_out: set[int] = field(default_factory=set)
    last_steps: LastSteps = field(default_factory=LastSteps)
    """The step of each site from which it goes on."""
    strays: int = 0
    """How many late, double or old answers came."""
    _held: dict[int, str] = field(default_factory=dict)
    """The payload that each site is known to hold."""
    _forgetful: set[int] = field(default_factory=set)
    """The sites that held nothing of what they got before, as where every message starts a new process."""

    def open(self) -> dict[int, Declaration]:
        """Greet the sites and learn about their samples."""
        self.ask({site: self._hello(site) for site in range(len(self.names))}, lambda site, reply: None)
        return self.declarations

    def ask(self, requests: Mapping[int, Request], check: Callable[[int, Reply], T]) -> dict[int, T]:
        """Put a question to some sites and collect what ``check`` makes of their answers, in the sites' order.

        An answer on which ``check`` raises is refused.
        """
        asked = {site: request for site, request in requests.items() if site not in self.left_out}
        question = _question(requests)
        waiting = {site: _Open(self._course(site, request)) for site, request in asked.items()}
        answers: dict[int, T] = {}
        began = self.network.now()
        self._report(question, answers, waiting)
        for site, open in waiting.items():
            self._send(site, open.todo[0])
        while waiting:
            left = began + self.rules.round_timeout - self.network.now()
            if left <= 0 and self.rules.enough(len(answers), len(requests)):
                break
            for event in self.network.receive(max(left, _IDLE_SECONDS)):
                self._handle(event, waiting, answers, check)
                self._report(question, answers, waiting)
        for site in waiting:
            self.log(f"{self.names[site]} is late for '{question}'; it goes on without")
        self.require(requests, len(answers))
        return dict(sorted(answers.items()))

    def end(self, state: str, text: str, seconds: float = _SECONDS_TO_HEAR) -> None:
        """Tell the sites that took part how the run ended, and wait a little until they have heard it."""
        request = Request("end", self.run, facts={"state": state, "text": text[:1000]})
        waiting = {*self.declarations, *self.left_out}
        for site in sorted(waiting):
            self.network.send(site, request)
        until = self.network.now() + seconds
        with suppress(FedStrataError):  # nothing that happens now is worth more than how the run ended
            while waiting and self.network.now() < until:
                for event in self.network.receive(_IDLE_SECONDS):
                    heard = event.reply is not None and event.reply.ticket == request.ticket
                    if event.joined and event.site in waiting:
                        self.network.send(event.site, request)
                    elif event.failure is not None or heard:
                        waiting.discard(event.site)
        for site in sorted(waiting):
            self.log(f"{self.names[site]} was not there to hear how the run ended")

    def refuse(self, site: int, reason: str) -> None:
        """Refuse a reply by name, tell the site why, and leave it out if that happens too often."""
        self.refusals[site] += 1
        text = f"the reply of {self.names[site]} is refused: {reason.rstrip('.')}"
        if self.refusals[site] >= self.rules.max_refusals:
            self.left_out.add(site)
            text += f"; after {self.refusals[site]} refusals the site is left out"
        self.log(text)
        self.network.send(site, Request("notice", self.run, facts={"text": text}))

    def require(self, requests: Mapping[int, Request], answered: int) -> None:
        """Stop the run where so few usable answers to a question came that nobody can go on with them."""
        needed = self.rules.needed(len(requests))
        if answered < needed:
            raise TooFewAnswers(
                f"Only {answered} of the {needed} needed sites gave a usable answer to '{_question(requests)}', and "
                "nobody else is left to wait for. The rounds so far are saved: look into the log, and start the server "
                "again."
            )

    def _course(self, site: int, request: Request) -> list[Request]:
        known = site in self.declarations or request.kind == "hello"
        return [request] if known else [self._hello(site), request]

    def _hello(self, site: int) -> Request:
        facts = {
            "experiment": self.experiment.to_mapping(),
            "number": site,
            "sites": len(self.names),
            "session": self.session,
            "committed": self.committed,
            "secure": self.rules.secure_facts(),
            "statistics": statistics_to_facts(self.statistics),
        }
        return Request("hello", self.run, facts=facts)

    def _send(self, site: int, request: Request) -> None:
        """Send a request; a payload that the site holds already is only named."""
        request = replace(request, facts={**request.facts, **self.last_steps.facts(site, request)})
        if request.payload:
            name = digest(request.payload)
            held = self._held.get(site) == name and site not in self._forgetful
            request = replace(
                request, facts={**request.facts, "payload": name}, payload=b"" if held else request.payload
            )
        self.network.send(site, request)

    def _handle(
        self,
        event: Event,
        waiting: dict[int, _Open],
        answers: dict[int, T],
        check: Callable[[int, Reply], T],
    ) -> None:
        site = event.site
        if event.joined:
            self.log(f"{self.names[site]} has connected")
            self._held.pop(site, None)
            if site in waiting:
                self._send(site, waiting[site].todo[0])
        elif event.failure is not None:
            self.log(f"{self.names[site]} failed: {event.failure}")
            waiting.pop(site, None)
        elif event.reply is not None:
            self._take(site, event.reply, waiting, answers, check)

    def _take(
        self,
        site: int,
        reply: Reply,
        waiting: dict[int, _Open],
        answers: dict[int, T],
        check: Callable[[int, Reply], T],
    ) -> None:
        """Take an answer: the one that was asked for, one on the way to it, or a stray one."""
        open = waiting.get(site)
        if open is None or reply.ticket != open.todo[0].ticket:
            self.strays += not reply.ticket.startswith("notice")
            return
        request = open.todo[0]
        try:
            if reply.status == OK:
                if request.payload:
                    self._held[site] = digest(request.payload)
                if request.kind == "hello":
                    self._declare(site, reply)
                self.last_steps.note(site, request)
                open.todo.pop(0)
                if not open.todo:
                    answers[site] = check(site, reply)
            elif reply.status in (UNREADY, BEHIND, MISSING):
                self._take_detour(site, open, reply.status)
            elif reply.status == LOST:
                self._take_loss(site, open, reply.reason)
            else:
                self.log(f"{self.names[site]} refuses '{request.ticket}': {reply.reason}")
                open.todo.clear()
        except LostState:
            raise
        except FedStrataError as error:
            self.refuse(site, str(error))
            open.todo.clear()
        if open.todo:
            self._send(site, open.todo[0])
        else:
            del waiting[site]

    def _take_detour(self, site: int, open: _Open, status: str) -> None:
        """Give a site what it says that it misses."""
        open.detours += 1
        if open.detours > _DETOURS:
            raise RefusedReply(f"it says '{status}' again and again")
        self._held.pop(site, None)
        if status == MISSING:
            self._forgetful.add(site)
        elif status == UNREADY:
            open.todo.insert(0, self._hello(site))
        elif status == BEHIND:
            open.todo[:0] = self.missed(site, open.todo[0].round)

    def _take_loss(self, site: int, open: _Open, reason: str) -> None:
        """Go on with a site that has lost its state if that is accepted, else without it, else not at all."""
        if not self.last_steps.facts(site, open.todo[0]):
            raise RefusedReply("it says that it has lost a state which nobody asked for")
        lost, ticket = f"{self.names[site]} has lost what it needs", open.todo[0].ticket
        if self.rules.accept_lost_state:
            self.log(f"{lost} for '{ticket}': {reason}; it goes on without, which the results will say")
            self.last_steps.forget(site, open.todo[0].round)
            return
        advice = (
            "put the right copy of its state, or of the server's run folder, back and start again; or let it go on "
            "without: --accept-lost-state"
        )
        if self.rules.min_sites is None:
            raise LostState(f"The site {lost} for '{ticket}': {reason}. The rounds so far are saved: {advice}.")
        self.left_out.add(site)
        self.log(f"{lost} for '{ticket}': {reason}; it is left out. To have it back, {advice}")
        open.todo.clear()

    def _declare(self, site: int, reply: Reply) -> None:
        declared = Declaration.read(reply.facts)
        self.schema = self.schema or declared.schema
        if declared.schema.whole_numbers != self.schema.whole_numbers:
            one, others = ("whole", "any") if declared.schema.whole_numbers else ("any", "whole")
            raise RefusedReply(f"its inputs are {one} numbers, those of the other sites {others} numbers")
        if declared.schema == replace(self.schema, columns=declared.schema.columns) != self.schema:
            raise RefusedReply(
                "its table has other columns or categories than those of the other sites; all must use one encoding, "
                "as in table(label=..., encoding=columns.json)"
            )
        if declared.schema != self.schema:
            raise RefusedReply(f"its samples have {declared.schema}, instead of {self.schema}")
        usual = next(iter(self.declarations.values()), declared).normalises_by
        if declared.normalises_by != usual:
            raise RefusedReply(
                f"its samples are normalised by {_words(declared.normalises_by)}, those of the other sites by "
                f"{_words(usual)}; 'normalise:site' or normalise(mean='...', deviation='...') would be the same for all"
            )
        if self.declarations.setdefault(site, declared) != declared:
            raise RefusedReply("it declares other samples than before")

    def _report(self, question: str, answers: Mapping[int, Any], waiting: Mapping[int, Any]) -> None:
        answered, late, out = (
            tuple(self.names[site] for site in sorted(sites)) for sites in (answers, waiting, self.left_out)
        )
        self.watch(Standing(question, answered, late, out))


def _question(requests: Mapping[int, Request]) -> str:
    return next(iter(requests.values())).ticket


def _words(normalises_by: str | Statistics) -> str:
    if isinstance(normalises_by, Statistics):
        return f"the constants {list(normalises_by.mean)} and {list(normalises_by.deviation)}"
    return "the statistics of all sites" if normalises_by == SUMS else normalises_by
