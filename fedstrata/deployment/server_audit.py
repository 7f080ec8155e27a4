"""What a server writes into its audit log: who connected from where, what was asked, what came, and what of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.callbacks import RoundView
from fedstrata.deployment.audit import ANCHORED, AuditLog, head_in, payload_facts
from fedstrata.deployment.federation import Event, Network
from fedstrata.deployment.protocol import REFUSED, Request
from fedstrata.deployment.rules import Rules
from fedstrata.experiment import Experiment
from fedstrata.stack import Tensors

STRANGERS_A_MINUTE = 60
"""So many refused connections are written down one by one; of more only the number, or they would fill the disk."""


class ServerAudit:
    """Writes down what happens at a server; connections come from other threads than the rounds."""

    def __init__(self, log: AuditLog, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.log = log
        self.names = names
        self._clock = clock
        self._mutex = threading.Lock()
        self._since = clock()
        self._strangers = 0

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Note something that is on the disk before the server goes on."""
        if event == "end":
            with self._mutex:
                self._tell_of_many(at_once=True)
        self.log.note(event, facts)

    def start(self, run: str, experiment: Experiment, rules: Rules, committed: int) -> None:
        """Note that a run begins, or goes on behind a round."""
        facts = {
            "version": __version__,
            "run": run,
            "experiment": sha256(experiment.to_toml().encode()).hexdigest(),
            "method": experiment.method,
            "model": experiment.model,
            "rounds": experiment.rounds,
            "sites": list(self.names),
            "rules": vars(rules),
            "committed": committed,
        }
        self.note("start", facts)

    def over(self, network: Network) -> AuditedNetwork:
        """Let a network write down what travels over it."""
        return AuditedNetwork(network, self)

    def committed(self, model: Callable[[], Tensors]) -> Callable[[RoundView], None]:
        """Make what is called after every round: it notes the hash of the model, as its file has it in the end."""

        def note(update: RoundView) -> None:
            spent = update.metrics.get("privacy.epsilon")
            facts = {"round": update.round, "model": sha256(files.to_safetensors(model())).hexdigest()}
            self.note("round", facts if spent is None else {**facts, "epsilon": spent})

        return note

    # What the transport tells, from its own threads ------------------------------------------------------------------

    def connected(self, site: int | str, address: str) -> None:
        """Note that a site has connected, and from where."""
        self.log.note("connected", {"site": self._name(site), "address": address}, wait=False)

    def disconnected(self, site: int | str, address: str = "") -> None:
        """Note that a site has gone."""
        self.log.note("disconnected", {"site": self._name(site), "address": address}, wait=False)

    def refused(self, address: str, fingerprint: str, reason: str) -> None:
        """Note a failed log-in."""
        with self._mutex:
            self._tell_of_many()
            self._strangers += 1
            if self._strangers <= STRANGERS_A_MINUTE:
                facts = {"address": address, "fingerprint": fingerprint, "reason": reason}
                self.log.note("stranger", facts, wait=False)

    def _tell_of_many(self, at_once: bool = False) -> None:
        """Once a minute is over, note how many strangers came in it that were not written down."""
        if self._clock() - self._since >= 60 or at_once:
            more = self._strangers - STRANGERS_A_MINUTE
            if more > 0:
                self.log.note("strangers", {"more": more}, wait=False)
            self._since, self._strangers = self._clock(), 0

    def _name(self, site: int | str) -> str:
        return self.names[site] if isinstance(site, int) and 0 <= site < len(self.names) else str(site)


class AuditedNetwork:
    """Carries requests and answers as the network beneath does, and writes them down.

    A request to a site that is away is asked again, and written down again, when the site is back.
    """

    def __init__(self, network: Network, audit: ServerAudit) -> None:
        self.network = network
        self.audit = audit
        self._named: tuple[bytes, dict[str, Any]] = (b"", payload_facts(b""))

    def now(self) -> float:
        """Return the time of the network beneath."""
        return self.network.now()

    def send(self, site: int, request: Request) -> None:
        """Write a request down, and send it; with some, the head of the log travels."""
        if request.kind in ANCHORED:
            request = replace(request, facts={**request.facts, "head": self.audit.log.head})
        self._note("asked", site, kind=request.kind, place=request.place.to_facts(), **self._payload(request.payload))
        self.network.send(site, request)

    def receive(self, seconds: float) -> list[Event]:
        """Return what has come, once it is written down."""
        events = self.network.receive(seconds)
        for event in events:
            if event.joined:
                self._note("joined", event.site)
            elif event.failure is not None:
                self._note("failed", event.site, reason=event.failure)
            elif event.reply is not None:
                reply, head = event.reply, head_in(event.reply.facts)
                self._note(
                    "answered",
                    event.site,
                    ticket=reply.ticket,
                    status=reply.status,
                    **payload_facts(reply.payload),
                    **({"reason": reply.reason} if reply.status == REFUSED else {}),
                    **({} if head is None else {"site_head": head}),
                )
        return events

    def _note(self, event: str, site: int, **facts: Any) -> None:
        self.audit.log.note(event, {"site": self.audit.names[site], **facts}, wait=False)

    def _payload(self, payload: bytes) -> Mapping[str, Any]:
        """Name a payload; most go to many sites, and are hashed once."""
        if payload is not self._named[0]:
            self._named = payload, payload_facts(payload)
        return self._named[1]
