"""A federation of four sites that is small enough to be run many times: real digits, a model of a few layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.data import Dataset, Split, datasets
from fedstrata.data.channels import with_statistics_of_all
from fedstrata.deployment.protocol import Place, Request, digest
from fedstrata.engines.planning import Plan
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients

SITES = 4
ACTING = {
    "freeze-middle": "freeze-middle(after=1)", "lips": "lips(every=1)", "transient": "transient(every=1)",
    "l-dawa": "l-dawa(warmup=1)", "fedlama": "fedlama(warmup=0)", "feddst": "feddst(every=1, until=1.0)",
}  # fmt: skip
"""Parameters under which a method does something in three rounds."""
EXPERIMENT = Experiment(
    rounds=3,
    epochs=1,
    batch_size=8,
    optimiser="sgd(learning_rate=0.05, momentum=0.9, keep=true)",
    engine="loop",
    seed=3,
    checkpoint_every=1,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.hidden = nn.Linear(16, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = nn.functional.max_pool2d(torch.relu(self.body(x)), 4)
        return self.head(torch.relu(self.hidden(x.flatten(1))))


@cache
def digits() -> Dataset:
    return datasets.make("digits").load(None)


def ingredients(sizes: tuple[int, ...] = (9, 16, 12, 23), model: Any = Net) -> Ingredients:
    dataset = digits()
    order = np.random.default_rng(0).permutation(dataset.train)
    train = tuple(np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]))
    test = tuple(dataset.test[10 * site : 10 * site + 10 + site % 3] for site in range(len(sizes)))
    # No secrets, so that noise is that of the simulation.
    return Ingredients(dataset=dataset, split=Split(train, test), model=model, secret=False)


@cache
def statistics() -> dict[str, list[float]]:
    """Tell mean and deviation of all training samples, as a server does once it knows them."""
    own = ingredients()
    assert own.split is not None
    known = with_statistics_of_all(digits(), own.split)
    return {"mean": list(known.mean or ()), "deviation": list(known.deviation or ())}


def simulated(method: str, own: Ingredients | None = None, **changes: Any) -> Driver:
    experiment = EXPERIMENT.with_changes({"method": method, **changes})
    return Driver.prepare(experiment, own or ingredients(), Plan("loop", 1))


def hello(
    run: str = "run", number: int = 0, method: str = "fedbn", committed: int = 0, session: str = "one"
) -> Request:
    experiment = EXPERIMENT.with_changes({"method": method, "clients": SITES})
    facts = {
        "experiment": experiment.to_mapping(),
        "number": number,
        "sites": SITES,
        "session": session,
        "committed": committed,
        "statistics": statistics(),
    }
    return Request("hello", run, facts=facts)


def request(kind: str, place: Place, payload: bytes, run: str = "run", **facts: Any) -> Request:
    return Request(kind, run, place, {"payload": digest(payload), **facts}, payload)
