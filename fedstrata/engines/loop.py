"""The loop engine: one client after another, in plain PyTorch.

Server and clients are separate objects that exchange encoded messages and share nothing else, so whatever runs here can
run on a network. It is the reference with which the other engines must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.client import (
    ClientState,
    Outcome,
    Setting,
    adapt,
    client_round,
    first_state,
    own_model,
)
from fedstrata.engines.engine import RoundReport
from fedstrata.engines.evaluation import Evaluator, Scores
from fedstrata.engines.exchange import adopt_announcement, answer_survey
from fedstrata.engines.forward import LoopForward
from fedstrata.engines.server import (
    Declared,
    ServerState,
    broadcast,
    conclude,
    first_server_state,
    server_round,
)
from fedstrata.methods.base import Message
from fedstrata.methods.composition import Exchange
from fedstrata.stack import Tensors, take_first
from fedstrata.wire import decode, encode


class LoopClient:
    """One client: its data and its state, and nothing of anybody else."""

    def __init__(self, setting: Setting, model: nn.Module, data: DeviceData, number: int) -> None:
        self.setting = setting
        self.forward = LoopForward(model)
        self.data = data
        self.number = number
        self.state = first_state(setting, data, [number])

    def answer(self, message: bytes, round: int) -> tuple[bytes, Outcome]:
        """Take part in a round: the bytes that leave the client, and what it knows itself."""
        received = decode(message, self.setting.device)
        outcome = client_round(self.setting, self.forward, self.data, [self.number], self.state, received, round)
        self.state = outcome.state
        return encode(outcome.reply), outcome

    def answer_survey(self, exchange: Exchange, message: bytes, round: int) -> bytes:
        """Answer a survey before a round."""
        received = decode(message, self.setting.device)
        ids = [self.number]
        return encode(answer_survey(self.setting, self.forward, self.data, ids, self.state, exchange, received, round))

    def adopt(self, exchange: Exchange, message: bytes, round: int) -> None:
        """Take in what the server concluded."""
        received = decode(message, self.setting.device)
        self.state = adopt_announcement(self.setting, self.data, [self.number], self.state, exchange, received, round)

    def model(self, message: bytes) -> Tensors:
        """Put the client's own model together from a broadcast."""
        return own_model(self.setting, self.state, decode(message, self.setting.device), 1)

    def adapted_model(self, message: bytes, round: int) -> Tensors:
        """Adapt the client's own model once more."""
        return adapt(self.setting, self.forward, self.data, [self.number], self.state, self.model(message), round)


class LoopServer:
    """The server: its state, and what clients declared."""

    def __init__(self, setting: Setting, declared: Declared) -> None:
        self.setting = setting
        self.declared = declared
        self.state = first_server_state(setting, declared)

    def messages(self, participants: Sequence[int], round: int) -> list[bytes]:
        """Encode what each participant gets; what is the same for everybody is encoded once."""
        return self._encoded(broadcast(self.setting, self.state, self.declared, participants, round), len(participants))

    def conclude(self, exchange: Exchange, replies: list[bytes], round: int) -> list[bytes]:
        """Conclude a survey of all clients, and encode the announcement for each."""
        joined = Message.join([decode(reply, self.setting.device) for reply in replies])
        self.state, announcement = conclude(self.setting, self.state, self.declared, exchange, joined, round)
        return self._encoded(announcement, len(replies))

    def _encoded(self, message: Message, clients: int) -> list[bytes]:
        if message.common:
            return [encode(message)] * clients
        rows = torch.arange(clients, device=self.setting.device)
        return [encode(message.rows(row[None])) for row in rows]

    def receive(self, replies: dict[int, bytes], round: int) -> None:
        """Aggregate the replies, in the order of the clients, whatever order they came in."""
        participants = sorted(replies)
        decoded = [decode(replies[client], self.setting.device) for client in participants]
        self.state = server_round(self.setting, self.state, self.declared, participants, Message.join(decoded), round)


class LoopEngine:
    """Runs rounds one client at a time."""

    def __init__(self, setting: Setting, model: nn.Module, data: DeviceData, declared: Declared) -> None:
        self.setting = setting
        self.evaluator = Evaluator(setting, data)
        self.forward = LoopForward(model)
        self.members = [LoopClient(setting, model, data, number) for number in range(setting.clients)]
        self._server = LoopServer(setting, declared)

    @property
    def server(self) -> ServerState:
        """The server's state."""
        return self._server.state

    def exchange(self, round: int) -> tuple[int, int]:
        """Do what exchanges the method has before a round; return the bytes up and down."""
        up = down = 0
        for exchange in self.setting.method.exchanges_before(round):
            messages = self._server.messages(range(self.setting.clients), round)
            replies = [
                member.answer_survey(exchange, message, round)
                for member, message in zip(self.members, messages, strict=True)
            ]
            announcements = self._server.conclude(exchange, replies, round)
            for member, announcement in zip(self.members, announcements, strict=True):
                member.adopt(exchange, announcement, round)
            up += sum(map(len, replies))
            down += sum(map(len, (*messages, *announcements)))
        return up, down

    def round(self, round: int, participants: Sequence[int], evaluate: bool) -> RoundReport:
        """Run one round."""
        messages = self._server.messages(participants, round)
        replies, losses, scores = {}, [], []
        for client, message in zip(participants, messages, strict=True):
            replies[client], outcome = self.members[client].answer(message, round)
            losses.append(outcome.loss)
            if evaluate:
                scores.append(self.evaluator.own_models(self.forward, outcome.trained, [client]))
        self._server.receive(replies, round)
        return RoundReport(
            loss=torch.cat(losses),
            bytes_up=sum(map(len, replies.values())),
            bytes_down=sum(map(len, messages)),
            before=Scores.join(scores) if evaluate else None,
        )

    def after(self, round: int) -> tuple[Scores, tuple[float, float] | None]:
        """Test every client's own model after aggregation, and the global one on the global test set."""
        messages = self._server.messages(range(self.setting.clients), round + 1)
        if not self.setting.resident and len(set(messages)) == 1:
            return self.evaluator.common_model(self.forward, take_first(self.members[0].model(messages[0])))
        return self._test(member.model(message) for member, message in zip(self.members, messages, strict=True)), None

    def adapted(self, round: int) -> Scores:
        """Let every client adapt its model once more, and test it."""
        messages = self._server.messages(range(self.setting.clients), round + 1)
        return self._test(
            member.adapted_model(message, round) for member, message in zip(self.members, messages, strict=True)
        )

    def _test(self, models: Iterator[Tensors]) -> Scores:
        return Scores.join(
            [self.evaluator.own_models(self.forward, model, [number]) for number, model in enumerate(models)]
        )

    def clients(self) -> ClientState:
        """Return the state of all clients, in their order."""
        return ClientState.concatenate([member.state for member in self.members])

    def restore(self, server: ServerState, clients: ClientState) -> None:
        """Go on from a saved state."""
        self._server.state = server
        for member in self.members:
            member.state = clients.rows(torch.tensor([member.number], device=self.setting.device))
