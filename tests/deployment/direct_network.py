"""A network in one process, with a clock of its own: answers may be altered, delayed, doubled, lost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from small_world import ingredients

from fedstrata.deployment.federation import Event
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.runs.preparing import Ingredients

Delivery = tuple[float, Reply | str]
"""After how many seconds an answer comes, or a failure."""
Tamper = Callable[[int, Request, Reply], Sequence[Delivery]]


def honest(site: int, request: Request, reply: Reply) -> Sequence[Delivery]:
    return [(0.1, reply)]


class DirectNetwork:
    def __init__(
        self,
        folder: Path,
        sites: int,
        tamper: Tamper = honest,
        own: Ingredients | None = None,
        away: Sequence[int] = (),
    ) -> None:
        self.folder = folder
        self.own = own or ingredients()
        self.lines: list[list[str]] = [[] for _ in range(sites)]
        self.sites = [self.start(number) for number in range(sites)]
        self.tamper = tamper
        self.time = 0.0
        self.order = count()
        self.connected = set(range(sites)) - set(away)
        self.queue: list[tuple[float, int, Event]] = []
        self.sent: list[tuple[int, Request]] = []
        for site in sorted(self.connected):
            self.later(0.0, Event(site, joined=True))

    def start(self, number: int) -> Site:
        data = SiteData(part=number, ingredients=self.own)
        return Site(self.folder / f"site-{number}", data, self.lines[number].append)

    def restart(self, site: int, after: float = 0.0) -> None:
        """Let a site lose all that is not on its disk, and connect again."""
        self.sites[site] = self.start(site)
        self.connected.add(site)
        self.later(after, Event(site, joined=True))

    def later(self, seconds: float, event: Event) -> None:
        heapq.heappush(self.queue, (self.time + seconds, next(self.order), event))

    def now(self) -> float:
        return self.time

    def send(self, site: int, request: Request) -> None:
        self.sent.append((site, request))
        if site in self.connected:
            for seconds, what in self.tamper(site, request, self.sites[site].answer(request)):
                event = Event(site, failure=what) if isinstance(what, str) else Event(site, what)
                self.later(seconds, event)

    def receive(self, seconds: float) -> list[Event]:
        if not self.queue or self.queue[0][0] > self.time + seconds:
            self.time += seconds
            return []
        self.time = max(self.time, self.queue[0][0])
        events = []
        while self.queue and self.queue[0][0] <= self.time:
            events.append(heapq.heappop(self.queue)[2])
        return events
