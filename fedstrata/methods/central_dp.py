"""Central differential privacy: the server puts noise on the mean of clipped updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Server
from fedstrata.methods.mechanisms.private_updates import PrivateUpdates
from fedstrata.stack import Tensors


@methods.register("central-dp")
@dataclass(frozen=True)
class CentralDP(PrivateUpdates):
    r"""Clients clip their updates; the server puts noise on the mean (DP-FedAvg with fixed clipping).

    :math:`\hat w = w + \frac{1}{m} \sum_k \Delta_k \min(1, C / \|\Delta_k\|) + \mathcal{N}(0, (z C / m)^2)` over m
    participants. The guarantee is for whole clients: whoever sees all global models can hardly tell whether a client's
    update was there or was nothing. The server itself sees the updates and is trusted, unless secure aggregation hides
    them from it. The noise of a run with few clients drowns the model; the paper has thousands of clients.

    A real server draws its noise from the operating system, and has a model on its disk before any site gets it: one
    that is killed goes on with the same model, so that each round is published once, as the account says. In a
    simulation noise comes from the seed, so that it can be repeated, and anybody who knows the seed can take it off.

    Not covered are the training losses, test scores, sample sizes and label counts that clients report, and the mean
    and deviation of ``normalise``. Noise is drawn in floating point, whose last digits are no real numbers.
    """

    facts: ClassVar[Facts] = Facts(
        "privacy",
        "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018",
        "https://arxiv.org/abs/1710.06963",
    )
    touches: ClassVar[Touches] = PrivateUpdates.touches.also(relies_on=(Matter.EXACT_UPLOADS,))

    def published(self, server: Server, merged: Tensors) -> Tensors:
        """Put noise on the merged model."""
        scale = self.multiplier(server.rounds) * self.clip / len(server.participants)
        return {
            name: tensor + scale * server.noise(self.name, tensor.shape, place).to(tensor.dtype)
            if tensor.is_floating_point()
            else tensor
            for place, (name, tensor) in enumerate(merged.items())
        }
