"""A small federation on which methods are checked: real digits, five unequal clients, a model with convolutions, norms
(one of them in a shortcut), dropout and a head.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.data import Dataset, Split, datasets
from fedstrata.engines.planning import Plan
from fedstrata.experiment import Experiment
from fedstrata.methods import Method, Part
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients

SIZES = (9, 16, 16, 5, 23)
"""How many samples the clients have."""
EXPERIMENT = Experiment(
    rounds=3,
    epochs=2,
    batch_size=8,
    precision="fp64",
    optimiser="sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.001)",
    engine="loop",
    seed=7,
    replay=False,
)


class TinyNet(nn.Module):
    """Convolutions with norms (one in a shortcut, named so that no name gives it away), dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.scale = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.dropout = nn.Dropout(0.2)
        self.hidden = nn.Linear(16, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the network."""
        x = torch.relu(self.scale(self.stem(x)))
        x = nn.functional.max_pool2d(torch.relu(self.body(x) + self.shortcut(x)), 4)
        return self.head(torch.relu(self.hidden(self.dropout(x.flatten(1)))))  # type: ignore[no-any-return]


@cache
def digits() -> Dataset:
    """Load scikit-learn's digits, with a little noise.

    Without it, weights of one size (FedPM's) give sums of a few whole numbers that are equal or zero but for rounding,
    and whether a rectifier or a pooling passes a gradient on would depend on the machine.
    """
    data = datasets.make("digits").load(None)
    noise = np.random.default_rng(0).normal(scale=0.01, size=data.inputs.shape)
    return replace(data, inputs=data.inputs + torch.from_numpy(noise).to(data.inputs.dtype))


def unequal_split(dataset: Dataset, sizes: tuple[int, ...] = SIZES) -> Split:
    """Give clients different numbers of samples."""
    order = np.random.default_rng(0).permutation(dataset.train)
    train = tuple(order[begin:end] for begin, end in pairwise(np.cumsum((0, *sizes))))
    test = tuple(dataset.test[20 * client : 20 * client + 10 + client] for client in range(len(sizes)))
    return Split(train, test)


def prepare(
    method: str | Part | Method, engine: str = "loop", chunk: int = 99, dataset: Dataset | None = None, **changes: Any
) -> Driver:
    """Prepare a run of a method in the small federation."""
    dataset = dataset or digits()
    ingredients = Ingredients(dataset=dataset, split=unequal_split(dataset), model=TinyNet, method=Method.make(method))
    plan = Plan(engine, 1 if engine == "loop" else chunk)
    with warnings.catch_warnings():  # nobody's privacy is at stake here
        warnings.filterwarnings("ignore", "'normalise' takes the exact mean")
        return Driver.prepare(EXPERIMENT.with_changes({"engine": engine, **changes}), ingredients, plan)


def with_changed_client(dataset: Dataset, split: Split, client: int) -> Dataset:
    """Give one client other images under the same labels."""
    inputs = dataset.inputs.clone()
    inputs[split.train[client]] = inputs[split.train[client]].flip(-1)
    return replace(dataset, inputs=inputs)
