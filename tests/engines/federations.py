"""Small federations whose every number can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.data import Dataset, Split
from fedstrata.engines.batches import DeviceData
from fedstrata.engines.planning import Plan
from fedstrata.engines.server import Declared
from fedstrata.engines.setting import Setting
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients

CPU = torch.device("cpu")


@dataclass
class Federation:
    """What engines work on."""

    setting: Setting
    model: nn.Module
    data: DeviceData
    declared: Declared


def samples(
    count: int, inputs: Tensor | None = None, labels: Sequence[int] | None = None, test: Sequence[int] = ()
) -> Dataset:
    """Make a pool of samples; those that are not for testing are for training."""
    drawn = torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    classes = torch.arange(count) % 3 if labels is None else torch.tensor(labels)
    train = np.setdiff1d(np.arange(count), test)
    names = tuple(str(label) for label in range(int(classes.max()) + 1))
    return Dataset(
        "samples", drawn if inputs is None else inputs, classes, train, np.array(test, dtype=np.int64), names
    )


def split_by_size(sizes: Sequence[int], test: Sequence[Sequence[int]] | None = None) -> Split:
    """Give each client the next samples of the pool."""
    train = tuple(np.arange(begin, end) for begin, end in pairwise(np.cumsum((0, *sizes))))
    positions = test if test is not None else [()] * len(sizes)
    return Split(train, tuple(np.array(own, dtype=np.int64) for own in positions))


def federation(model: nn.Module, dataset: Dataset, split: Split, **changes: Any) -> Federation:
    """Prepare a run in float64, without the engine that the run itself would use."""
    experiment = Experiment(rounds=2, precision="fp64", transforms="none", replay=False).with_changes(changes)
    ingredients = Ingredients(dataset=dataset, split=split, model=model)
    simulation = Driver.prepare(experiment, ingredients, Plan("loop", 1))
    data = DeviceData(dataset, split, (), CPU, torch.float64)
    declared = Declared(torch.from_numpy(split.sizes), data.label_counts)
    return Federation(simulation.setting, model.double(), data, declared)
