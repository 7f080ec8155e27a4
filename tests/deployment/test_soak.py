"""Many sites and many rounds over Flower's message API, with everything going wrong now and then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import Error, Message, MessageType
from in_process import InProcessGrid
from replaying import assert_same_model, merged_sites, replayed
from small_world import EXPERIMENT, ingredients
from torch import nn

from fedstrata.deployment.flower import GridNetwork, client_app
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.runs.folder import RunFolder

FAULTS = ("crash before", "crash after", "raises", "double", "old", "delay", "hang")
STATELESS = "sgd(learning_rate=0.05)"
KNOWN = "normalise(mean='0.3', deviation='0.4')"
"""A site that fails when sums are asked for would change the statistics of all."""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        return self.head(self.hidden(x.flatten(1)).relu())


class FaultyGrid(InProcessGrid):
    """Loses, delays and doubles answers, gives old ones, and restarts sites without what they had in memory.

    ``marks`` changes for a site whenever it connects anew.
    """

    def __init__(self, start, nodes: int, seed: int, trouble: float) -> None:
        super().__init__(start(), nodes, seed)
        self.start = start
        self.trouble = trouble
        self.apps = {node: start() for node in self.contexts}
        self.marks = dict.fromkeys(self.contexts, 0)
        self.faults: Counter[str] = Counter()
        self.delayed: dict[str, int] = {}
        self.earlier: dict[int, Message] = {}

    def deliver(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        fault = self.fault()
        self.faults[fault] += 1
        if fault == "crash before":
            self.restart(node)
            return self.lost(message)
        reply = self.apps[node](message, self.contexts[node])
        if fault == "crash after":
            self.restart(node)
            return self.lost(message)
        if fault == "raises":
            return Message(Error(2, "out of memory"), reply_to=message)
        if fault == "double":
            reply = self.apps[node](message, self.contexts[node])
        if fault == "old" and node in self.earlier:
            reply = Message(self.earlier[node].content, reply_to=message)
        if message.metadata.message_type == MessageType.TRAIN:
            self.earlier[node] = reply
        if fault in ("delay", "hang"):
            self.delayed[message.metadata.message_id] = 10**9 if fault == "hang" else self.chance.randint(1, 60)
        return reply

    def fault(self) -> str:
        return self.chance.choice(FAULTS) if self.chance.random() < self.trouble else "none"

    def restart(self, node: int) -> None:
        self.apps[node] = self.start()
        self.marks[node] += 1

    def lost(self, message: Message) -> Message:
        return Message(Error(3, "the node is gone"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = []
        for name in message_ids:
            self.delayed[name] = self.delayed.get(name, 0) - 1
            if self.delayed[name] < 0:
                ready.append(name)
        pulled = list(super().pull_messages(ready))
        for message in pulled:
            self.delayed.pop(message.metadata.reply_to_message_id, None)
        return pulled

    def forget(self, name: str) -> None:
        self.answers.pop(name, None)
        self.delayed.pop(name, None)

    def nodes(self) -> dict[int, tuple[int, str]]:
        return {number: (node, str(self.marks[node])) for number, node in enumerate(self.contexts)}


class QuickNetwork(GridNetwork):
    """A network whose clock is the number of times that it was looked at, so that nobody really waits."""

    looks = 0

    def now(self) -> float:
        self.looks += 1
        return self.looks / 10


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def soak(folder: Path, sites: int, rounds: int, trouble: float, seed: int) -> tuple[FaultyGrid, list[float], list[str]]:
    chance = random.Random(seed)
    own = ingredients(tuple(chance.randint(5, 12) for _ in range(sites)), Small)
    grid = FaultyGrid(
        lambda: client_app(folder / "sites", part_of_partition=True, ingredients=own), sites, seed, trouble
    )
    experiment = EXPERIMENT.with_changes({"rounds": rounds, "optimiser": STATELESS, "transforms": KNOWN})
    names = [f"site-{number}" for number in range(sites)]
    rules = Rules(min_sites=sites // 2, round_timeout=20, max_refusals=10**6)
    deployment = Deployment(experiment, names, folder / "run", rules, rehearsal=True, ingredients=own)
    memory: list[float] = []
    lines: list[str] = []
    network = QuickNetwork(grid, grid.nodes, 0.0, grid.forget)
    deployment.run(network, lambda update: memory.append(resident_megabytes()), log=lines.append)
    return grid, memory, lines


def assert_accounted_for(folder: Path, grid: FaultyGrid, sites: int, rounds: int, seed: int) -> None:
    """Every round is there, and its result is that of the replies which were merged, each counted once."""
    assert all(grid.faults[kind] for kind in FAULTS)
    run = RunFolder.open(folder / "run")
    merged = merged_sites(run)
    assert sorted(merged) == list(range(1, rounds + 1))
    assert all(len(set(present)) == len(present) >= sites // 2 for present in merged.values())
    assert any(len(present) < sites for present in merged.values())
    chance = random.Random(seed)
    own = ingredients(tuple(chance.randint(5, 12) for _ in range(sites)), Small)
    assert_same_model(run, replayed(merged, own=own, optimiser=STATELESS, transforms=KNOWN, evaluate_every=rounds))


def test_twenty_sites_through_all_kinds_of_trouble(tmp_path):
    grid, _, _ = soak(tmp_path, sites=20, rounds=8, trouble=0.1, seed=1)
    assert_accounted_for(tmp_path, grid, 20, 8, seed=1)


@pytest.mark.slow
@pytest.mark.attack(
    "Twenty sites for five hundred rounds, with faults drawn at random: crashes before and after an answer, failures, "
    "double, old and late answers, and none at all.",
    "Every round is the mean of the replies that were merged, each counted once; nothing is lost, and memory is flat.",
)
def test_twenty_sites_for_five_hundred_rounds_and_memory_stays_flat(tmp_path, record_property):
    rounds = 500
    grid, memory, _ = soak(tmp_path, sites=20, rounds=rounds, trouble=0.05, seed=2)
    assert_accounted_for(tmp_path, grid, 20, rounds, seed=2)
    grown = memory[-1] - memory[50]
    faults = sum(count for kind, count in grid.faults.items() if kind != "none")
    record_property("measured", f"{faults} faults; {grown:+.0f} MB from round 50 to round {rounds}")
    assert grown < 50, "megabytes"
