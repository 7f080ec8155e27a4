"""What everybody in a run knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedstrata.engines.batches import Work
from fedstrata.layers import LayerMap
from fedstrata.methods.composition import Method
from fedstrata.optimisers import Optimiser
from fedstrata.schedules import Schedule
from fedstrata.stack import Tensors


@dataclass(frozen=True)
class Setting:
    """All that stays the same over a run, and that every client and the server know."""

    method: Method
    layers: LayerMap
    initial: Tensors
    personal: frozenset[str]
    resident: frozenset[str]
    optimiser: Optimiser
    schedule: Schedule
    work: Work
    rounds: int
    seed: int
    clients: int
    precision: str
    device: torch.device

    @property
    def shared(self) -> frozenset[str]:
        """The names that travel."""
        return frozenset(self.initial) - self.personal

    @property
    def head(self) -> str | None:
        """The name of the model's last linear layer, if it has one."""
        return None if self.layers.head is None else self.layers.head.name

    @property
    def everybody_alike(self) -> bool:
        """Whether all clients use the model that the server sends: nothing is kept, nothing is put together by each."""
        return not self.resident and not self.method.personalises
