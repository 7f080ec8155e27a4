"""A round of a small federation as diagnostics see it, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.data import Dataset, Split
from fedstrata.diagnostics import Seen
from fedstrata.engines.client import ClientSide
from fedstrata.engines.forward import LoopForward, StackedForward
from fedstrata.experiment import Experiment
from fedstrata.runs.preparing import Ingredients, Prepared, prepare
from fedstrata.stack import repeat

SIZES = (8, 12, 10)
"""How many samples clients have."""
ALL = 100
"""A batch so large that it holds all samples of a client: nothing is left to chance."""
FORWARDS = {"loop": LoopForward, "stacked": StackedForward}


@dataclass
class Round:
    """What diagnostics see, and what it was made of."""

    seen: Seen
    ready: Prepared
    side: ClientSide

    def module(self, client: int, training: bool) -> nn.Module:
        """One client's trained model as a plain module."""
        model = self.ready.model.train(training)
        model.load_state_dict({name: tensor[client] for name, tensor in self.seen.trained.items()})
        return model

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """All training samples of a client, and their labels."""
        positions = torch.from_numpy(self.ready.data.split.train[client])[None]
        inputs, labels = self.ready.data.make(positions, None, clients=[client])
        return inputs[0], labels[0]


def pictures() -> tuple[Dataset, Split]:
    """Small pictures of three classes, which differ in their brightness, and clients of unequal size.

    Each client has six more to be tested on.
    """
    trained, tested = sum(SIZES), 6 * len(SIZES)
    labels = torch.arange(trained + tested) % 3
    noise = torch.randn(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs, test = noise + labels[:, None, None, None] / 4, np.arange(trained, trained + tested)
    edges = np.cumsum((0, *SIZES))
    split = Split(tuple(np.arange(*pair) for pair in pairwise(edges)), tuple(test.reshape(len(SIZES), 6)))
    return Dataset("pictures", inputs, labels, np.arange(trained), test, ("a", "b", "c")), split


def ingredients(model: nn.Module | None = None) -> Ingredients:
    """The pictures, and a model of one's own."""
    dataset, split = pictures()
    return Ingredients(dataset=dataset, split=split, model=model)


EXPERIMENT = Experiment(rounds=4, epochs=1, batch_size=4, precision="fp64", transforms="none", replay=False)


def first_round(forward: str, model: str | nn.Module = "mlp", **changes: Any) -> Round:
    """Train clients for one epoch from the common initial model."""
    named = isinstance(model, str)
    experiment = EXPERIMENT.with_changes({**({"model": model} if named else {}), **changes})
    ready = prepare(experiment, ingredients(None if named else model))
    clients = len(SIZES)
    setting, ids = ready.setting, range(clients)
    side = ClientSide(setting, FORWARDS[forward](ready.model, head=setting.head), ready.data)
    received = repeat(setting.initial, clients)
    probe = side.probe(ids, 1)
    trained = probe.train(received, epochs=1)
    merged = {name: tensor.to(torch.float64).mean(0).to(tensor.dtype) for name, tensor in trained.items()}
    seen = Seen(
        round=1,
        rounds=4,
        layers=setting.layers,
        before=setting.initial,
        after={name: tensor for name, tensor in merged.items() if name in setting.shared},
        travelled=setting.shared,
        participants=tuple(ids),
        sizes=ready.declared.sizes,
        label_counts=ready.declared.label_counts,
        received=received,
        started=received,
        trained=trained,
        probe=probe,
    )
    return Round(seen, ready, side)
