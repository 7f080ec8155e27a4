"""A round of a small federation as diagnostics see it, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.diagnostics import Seen
from fedstrata.engines.client import ClientSide
from fedstrata.engines.forward import LoopForward, StackedForward
from fedstrata.experiment import Experiment
from fedstrata.runs.preparing import Ingredients, Prepared, prepare
from fedstrata.stack import repeat

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


def first_round(engine: str, model: str | nn.Module = "mlp", clients: int = 3, **changes: Any) -> Round:
    """Train clients for one epoch from the common initial model."""
    named = {"model": model} if isinstance(model, str) else {}
    experiment = Experiment(
        data="digits", clients=clients, rounds=4, epochs=1, precision="fp64", transforms="none", replay=False
    ).with_changes({**named, **changes})
    ready = prepare(experiment, Ingredients(model=None if named else model))
    setting, ids = ready.setting, range(clients)
    side = ClientSide(setting, FORWARDS[engine](ready.model, head=setting.head), ready.data)
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
