"""The network of a federation over a Flower Grid, and which of its nodes is which site."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from fedstrata.deployment.federation import Event
from fedstrata.deployment.flower.internals import APP_RAISED
from fedstrata.deployment.flower.messages import SECONDS_TO_LIVE, from_record, push
from fedstrata.deployment.foreign_text import clean
from fedstrata.deployment.protocol import ProtocolError, Reply, Request

Nodes = Callable[[], Mapping[int, tuple[int, str]]]
"""The connected sites: from their numbers to Flower's node ids, and a mark that changes when a node connects anew."""


_SECONDS_BEFORE_AGAIN = 5.0
"""A message that Flower gave up is sent again after so long: its node may have gone, which is known a little later."""


@dataclass(frozen=True)
class _Asked:
    """A request that was sent to a site."""

    site: int
    request: Request


class GridNetwork:
    """Carries requests and answers over a Flower Grid (see :class:`fedstrata.deployment.federation.Network`).

    ``forget`` is told of messages that nobody waits for any more, ``allow`` of how many bytes the next answer of a site
    may have, and ``failures`` tells whose answers were cut off because they had more. A message that Flower gives up,
    because its time to live is over, is sent again; a site that has done the step meanwhile answers from its disk, and
    one that still works on it takes up no second message before.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Nodes,
        seconds_between: float = 0.5,
        forget: Callable[[str], None] = lambda message: None,
        revoked: Callable[[], Iterable[int]] = tuple,
        allow: Callable[[int, int], None] = lambda site, most_bytes: None,
        failures: Callable[[], Mapping[int, str]] = dict,
        seconds_to_live: float = SECONDS_TO_LIVE,
    ) -> None:
        self.grid = grid
        self.nodes = nodes
        self.seconds_between = seconds_between
        self.forget = forget
        self.revoked = revoked
        """Tells the sites that were revoked since it was asked last."""
        self.allow = allow
        self.failures = failures
        self.seconds_to_live = seconds_to_live
        self._connected: dict[int, tuple[int, str]] = {}
        self._open: dict[str, _Asked] = {}
        self._again: list[tuple[float, _Asked]] = []

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def send(self, site: int, request: Request) -> None:
        """Send a request to a site that is connected; what was asked of it before is not waited for any more."""
        if request.kind != "notice":
            self._give_up(site)
            self.allow(site, request.most_bytes)
        if site in self._connected:
            node, _ = self._connected[site]
            [message] = push(self.grid, [(node, request)], self.seconds_to_live)
            self._open[message] = _Asked(site, request)

    def receive(self, seconds: float) -> list[Event]:
        """Return who has connected and what was answered, after waiting at most so long for the first of it."""
        end = self.now() + seconds
        while True:
            events = [*self._refused(), *self._joined(), *self._answered(), *self._failed()]
            self._ask_again()
            left = end - self.now()
            if events or left <= 0:
                return events
            time.sleep(min(self.seconds_between, left))

    def _give_up(self, site: int) -> None:
        """Forget what was asked of a site; nothing that it answers to that is looked at any more."""
        self._again = [(when, asked) for when, asked in self._again if asked.site != site]
        for message in [message for message, asked in self._open.items() if asked.site == site]:
            self._open.pop(message)
            self.forget(message)

    def _refused(self) -> list[Event]:
        sites = list(self.revoked())
        for site in sites:
            self._give_up(site)
        return [Event(site, revoked=True) for site in sites]

    def _joined(self) -> list[Event]:
        nodes = dict(self.nodes())
        new = [site for site, node in nodes.items() if self._connected.get(site) != node]
        self._connected = nodes
        return [Event(site, joined=True) for site in new]

    def _answered(self) -> list[Event]:
        """Fetch answers one by one: what one of them says of itself, or does to Flower, concerns no other site."""
        events = []
        for name, asked in list(self._open.items()):
            try:
                answers = [_event(asked.site, message) for message in self.grid.pull_messages([name])]
            except Exception as error:
                answers = [Event(asked.site, failure=f"its answer cannot be read ({type(error).__name__}: {error})")]
            if answers:
                del self._open[name]
                events += [event for event in answers[:1] if event is not None]
                if answers[0] is None and asked.request.kind != "notice":
                    self._again.append((self.now() + min(_SECONDS_BEFORE_AGAIN, self.seconds_to_live), asked))
                if answers[0] is None or answers[0].failure is not None:
                    self.forget(name)
        return events

    def _failed(self) -> list[Event]:
        failures = self.failures()
        for site in failures:
            self._give_up(site)
        return [Event(site, failure=reason) for site, reason in failures.items()]

    def _ask_again(self) -> None:
        """Send what Flower gave up once more; a site that is not connected is asked when it joins."""
        due, self._again = (
            [asked for when, asked in self._again if when <= self.now()],
            [(when, asked) for when, asked in self._again if when > self.now()],
        )
        for asked in due:
            self.send(asked.site, asked.request)


class AskedNodes:
    """Finds out which node is which site by asking every new node for its ``partition-id``."""

    def __init__(self, grid: Grid, sites: int, seconds_between: float = 1.0) -> None:
        self.grid = grid
        self.sites = sites
        self.seconds_between = seconds_between
        self._asked: dict[str, int] = {}
        self._known: dict[int, int] = {}
        self._last = -seconds_between

    def __call__(self) -> dict[int, tuple[int, str]]:
        """List the sites that are there."""
        if time.monotonic() - self._last >= self.seconds_between:
            self._last = time.monotonic()
            self._ask(set(self.grid.get_node_ids()))
        return {number: (node, "") for node, number in self._known.items()}

    def _ask(self, here: set[int]) -> None:
        new = sorted(here - set(self._asked.values()) - set(self._known))
        if new:
            messages = push(self.grid, [(node, Request("who")) for node in new])
            self._asked |= dict(zip(messages, new, strict=True))
        for message in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(message.metadata.reply_to_message_id, None)
            event = None if node is None else _event(0, message)
            number = None if event is None or event.reply is None else event.reply.facts.get("number")
            if node is not None and type(number) is int and 0 <= number < self.sites:
                self._known[node] = number
        self._known = {node: number for node, number in self._known.items() if node in here}


def _event(site: int, message: Message) -> Event | None:
    """Read an answer. A message that Flower gave up is none: its site is asked again."""
    if message.has_error():
        if message.error.code == APP_RAISED:
            return Event(site, failure=clean(str(message.error.reason)))
        return None
    try:
        return Event(site, Reply.read(*from_record(message.content)))
    except ProtocolError as error:
        return Event(site, failure=clean(str(error)))
