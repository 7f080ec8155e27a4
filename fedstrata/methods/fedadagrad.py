"""FedAdagrad: Adagrad at the server."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedstrata.methods.contract.registry import methods
from fedstrata.methods.mechanisms.server_optimiser import AdaptiveOptimiser
from fedstrata.spec import parameter


@methods.register("fedadagrad")
@dataclass(frozen=True)
class FedAdagrad(AdaptiveOptimiser):
    r"""FedAvg with Adagrad at the server: squares only add up, so steps grow shorter.

    As ``fedadam``, but :math:`v \leftarrow v + \Delta^2`, and without momentum unless ``beta1`` is given. Tau is the
    paper's; its learning rate is tuned for each task, and the default is ours. Running statistics are averaged. Nothing
    more travels than in FedAvg.
    """

    beta1: float = parameter(0.0, "The decay of the mean of updates.", low=0, below=1)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Add up."""
        return previous + square
