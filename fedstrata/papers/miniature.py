"""A run in miniature: a few clients with a few samples each send the messages that all of them would send.

How large messages are follows from the model and the method, and not from how long anybody trained; so a few steps tell
the bytes of a run, also of methods that find masks or choose layers before a round.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedstrata.data import Dataset, Split
from fedstrata.engines.planning import Plan, build_engine
from fedstrata.experiment import Experiment
from fedstrata.methods import Method
from fedstrata.runs.preparing import Ingredients, prepare

CLIENTS = 3
SAMPLES = 4
_BATCH = 2
_EXCHANGES = 4
"""So many rounds with exchanges before them are looked at, from the first on."""


@dataclass(frozen=True)
class Traffic:
    """The bytes of rounds, both ways: each number holds from its round until the next one that was looked at.

    ``of_round`` are those of a participant, ``of_exchange`` those of a client before the round.
    """

    rounds: tuple[int, ...]
    of_round: tuple[float, ...]
    of_exchange: tuple[float, ...]

    def lengths(self, rounds: int) -> list[int]:
        """For how many rounds each number holds.

        >>> Traffic((1, 2, 5), (8.0, 4.0, 2.0), (10.0, 0.0, 0.0)).lengths(6)
        [1, 3, 2]
        """
        return [after - before for before, after in itertools.pairwise((*self.rounds, rounds + 1))]

    def total(self, rounds: int, participants: float, clients: int) -> float:
        """Add up the bytes of a run.

        >>> Traffic((1, 2, 5), (8.0, 4.0, 2.0), (10.0, 0.0, 0.0)).total(6, participants=2, clients=3)
        78.0
        """
        numbers = zip(self.lengths(rounds), self.of_round, self.of_exchange, strict=True)
        return sum(length * (participants * each + clients * before) for length, each, before in numbers)


def measure_traffic(experiment: Experiment, dataset: Dataset, split: Split) -> Traffic:
    """Run the rounds that tell a run's messages, with a few clients, on the samples of those that hold the most."""
    few = min(split.clients, max(CLIENTS, Method.make(experiment.method).needs.relays + 1))
    ids = np.sort(np.argsort(-split.sizes, kind="stable")[:few])
    small = Split([split.train[one][:SAMPLES] for one in ids], [split.test[one][:SAMPLES] for one in ids])
    least = dataclasses.replace(dataset, test=np.unique([*small.test_parts.joined(), *dataset.test[:SAMPLES]]))
    short = experiment.with_changes(
        {
            "clients": few,
            "participation": 1.0,
            "batch_size": _BATCH,
            "steps": 1,
            "late_clients": 0,
            "join_round": None,
            "validation": None,
            "validation_fraction": None,
            "patience": None,
        }
    )
    ready = prepare(short, Ingredients(dataset=least, split=small))
    engine = build_engine(Plan("loop", 1), ready.setting, ready.model, ready.data, ready.declared)
    looked, of_round, of_exchange = [], [], []
    losses: list[float] = []
    for round in _telling_rounds(ready.setting.method, experiment.rounds):
        up, down = engine.exchange(round)
        report = engine.round(round, range(few), False, losses)
        losses.append(float(report.loss.mean()))
        looked.append(round)
        of_round.append((report.bytes_up + report.bytes_down) / few)
        of_exchange.append((up + down) / few)
    return Traffic(tuple(looked), tuple(of_round), tuple(of_exchange))


def _telling_rounds(method: Method, rounds: int) -> list[int]:
    """List the rounds to look at: the first two, the last, and those around the first exchanges with clients."""
    found = itertools.islice(_exchanging(method, rounds), _EXCHANGES)
    around = {round for first in found for round in (first, first + 1)}
    return sorted(round for round in {1, 2, rounds, *around} if round <= rounds)


def _exchanging(method: Method, rounds: int) -> Iterator[int]:
    return (round for round in range(1, rounds + 1) if method.exchanges_before(round, rounds))
