"""What engines show to those who look on: the uploads and models of a round, and the participants' samples.

Looking on changes nothing: what is kept are the tensors that the round made anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Need
from fedstrata.methods.contract.views import Message, Probe
from fedstrata.stack import Stack, Tensors, concatenate


@dataclass(frozen=True)
class Gathered:
    """What was kept of a round, in the order of its participants; what nobody needs is empty."""

    uploads: Message = field(default_factory=Message)
    received: Tensors = field(default_factory=dict)
    started: Tensors = field(default_factory=dict)
    trained: Tensors = field(default_factory=dict)
    client_memory: Stack = field(default_factory=Stack)

    def bytes_kept(self, needs: Collection[Need]) -> int:
        """Tell how much memory is kept for some needs; what stands twice in it counts once."""
        kept: list[Tensor] = []
        if Need.UPLOADS in needs:
            kept += [*self.uploads.tensors.values(), *self.uploads.masks.values(), *self.uploads.numbers.values()]
        if Need.MODELS in needs:
            kept += [*self.received.values(), *self.started.values(), *self.trained.values()]
            kept += self.client_memory.values()
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        return sum(storages.values())


class Observer:
    """Keeps what is needed of a round, as its clients come: one by one, or some at a time."""

    def __init__(self) -> None:
        self._needs: frozenset[Need] = frozenset()
        self._uploads: dict[Sequence[int], Message] = {}
        self._models: dict[Sequence[int], tuple[Tensors, Tensors, Tensors, Tensors]] = {}

    def begin(self, needs: frozenset[Need]) -> None:
        """Forget the round before, and keep from now on what is needed."""
        self._needs, self._uploads, self._models = needs, {}, {}

    def note_uploads(self, clients: Sequence[int], message: Message) -> None:
        """Keep what the server received from some clients."""
        if Need.UPLOADS in self._needs:
            self._uploads[tuple(clients)] = message

    def note_models(
        self, clients: Sequence[int], received: Tensors, started: Tensors, trained: Tensors, memory: Tensors
    ) -> None:
        """Keep the models of some clients as they came, as training began and as it ended, and what clients keep."""
        if Need.MODELS in self._needs:
            self._models[tuple(clients)] = received, started, trained, memory

    def gather(self, participants: Sequence[int]) -> Gathered:
        """Put together what was kept, in the order of the participants."""
        place = {client: number for number, client in enumerate(participants)}

        def in_order(groups: Mapping[Sequence[int], Any]) -> list[Any]:
            used = (clients for clients in groups if clients[0] in place)
            return [groups[clients] for clients in sorted(used, key=lambda clients: place[clients[0]])]

        uploads, models = in_order(self._uploads), in_order(self._models)
        self.begin(self._needs)
        stacks = [_joined(kind) for kind in zip(*models, strict=True)] if models else [Stack()] * 4
        joined = _for_each(Message.join(uploads), len(participants)) if uploads else Message()
        return Gathered(joined, *stacks)


def _joined(stacks: Sequence[Tensors]) -> Stack:
    return Stack(stacks[0]) if len(stacks) == 1 else concatenate(stacks)


def _for_each(message: Message, clients: int) -> Message:
    """Give every client its slice of what is the same for everybody."""

    def spread(tensors: Tensors) -> Tensors:
        return {name: tensor.expand(clients, *tensor.shape[1:]) for name, tensor in tensors.items()}

    return Message(spread(message.tensors), spread(message.masks), spread(message.numbers))


COMMON = frozenset({"representations"})
"""The questions of a probe that look at the samples of several clients at once."""


class ProbeInPieces:
    """Asks some clients at a time, and puts the answers together: as many as fit the memory, or one by one.

    It answers whatever the pieces answer. Tensors in a question and in an answer have a client axis, alone or in dicts
    and tuples. Questions in which clients are compared on the same samples (:data:`COMMON`) are asked of all together;
    how many models run at once is then up to the probe.
    """

    def __init__(self, pieces: Sequence[Sequence[int]], probe_of: Callable[[Sequence[int]], Probe]) -> None:
        self._pieces = pieces
        self._probe_of = probe_of

    def __getattr__(self, question: str) -> Callable[..., Any]:
        """Make the function that asks one piece after another."""
        if question.startswith("_"):
            raise AttributeError(question)
        if question in COMMON:
            everybody = [client for piece in self._pieces for client in piece]
            return cast(Callable[..., Any], getattr(self._probe_of(everybody), question))

        def ask(*given: Any, **named: Any) -> Any:
            answers, first = [], 0
            for clients in self._pieces:
                rows = slice(first, first + len(clients))
                own = [_part(one, rows) for one in given]
                own_named = {name: _part(one, rows) for name, one in named.items()}
                answers.append(getattr(self._probe_of(clients), question)(*own, **own_named))
                first += len(clients)
            return _together(answers)

        return ask


def probe_in_pieces(clients: Sequence[int], at_once: int, probe_of: Callable[[Sequence[int]], Probe]) -> Probe:
    """Offer the data of some clients, asked at most some at once."""
    if len(clients) <= at_once:
        return probe_of(clients)
    pieces = [clients[first : first + at_once] for first in range(0, len(clients), at_once)]
    return cast(Probe, ProbeInPieces(pieces, probe_of))


def _part(given: Any, rows: slice) -> Any:
    """Take the slices of some clients out of a question."""
    if isinstance(given, Tensor):
        return given[rows]
    if isinstance(given, dict):
        return type(given)({name: _part(one, rows) for name, one in given.items()})
    return given


def _together(answers: Sequence[Any]) -> Any:
    """Join the answers of some clients each."""
    first = answers[0]
    if isinstance(first, Tensor):
        return torch.cat(list(answers))
    if isinstance(first, dict):
        return type(first)({name: _together([answer[name] for answer in answers]) for name in first})
    if isinstance(first, tuple | list):
        return type(first)(_together(list(some)) for some in zip(*answers, strict=True))
    raise TypeError(f"Answers of single clients cannot be put together from {type(first).__name__}.")
