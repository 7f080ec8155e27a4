"""Krum: the new model is that of the one client that lies where most others do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.mechanisms.krum_choice import LINK, PAPER, KrumChoice


@methods.register("krum")
@dataclass(frozen=True)
class Krum(KrumChoice):
    r"""Go on with the model of the one client whose nearest neighbours are nearest.

    The client with the lowest score :math:`s_k = \sum_{j \in N_k} \lVert w_k - w_j \rVert^2` over its :math:`n - f - 2`
    nearest is taken as it is, running statistics and counters too, and everybody else's work of the round is lost: the
    price is paid also where nobody lies, and most where clients hold different classes. Liars that stay within the
    spread of the honest (``attack(kind=alie)``) are taken rather than anybody. Nothing more travels than in FedAvg.

    Defaults:
        byzantine: ours; what is right depends on the federation.
    """

    facts: ClassVar[Facts] = Facts("robust", PAPER, LINK)

    def believed(self, replies: int) -> int:
        """Believe one client."""
        return 1
