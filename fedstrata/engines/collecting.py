"""Taking the replies of a round as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedstrata.engines.server import ServerSide, ServerState
from fedstrata.engines.stopwatch import Stopwatch
from fedstrata.methods.contract.views import Message
from fedstrata.stack import Tensors


class RunningMean:
    r"""A weighted mean of models that come one by one, in the memory of one: :math:`\sum_k u_k w_k / \sum_k u_k`.

    Under masks the sums run over the clients that sent an entry. They are kept in double precision, so that the order
    in which replies come does not matter for single precision, but for a rounding in very rare cases.
    """

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self._weights: dict[str, Tensor] = {}

    def add(self, message: Message, weight: Tensor) -> None:
        """Add one client's tensors ``[1, ...]`` with its weight, a number in double precision."""
        for name, tensor in message.tensors.items():
            mask = message.masks.get(name)
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(tensor[0], dtype=torch.float64)
                self._weights[name] = torch.zeros_like(weight)
            self._sums[name] += weight * tensor[0]
            self._weights[name] = self._weights[name] + (weight if mask is None else weight * mask[0])

    def mean(self, otherwise: Mapping[str, Tensor]) -> Tensors:
        """Return the mean, for the names of ``otherwise``, which also gives the entries that nobody sent."""
        return {
            name: _divided(total, self._weights[name], otherwise[name])
            for name, total in self._sums.items()
            if name in otherwise
        }


def _divided(total: Tensor, weight: Tensor, otherwise: Tensor) -> Tensor:
    mean = total / weight.where(weight > 0, 1)
    mean = mean if otherwise.is_floating_point() else mean.round()
    return mean.to(otherwise.dtype).where(weight > 0, otherwise)


class Collector:
    """Makes the server's next state of the replies of a round, in whatever order they come.

    Where the method does nothing but add replies up, they are added up at once, and the server's memory does not grow
    with the number of clients; methods that look at single replies have all of them kept until the end. ``watch`` tells
    how long both took: weighing, merging, and what the method does to the new model.
    """

    def __init__(self, side: ServerSide, state: ServerState, round: int) -> None:
        self.side = side
        self.state = state
        self.round = round
        self.clients: list[int] = []
        self.watch = Stopwatch(side.setting.device)
        self._method = side.setting.method
        self._keeps = self._method.objection_to_summing is not None
        self._mean = RunningMean()
        self._replies: dict[int, Message] = {}

    def add(self, client: int, reply: Message) -> None:
        """Take the reply of a client."""
        self.clients.append(client)
        if self._keeps:
            self._replies[client] = reply
        else:
            with self.watch.measuring():
                self._add([client], [reply])

    def finish(self) -> ServerState:
        """Return the server's state after the round, from the replies that came."""
        with self.watch.measuring():
            return self._finished()

    def _finished(self) -> ServerState:
        participants = sorted(self.clients)
        if not self._keeps:
            return self.side.advance(self.state, participants, self._mean.mean(self.state.model), self.round)
        replies = [self._replies[client] for client in participants]
        if not self._method.merges_by_mean:
            return self.side.aggregate(self.state, participants, Message.join(replies), self.round)
        self._add(participants, replies)
        merged = self._mean.mean(self.state.model)
        return self.side.advance(self.state, participants, merged, self.round, Message.join(replies))

    def _add(self, clients: Sequence[int], replies: Sequence[Message]) -> None:
        for reply, weight in zip(replies, self.side.weights(clients), strict=True):
            self._mean.add(reply, weight)
