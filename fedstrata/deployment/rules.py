"""How long a server waits, for how many sites, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.errors import FedStrataError
from fedstrata.spec import Spec, parameter


@dataclass(frozen=True)
class Rules(Spec):
    """What a server insists on, as the ``[rules]`` of a sites file say."""

    name: ClassVar[str] = "rules"
    kind: ClassVar[str] = "rules"

    min_sites: int | None = parameter(
        None, "A round goes on with so many sites after the timeout; none: it waits for all.", low=1
    )
    round_timeout: float = parameter(600.0, "Seconds that a round waits for all of its sites.", above=0)
    max_refusals: int = parameter(3, "After so many refused replies a site is left out.", low=1)
    norm_limit: float = parameter(
        100.0, "A reply is refused whose norm is so many times that of the model that was sent.", above=0
    )

    def check(self, sites: int) -> None:
        """Refuse to wait for more sites than there are."""
        if self.min_sites is not None and self.min_sites > sites:
            raise FedStrataError(f"min_sites is {self.min_sites}, but there are only {sites} sites; lower it.")

    def needed(self, asked: int) -> int:
        """Tell how many of the sites that were asked must give a usable answer."""
        return 1 if self.min_sites is None else min(self.min_sites, asked)

    def enough(self, answered: int, asked: int) -> bool:
        """Tell whether a question goes on without the others when the time is over."""
        return self.min_sites is not None and answered >= self.needed(asked)
