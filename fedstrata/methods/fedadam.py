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
    \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`, :math:`w \leftarrow w + \eta \, m / (\sqrt v + \tau)`. The betas and
    tau are the paper's; its learning rate is tuned for each task, and the default is ours. Running statistics are
    averaged. Nothing more travels than in FedAvg.
    """

    beta2: float = parameter(0.99, "The decay of the mean of squared updates.", low=0, below=1)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Take a running mean."""
        return self.beta2 * previous + (1 - self.beta2) * square
