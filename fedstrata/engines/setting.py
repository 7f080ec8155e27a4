"""What everybody in a run knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedstrata.engines.batches import Work
from fedstrata.flops import Flops
from fedstrata.layers import LayerMap
from fedstrata.losses import Loss
from fedstrata.methods.contract.composition import Method, PartExchange
from fedstrata.optimisers import Optimiser
from fedstrata.schedules import Schedule
from fedstrata.scores import Metric
from fedstrata.stack import Tensors
from fedstrata.wire import AS_IS


@dataclass(frozen=True)
class Setting:
    """All that stays the same over a run, and that every client and the server know.

    ``own_inputs`` tells that each client prepares inputs in its own way, by statistics of its own. ``loss`` is what is
    minimised, ``test_loss`` what tests tell, and ``metrics`` are those that the experiment asks for beside it and
    accuracy. ``secret`` tells that server and clients are not one process, and draw noise that nobody can draw again.
    ``replay`` lets training steps be recorded and replayed.
    """

    method: Method
    layers: LayerMap
    flops: Flops
    initial: Tensors
    personal: frozenset[str]
    resident: frozenset[str]
    optimiser: Optimiser
    schedule: Schedule
    loss: Loss
    test_loss: Loss
    work: Work
    rounds: int
    seed: int
    clients: int
    precision: str
    device: torch.device
    late_clients: int = 0
    join_round: int | None = None
    upload_values: str = AS_IS
    download_values: str = AS_IS
    own_inputs: bool = False
    metrics: tuple[Metric, ...] = ()
    secret: bool = False
    replay: bool = True

    def present(self, round: int) -> range:
        """The clients that are there in a round: the late ones, the last, only once they have joined."""
        joined = self.join_round is None or round >= self.join_round
        return range(self.clients if joined else self.clients - self.late_clients)

    def exchanges_before(self, round: int) -> list[PartExchange]:
        """List the method's exchanges with clients before a round, in their order."""
        return self.method.exchanges_before(round, self.rounds, joining=round == self.join_round)

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
        """Whether all clients use the model that the server sends: nothing is kept, nothing is put together by each,
        and inputs are prepared in the same way.
        """
        return not self.resident and not self.method.personalises and not self.own_inputs
