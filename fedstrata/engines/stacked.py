"""The stacked engine: all participating clients as one batch of models on one device, in chunks that fit the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.client import (
    ClientState,
    Setting,
    adapt,
    client_round,
    first_state,
    own_model,
)
from fedstrata.engines.engine import RoundReport
from fedstrata.engines.evaluation import Evaluator, Scores
from fedstrata.engines.exchange import adopt_announcement, answer_survey
from fedstrata.engines.forward import StackedForward
from fedstrata.engines.server import (
    Declared,
    ServerState,
    broadcast,
    conclude,
    first_server_state,
    server_round,
)
from fedstrata.methods.base import Message
from fedstrata.stack import Tensors, take_first
from fedstrata.wire import encoded_sizes


class StackedEngine:
    """Runs rounds with ``chunk`` clients at once."""

    def __init__(self, setting: Setting, model: nn.Module, data: DeviceData, declared: Declared, chunk: int) -> None:
        self.setting = setting
        self.data = data
        self.declared = declared
        self.chunk = chunk
        self.forward = StackedForward(model)
        self.evaluator = Evaluator(setting, data)
        self.server = first_server_state(setting, declared)
        self._clients = first_state(setting, data, range(setting.clients))

    def exchange(self, round: int) -> tuple[int, int]:
        """Do what exchanges the method has before a round; return the bytes up and down."""
        up = down = 0
        everybody = range(self.setting.clients)
        for exchange in self.setting.method.exchanges_before(round):
            message = broadcast(self.setting, self.server, self.declared, everybody, round)
            replies = [
                answer_survey(
                    self.setting,
                    self.forward,
                    self.data,
                    ids,
                    self._clients.rows(rows),
                    exchange,
                    message.rows(places),
                    round,
                )
                for places, ids, rows in self._chunks(everybody)
            ]
            joined = Message.join(replies)
            self.server, announcement = conclude(self.setting, self.server, self.declared, exchange, joined, round)
            self._clients = adopt_announcement(
                self.setting, self.data, everybody, self._clients, exchange, announcement, round
            )
            up += sum(encoded_sizes(joined, len(everybody)))
            down += sum(encoded_sizes(message, len(everybody)) + encoded_sizes(announcement, len(everybody)))
        return up, down

    def round(self, round: int, participants: Sequence[int], evaluate: bool) -> RoundReport:
        """Run one round."""
        message = broadcast(self.setting, self.server, self.declared, participants, round)
        replies, losses, scores = [], [], []
        for places, ids, rows in self._chunks(participants):
            outcome = client_round(
                self.setting, self.forward, self.data, ids, self._clients.rows(rows), message.rows(places), round
            )
            self._clients.put_(rows, outcome.state)
            replies.append(outcome.reply)
            losses.append(outcome.loss)
            if evaluate:
                scores.append(self.evaluator.own_models(self.forward, outcome.trained, ids))
        joined = Message.join(replies)
        self.server = server_round(self.setting, self.server, self.declared, participants, joined, round)
        return RoundReport(
            loss=torch.cat(losses),
            bytes_up=sum(encoded_sizes(joined, len(participants))),
            bytes_down=sum(encoded_sizes(message, len(participants))),
            before=Scores.join(scores) if evaluate else None,
        )

    def after(self, round: int) -> tuple[Scores, tuple[float, float] | None]:
        """Test every client's own model after aggregation, and the global one on the global test set."""
        message = self._next_broadcast(round)
        if message.common and not self.setting.resident:
            return self.evaluator.common_model(self.forward, take_first(message.tensors))
        scores = [self.evaluator.own_models(self.forward, model, ids) for ids, _, model in self._models(message)]
        return Scores.join(scores), None

    def adapted(self, round: int) -> Scores:
        """Let every client adapt its model once more, and test it."""
        scores = []
        for ids, state, model in self._models(self._next_broadcast(round)):
            adapted = adapt(self.setting, self.forward, self.data, ids, state, model, round)
            scores.append(self.evaluator.own_models(self.forward, adapted, ids))
        return Scores.join(scores)

    def clients(self) -> ClientState:
        """Return the state of all clients, in their order."""
        return self._clients

    def restore(self, server: ServerState, clients: ClientState) -> None:
        """Go on from a saved state."""
        self.server, self._clients = server, clients

    def _next_broadcast(self, round: int) -> Message:
        return broadcast(self.setting, self.server, self.declared, range(self.setting.clients), round + 1)

    def _models(self, message: Message) -> Iterator[tuple[list[int], ClientState, Tensors]]:
        """Put every client's own model together, chunk by chunk."""
        for places, ids, rows in self._chunks(range(self.setting.clients)):
            state = self._clients.rows(rows)
            yield ids, state, own_model(self.setting, state, message.rows(places), len(ids))

    def _chunks(self, participants: Sequence[int]) -> Iterator[tuple[Tensor | None, list[int], Tensor | None]]:
        """Divide participants into chunks: their places in the message, their numbers, their rows in the state
        (``None``: all)."""
        device, count = self.setting.device, len(participants)
        for begin in range(0, count, self.chunk):
            ids = list(participants[begin : begin + self.chunk])
            places = None if len(ids) == count else torch.arange(begin, begin + len(ids), device=device)
            rows = None if len(ids) == self.setting.clients else torch.tensor(ids, device=device)
            yield places, ids, rows
