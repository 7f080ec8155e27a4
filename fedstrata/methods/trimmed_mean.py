"""Trimmed mean: every weight is the mean of the clients' weights without the largest and the smallest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.functional import trimmed_mean
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, Outline, Server
from fedstrata.methods.mechanisms.robust_merging import RobustMerge, median_counters
from fedstrata.methods.median import LINK, PAPER
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(RobustMerge):
    r"""Merge every entry of the model by the mean over the clients without its largest and smallest values.

    Of the m clients that sent an entry, :math:`\lfloor \beta m \rfloor` are left out on either side, others for every
    entry; the rest count alike, whatever they say about their samples. What is left lies between values of honest
    clients as long as at most the fraction :math:`\beta` lies. Running statistics are trimmed too, counters are their
    median. Nothing more travels than in FedAvg.

    Defaults:
        trim: ours; what is right depends on how many may lie.
    """

    facts: ClassVar[Facts] = Facts("robust", PAPER, LINK)

    trim: float = parameter(0.1, "The fraction of clients left out on either side (beta).", low=0, below=0.5)

    def notes(self, outline: Outline) -> Iterator[str]:
        """Say where nobody is left out."""
        if self.trim * outline.participants < 1 - 1e-9:
            yield (
                f"'{self.name}' leaves nobody out: {self.trim:g} of {outline.participants} participants is less than "
                "one; give a larger trim=..., or more participants."
            )

    def combined(self, server: Server, replies: Message) -> Tensors:
        """Take the trimmed mean of every entry."""
        middle = {
            name: trimmed_mean(tensor, self.trim, mask=replies.masks.get(name), otherwise=server.model[name])
            for name, tensor in replies.tensors.items()
            if tensor.is_floating_point()
        }
        return {**middle, **median_counters(replies.tensors)}
