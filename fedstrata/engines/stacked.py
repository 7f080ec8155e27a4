"""The stacked engine: all participating clients as one batch of models on one device, in chunks that fit the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.broadcast import Broadcast
from fedstrata.engines.client import ClientSide
from fedstrata.engines.client_store import client_store
from fedstrata.engines.engine import Adapted, RoundReport, wire_errors
from fedstrata.engines.evaluation import Evaluator, Scores
from fedstrata.engines.forward import StackedForward
from fedstrata.engines.observing import Observer, probe_in_pieces
from fedstrata.engines.proxy import server_proxy
from fedstrata.engines.server import ServerSide, ServerState
from fedstrata.engines.setting import Setting
from fedstrata.engines.stopwatch import Stopwatch
from fedstrata.flops import Cost
from fedstrata.methods.contract.composition import PartExchange
from fedstrata.methods.contract.views import Declared, Message, Probe
from fedstrata.stack import Stack, Tensors, concatenate, take_first
from fedstrata.transfer import numbers_on
from fedstrata.wire import AS_IS, bytes_to_count, quantisation_error, received


class StackedEngine:
    """Runs rounds with ``chunk`` clients at once."""

    def __init__(self, setting: Setting, model: nn.Module, data: DeviceData, declared: Declared, chunk: int) -> None:
        self.setting = setting
        self.chunk = chunk
        self.forward = StackedForward(model, head=setting.head)
        self.evaluator = Evaluator(setting, data)
        self.client_side = ClientSide(setting, self.forward, data)
        self.side = ServerSide(setting, declared, server_proxy(setting, self.forward, data))
        self.server = self.side.first_state()
        self.observer = Observer()
        self._everybody = range(setting.clients)
        self._clients = client_store(self.client_side.first_state, setting.clients, setting.device)

    def exchange(self, round: int) -> tuple[int, int]:
        """Do what exchanges the method has before a round; return the bytes up and down."""
        up = down = 0
        for exchange in self.setting.exchanges_before(round):
            asked = self.side.asked(self.server, exchange, round)
            sent = self._broadcast(asked, round)
            replies = [
                self.client_side.answer_survey(ids, self._clients.take(ids), exchange, message, round)
                for ids, message in sent.chunks(self.chunk)
            ]
            joined = Message.join(replies)
            self.server, announcement = self.side.conclude(self.server, exchange, joined, round)
            self._adopt(exchange, announcement, round)
            up += self._bytes(joined, asked)()
            down += sent.bytes()() + self._bytes(announcement, self._everybody)()
        return up, down

    def round(
        self, round: int, participants: Sequence[int], evaluate: bool, losses_so_far: Sequence[float] = ()
    ) -> RoundReport:
        """Run one round."""
        sent, upload_values = self._broadcast(participants, round), self.setting.upload_values
        replies, losses, costs, scores, judged = [], [], [], [], []
        for ids, message in sent.chunks(self.chunk):
            state = self._clients.take(ids)
            outcome = self.client_side.round(ids, state, message, round, losses_so_far, self.observer)
            self._clients.put(ids, outcome.state)
            replies.append(outcome.reply)
            losses.append(outcome.loss)
            costs.append(outcome.cost)
            if evaluate:
                scores.append(self.evaluator.pending(self.forward, outcome.trained, ids))
                if self.evaluator.judges:
                    judged.append(self.evaluator.pending_judgement(self.forward, outcome.trained, ids))
        joined = Message.join(replies)
        known = self.side.masks_known(self.server, participants, round, upload=True)
        uploads = received(joined, upload_values)
        watch = Stopwatch(self.setting.device)
        with watch.measuring():
            self.server = self.side.aggregate(self.server, participants, uploads, round)
        self.observer.note_uploads(participants, uploads)
        return RoundReport(
            participants=tuple(participants),
            sent=sent.names,
            loss=torch.cat(losses),
            cost=Cost.join(costs),
            up=self._bytes(joined, participants, known, upload_values),
            down=sent.bytes(),
            before=Scores.join([tested() for tested in scores]) if evaluate else None,
            judged=Scores.join([tested() for tested in judged]) if judged else None,
            errors=wire_errors(self.setting, lambda: quantisation_error(joined, upload_values), sent.errors),
            aggregation=watch,
        )

    def after(self, round: int) -> tuple[Scores, dict[str, float]]:
        """Test every client's own model after aggregation, and the global one on sets that nobody owns."""
        sent = self._for_testing(self._everybody, round)
        if sent.common is not None and self.setting.everybody_alike:
            model = self.client_side.deployed_model([0], self._clients.take([0]), sent.common, round)
            return self.evaluator.common_model(self.forward, take_first(model))
        scores = []
        for ids, message in sent.chunks(self.chunk):
            models = self.client_side.deployed_model(ids, self._clients.take(ids), message, round)
            scores.append(self.evaluator.pending(self.forward, models, ids))
        return Scores.join([tested() for tested in scores]), {}

    def adapted(self, round: int) -> Adapted:
        """Let every client adapt its model once more, and test it."""
        scores, judged, adapted = [], [], []
        for ids, message in self._for_testing(self._everybody, round).chunks(self.chunk):
            models = self.client_side.adapted_model(ids, self._clients.take(ids), message, round)
            scores.append(self.evaluator.pending(self.forward, models, ids))
            if self.evaluator.judges:
                judged.append(self.evaluator.pending_judgement(self.forward, models, ids))
            adapted.append({name: tensor.cpu() for name, tensor in models.items()})
        return Adapted(
            concatenate(adapted),
            Scores.join([tested() for tested in scores]),
            Scores.join([tested() for tested in judged]) if judged else None,
        )

    def judged(self, round: int) -> Iterator[tuple[Sequence[int], Tensors, np.ndarray]]:
        """Let clients judge the models that they use after a round."""
        for ids, message in self._for_testing(self._everybody, round).chunks(self.chunk):
            models = self.client_side.deployed_model(ids, self._clients.take(ids), message, round)
            yield ids, models, self.evaluator.on_validation(self.forward, models, ids)

    def models(self, clients: Sequence[int], round: int) -> Tensors:
        """Return the models that some clients use after a round, as they are tested."""
        message = self._for_testing(self._everybody, round).received_by(clients)
        return self.client_side.deployed_model(clients, self._clients.take(clients), message, round)

    def probe(self, clients: Sequence[int], round: int) -> Probe:
        """Offer the data of some clients, at most ``chunk`` at once."""

        def of_some(some: Sequence[int]) -> Probe:
            return self.client_side.probe(some, round, self._clients.take(some), self.chunk)

        return probe_in_pieces(clients, self.chunk, of_some)

    def clients(self) -> Stack:
        """Return the state of all clients, in their order."""
        return self._clients.everything()

    def restore(self, server: ServerState, clients: Stack) -> None:
        """Go on from a saved state."""
        self.server = server
        first, device = self.client_side.first_state, self.setting.device
        self._clients = client_store(first, self.setting.clients, device, clients)

    def _adopt(self, exchange: PartExchange, announcement: Message, round: int) -> None:
        """Let all clients take in what the server concluded."""
        for some in self._clients.pieces():
            places = None if len(some) == self.setting.clients else numbers_on(some, self.setting.device)
            told = announcement.rows(places)
            self._clients.put(some, self.client_side.adopt(some, self._clients.take(some), exchange, told, round))

    def _broadcast(self, clients: Sequence[int], round: int) -> Broadcast:
        return Broadcast(self.side, self.server, clients, round)

    def _for_testing(self, clients: Sequence[int], round: int) -> Broadcast:
        """Return what clients get after a round."""
        return Broadcast(self.side, self.server, clients, round + 1, testing=True)

    def _bytes(
        self, message: Message, clients: Sequence[int], known: Tensors | None = None, values: str = AS_IS
    ) -> Callable[[], int]:
        return bytes_to_count(message, len(clients), known, values)
