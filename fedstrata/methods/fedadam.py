"""FedAdam: Adam at the server."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedstrata.methods.contract.registry import methods
from fedstrata.methods.mechanisms.server_optimiser import AdaptiveOptimiser
from fedstrata.spec import parameter


@methods.register("fedadam")
@dataclass(frozen=True)
class FedAdam(AdaptiveOptimiser):
    r"""FedAvg with Adam at the server.

    With :math:`\Delta = \sum_k p_k (w_k - w)`: :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta`, :math:`v
    \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`, :math:`w \leftarrow w + \eta \, m / (\sqrt v + \tau)`. Running
    statistics are averaged. Nothing more travels than in FedAvg.

    Defaults:
        learning_rate, tau: google-research/federated, optimization/docs/hyperparameters.md (Shakespeare; those of the
            CIFAR-10 configuration of adap/flower are the same).
        beta1: google-research/federated, optimization/docs/hyperparameters.md.
        beta2: adap/flower, conf/cifar10/strategy/fedadam.yaml of its baseline adaptive_federated_optimization
            (0.999 in the authors' code).
    """

    beta2: float = parameter(0.99, "The decay of the mean of squared updates.", low=0, below=1)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Take a running mean."""
        return self.beta2 * previous + (1 - self.beta2) * square
