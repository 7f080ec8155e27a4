"""A Flower Grid without processes: messages go straight to ClientApps, and answers come back in any order."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import count

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


class InProcessGrid(Grid):
    """Nodes with arbitrary ids, each a ClientApp; ``chance`` decides which answer comes when."""

    def __init__(self, app: ClientApp, nodes: int, seed: int = 0) -> None:
        self.app = app
        self.chance = random.Random(seed)
        ids = self.chance.sample(range(10**6, 10**9), nodes)
        self.contexts = {
            node: Context(1, node, {"partition-id": number, "num-partitions": nodes}, RecordDict(), {})
            for number, node in enumerate(ids)
        }
        self.answers: dict[str, Message] = {}
        self.numbers = count()
        self.carried = 0
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *arguments: object, **keywords: object) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        nodes = list(self.contexts)
        self.chance.shuffle(nodes)
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(f"message-{next(self.numbers)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            self.answers[names[-1]] = self.deliver(message)
        return names

    def deliver(self, message: Message) -> Message:
        return self.app(message, self.contexts[message.metadata.dst_node_id])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        here = [name for name in message_ids if name in self.answers]
        self.chance.shuffle(here)
        return [self.answers.pop(name) for name in here[: self.chance.randint(0, len(here))]]
