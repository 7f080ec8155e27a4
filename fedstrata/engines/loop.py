"""The loop engine: one client after another, in plain PyTorch.

Server and clients are separate objects that exchange encoded messages and share nothing else, so whatever runs here can
run on a network. It is the reference with which the other engines must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.client import ClientSide, Outcome
from fedstrata.engines.collecting import Collector
from fedstrata.engines.engine import Adapted, RoundReport, wire_errors
from fedstrata.engines.evaluation import Evaluator, Scores
from fedstrata.engines.forward import LoopForward
from fedstrata.engines.observing import Observer, probe_in_pieces
from fedstrata.engines.proxy import server_proxy
from fedstrata.engines.server import ServerSide, ServerState
from fedstrata.engines.setting import Setting
from fedstrata.engines.threads import SideBySide
from fedstrata.flops import Cost
from fedstrata.methods.contract.composition import PartExchange
from fedstrata.methods.contract.views import Declared, Message, Probe
from fedstrata.stack import Stack, Tensors, concatenate, take, take_first
from fedstrata.wire import AS_IS, bytes_sent, decode, encode, quantisation_error


class LoopClient:
    """One client: its data and its state, and nothing of anybody else."""

    def __init__(self, side: ClientSide, number: int) -> None:
        self.side = side
        self.ids = [number]
        self._state: Stack | None = None

    @property
    def state(self) -> Stack:
        """What the client keeps; made when it is first needed."""
        if self._state is None:
            self._state = self.side.first_state(self.ids)
        return self._state

    @state.setter
    def state(self, state: Stack) -> None:
        self._state = state

    def answer(
        self,
        message: bytes,
        round: int,
        losses_so_far: Sequence[float] = (),
        side: ClientSide | None = None,
        observer: Observer | None = None,
    ) -> tuple[bytes, Outcome]:
        """Take part in a round: the bytes that leave the client, and what it knows itself.

        Another ``side`` does the same; a thread has its own.
        """
        side = side or self.side
        received = self._decoded(message, round)
        outcome = side.round(self.ids, self.state, received, round, losses_so_far, observer)
        self.state = outcome.state
        return encode(outcome.reply, outcome.known, side.setting.upload_values, round), outcome

    def answer_survey(self, exchange: PartExchange, message: bytes, round: int) -> bytes:
        """Answer a survey before a round."""
        reply = self.side.answer_survey(self.ids, self.state, exchange, self._decoded(message, round), round)
        return encode(reply, round=round)

    def adopt(self, exchange: PartExchange, message: bytes, round: int) -> None:
        """Take in what the server concluded."""
        self.state = self.side.adopt(self.ids, self.state, exchange, self._decoded(message, round), round)

    def model(self, message: bytes, round: int) -> Tensors:
        """Put the model that the client uses after a round together from the broadcast of the next."""
        return self.side.deployed_model(self.ids, self.state, self._decoded(message, round + 1), round)

    def adapted_model(self, message: bytes, round: int) -> Tensors:
        """Adapt the client's own model once more."""
        return self.side.adapted_model(self.ids, self.state, self._decoded(message, round + 1), round)

    def _decoded(self, message: bytes, round: int) -> Message:
        return decode(message, self.side.setting.device, self.side.masks_known(self.ids, self.state, round), round)


class LoopServer:
    """The server: its state, and nothing of the clients but their messages."""

    def __init__(self, side: ServerSide) -> None:
        self.side = side
        self.state = side.first_state()

    def broadcast(self, participants: Sequence[int], round: int, testing: bool = False) -> tuple[Message, list[bytes]]:
        """Build what the server sends, and encode what each participant gets of it."""
        known = self.side.masks_known(self.state, participants, round, upload=False)
        message = self.side.broadcast(self.state, participants, round, testing)
        return message, self._encoded(message, len(participants), known, self.side.setting.download_values, round)

    def messages(self, participants: Sequence[int], round: int, testing: bool = False) -> list[bytes]:
        """Encode what each participant gets."""
        return self.broadcast(participants, round, testing)[1]

    def asked(self, exchange: PartExchange, round: int) -> tuple[int, ...]:
        """Choose the clients that a survey asks."""
        return self.side.asked(self.state, exchange, round)

    def conclude(self, exchange: PartExchange, replies: list[bytes], round: int) -> list[bytes]:
        """Conclude a survey, and encode the announcement for every client."""
        joined = Message.join([decode(reply, self.side.setting.device, round=round) for reply in replies])
        self.state, announcement = self.side.conclude(self.state, exchange, joined, round)
        return self._encoded(announcement, self.side.setting.clients, {}, AS_IS, round)

    def collector(self, round: int) -> Collector:
        """Prepare to take the replies of a round."""
        return Collector(self.side, self.state, round)

    def decoded(self, reply: bytes, client: int, round: int) -> Message:
        """Read a client's reply to the current broadcast."""
        known = self.side.masks_known(self.state, [client], round, upload=True)
        return decode(reply, self.side.setting.device, known, round)

    def _encoded(self, message: Message, clients: int, known: Tensors, values: str, round: int) -> list[bytes]:
        """Encode a message for each client; what is the same for everybody is encoded once."""
        held = Message(known)
        if message.common and held.common:
            return [encode(message, known, values, round)] * clients
        rows = torch.arange(clients, device=self.side.setting.device)[:, None]
        return [encode(message.rows(row), held.rows(row).tensors, values, round) for row in rows]


class LoopEngine:
    """Runs rounds one client at a time, or a few, each in a thread of its own."""

    def __init__(
        self, setting: Setting, model: nn.Module, data: DeviceData, declared: Declared, at_once: int = 1
    ) -> None:
        self.setting = setting
        self.forward = LoopForward(model, setting.head)
        self.evaluator = Evaluator(setting, data)
        side = ClientSide(setting, self.forward, data)
        self.observer = Observer()
        self._side_by_side = SideBySide(side, at_once)
        self.members = [LoopClient(side, number) for number in range(setting.clients)]
        self.central = LoopServer(ServerSide(setting, declared, server_proxy(setting, self.forward, data)))

    @property
    def side(self) -> ServerSide:
        """What the server does."""
        return self.central.side

    @property
    def server(self) -> ServerState:
        """The server's state."""
        return self.central.state

    def exchange(self, round: int) -> tuple[int, int]:
        """Do what exchanges the method has before a round; return the bytes up and down."""
        up = down = 0
        for exchange in self.setting.exchanges_before(round):
            asked = self.central.asked(exchange, round)
            messages = self.central.messages(asked, round)
            replies = [
                self.members[client].answer_survey(exchange, message, round)
                for client, message in zip(asked, messages, strict=True)
            ]
            announcements = self.central.conclude(exchange, replies, round)
            for member, announcement in zip(self.members, announcements, strict=True):
                member.adopt(exchange, announcement, round)
            up += bytes_sent(map(len, replies))
            down += bytes_sent(map(len, (*messages, *announcements)))
        return up, down

    def round(
        self, round: int, participants: Sequence[int], evaluate: bool, losses_so_far: Sequence[float] = ()
    ) -> RoundReport:
        """Run one round."""
        sent, messages = self.central.broadcast(participants, round)
        collector = self.central.collector(round)
        bytes_up, losses, costs, scores, judged, lost = 0, [], [], [], [], []

        def answer(side: ClientSide, asked: tuple[int, bytes]) -> tuple[bytes, Outcome]:
            client, message = asked
            return self.members[client].answer(message, round, losses_so_far, side, self.observer)

        asked = list(zip(participants, messages, strict=True))
        for client, (reply, outcome) in zip(participants, self._side_by_side.map(answer, asked), strict=True):
            upload = self.central.decoded(reply, client, round)
            collector.add(client, upload)
            self.observer.note_uploads([client], upload)
            bytes_up += bytes_sent([len(reply)])
            losses.append(outcome.loss)
            costs.append(outcome.cost)
            if self.setting.upload_values != AS_IS:
                lost.append(quantisation_error(outcome.reply, self.setting.upload_values))
            if evaluate:
                scores.append(self.evaluator.own_models(self.forward, outcome.trained, [client]))
                if self.evaluator.judges:
                    judged.append(self.evaluator.pending_judgement(self.forward, outcome.trained, [client])())
        errors = wire_errors(self.setting, lambda: torch.cat(lost), sent)
        self.central.state = collector.finish()
        return RoundReport(
            participants=tuple(participants),
            sent=frozenset(sent.tensors),
            loss=torch.cat(losses),
            cost=Cost.join(costs),
            up=bytes_up,
            down=bytes_sent(map(len, messages)),
            before=Scores.join(scores) if evaluate else None,
            judged=Scores.join(judged) if judged else None,
            errors=errors,
            aggregation=collector.watch,
        )

    def after(self, round: int) -> tuple[Scores, dict[str, float]]:
        """Test every client's own model after aggregation, and the global one on sets that nobody owns."""
        messages = self.central.messages(range(self.setting.clients), round + 1, testing=True)
        if self.setting.everybody_alike and len(set(messages)) == 1:
            return self.evaluator.common_model(self.forward, take_first(self.members[0].model(messages[0], round)))
        models = (member.model(message, round) for member, message in zip(self.members, messages, strict=True))
        return self._test(models), {}

    def adapted(self, round: int) -> Adapted:
        """Let every client adapt its model once more, and test it."""
        messages = self.central.messages(range(self.setting.clients), round + 1, testing=True)
        models = [member.adapted_model(message, round) for member, message in zip(self.members, messages, strict=True)]
        judged = None
        if self.evaluator.judges:
            judging = [self.evaluator.pending_judgement(self.forward, one, [ids]) for ids, one in enumerate(models)]
            judged = Scores.join([tested() for tested in judging])
        joined = {name: tensor.cpu() for name, tensor in concatenate(models).items()}
        return Adapted(joined, self._test(iter(models)), judged)

    def _test(self, models: Iterator[Tensors]) -> Scores:
        scores = [self.evaluator.own_models(self.forward, model, [number]) for number, model in enumerate(models)]
        return Scores.join(scores)

    def judged(self, round: int) -> Iterator[tuple[Sequence[int], Tensors, np.ndarray]]:
        """Let clients judge the models that they use after a round."""
        messages = self.central.messages(range(self.setting.clients), round + 1, testing=True)
        for number, (member, message) in enumerate(zip(self.members, messages, strict=True)):
            model = member.model(message, round)
            yield [number], model, self.evaluator.on_validation(self.forward, model, [number])

    def models(self, clients: Sequence[int], round: int) -> Tensors:
        """Return the models that some clients use after a round, as they are tested."""
        messages = self.central.messages(range(self.setting.clients), round + 1, testing=True)
        return concatenate([self.members[client].model(messages[client], round) for client in clients])

    def probe(self, clients: Sequence[int], round: int) -> Probe:
        """Offer the data of some clients, one after another."""
        side = self.members[0].side

        def of_some(some: Sequence[int]) -> Probe:
            return side.probe(some, round, concatenate([self.members[client].state for client in some]), at_once=1)

        return probe_in_pieces(clients, 1, of_some)

    def clients(self) -> Stack:
        """Return the state of all clients, in their order."""
        return concatenate([member.state for member in self.members])

    def restore(self, server: ServerState, clients: Stack) -> None:
        """Go on from a saved state."""
        self.central.state = server
        for member in self.members:
            member.state = take(clients, torch.tensor(member.ids, device=self.setting.device))
