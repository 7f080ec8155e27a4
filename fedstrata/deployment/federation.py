"""The sites as the server sees them: asked, waited for, and where need be refused.

A question goes to some sites; their answers are collected until all are in, or the time is over and enough are. A site
that comes back meanwhile is asked again, and first given what it missed. Late, double and old answers are known by
their ticket and counted, not used. Whatever one site sends, the question goes on for the others: what cannot be used is
refused by name, and the log says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from fedstrata.data.channels import Statistics
from fedstrata.deployment.agreement import Agreement, NotBegun
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.declarations import Declaration, Schema
from fedstrata.deployment.facts import statistics_to_facts
from fedstrata.deployment.foreign_text import clean, cleaned
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
    """What came from the network: an answer; or a site that has connected, or was revoked, or failed, and why."""

    site: int
    reply: Reply | None = None
    joined: bool = False
    revoked: bool = False
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
class _Question(Generic[T]):
    """A question while it is open: what was asked of whom, who is waited for, and what came."""

    requests: Mapping[int, Request]
    check: Callable[[int, Reply], T]
    waiting: dict[int, _Open] = field(default_factory=dict)
    answers: dict[int, T] = field(default_factory=dict)
    declined: dict[int, str] = field(default_factory=dict)
    """The sites that refused or failed, and why; they are asked again when they come back."""

    def __str__(self) -> str:
        """Name it by its ticket."""
        return _ticket(self.requests)


@dataclass
class Federation:
    """Some sites, by their numbers, and what became of them in a run.

    ``agreement`` is what their samples have in common, as far as it is known. A run that only ``begins`` needs all
    sites, unless the rules say how many are enough.
    """

    network: Network
    names: Sequence[str]
    rules: Rules
    run: str
    session: str
    experiment: Experiment
    committed: int = 0
    begins: bool = True
    agreement: Agreement = field(default_factory=Agreement)
    statistics: Statistics | None = None
    """Mean and deviation of all sites' training samples, once they are known."""
    log: Callable[[str], None] = lambda line: None
    watch: Callable[[Standing], None] = lambda standing: None
    note: Callable[[str, Mapping[str, Any]], object] = lambda event, facts: None
    """Writes down what becomes of sites and of the run."""
    missed: Callable[[int, int], list[Request]] = lambda site, round: []
    """The announcements that a site must have taken in before a round."""
    declarations: dict[int, Declaration] = field(default_factory=dict)
    refusals: Counter[int] = field(default_factory=Counter)
    left_out: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    """The sites that are not on the list any more: left out, and not to be reached."""
    last_steps: LastSteps = field(default_factory=LastSteps)
    """The step of each site from which it goes on."""
    strays: int = 0
    """How many late, double or old answers came."""
    _held: dict[int, str] = field(default_factory=dict)
    """The payload that each site is known to hold."""
    _forgetful: set[int] = field(default_factory=set)
    """The sites that held nothing of what they got before, as where every message starts a new process."""

    def __post_init__(self) -> None:
        self.log = cleaned(self.log)

    @property
    def schema(self) -> Schema | None:
        """What all sites' samples have in common, once it is known."""
        return self.agreement.schema

    def open(self) -> dict[int, Declaration]:
        """Greet the sites, learn about their samples, and settle what these have in common."""
        requests = {site: self._hello(site) for site in range(len(self.names))}
        self.ask(requests, lambda site, reply: None, all_needed=self.begins and self.rules.min_sites is None)
        self.agreement = self.agreement.settled(self.declarations, self.names)
        for site, declared in list(self.declarations.items()):
            try:
                self.agreement.check(declared)
            except RefusedReply as refusal:
                del self.declarations[site]
                self.refuse(site, str(refusal))
        self.require(requests, len(self.declarations))
        return self.declarations

    def ask(
        self,
        requests: Mapping[int, Request],
        check: Callable[[int, Reply], T],
        majority: bool = True,
        all_needed: bool = False,
    ) -> dict[int, T]:
        """Put a question to some sites and collect what ``check`` makes of their answers, in the sites' order.

        An answer on which ``check`` raises is refused, and the others go on without. How many usable answers are
        needed, the rules say (:meth:`Rules.needed`). A site that refuses or fails is asked again if it comes back
        while others are waited for; where all are needed, nobody goes on without it.
        """
        asked = {site: request for site, request in requests.items() if site not in self.left_out}
        waiting = {site: _Open(self._course(site, request)) for site, request in asked.items()}
        question = _Question(requests, check, waiting)
        until = self.network.now() + self.rules.round_timeout
        self._report(question)
        for site, open in waiting.items():
            self._send(site, open.todo[0])
        while waiting:
            left = until - self.network.now()
            if left <= 0 and self.rules.enough(len(question.answers), len(requests)):
                break
            for event in self.network.receive(max(left, _IDLE_SECONDS)):
                self._handle(event, question)
                self._report(question)
        for site in waiting:
            self.log(f"{self.names[site]} is late for '{question}'; it goes on without")
            self.note("late", {"site": self.names[site], "question": str(question)})
        if all_needed and question.declined:
            raise NotBegun(
                f"The run begins with all sites, and not all take part: {self._told(question.declined)}. Put that "
                "right and start the server again, or set 'min_sites' in the rules to begin without them."
            )
        self.require(requests, len(question.answers), question.declined, majority)
        return dict(sorted(question.answers.items()))

    def end(self, state: str, text: str, seconds: float = _SECONDS_TO_HEAR) -> None:
        """Tell the sites that took part how the run ended, and wait a little until they have heard it."""
        self.note("end", {"state": state, "text": text})
        request = Request("end", self.run, facts={"state": state, "text": clean(text, 1000)})
        waiting = {*self.declarations, *self.refusals} - self.removed
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

    def remove(self, site: int) -> None:
        """Go on without a site that is not on the list any more."""
        self.removed.add(site)
        self.left_out.add(site)
        left = [name for number, name in enumerate(self.names) if number not in self.left_out]
        self.log(
            f"{self.names[site]} is not on the list of sites any more: its key is refused, and the run goes on without "
            f"it, with {', '.join(left) or 'nobody'}"
        )

    def refuse(self, site: int, reason: str) -> None:
        """Refuse a reply by name, tell the site why, and leave it out if that happens too often."""
        self.refusals[site] += 1
        text = f"the reply of {self.names[site]} is refused: {clean(reason).rstrip('.')}"
        if self.refusals[site] >= self.rules.max_refusals:
            self.left_out.add(site)
            text += f"; after {self.refusals[site]} refusals the site is left out"
        self.log(text)
        self.note("refused", {"site": self.names[site], "reason": reason, "left_out": site in self.left_out})
        self.network.send(site, Request("notice", self.run, facts={"text": text}))

    def require(
        self,
        requests: Mapping[int, Request],
        answered: int,
        declined: Mapping[int, str] | None = None,
        majority: bool = True,
    ) -> None:
        """Stop the run where so few usable answers to a question came that nobody can go on with them."""
        needed = self.rules.needed(len(requests), majority)
        if answered < needed:
            who = f" ({self._told(declined)})" if declined else ""
            raise TooFewAnswers(
                f"Only {answered} of the {needed} needed sites gave a usable answer to '{_ticket(requests)}', and "
                f"nobody else is left to wait for{who}. The rounds so far are saved: look into the log, and start the "
                "server again."
            )

    def _told(self, declined: Mapping[int, str]) -> str:
        return "; ".join(f"{self.names[site]} {why.rstrip('.')}" for site, why in sorted(declined.items()))

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
            "min_sites": self.rules.min_sites,
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

    def _handle(self, event: Event, question: _Question[Any]) -> None:
        site, waiting = event.site, question.waiting
        if event.revoked:
            self.remove(site)
            waiting.pop(site, None)
            question.declined.pop(site, None)
        elif event.joined:
            self.log(f"{self.names[site]} has connected")
            self._held.pop(site, None)
            if question.declined.pop(site, None) is not None:
                waiting[site] = _Open(self._course(site, question.requests[site]))
            if site in waiting:
                self._send(site, waiting[site].todo[0])
        elif event.failure is not None:
            why = f"failed: {clean(event.failure)}"
            self.log(f"{self.names[site]} {why}")
            if waiting.pop(site, None) is not None:
                question.declined[site] = why
        elif event.reply is not None:
            self._take(site, event.reply, question)

    def _take(self, site: int, reply: Reply, question: _Question[Any]) -> None:
        """Take an answer: the one that was asked for, one on the way to it, or a stray one."""
        open = question.waiting.get(site)
        if open is None or reply.ticket != open.todo[0].ticket:
            self.strays += not reply.ticket.startswith("notice")
            return
        request = open.todo[0]
        try:
            if len(reply.payload) > request.most_bytes:
                raise RefusedReply(
                    f"it has {len(reply.payload)} bytes, and {request.most_bytes} are the most for '{request.ticket}'"
                )
            if reply.status == OK:
                if request.payload:
                    self._held[site] = digest(request.payload)
                if request.kind == "hello":
                    self._declare(site, reply)
                self.last_steps.note(site, request)
                open.todo.pop(0)
                if not open.todo:
                    question.answers[site] = question.check(site, reply)
            elif reply.status in (UNREADY, BEHIND, MISSING):
                self._take_detour(site, open, reply.status)
            elif reply.status == LOST:
                self._take_loss(site, open, reply.reason)
            else:
                question.declined[site] = f"refuses '{request.ticket}': {reply.reason}"
                self.log(f"{self.names[site]} {question.declined[site]}")
                open.todo.clear()
        except LostState:
            raise
        except FedStrataError as error:
            self.refuse(site, str(error))
            open.todo.clear()
        except Exception as error:  # whatever a reply leads to, the others go on; the type tells where to look
            self.refuse(site, f"it leads to an error ({type(error).__name__}: {error})")
            open.todo.clear()
        if open.todo:
            self._send(site, open.todo[0])
        else:
            del question.waiting[site]

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
        self.agreement.check(declared)
        if self.declarations.setdefault(site, declared) != declared:
            raise RefusedReply("it declares other samples than before")

    def _report(self, question: _Question[Any]) -> None:
        answered, late, out = (
            tuple(self.names[site] for site in sorted(sites))
            for sites in (question.answers, question.waiting, self.left_out)
        )
        self.watch(Standing(str(question), answered, late, out))


def _ticket(requests: Mapping[int, Request]) -> str:
    return next(iter(requests.values())).ticket
