"""FedAvgM: momentum on the server's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.mechanisms.server_optimiser import ServerOptimiser
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(ServerOptimiser):
    r"""FedAvg with momentum on the server's update.

    With :math:`\Delta = \sum_k p_k (w_k - w)`: :math:`v \leftarrow \beta v + \Delta`, :math:`w \leftarrow w + \eta v`.
    Only parameters have momentum; running statistics are averaged. Nothing more travels than in FedAvg.

    Defaults:
        beta, learning_rate: google-research/federated, optimization/docs/hyperparameters.md.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, "
        "2019",
        "https://arxiv.org/abs/1909.06335",
    )

    beta: float = parameter(0.9, "The momentum.", low=0, below=1)
    learning_rate: float = parameter(1.0, "The server's learning rate.", above=0)

    def state(self, tensor: Tensor) -> Tensors:
        """Start with no velocity."""
        return {"velocity": torch.zeros_like(tensor)}

    def move(self, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Accumulate the update into the velocity and follow it."""
        velocity = self.beta * state["velocity"] + update
        return self.learning_rate * velocity, {"velocity": velocity}
