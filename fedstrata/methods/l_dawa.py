"""L-DAWA: a client's layer counts by its angle to the global one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import ldawa
from fedstrata.functional.l_dawa import cosines
from fedstrata.methods.contract.declarations import Decision, Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, Outline, Server
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align


@methods.register("l-dawa")
@dataclass(frozen=True)
class LDawa(Part):
    r"""Multiply each client's tensors by their cosines to the global ones before they are averaged.

    :math:`w^{t+1}_l = \frac{1}{K} \sum_k \cos(w_{k,l}, w^t_l) \, w_{k,l}` for every parameter tensor l, after
    ``warmup`` rounds of plain FedAvg, in which clients count by their samples. Then they count equally, and the sum is
    not divided by that of the cosines, so a tensor shrinks where clients turn away from it. A global tensor of zeros,
    such as a bias at the beginning, has no direction; its clients are averaged, where the released code computes 0 / 0.
    Nothing more travels than in FedAvg.

    The running statistics of a norm layer are not averaged by cosines of their own, as in the released code, but follow
    the layer whose output they describe: the mean is multiplied by that layer's cosine and the variance by its square,
    so that they stay those of the shrunk weights. With large local steps on a model with norm layers a round may still
    shrink weights by half, which makes the next local steps larger; few local steps suit the method.

    Defaults:
        warmup: yasar-rehman/L-DAWA, FL_Pretraining/main_CIFAR10_LDAWA.py.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Rehman et al., L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual "
        "Representation Learning, ICCV 2023",
        "https://arxiv.org/abs/2307.07393",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.SHARES,))

    warmup: int = parameter(3, "Rounds of plain FedAvg in the beginning.", low=0)

    def notes(self, outline: Outline) -> Iterator[str]:
        """Say where the warm-up never ends."""
        if outline.rounds <= self.warmup:
            yield (
                f"'{self.name}' begins with {self.warmup} rounds of plain FedAvg, and the run has {outline.rounds}; "
                "give a shorter warmup=..., or more rounds."
            )

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average the parameters by their cosines, clients alike, and everything else as it is."""
        if server.round <= self.warmup:
            return super().merge(server, replies, shares)
        shares = torch.full_like(shares, 1 / len(shares))
        masks, tensors = replies.masks, replies.tensors
        parameters = [name for name in shared_parameters(server) if name in tensors]
        rest = replies.without(parameters)
        followed = {name: tensors[name] * align(factor, tensors[name]) for name, factor in _followed(server, replies)}
        return {
            **super().merge(server, replace(rest, tensors={**rest.tensors, **followed}), shares),
            **{name: ldawa(server.model[name], tensors[name], mask=masks.get(name)) for name in parameters},
        }


def _followed(server: Server, replies: Message) -> Iterator[tuple[str, Tensor]]:
    """Find the running statistics that follow a layer, and by what each client's are multiplied ``[K]``.

    The mean of a layer's output grows with the layer, the variance with its square.
    """
    for norm in server.layers.all:
        weight = None if norm.follows is None else server.layers.layer(norm.follows).weight
        if weight in replies.tensors:
            cosine = cosines(server.model[weight], replies.tensors[weight], replies.masks.get(weight))
            for name, power in ((norm.running_mean, 1), (norm.running_variance, 2)):
                if name in replies.tensors:
                    yield name, (cosine**power).to(replies.tensors[name].dtype)
