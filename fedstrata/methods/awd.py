"""AWD at the server: weights decay in proportion to the length of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.part import Metrics
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Server
from fedstrata.methods.mechanisms.server_decay import ServerDecay
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, squared_norm


@methods.register("awd")
@dataclass(frozen=True)
class AWD(ServerDecay):
    r"""After any aggregation, decay the global weights in proportion to the length of the update.

    With :math:`g = w^t - \hat w` as the gradient, over all shared parameters: :math:`\lambda_t =
    \lambda_{\mathrm{awd}} \lVert g \rVert / \lVert w^t \rVert`, :math:`\bar\lambda \leftarrow 0.1 \bar\lambda + 0.9
    \lambda_t` from zero, :math:`w^{t+1} = \hat w - \bar\lambda w^t`. So the decay is a fixed part of the update's
    length.

    AWD is an optimiser for one model, and its smoothing gives the new value the larger part (Algorithm 1). FedLWS
    (Table 6) moves it to the server without saying how; here the round's update is the gradient and the learning rate
    is 1. Nothing more travels than in FedAvg. The decay of a round is in the run's layer metrics as ``weight_decay``.

    Defaults:
        decay: ours; the value of reimplementations, for adversarial training on CIFAR.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Ghiasi, Shafahi and Ardekani, Improving Robustness with Adaptive Weight Decay, NeurIPS 2023",
        "https://arxiv.org/abs/2210.00094",
    )

    decay: float = parameter(0.022, "The length of the decay as a part of the update's.", low=0)

    def server_memory(self, server: Server) -> Tensors:
        """Start without decay."""
        return {"rate": torch.zeros((), dtype=torch.float64, device=server.sizes.device)}

    def rates(self, server: Server, old: Tensors, updates: Tensors) -> tuple[Tensors, Tensors]:
        """Compare the lengths over all parameters."""
        length, size = (_length(tensors) for tensors in (updates, old))
        now = (self.decay * length / size).where(size > 0, 0)
        rate = 0.1 * server.memory["rate"] + 0.9 * now
        return {name: rate.to(tensor.dtype) for name, tensor in old.items()}, {"rate": rate}

    def metrics(self, server: Server) -> Metrics:
        """Tell the decay of the round."""
        return {"weight_decay": {"(model)": float(server.memory["rate"])}}


def _length(tensors: Tensors) -> Tensor:
    """Compute the norm over all tensors, in float64."""
    return squared_norm({name: tensor[None].to(torch.float64) for name, tensor in tensors.items()})[0].sqrt()
