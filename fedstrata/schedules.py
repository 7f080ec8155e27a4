"""How the learning rate changes from round to round."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.spec import Registry, Spec, parameter

schedules: Registry[Schedule] = Registry("schedule")


@dataclass(frozen=True)
class Schedule(Spec, ABC):
    """A factor on the learning rate for each round."""

    reads_losses: ClassVar[bool] = True
    """Whether the factor may depend on the losses so far: then each round waits for that of the one before."""

    @abstractmethod
    def factor(self, round: int, rounds: int, losses: Sequence[float] = ()) -> float:
        """Return the factor in a round, counted from 1; ``losses`` are the training losses of the rounds before."""

    def factor_in_stage(self, round: int, stage: tuple[int, int], losses: Sequence[float] = ()) -> float:
        """Return the factor in a round of a stage, its first and last round, as if there were no other rounds.

        >>> [Exponential(0.5).factor_in_stage(round, (3, 5)) for round in (3, 4, 5)]
        [1.0, 0.5, 0.25]
        """
        first, last = stage
        return self.factor(round - first + 1, last - first + 1, losses[first - 1 :])


@schedules.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The same learning rate in every round."""

    reads_losses: ClassVar[bool] = False

    def factor(self, round: int, rounds: int, losses: Sequence[float] = ()) -> float:
        """Return 1."""
        return 1.0


@schedules.register("exponential")
@dataclass(frozen=True)
class Exponential(Schedule):
    """Multiply the learning rate by a constant after each round: :math:`\\gamma^{t-1}`."""

    reads_losses: ClassVar[bool] = False

    decay: float = parameter(0.998, "What each round multiplies the rate by.", above=0, high=1)

    def factor(self, round: int, rounds: int, losses: Sequence[float] = ()) -> float:
        """Return the decay to the power of the rounds done."""
        return float(self.decay ** (round - 1))


@schedules.register("cosine")
@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the full rate down to ``floor`` of it in the last round."""

    reads_losses: ClassVar[bool] = False

    floor: float = parameter(0.0, "The factor in the last round.", low=0, high=1)

    def factor(self, round: int, rounds: int, losses: Sequence[float] = ()) -> float:
        """Return the factor on the cosine."""
        progress = (round - 1) / max(rounds - 1, 1)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@schedules.register("step")
@dataclass(frozen=True)
class StepDown(Schedule):
    """Multiply the learning rate by ``factor_per_drop`` when 1/2 and when 3/4 of the rounds are done."""

    reads_losses: ClassVar[bool] = False

    factor_per_drop: float = parameter(0.1, "What each drop multiplies the rate by.", above=0, high=1)

    def factor(self, round: int, rounds: int, losses: Sequence[float] = ()) -> float:
        """Return the factor after the drops so far."""
        drops = sum(round - 1 >= rounds * place for place in (0.5, 0.75))
        return float(self.factor_per_drop**drops)


@schedules.register("plateau")
@dataclass(frozen=True)
class Plateau(Schedule):
    """Multiply the learning rate by ``drop`` when the training loss has stopped falling for ``patience`` rounds.

    As PyTorch's ReduceLROnPlateau with a relative threshold, on the mean training loss of the participants.
    """

    drop: float = parameter(0.1, "What each drop multiplies the rate by.", above=0, below=1)
    patience: int = parameter(10, "How many rounds without a better loss are waited for.", low=0)
    threshold: float = parameter(1e-4, "By which fraction a loss must be lower to be better.", low=0, below=1)

    def factor(self, round: int, rounds: int, losses: Sequence[float] = ()) -> float:
        """Return the factor after the drops so far."""
        factor, best, waited = 1.0, math.inf, 0
        for loss in losses:
            better = loss < best * (1 - self.threshold)
            best, waited = (loss, 0) if better else (best, waited + 1)
            if waited > self.patience:
                factor, waited = factor * self.drop, 0
        return factor
