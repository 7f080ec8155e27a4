"""What every engine offers to the driver of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from fedstrata.engines.evaluation import Scores
from fedstrata.engines.observing import Observer
from fedstrata.engines.server import ServerSide, ServerState
from fedstrata.engines.setting import Setting
from fedstrata.engines.stopwatch import Stopwatch
from fedstrata.flops import Cost
from fedstrata.methods.contract.views import Message, Probe
from fedstrata.stack import Stack, Tensors, under
from fedstrata.wire import AS_IS, quantisation_error


@dataclass(frozen=True)
class RoundReport:
    """What a round cost and gave.

    ``participants`` are those who really took part: on a network, those whose replies came and were used. ``sent``
    names what the server sent them. ``loss`` is each participant's mean training loss, ``cost`` what its training took,
    ``up`` and ``down`` the bytes of all replies and broadcasts, or what counts them when they are asked for,
    ``before`` the scores before aggregation, if asked, and ``judged`` those on the samples that clients hold out to
    choose models by, where they do. ``errors`` are the metrics of what was lost by sending values in
    a narrower type, if anything was. ``aggregation`` knows how long the server took to make the next model of the
    replies, where it was measured.
    """

    participants: tuple[int, ...]
    sent: frozenset[str]
    loss: Tensor
    cost: Cost
    up: int | Callable[[], int]
    down: int | Callable[[], int]
    before: Scores | None
    judged: Scores | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    aggregation: Stopwatch | None = None

    @cached_property
    def bytes_up(self) -> int:
        """The bytes of all replies; masks on a GPU are counted now, which waits for it."""
        return self.up() if callable(self.up) else self.up

    @cached_property
    def bytes_down(self) -> int:
        """The bytes of all broadcasts, counted likewise."""
        return self.down() if callable(self.down) else self.down


@dataclass(frozen=True)
class Adapted:
    """Clients' models after their final adaptation: stacks over all clients, on the CPU, where they are here.

    ``scores`` are those on the clients' test sets, ``judged`` those on the samples that clients hold out to choose
    models by, where they do.
    """

    models: Tensors
    scores: Scores
    judged: Scores | None = None


def wire_errors(setting: Setting, up: Callable[[], Tensor], sent: Message | Callable[[], Tensor]) -> dict[str, float]:
    """Tell what messages lost on their way, in the mean, where values travel in a narrower type.

    ``up`` measures it for each participant's reply (:func:`fedstrata.wire.quantisation_error`), ``sent`` is the
    broadcast, or measures it too.
    """

    def down() -> Tensor:
        return quantisation_error(sent, setting.download_values) if isinstance(sent, Message) else sent()

    ways = {"up": (setting.upload_values, up), "down": (setting.download_values, down)}
    return {f"wire_error.{way}": float(measure().mean()) for way, (values, measure) in ways.items() if values != AS_IS}


class Engine(Protocol):
    """Runs rounds and holds the state of the server and of all clients."""

    @property
    def side(self) -> ServerSide:
        """What the server does, and what its hooks see."""
        ...

    @property
    def server(self) -> ServerState:
        """The server's state."""
        ...

    @property
    def observer(self) -> Observer:
        """What keeps of a round that which others want to look at."""
        ...

    def probe(self, clients: Sequence[int], round: int) -> Probe | None:
        """Offer the data of some clients after a round; none where it lies elsewhere."""
        ...

    def exchange(self, round: int) -> tuple[int, int]:
        """Do what exchanges a method has before a round; return the bytes up and down."""
        ...

    def round(
        self, round: int, participants: Sequence[int], evaluate: bool, losses_so_far: Sequence[float] = ()
    ) -> RoundReport:
        """Run one round; ``losses_so_far`` are the mean training losses of the rounds before."""
        ...

    def after(self, round: int) -> tuple[Scores, dict[str, float]]:
        """Test every client's own model after aggregation, and the global one, if it exists, on sets that nobody owns:
        what it reaches on these, by the names of metrics.
        """
        ...

    def adapted(self, round: int) -> Adapted:
        """Let every client adapt its model once more, and test it; clients' state does not change."""
        ...

    def judged(self, round: int) -> Iterator[tuple[Sequence[int], Tensors, np.ndarray]]:
        """Let clients judge the models that they use after a round on samples held out for that.

        Some at a time: their numbers, their models, and the accuracies.
        """
        ...

    def models(self, clients: Sequence[int], round: int) -> Tensors:
        """Return the models that some clients use after a round, as they are tested: a stack in their order."""
        ...

    def clients(self) -> Stack:
        """Return the state of all clients, in their order."""
        ...

    def restore(self, server: ServerState, clients: Stack) -> None:
        """Go on from a saved state."""
        ...


def pack(server: ServerState, clients: Stack) -> Stack:
    """Put all state into one stack, as a checkpoint stores it."""
    return under("server/model", server.model) | under("server/memory", server.memory) | under("clients", clients)


def unpack(state: Stack) -> tuple[ServerState, Stack]:
    """Take such a stack apart again."""
    return ServerState(state.group("server/model"), state.group("server/memory")), state.group("clients")
