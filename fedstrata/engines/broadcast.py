"""What the server sends in a round, as the stacked engine hands it out: to a chunk of clients at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedstrata.engines.server import ServerSide, ServerState
from fedstrata.methods.contract.views import Message
from fedstrata.transfer import numbers_on
from fedstrata.wire import AS_IS, bytes_to_count, quantisation_error, received


class Broadcast:
    """The message to some clients, built for all of them at once.

    Where a method relays the models of other clients (:attr:`~fedstrata.methods.Needs.relays`), whose number times that
    of the clients would not fit the memory, it is built for a chunk at a time, and only what it cost is kept.
    """

    def __init__(
        self, side: ServerSide, state: ServerState, clients: Sequence[int], round: int, testing: bool = False
    ) -> None:
        self._side = side
        self._state = state
        self._clients = clients
        self._round = round
        self._testing = testing
        self._values = side.setting.download_values
        self._whole = None if side.setting.method.needs.relays else self._built(clients)
        self._got = None if self._whole is None else received(self._whole, self._values)
        self._relayed_names: frozenset[str] = frozenset()
        self._relayed_bytes = 0
        self._relayed_errors: list[Tensor] = []

    def _built(self, clients: Sequence[int]) -> Message:
        return self._side.broadcast(self._state, clients, self._round, self._testing)

    @property
    def common(self) -> Message | None:
        """What all clients receive, if it is the same for everybody."""
        return self._got if self._got is not None and self._got.common else None

    def chunks(self, size: int) -> Iterator[tuple[Sequence[int], Message]]:
        """Hand it out to so many clients at a time: their numbers, and what they receive."""
        device, count = self._side.setting.device, len(self._clients)
        for begin in range(0, count, size):
            ids = self._clients[begin : begin + size]
            if self._got is None:
                yield ids, self._relayed(ids)
            elif len(ids) == count:
                yield ids, self._got
            else:
                yield ids, self._got.rows(torch.arange(begin, begin + len(ids), device=device))

    def received_by(self, clients: Sequence[int]) -> Message:
        """Return what some clients receive, given by their numbers, where it is sent to everybody."""
        if self._got is None:
            return self._relayed(clients)
        return self._got.rows(numbers_on(clients, self._side.setting.device))

    def _relayed(self, clients: Sequence[int]) -> Message:
        message = self._built(clients)
        if not self._testing:
            self._relayed_names = frozenset(message.tensors)
            self._relayed_bytes += self._bytes(message, clients)()
            if self._values != AS_IS:
                self._relayed_errors.append(quantisation_error(message, self._values))
        return received(message, self._values)

    def _bytes(self, message: Message, clients: Sequence[int]) -> Callable[[], int]:
        known = self._side.masks_known(self._state, clients, self._round, upload=False)
        return bytes_to_count(message, len(clients), known, self._values)

    @property
    def names(self) -> frozenset[str]:
        """What was sent."""
        return self._relayed_names if self._whole is None else frozenset(self._whole.tensors)

    def bytes(self) -> Callable[[], int]:
        """Prepare to count the bytes of the messages to all clients, after they were handed out."""
        relayed = self._relayed_bytes
        return (lambda: relayed) if self._whole is None else self._bytes(self._whole, self._clients)

    def errors(self) -> Tensor:
        """Tell what each client's message lost in a narrower type, or the one of all ``[K]`` or ``[1]``."""
        if self._whole is None:
            return torch.cat(self._relayed_errors)
        return quantisation_error(self._whole, self._values)
