"""Separate training: the baseline without any federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Kept, Part
from fedstrata.methods.contract.registry import methods


@methods.register("local")
@dataclass(frozen=True)
class Local(Part):
    """Every client trains its own model; nothing is ever sent (called "Separate" in LIPS).

    So a run reports 0 bytes; on a real network the server still asks for each round, in messages that hold nothing.
    """

    facts: ClassVar[Facts] = Facts("averaging", "The baseline without federation")
    touches: ClassVar[Touches] = Touches(
        decides=(Decision.TRAVEL,), takes_away=(Matter.SHARING, Matter.SHARED_HEAD, Matter.SHARED_NORMS)
    )

    def keeps(self, layers: LayerMap) -> Kept:
        """Keep everything."""
        return Kept(personal=(*layers.parameter_names, *layers.buffer_names))
