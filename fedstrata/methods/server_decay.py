"""Adaptive weight decay at the server: AdaDecay and AWD, as FedLWS compares with them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Server
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, squared_norm, subtract


@dataclass(frozen=True)
class ServerDecay(Part):
    r"""Decay the global weights as an optimiser would for which the round's update is a step along a gradient.

    With :math:`g = w^t - \hat w` and a learning rate of 1, a step :math:`w - (g + \lambda w)` leads to :math:`\hat w -
    \lambda w^t`. Only the shared parameters decay that came in the round.
    """

    @abstractmethod
    def rates(self, server: Server, old: Tensors, updates: Tensors) -> tuple[Tensors, Tensors]:
        """Compute how strongly each entry, or each tensor, decays, and the server's new memory."""

    def refine(self, server: Server, new: Tensors) -> tuple[Tensors, Tensors]:
        """Decay what came."""
        old = {name: server.model[name] for name in shared_parameters(server) if name in new}
        if not old:
            return new, server.memory
        rates, memory = self.rates(server, old, subtract(old, new))
        return {**new, **{name: new[name] - rates[name] * tensor for name, tensor in old.items()}}, memory


@methods.register("adadecay")
@dataclass(frozen=True)
class AdaDecay(ServerDecay):
    r"""After any aggregation, decay each global weight by how much it moved among those of its layer.

    With :math:`g = w^t - \hat w` as the gradient and :math:`\hat g = (|g| - \mathrm{mean}) / \mathrm{std}` over the
    layer: :math:`w^{t+1} = \hat w - \lambda \theta \, w^t` with :math:`\theta = 2 / (1 + e^{-\alpha \hat g})`. Where a
    layer moved evenly, :math:`\theta = 1`: ordinary weight decay.

    AdaDecay is an optimiser for one model. FedLWS (Table 6) moves it to the server without saying how; here the round's
    update is the gradient and the learning rate is 1. A layer's weight and bias are normalised together. The paper's
    :math:`\alpha` is 4; the decay is the usual 0.0005. Nothing more travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Nakamura and Hong, Adaptive Weight Decay for Deep Neural Networks, IEEE Access 2019",
        "https://arxiv.org/abs/1907.08931",
    )

    decay: float = parameter(0.0005, "The weight decay of an entry that moved as much as its layer.", low=0)
    alpha: float = parameter(4.0, "How much more an entry decays that moved more.", low=0)

    def rates(self, server: Server, old: Tensors, updates: Tensors) -> tuple[Tensors, Tensors]:
        """Normalise within each layer."""
        rates: Tensors = {}
        for layer in server.layers.all:
            sizes = {name: updates[name].abs() for name in layer.parameters if name in updates}
            if sizes:
                together = torch.cat([size.flatten() for size in sizes.values()])
                mean, deviation = together.mean(), together.std(correction=0)
                deviation = deviation.where(deviation > 0, 1)
                for name, size in sizes.items():
                    rates[name] = 2 * self.decay * torch.sigmoid(self.alpha * (size - mean) / deviation)
        return rates, server.memory


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
    is 1. The default is the paper's for adversarial training on CIFAR. Nothing more travels than in FedAvg. The decay
    of a round is in the run's layer metrics as ``weight_decay``.
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

    def layer_metrics(self, server: Server) -> dict[str, dict[str, float]]:
        """Tell the decay of the round."""
        return {"weight_decay": {"(model)": float(server.memory["rate"])}}


def _length(tensors: Tensors) -> Tensor:
    """Compute the norm over all tensors, in float64."""
    return squared_norm({name: tensor[None].to(torch.float64) for name, tensor in tensors.items()})[0].sqrt()
