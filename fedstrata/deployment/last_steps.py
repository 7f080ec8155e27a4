"""The last step of each site that the server has heard of, by which a state that is gone, or another one, is noticed.

What a site keeps to itself lies on its own disk, and the server's part of the run on the server's. Either can be lost,
or set back to an older copy. So the server keeps with every round which step of each site it has heard of last, and
names that step in everything that goes on from it. A site that does not hold just that step any more says so, instead
of going on from another state in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedstrata.deployment.protocol import Place, ProtocolError, Request, digest
from fedstrata.runs.summaries import WITHOUT_STATE
from fedstrata.stack import Stack

_CHANGING = ("survey", "adopt", "train")
_RESTING_ON = (*_CHANGING, "test", "adapt")
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Step:
    """A step that a site has done: its place in the run, and the digest of what it was sent for it."""

    place: Place
    asked: str

    def to_facts(self) -> list[Any]:
        """Write it into a request."""
        return [self.place.to_facts(), self.asked]

    @classmethod
    def read(cls, value: Any) -> Step | None:
        """Read it from a request that may name one; whatever cannot be one is a :class:`ProtocolError`."""
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], str):
            raise ProtocolError("A request came that names a step which can be none.")
        return cls(Place.read(value[0]), value[1])


@dataclass
class LastSteps:
    """What the server knows of the sites' states: the last step of each, and who had to go on without its state."""

    steps: dict[int, Step] = field(default_factory=dict)
    anew: dict[int, int] = field(default_factory=dict)
    """The round in which a site went on without the state that it had, by the site's number."""

    def facts(self, site: int, request: Request) -> dict[str, Any]:
        """Name the step from which a request goes on, where the server has heard of one."""
        step = self.steps.get(site)
        rests = step is not None and request.kind in _RESTING_ON and step.place < request.place
        return {"after": step.to_facts()} if step is not None and rests else {}

    def note(self, site: int, request: Request) -> None:
        """Keep that a site has done what it was asked for."""
        if request.kind in _CHANGING:
            self.steps[site] = Step(request.place, digest(request.payload))

    def forget(self, site: int, round: int) -> None:
        """Let a site go on from whatever it has, and remember that it did."""
        self.steps.pop(site, None)
        self.anew[site] = round

    def metrics(self) -> Mapping[str, float]:
        """Tell how many sites have gone on without their state, where any has."""
        return {WITHOUT_STATE: float(len(self.anew))} if self.anew else {}

    def to_stack(self, sites: int) -> Stack:
        """Write it as a stack over the sites, which is how a checkpoint keeps what belongs to clients."""
        steps = [self.steps.get(site, _NONE) for site in range(sites)]
        return Stack(
            {
                "last_step/place": torch.tensor([step.place.to_facts() for step in steps]),
                "last_step/asked": torch.tensor([list(bytes.fromhex(step.asked)) for step in steps], dtype=torch.uint8),
                "last_step/anew": torch.tensor([self.anew.get(site, 0) for site in range(sites)]),
            }
        )

    def restore(self, stack: Stack) -> None:
        """Read what :meth:`to_stack` has written; runs that were begun before it existed have nothing of it."""
        if not stack:
            return
        places, asked = stack["last_step/place"].tolist(), stack["last_step/asked"].tolist()
        steps = {site: Step(Place.read(place), bytes(asked[site]).hex()) for site, place in enumerate(places)}
        self.steps = {site: step for site, step in steps.items() if step != _NONE}
        self.anew = {site: round for site, round in enumerate(stack["last_step/anew"].tolist()) if round}


_NONE = Step(Place(), bytes(_DIGEST_BYTES).hex())


def what_is_missing(needed: Step, kept: list[Place]) -> str:
    """Say of a site that does not hold a needed step what it holds instead."""
    round = needed.place.round
    if not kept:
        return f"it has taken part up to round {round}, and nothing is left of what it kept to itself"
    first, newest = kept[0], kept[-1]
    if newest < needed.place:
        return (
            f"it has taken part up to round {round}, but its state is of round {newest.round}, as if set back to an "
            "older copy"
        )
    if needed.place < first:
        return (
            f"the server goes on after round {round}, as if set back to an older copy, but the site has come to round "
            f"{newest.round} since, and keeps its states of rounds {first.round} to {newest.round} only"
        )
    return f"its state of round {round} comes from another course of the run than the server's"
