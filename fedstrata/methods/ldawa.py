"""L-DAWA: a client's layer counts by its angle to the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.functional import ldawa
from fedstrata.methods.base import Facts, Message, Part, Server
from fedstrata.methods.registry import methods
from fedstrata.methods.shared import equal_shares, shared_parameters
from fedstrata.stack import Tensors


@methods.register("l-dawa")
@dataclass(frozen=True)
class LDawa(Part):
    r"""Multiply each client's tensors by their cosines to the global ones before they are averaged.

    :math:`w^{t+1}_l = \frac{1}{K} \sum_k \cos(w_{k,l}, w^t_l) \, w_{k,l}` for every parameter tensor l. Clients count
    equally, and the sum is not divided by that of the cosines, so a tensor shrinks where clients turn away from it. A
    global tensor of zeros, such as a bias at the beginning, has no direction; its clients are averaged, where the
    released code computes 0 / 0. Running statistics are averaged: a variance has no direction to agree on. Nothing more
    travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Rehman et al., L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual "
        "Representation Learning, ICCV 2023",
        "https://arxiv.org/abs/2307.07393",
    )

    def weigh(self, server: Server, replies: Message) -> Tensor:
        """Let all participants count equally."""
        return equal_shares(server)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average the parameters by their cosines, and everything else as it is."""
        parameters = [name for name in shared_parameters(server) if name in replies.tensors]
        return {
            **super().merge(server, replies.without(parameters), shares),
            **{
                name: ldawa(server.model[name], replies.tensors[name], mask=replies.masks.get(name))
                for name in parameters
            },
        }
