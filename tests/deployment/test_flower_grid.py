"""Answers that a Flower Grid brings: one that cannot be read, or claims to be another's, concerns its site alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict
from in_process import InProcessGrid

from fedstrata.deployment.flower.app import app_of
from fedstrata.deployment.flower.grid import GridNetwork
from fedstrata.deployment.flower.messages import to_record
from fedstrata.deployment.protocol import Reply, Request

LIAR = 0


class Answering:
    """A site that answers with its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def answer(self, request: Request) -> Reply:
        return Reply(request.ticket, facts={"number": self.number})


class HostileGrid(InProcessGrid):
    """Lets the answer of one node be what a test wants, or raise while it is put together."""

    def __init__(self, lie: Any) -> None:
        super().__init__(app_of(lambda context: Answering(int(context.node_config["partition-id"]))), 3)  # type: ignore[arg-type,return-value]
        self.lie = lie
        self.asked: dict[str, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        names = list(super().push_messages(messages))
        for name, message in zip(names, messages, strict=True):
            self.asked[name] = int(self.contexts[message.metadata.dst_node_id].node_config["partition-id"])
            self.answers[name].metadata.__dict__["_reply_to_message_id"] = name
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [(name, self.answers.pop(name)) for name in list(message_ids) if name in self.answers]
        return [self.lie(self, message) if self.asked[name] == LIAR else message for name, message in found]


def unreadable(grid: HostileGrid, message: Message) -> Message:
    raise ValueError("an object of no known kind")


def another_sites(grid: HostileGrid, message: Message) -> Message:
    message.metadata.__dict__["_reply_to_message_id"] = next(name for name, site in grid.asked.items() if site == 2)
    return message


def without_facts(grid: HostileGrid, message: Message) -> Message:
    message.content = RecordDict()
    return message


def with_markup(grid: HostileGrid, message: Message) -> Message:
    message.content = to_record('{"ticket": "[/x]\\ud800", "status": "\\u001b[2J", "facts": {}}', b"")
    return message


@pytest.mark.attack(
    "A site's answer cannot be put together, holds nothing, or says of itself that it answers another site's question.",
    "It counts as a failure of that site; the answers of the others arrive, under their own names.",
)
@pytest.mark.parametrize("lie", [unreadable, another_sites, without_facts, with_markup])
def test_an_answer_concerns_its_own_site_alone(lie):
    grid = HostileGrid(lie)
    nodes = {int(context.node_config["partition-id"]): (node, "") for node, context in grid.contexts.items()}
    network = GridNetwork(grid, lambda: nodes, 0.0)
    assert len(network.receive(0.0)) == 3
    for site in range(3):
        network.send(site, Request("who"))
    events = {event.site: event for event in network.receive(0.0)}
    assert sorted(events) == [0, 1, 2]
    for site in (1, 2):
        reply = events[site].reply
        assert reply is not None
        assert reply.facts == {"number": site}
    if lie is another_sites:
        assert events[LIAR].reply is not None
        assert events[LIAR].reply.facts == {"number": LIAR}
    else:
        assert events[LIAR].failure
        assert not set("\x1b\ud800") & set(str(events[LIAR].failure))
