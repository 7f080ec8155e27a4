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

    As ``fedadam``, but :math:`v \leftarrow v + \Delta^2`, and without momentum unless ``beta1`` is given. Running
    statistics are averaged. Nothing more travels than in FedAvg.

    Defaults:
        learning_rate, tau: google-research/federated, optimization/docs/hyperparameters.md (CIFAR-100 and EMNIST;
            those of the CIFAR-10 configuration of adap/flower are the same).
        beta1: google-research/federated, optimization/docs/hyperparameters.md (the Adagrad of Keras, which has none).
    """

    learning_rate: float = parameter(0.1, "The server's learning rate, which the paper tunes for each task.", above=0)
    beta1: float = parameter(0.0, "The decay of the mean of updates.", low=0, below=1)
    tau: float = parameter(1e-2, "The adaptivity: the smaller, the more alike all entries move.", above=0)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Add up."""
        return previous + square
