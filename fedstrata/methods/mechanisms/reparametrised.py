"""What methods share that train something else than the weights of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.compatibility import defines
from fedstrata.methods.contract.part import Part
from fedstrata.methods.mechanisms.layer_choice import EXPLAINS_GAPS, SETS_WEIGHTS


@dataclass(frozen=True)
class Reparametrised(Part):
    """A part that trains something in the place of weights, such as scores or roots.

    A subclass puts it there in :meth:`initial`, and computes the weights from it in :meth:`effective`, where the model
    trains, and in :meth:`deployed`, where it is tested.
    """

    claims: ClassVar[tuple[str, ...]] = (SETS_WEIGHTS, EXPLAINS_GAPS)
    one_support: ClassVar[bool] = False
    deploys_alike: ClassVar[bool] = True

    def objects_to(self, other: Part) -> str | None:
        """Refuse what learns weights beside those that are not weights here."""
        if defines(other, "learns"):
            return f"'{self.name}' does not train weights, and '{other.name}' learns weights beside the model's"
        return None
