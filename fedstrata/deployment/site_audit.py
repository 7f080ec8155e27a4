"""What a site writes into its audit log: who asked for what, and what left, before it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.deployment.audit import ANCHORED, AuditLog, head_in, payload_facts
from fedstrata.deployment.protocol import OK, REFUSED, Reply, Request
from fedstrata.trained.model import WEIGHTS_FILE
from fedstrata.wire import WireError, outline

_TOLD = {
    "hello": ("number", "sites", "session", "committed", "min_sites"),
    "notice": ("text",),
    "end": ("state", "text"),
}
"""The facts of requests that are written down with their values; of the others only the names are."""


@dataclass(frozen=True)
class SiteAudit:
    """Writes down what a site is asked and what leaves it; no values of tensors, losses or scores, and no secrets.

    ``spent`` tells the epsilon that the site has spent so far, where it keeps an account of that.
    """

    log: AuditLog
    spent: Callable[[], float | None] = lambda: None

    def start(self, **facts: Any) -> None:
        """Note that the site was started, and how."""
        self.log.note("start", {"version": __version__, **facts})

    def note(self, event: str, **facts: Any) -> None:
        """Note something else that happens to the site."""
        self.log.note(event, facts)

    def asked(self, request: Request) -> None:
        """Note a request, before anything is done for it."""
        facts = request.facts
        told = {key: facts[key] for key in _TOLD.get(request.kind, ()) if isinstance(facts.get(key), str | int)}
        experiment = facts.get("experiment")
        if request.kind == "hello" and isinstance(experiment, Mapping):
            told |= {key: experiment.get(key) for key in ("method", "model", "rounds", "epochs", "steps", "metrics")}
            told |= {"experiment": _hash_of(experiment), "secure": facts.get("secure") is not None}
        self.log.note(
            "asked",
            {
                **_place(request),
                "facts": sorted(facts),
                **payload_facts(request.payload),
                **told,
                **({"server_head": head_in(facts)} if head_in(facts) else {}),
            },
            wait=False,
        )

    def answered(self, request: Request, reply: Reply) -> Reply:
        """Note what is about to leave, or why nothing does; return the reply, with the head of the log where due."""
        if reply.status == REFUSED:
            self.log.note("refused", {**_place(request), "reason": reply.reason})
            return reply
        spent = self.spent()
        self.log.note(
            "left",
            {
                **_place(request),
                "status": reply.status,
                "facts": _names(reply.facts),
                "facts_bytes": len(reply.header()),
                **payload_facts(reply.payload),
                **_contents(reply.payload),
                **({} if spent is None else {"epsilon": spent}),
            },
        )
        if request.kind in ANCHORED and reply.status == OK:
            return replace(reply, facts={**reply.facts, "head": self.log.head})
        return reply

    def saved(self, folder: Path, round: int) -> None:
        """Note where the site's own model lies, and its hash."""
        facts = {"folder": str(folder), "round": round, **payload_facts(files.read_bytes(folder / WEIGHTS_FILE))}
        self.log.note("saved", facts, wait=False)

    @contextmanager
    def until_stopped(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Note how the site's process ends, unless it is killed, and tell the head of the log."""
        why = "stopped"
        try:
            yield
        except BaseException as error:
            why = str(error) or type(error).__name__
            raise
        finally:
            self.log.note("stop", {"reason": why})
            tell(str(self.log))


def _place(request: Request) -> dict[str, Any]:
    return {"kind": request.kind, "run": request.run, "round": request.round, "place": request.place.to_facts()}


def _names(facts: Mapping[str, Any]) -> list[str]:
    """Name the facts of a reply, and of the scores each one."""
    return sorted(name for key, value in facts.items() for name in (_inner(key, value) if key == "scores" else [key]))


def _inner(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _inner(f"{name}.{key}", item)
    else:
        yield name


def _contents(payload: bytes) -> dict[str, Any]:
    """List the tensors of an upload; one under the masks of secure aggregation is whole numbers without a name."""
    try:
        return {"tensors": outline(payload)} if payload else {}
    except WireError:
        return {"masked": True}


def _hash_of(experiment: Mapping[str, Any]) -> str:
    from fedstrata.experiment import Experiment

    try:
        return sha256(Experiment.from_mapping(dict(experiment)).to_toml().encode()).hexdigest()
    except Exception:  # whatever a server may send instead; the site refuses it by itself
        return "none"
