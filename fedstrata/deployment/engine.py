"""Rounds over a federation of sites: an engine like any other, whose clients are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedstrata.deployment.checks import Layout, check_weights, layout, most_bytes, odd_ones_out, read_reply
from fedstrata.deployment.declarations import with_declarations
from fedstrata.deployment.facts import cost_from_facts, number_in, read_scores
from fedstrata.deployment.federation import Federation
from fedstrata.deployment.protocol import BEGINNING, SMALL_ANSWER, Place, Reply, Request
from fedstrata.deployment.releases import Releases
from fedstrata.engines.batches import DeviceData
from fedstrata.engines.client import ClientSide
from fedstrata.engines.collecting import Collector
from fedstrata.engines.engine import Adapted, RoundReport, wire_errors
from fedstrata.engines.evaluation import Evaluator, Scores
from fedstrata.engines.forward import LoopForward
from fedstrata.engines.loop import LoopServer
from fedstrata.engines.observing import Observer
from fedstrata.engines.server import ServerSide, ServerState
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataError
from fedstrata.flops import Cost
from fedstrata.methods.contract.composition import PartExchange
from fedstrata.methods.contract.views import Message, Probe
from fedstrata.runs.preparing import Prepared
from fedstrata.stack import Stack, Tensors, repeat, take_first
from fedstrata.wire import AS_IS, bytes_sent, encode, received

if TYPE_CHECKING:
    from fedstrata.deployment.secure.rounds import SecureRounds

ENGINE = "network"
"""The name of this engine, where run folders tell with which one a run was made."""
Announced = tuple[PartExchange, Message, int]
"""What was announced to a site, and before which round."""
Deployed = Callable[[Message, Sequence[Announced], int], Tensors]
"""The model that a client uses which keeps nothing to itself, from the broadcast after a round: a stack of one."""
GlobalTest = Callable[[Message, Sequence[Announced], int], tuple[Scores, dict[str, float]]]
"""The scores of the model broadcast after a round, at a client that has heard the announcements so far, on the
server's own test set, where the server has one.
"""


class NetworkEngine:
    """Runs rounds with sites that hold their own data and state; the server has nothing of them but their messages."""

    def __init__(
        self,
        side: ServerSide,
        federation: Federation,
        test: GlobalTest | None = None,
        deployed: Deployed | None = None,
        secure: SecureRounds | None = None,
        releases: Releases | None = None,
    ) -> None:
        self.setting = side.setting
        self.federation = federation
        self.central = LoopServer(side)
        self.test = test
        self.deployed = deployed
        self.secure = secure
        self.releases = releases
        self.observer = Observer()
        self._concluded = (0, 0)
        federation.missed = self._announcements

    @property
    def side(self) -> ServerSide:
        """What the server does."""
        return self.central.side

    @property
    def server(self) -> ServerState:
        """The server's state."""
        return self.central.state

    def clients(self) -> Stack:
        """Return which steps of the sites the server knows of; the sites keep their state themselves."""
        return self.federation.last_steps.to_stack(self.setting.clients)

    def judged(self, round: int) -> Iterator[tuple[Sequence[int], Tensors, np.ndarray]]:
        """Refuse: validation is not offered on real sites."""
        raise FedStrataError("Sites do not choose models on validation samples; leave validation_fraction out.")

    def probe(self, clients: Sequence[int], round: int) -> Probe | None:
        """Offer nothing: samples stay at the sites."""
        return None

    def models(self, clients: Sequence[int], round: int) -> Tensors:
        """Return the model that all sites use alike; where they have models of their own, these lie at the sites."""
        if self.deployed is None or not self.setting.everybody_alike:
            raise FedStrataError("The models that sites use lie at the sites; each saves its own when the run ends.")
        return repeat(take_first(self.deployed(*self._heard_by_anybody(round), round)), len(clients))

    def restore(self, server: ServerState, clients: Stack) -> None:
        """Go on from a saved state; the sites have theirs.

        Names are put into the order of an unbroken run, so that what was sent before is the same bytes when sent again.
        """
        self.federation.last_steps.restore(clients)
        first = self.central.state
        self.central.state = ServerState(_in_order(server.model, first.model), _in_order(server.memory, first.memory))

    def exchange(self, round: int) -> tuple[int, int]:
        """Do what exchanges the method has before a round; return the bytes up and down."""
        up = down = 0
        for index, exchange in enumerate(self.setting.exchanges_before(round)):
            self._concluded = (round, index)
            chosen = self._on_the_list(self.central.asked(exchange, round), round)
            messages = self.central.messages(chosen, round)
            asked = self._requests("survey", Place.survey(round, index), chosen, messages)
            answers = self.federation.ask(asked, lambda site, reply: self._read(reply, round))
            usual = self._usual(asked, {site: layout(message) for site, (message, _) in answers.items()})
            self._conclude(exchange, {site: answers[site][0] for site in usual}, round)
            self._concluded = (round, index + 1)
            place = Place.announcement(round, index)
            told = {site: self._announcement(exchange, place, site) for site in self._everybody}
            self.federation.ask(told, lambda site, reply: None)
            up += bytes_sent(answers[site][1] for site in usual)
            down += bytes_sent(len(request.payload) for request in (*asked.values(), *told.values()))
        return up, down

    def round(
        self, round: int, participants: Sequence[int], evaluate: bool, losses_so_far: Sequence[float] = ()
    ) -> RoundReport:
        """Run one round with the participants that answer in time; one whose model has left is not run again."""
        released = None if self.releases is None else self.releases.find(round)
        if released is not None:
            state, report = released
            self._note_declarations()
            self.restore(_on_device(state, self.setting.device), Stack())
            return report
        report = self._collect(round, participants, evaluate, losses_so_far)
        if self.releases is not None:
            self.releases.keep(round, self.server, report)
        return report

    def _collect(
        self, round: int, participants: Sequence[int], evaluate: bool, losses_so_far: Sequence[float]
    ) -> RoundReport:
        """Let the participants train, and merge what comes in time."""
        participants = self._on_the_list(participants, round)
        sent, messages = self.central.broadcast(participants, round)
        facts = {"evaluate": evaluate, "losses": list(losses_so_far)}
        asked = self._requests("train", Place.training(round), participants, messages, facts)
        if self.secure is not None:
            names = frozenset(sent.tensors)
            self.central.state, report = self.secure.run(self.side, self.server, round, asked, evaluate, names)
            self._note_declarations()
            return report
        losses: dict[int, float] = {}
        costs: dict[int, Cost] = {}
        scores: dict[int, Scores] = {}
        lost: dict[int, float] = {}
        collectors: dict[Layout, Collector] = {}

        def read(site: int, reply: Reply) -> tuple[Layout, int]:
            losses[site] = number_in(reply.facts, "loss")
            costs[site] = cost_from_facts(reply.facts)
            scores[site] = read_scores(self.side, site, reply.facts.get("scores") if evaluate else {})
            known = self.central.side.masks_known(self.server, [site], round, upload=True)
            message, size = self._read(reply, round, known)
            if self.setting.upload_values != AS_IS:
                lost[site] = number_in(reply.facts, "error", low=0.0)
            check_weights(message, self.server.model, self.federation.rules.norm_limit)
            self._note_declarations()
            held = layout(message)  # normally there is one; whoever sends other layers than most is refused below
            collector = collectors.setdefault(held, self.central.collector(round))
            collector.side = self.side  # this site may have declared itself after the collector was made
            collector.add(site, message)
            self.observer.note_uploads([site], message)
            return held, size

        replies = self.federation.ask(asked, read)
        usual = self._usual(asked, {site: held for site, (held, _) in replies.items()})
        errors = wire_errors(self.setting, lambda: torch.tensor([lost[site] for site in usual]), sent)
        collector = collectors[replies[usual[0]][0]]
        self.central.state = collector.finish()
        return RoundReport(
            participants=tuple(usual),
            sent=frozenset(sent.tensors),
            loss=torch.tensor([losses[site] for site in usual], dtype=torch.float64),
            cost=Cost.join([costs[site] for site in usual]),
            up=bytes_sent(replies[site][1] for site in usual),
            down=bytes_sent(len(request.payload) for request in asked.values()),
            before=Scores.join([scores[site] for site in usual]) if evaluate else None,
            errors=errors,
            aggregation=collector.watch,
        )

    def after(self, round: int) -> tuple[Scores, dict[str, float]]:
        """Let every site test its own model after aggregation; test the global one where the server has data."""
        messages = self.central.messages(self._everybody, round + 1, testing=True)
        scores = self._tested("test", round, messages)
        alike = self.setting.everybody_alike and len(set(messages)) == 1
        if self.test is None or not alike:
            return scores, {}
        tested, everywhere = self.test(*self._heard_by_anybody(round), round)
        return replace(scores, of_all=tested.of_all), everywhere

    def _heard_by_anybody(self, round: int) -> tuple[Message, list[Announced]]:
        """Gather what any site gets to test with after a round, and what was announced to it before."""
        sent = self.central.side.broadcast(self.server, [0], round + 1, testing=True)
        heard = [
            (exchange, self._announced(exchange, place, 0), place.round) for place, exchange in self._last(round + 1)
        ]
        return received(sent, self.setting.download_values), heard

    def adapted(self, round: int) -> Adapted:
        """Let every site adapt its model once more, and test it."""
        messages = self.central.messages(self._everybody, round + 1, testing=True)
        return Adapted({}, self._tested("adapt", round, messages))

    def _tested(self, kind: str, round: int, messages: Sequence[bytes]) -> Scores:
        asked = self._requests(kind, Place(round + 1), self._everybody, messages)
        found = self.federation.ask(asked, lambda site, reply: read_scores(self.side, site, reply.facts.get("scores")))
        return Scores.join(list(found.values()))

    @property
    def _everybody(self) -> range:
        return range(self.setting.clients)

    def _on_the_list(self, chosen: Sequence[int], round: int) -> Sequence[int]:
        """Let others, in turn, take the places of chosen sites that were removed from the list, while there are any."""
        removed = self.federation.removed
        here = [site for site in chosen if site not in removed]
        others = [site for site in self.setting.present(round) if site not in removed and site not in here]
        turn = round % max(1, len(others))
        return sorted((*here, *(others[turn:] + others[:turn])[: len(chosen) - len(here)]))

    def _note_declarations(self) -> None:
        self.central.side = with_declarations(self.side, self.federation.declarations)

    # What travels -----------------------------------------------------------------------------------------------------

    def _requests(
        self,
        kind: str,
        place: Place,
        sites: Iterable[int],
        messages: Sequence[bytes],
        facts: Mapping[str, Any] | None = None,
    ) -> dict[int, Request]:
        adopted = max((heard for heard, _ in self._exchanges(place.round)), default=BEGINNING)
        uploads = kind == "survey" or (kind == "train" and self.secure is None)
        most = most_bytes(self.setting.initial) if uploads else SMALL_ANSWER
        told = {"adopted": adopted.to_facts(), **(facts or {})}
        return {
            site: Request(kind, self.federation.run, place, told, message, most)
            for site, message in zip(sites, messages, strict=True)
        }

    def _usual(self, asked: Mapping[int, Request], layouts: Mapping[int, Layout]) -> list[int]:
        """Refuse the replies that hold other layers than the rest; return the sites of the rest."""
        odd = odd_ones_out(layouts)
        for site, reason in odd.items():
            self.federation.refuse(site, reason)
        usual = [site for site in layouts if site not in odd]
        self.federation.require(asked, len(usual))
        return usual

    def _read(self, reply: Reply, round: int, known: Tensors | None = None) -> tuple[Message, int]:
        message = read_reply(reply.payload, self.setting.initial, self.setting.device, known, round)
        return message, len(reply.payload)

    # Exchanges --------------------------------------------------------------------------------------------------------

    def _conclude(self, exchange: PartExchange, replies: Mapping[int, Message], round: int) -> None:
        """Conclude a survey from the sites that answered."""
        self._note_declarations()
        side, state = self.side, self.server
        model, memory = exchange.conclude(side.view(state, list(replies), round), Message.join(list(replies.values())))
        self.central.state = ServerState({**state.model, **model}, memory)

    def _announced(self, exchange: PartExchange, place: Place, site: int) -> Message:
        """Tell what a site must know of a concluded survey; the server's state says it at any later time too."""
        message = exchange.announce(self.central.side.view(self.central.state, self._everybody, place.round))
        return message if message.common else message.rows(torch.tensor([site], device=self.setting.device))

    def _announcement(self, exchange: PartExchange, place: Place, site: int) -> Request:
        payload = encode(self._announced(exchange, place, site), round=place.round)
        return Request("adopt", self.federation.run, place, {}, payload)

    def _announcements(self, site: int, round: int) -> list[Request]:
        """List what a site that was away must take in before a round."""
        return [self._announcement(exchange, place, site) for place, exchange in self._last(round)]

    def _last(self, round: int) -> list[tuple[Place, PartExchange]]:
        """List the last exchange of each part before a round."""
        return list({exchange.part.name: (place, exchange) for place, exchange in self._exchanges(round)}.values())

    def _exchanges(self, round: int) -> Iterator[tuple[Place, PartExchange]]:
        """List the exchanges that were concluded before a round or, in this one, so far."""
        for earlier in range(1, min(round, self.setting.rounds) + 1):
            for index, exchange in enumerate(self.setting.exchanges_before(earlier)):
                if earlier < round or (earlier, index) < self._concluded:
                    yield Place.announcement(earlier, index), exchange


def _on_device(state: ServerState, device: torch.device) -> ServerState:
    """Bring a state that was read from a disk to where the server computes."""
    model, memory = ({name: tensor.to(device) for name, tensor in one.items()} for one in (state.model, state.memory))
    return ServerState(model, Stack(memory))


def _in_order(tensors: Tensors, like: Tensors) -> Stack:
    return Stack({name: tensors[name] for name in (*like, *tensors) if name in tensors})


def global_test(ready: Prepared) -> GlobalTest:
    """Test global models on the global test set of data that the server has itself."""
    forward, evaluator = LoopForward(ready.model, ready.setting.head), Evaluator(ready.setting, ready.data)
    deployed = deployed_anywhere(ready.setting, ready.model, ready.data)

    def test(broadcast: Message, heard: Sequence[Announced], round: int) -> tuple[Scores, dict[str, float]]:
        return evaluator.common_model(forward, take_first(deployed(broadcast, heard, round)))

    return test


def deployed_anywhere(setting: Setting, model: nn.Module, data: DeviceData) -> Deployed:
    """Make the model that a client uses which keeps nothing to itself; no sample of the data is looked at."""
    side = ClientSide(setting, LoopForward(model, setting.head), data)

    def deployed(broadcast: Message, heard: Sequence[Announced], round: int) -> Tensors:
        anybody = side.first_state([0])
        for exchange, announcement, before in heard:
            anybody = side.adopt([0], anybody, exchange, announcement, before)
        return side.deployed_model([0], anybody, broadcast, round)

    return deployed
