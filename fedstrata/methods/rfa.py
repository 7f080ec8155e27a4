"""RFA: the new model is the geometric median of the clients' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.functional import geometric_median_shares
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, Server
from fedstrata.methods.mechanisms.robust_merging import RobustMerge, updates_of
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("rfa")
@dataclass(frozen=True)
class RFA(RobustMerge):
    r"""Merge by the geometric median: the model with the smallest sum of distances to the clients' models.

    :math:`\hat w = \mathrm{argmin}_v \sum_k \lVert v - w_k \rVert` over all shared tensors but counters together, found
    by a few steps of the smoothed Weiszfeld algorithm: a mean in which a client counts the less, the farther away it
    is. Fewer than half of the clients cannot move it out of reach, and nobody has to say how many may lie.

    Clients count alike, where the paper weighs them by their samples, and the first step begins at the model that was
    sent, not at the mean: what a client says of its samples may be a lie, and a single liar moves the mean as far as it
    likes. The paper asks clients for a secure sum in every step; here the server does all steps by itself from single
    replies, so that it is not offered under secure aggregation. Nothing more travels than in FedAvg.

    Defaults:
        iterations, smoothing: krishnap25/RFA, models/model.py.
    """

    facts: ClassVar[Facts] = Facts(
        "robust",
        "Pillutla et al., Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 2022",
        "https://arxiv.org/abs/1912.13445",
    )

    iterations: int = parameter(4, "Steps of the Weiszfeld algorithm.", low=1)
    smoothing: float = parameter(1e-5, "The distance below which a client counts no more.", above=0)

    def combined(self, server: Server, replies: Message) -> Tensors:
        """Average by the shares that make the mean the geometric median."""
        updates = list(updates_of(server, replies).values())
        if not updates:
            return {name: server.model[name] for name in replies.tensors}
        return self.mean(server, replies, geometric_median_shares(updates, self.iterations, self.smoothing))
