"""PLayer-FL-Random: the ablation that shares a random prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.player import PRESETS, PLayer
from fedstrata.spec import parameter


@methods.register("player-random")
@dataclass(frozen=True)
class PLayerRandom(Part):
    """Share a random prefix of the layers, neither all of them nor those that PLayer-FL would choose.

    This is ``player(random=true)``: the prefix is drawn once per run. The survey of PLayer-FL takes place too, to know
    which prefix to leave out; with a ``preset`` it is the paper's on that dataset, as in the released code.

    Defaults:
        threshold: ours; the paper gives no value, and the released code has lists of layers instead.
        preset: ours; what would be chosen here is left out, unless a dataset of the paper is named.
        batch_size: gaiters-aerials/player_fl, code/configs.py.
    """

    facts: ClassVar[Facts] = PLayer.facts
    touches: ClassVar[Touches] = Touches()

    threshold: float = parameter(
        2.0, "By how much the sensitivity must grow from one layer to the next to end PLayer-FL's own prefix.", above=0
    )
    preset: str | None = parameter(
        None, "Leave out the layers that the paper shares on this dataset, without a survey.", choices=tuple(PRESETS)
    )
    batch_size: int = parameter(128, "Samples in the batch on which gradients are taken.", low=1)

    def parts(self) -> tuple[Part, ...]:
        """Stand for PLayer-FL with a random prefix."""
        return (PLayer(self.threshold, random=True, preset=self.preset, batch_size=self.batch_size),)
