"""Scales of colours: where they begin and end, where they turn, and what stands beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.diagnostics import Quantity

_MANY = 50
"""From how many values on a few may lie beyond the ends of a scale."""
_DECADES = 2.0
"""From how many powers of ten on positive numbers are shown by their logarithm."""


@dataclass(frozen=True)
class Scale:
    """The numbers at both ends of a scale of colours, and those that are written beside it."""

    low: float
    high: float
    logarithmic: bool = False
    diverging: bool = False
    """Whether its middle is a turning point, shown by two colours."""
    clipped: bool = False
    """Whether some numbers lie beyond its ends."""

    def ticks(self) -> list[float]:
        """Round numbers along the scale, from end to end."""
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, math.ceil((last - first) / 4))
            return [float(f"1e{power}") for power in range(first, last + 1, step)] or [self.low, self.high]
        apart = round_step((self.high - self.low) / 4)
        first = math.ceil(self.low / apart - 1e-9)
        return [short(number * apart, 6) or 0.0 for number in range(first, math.floor(self.high / apart + 1e-9) + 1)]


def scale_of(quantity: Quantity, values: np.ndarray) -> Scale:
    """Choose a scale for the values of a quantity.

    It ends at round numbers, and at the bounds of the quantity where values come close. Few values that lie far beyond
    all others get the colour of the end.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Scale(0.0, 1.0)
    low, high = float(finite.min()), float(finite.max())
    if quantity.centre is not None:
        reach = max(abs(low - quantity.centre), abs(high - quantity.centre)) or 1.0
        step = round_step(reach / 4)
        reach = step * math.ceil(reach / step - 1e-9)
        bounds = [abs(bound - quantity.centre) for bound in (quantity.low, quantity.high) if bound is not None]
        reach = min([reach, max(bounds)]) if len(bounds) == 2 else reach
        return Scale(quantity.centre - reach, quantity.centre + reach, diverging=True)
    positive = finite[finite > 0]
    if len(positive) and low >= 0:
        bottom, top = np.quantile(positive, (0.01, 0.99))
        if quantity.logarithmic or (quantity.high is None and top / bottom >= 10**_DECADES):
            ends = (10.0 ** math.floor(math.log10(bottom)), 10.0 ** math.ceil(math.log10(top)))
            ends = (ends[0], ends[1] if ends[1] > ends[0] else 10 * ends[0])
            return Scale(*ends, logarithmic=True, clipped=low < ends[0] or high > ends[1])
    clipped = False
    if quantity.high is None and len(finite) >= _MANY:
        usual = float(np.quantile(finite, 0.98))
        if high - low > 4 * (usual - low) > 0:
            high, clipped = usual, True
    differ = high - low > 1e-5 * max(abs(low), abs(high))  # more than the digits that are written
    step = round_step((high - low) / 4) if differ else abs(high) or 1.0
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    if quantity.low is not None:
        low = max(low, quantity.low)
    if quantity.high is not None:
        high = min(high, quantity.high)
    low, high = (low, high) if high > low else (low - step, high)
    # A bounded quantity is told apart in both directions from the middle of what is seen.
    bounded = quantity.low is not None and quantity.high is not None
    return Scale(short(low, 6) or 0.0, short(high, 6) or 0.0, diverging=bounded, clipped=clipped)


def difference_scale(scale: Scale, tables: Sequence[np.ndarray]) -> Scale:
    """Choose a scale for differences between methods, of the powers of ten where the scale is logarithmic."""
    values = np.stack(tables)
    if scale.logarithmic:
        values = np.log10(np.clip(values, scale.low, scale.high))
    known = np.isfinite(values)
    most, least = np.where(known, values, -math.inf).max(0), np.where(known, values, math.inf).min(0)
    shared = known.sum(0) > 1
    apart = (most - least)[shared]
    reach = float(np.quantile(apart, 0.98) if len(apart) >= _MANY else apart.max(initial=0.0)) or 1.0
    step = round_step(reach / 2)
    reach = short(step * math.ceil(reach / step - 1e-9), 6) or 1.0
    return Scale(-reach, reach, diverging=True)


def short(value: float, digits: int = 3) -> float | None:
    """Round to a few significant digits; JSON has no NaN, so none stands for it.

    >>> short(0.98765), short(float("nan"))
    (0.988, None)
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def round_step(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten that is not smaller.

    >>> round_step(0.17), round_step(2.1)
    (0.2, 5.0)
    """
    power = 10.0 ** math.floor(math.log10(step))
    factor = next(factor for factor in (1, 2, 5, 10) if step <= factor * power * (1 + 1e-9))
    return float(f"{factor * power:.6g}")
