"""AdaDecay at the server: each weight decays by how much it moved among those of its layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Server
from fedstrata.methods.mechanisms.server_decay import ServerDecay
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("adadecay")
@dataclass(frozen=True)
class AdaDecay(ServerDecay):
    r"""After any aggregation, decay each global weight by how much it moved among those of its layer.

    With :math:`g = w^t - \hat w` as the gradient and :math:`\hat g = (|g| - \mathrm{mean}) / \mathrm{std}` over the
    layer: :math:`w^{t+1} = \hat w - \lambda \theta \, w^t` with :math:`\theta = 2 / (1 + e^{-\alpha \hat g})`. Where a
    layer moved evenly, :math:`\theta = 1`: ordinary weight decay.

    AdaDecay is an optimiser for one model. FedLWS (Table 6) moves it to the server without saying how; here the round's
    update is the gradient and the learning rate is 1. A layer's weight and bias are normalised together. Nothing more
    travels than in FedAvg.

    Defaults:
        alpha: ours; the value of reimplementations.
        decay: ours; the usual weight decay of one model.
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
