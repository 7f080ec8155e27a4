"""What methods share that train something else than the weights of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Decision, Matter, Touches
from fedstrata.methods.contract.part import Part


@dataclass(frozen=True)
class Reparametrised(Part):
    """A part that trains something in the place of weights, such as scores or roots.

    A subclass puts it there in :meth:`initial`, and computes the weights from it in :meth:`effective`.
    """

    touches: ClassVar[Touches] = Touches(
        decides=(Decision.WEIGHTS, Decision.GAPS),
        takes_away=(Matter.WEIGHTS, Matter.SAME_ENTRIES),
    )
