"""Merging replies of which some may be lies: what the robust methods share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import coordinate_median
from fedstrata.methods.contract.declarations import Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Declared, Message, Server
from fedstrata.methods.mechanisms.masking import keep
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.stack import Tensors, per_client


@dataclass(frozen=True)
class RobustMerge(Part):
    """What merges so that a few liars cannot decide: it looks at single replies, and believes no number beside them.

    All participants count alike: how many samples a client declares may be a lie too. A reply that holds NaN or
    infinite numbers is left out; where none is left, the model stays as it is. Beside a part that lets each client send
    entries of its own, a liar would be alone at those that only it sends, so that such a part is refused.
    """

    touches: ClassVar[Touches] = Touches(
        relies_on=(Matter.SAME_ENTRIES, Matter.NO_SINGLE_REPLY), takes_away=(Matter.SUMS,)
    )

    def weigh(self, declared: Declared) -> Tensor:
        """Let all participants count alike."""
        return equal_weights(declared)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Merge the replies that are numbers at all."""
        sent = {name: tensor for name, tensor in replies.tensors.items() if name in server.model}
        finite = finite_rows(sent)
        believed = replace(replies, tensors=sent).rows(None if bool(finite.all()) else finite.nonzero()[:, 0])
        if not bool(finite.any()):
            return {name: server.model[name] for name in sent}
        return self.combined(server, believed)

    @abstractmethod
    def combined(self, server: Server, replies: Message) -> Tensors:
        """Merge replies, at least one, that hold nothing but finite tensors of the model."""

    def mean(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average replies by some shares, but counters, to which no share is due, by their median."""
        return {**Part.merge(self, server, replies, shares), **median_counters(replies.tensors)}


def finite_rows(tensors: Tensors) -> Tensor:
    """Tell whose tensors hold neither NaN nor infinite numbers ``[K]``."""
    rows = [torch.isfinite(per_client(tensor)).all(1) for tensor in tensors.values()]
    return torch.stack(rows).all(0) if rows else torch.ones(0, dtype=torch.bool)


def updates_of(server: Server, replies: Message) -> Tensors:
    """Return what each client changed of the model, counters aside; an entry that it did not send is unchanged."""
    moved = {
        name: tensor - server.model[name]
        for name, tensor in replies.tensors.items()
        if name in server.model and tensor.is_floating_point()
    }
    return keep(moved, replies.masks)


def median_counters(tensors: Tensors) -> Tensors:
    """Take the median of those tensors in which clients count something, in whole numbers."""
    return {
        name: coordinate_median(tensor).round().to(tensor.dtype)
        for name, tensor in tensors.items()
        if not tensor.is_floating_point()
    }
