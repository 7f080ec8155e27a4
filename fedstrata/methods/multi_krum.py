"""Multi-Krum: the new model is the mean of the clients that lie where most others do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Outline
from fedstrata.methods.mechanisms.krum_choice import LINK, PAPER, KrumChoice
from fedstrata.spec import parameter


@methods.register("multi-krum")
@dataclass(frozen=True)
class MultiKrum(KrumChoice):
    r"""Merge by the mean of the clients whose nearest neighbours are nearest.

    Those with the lowest scores of Krum, :math:`n - f - 2` of n as in its authors' code, count alike; who is far from
    most others is left out. With ``keep=1`` it is ``krum``, with as many as there are FedAvg without weights. Nothing
    more travels than in FedAvg.

    Defaults:
        byzantine: ours; what is right depends on the federation.
        keep: LPD-EPFL/ByzantineMomentum, aggregators/krum.py.
    """

    facts: ClassVar[Facts] = Facts("robust", PAPER, LINK)

    keep: int | None = parameter(None, "How many clients are believed (m); none: n - f - 2 of n replies.", low=1)

    def notes(self, outline: Outline) -> Iterator[str]:
        """Refuse to believe liars on purpose."""
        yield from super().notes(outline)
        honest = outline.participants - self.liars(outline.participants)
        if self.keep is not None and self.keep > honest:
            raise FedStrataError(
                f"'{self}' believes {self.keep} clients, but of {outline.participants} participants only {honest} are "
                f"taken to be honest; give keep={honest} or less."
            )

    def believed(self, replies: int) -> int:
        """Believe the honest, two of them less, as the authors do."""
        return max(1, replies - self.liars(replies) - 2) if self.keep is None else self.keep
