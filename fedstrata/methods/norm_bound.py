"""Norm bounding: the server cuts every update to a length before it is averaged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import bounding_factors
from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Declared, Message, Server
from fedstrata.methods.mechanisms.masking import keep
from fedstrata.methods.mechanisms.robust_merging import finite_rows, median_counters, updates_of
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align


@methods.register("norm-bound")
@dataclass(frozen=True)
class NormBound(Part):
    r"""Cut every client's update to a length of at most M at the server, then average.

    :math:`\hat w = w + \frac{1}{n} \sum_k \Delta_k \min(1, M / \lVert \Delta_k \rVert)` over all shared tensors but
    counters together, of which the median is taken. Of n clients m liars move the model by at most :math:`m M / n` in a
    round, in whichever direction they like: a bound on what they can do, no judgement of who they are. All clients
    count alike, since a liar could call itself as large as it likes. Without ``bound``, M is the median length of the
    round's updates, which fewer than half of the clients cannot raise above that of an honest one.

    The server does it from single replies; a bound at the clients, as that of ``central-dp``, holds only for those who
    keep to it, and the sum that secure aggregation shows cannot be cut client by client. Running statistics that are
    shared move far and take most of the length: ``fedbn`` keeps them at the clients. A reply that holds NaN or infinite
    numbers counts as no update. Nothing more travels than in FedAvg.

    Defaults:
        bound: ours; the paper's lengths (3 to 10) belong to its model.
    """

    facts: ClassVar[Facts] = Facts(
        "robust",
        "Sun et al., Can You Really Backdoor Federated Learning?, 2019",
        "https://arxiv.org/abs/1911.07963",
    )
    touches: ClassVar[Touches] = Touches(relies_on=(Matter.SAME_ENTRIES,))

    bound: float | None = parameter(
        None, "The length to which updates are cut (M); none: the median length of the round.", above=0
    )

    def weigh(self, declared: Declared) -> Tensor:
        """Let all participants count alike."""
        return equal_weights(declared)

    def admit(self, server: Server, replies: Message) -> Message:
        """Cut every update short."""
        updates = updates_of(server, replies)
        if not updates:
            return replies
        numbers = finite_rows(updates)
        updates = {name: update.where(align(numbers, update), 0) for name, update in updates.items()}
        factors = torch.ones(len(numbers), dtype=torch.float64, device=numbers.device)
        if bool(numbers.any()):
            some = [update[numbers] for update in updates.values()]
            factors[numbers] = bounding_factors(some, self.bound)
        bounded = {
            name: server.model[name] + update * align(factors, update).to(update.dtype)
            for name, update in updates.items()
        }
        return replace(
            replies, tensors={**replies.tensors, **keep(bounded, replies.masks), **_counted(server, replies)}
        )


def _counted(server: Server, replies: Message) -> Tensors:
    """Let every client have counted the median of what all did."""
    sent = {name: tensor for name, tensor in replies.tensors.items() if name in server.model}
    return {name: middle.expand_as(sent[name]) for name, middle in median_counters(sent).items()}
