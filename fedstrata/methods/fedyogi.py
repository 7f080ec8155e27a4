"""FedYogi: Yogi at the server."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.methods.contract.registry import methods
from fedstrata.methods.mechanisms.server_optimiser import AdaptiveOptimiser
from fedstrata.spec import parameter


@methods.register("fedyogi")
@dataclass(frozen=True)
class FedYogi(AdaptiveOptimiser):
    r"""FedAvg with Yogi at the server: as Adam, but squares that are too large fall slowly.

    As ``fedadam``, but :math:`v \leftarrow v - (1 - \beta_2) \Delta^2 \, \mathrm{sign}(v - \Delta^2)`. Running
    statistics are averaged. Nothing more travels than in FedAvg.

    Defaults:
        learning_rate, tau: google-research/federated, optimization/docs/hyperparameters.md (Shakespeare).
        beta1: google-research/federated, optimization/docs/hyperparameters.md.
        beta2: adap/flower, conf/cifar100/strategy/fedyogi.yaml of its baseline adaptive_federated_optimization
            (0.999 in the authors' code).
    """

    beta2: float = parameter(0.99, "The decay of the mean of squared updates.", low=0, below=1)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Go towards the new square."""
        return previous - (1 - self.beta2) * square * torch.sign(previous - square)
