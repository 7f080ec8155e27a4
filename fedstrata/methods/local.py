"""Separate training: the baseline without any federation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.mechanisms.layer_choice import CHOOSES_WHAT_TRAVELS


@methods.register("local")
@dataclass(frozen=True)
class Local(Part):
    """Every client trains its own model; nothing is ever sent (called "Separate" in LIPS)."""

    facts: ClassVar[Facts] = Facts("averaging", "The baseline without federation")
    claims: ClassVar[tuple[str, ...]] = (CHOOSES_WHAT_TRAVELS,)
    shares: ClassVar[bool] = False

    def personal(self, layers: LayerMap) -> Iterable[str]:
        """Keep everything."""
        return (*layers.parameter_names, *layers.buffer_names)
