"""FedAvgM: momentum at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.methods.base import Facts, Part, Server
from fedstrata.methods.registry import methods
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(Part):
    r"""FedAvg with momentum on the server's update.

    With :math:`\Delta = \sum_k p_k (w_k - w)`: :math:`v \leftarrow \beta v + \Delta`, :math:`w \leftarrow w + \eta v`.
    Only parameters have momentum; running statistics are averaged, since a running variance that overshoots may turn
    negative.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, "
        "2019",
        "https://arxiv.org/abs/1909.06335",
    )

    beta: float = parameter(0.9, "The momentum.", low=0, below=1)
    learning_rate: float = parameter(1.0, "The server's learning rate.", above=0)

    def server_memory(self, server: Server) -> Tensors:
        """Start with no velocity."""
        return {
            name: torch.zeros_like(server.model[name]) for name in server.layers.parameter_names if name in server.model
        }

    def step(self, server: Server, merged: Tensors) -> tuple[Tensors, Tensors]:
        """Accumulate the update into the velocity and follow it."""
        velocity = {
            name: self.beta * previous + (merged[name] - server.model[name]) if name in merged else self.beta * previous
            for name, previous in server.memory.items()
        }
        moved = {name: server.model[name] + self.learning_rate * value for name, value in velocity.items()}
        return {**merged, **moved}, velocity
