"""Coordinate median: every weight is the median of the clients' weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.functional import coordinate_median
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, Outline, Server
from fedstrata.methods.mechanisms.robust_merging import RobustMerge, median_counters
from fedstrata.stack import Tensors

PAPER = "Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018"
LINK = "https://arxiv.org/abs/1803.01498"


@methods.register("median")
@dataclass(frozen=True)
class Median(RobustMerge):
    r"""Merge every entry of the model by the median over the clients, so that fewer than half of them cannot move it.

    :math:`\hat w_j = \mathrm{median}_k \, w_{k,j}`, of an even number the mean of the middle two; running statistics
    and counters likewise. Each entry lies between those of honest clients as long as fewer than half lie. Clients count
    alike, whatever they say about their samples. Where honest clients differ much, as with few classes each, the median
    is not their mean, and who holds a rare class is outvoted; under a mask that all share (``ssfl``) it runs over what
    was sent. Nothing more travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts("robust", PAPER, LINK)

    def notes(self, outline: Outline) -> Iterator[str]:
        """Say where there is no middle."""
        if outline.participants < 3:
            yield f"'{self.name}' of fewer than three participants is their mean, which a single liar moves."

    def combined(self, server: Server, replies: Message) -> Tensors:
        """Take the median of every entry."""
        middle = {
            name: coordinate_median(tensor, mask=replies.masks.get(name), otherwise=server.model[name])
            for name, tensor in replies.tensors.items()
            if tensor.is_floating_point()
        }
        return {**middle, **median_counters(replies.tensors)}
