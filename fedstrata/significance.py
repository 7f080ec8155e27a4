"""What numbers over seeds say: means, spreads, intervals, paired tests and their correction; pure statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its sample standard deviation (n - 1), which a single seed does not have."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class Comparison:
    """The difference to a reference method over the seeds that both have.

    ``p_value`` is that of the two-sided paired t-test, ``adjusted`` the same after Holm's correction over all methods
    of the comparison; both are none where no test is possible, and ``note`` then says why.
    """

    reference: str
    difference: Estimate | None
    p_value: float | None
    adjusted: float | None
    note: str


def estimate(values: Iterable[float]) -> Estimate | None:
    """Mean and sample standard deviation; none without values.

    >>> estimate([0.5, 0.7])
    Estimate(mean=0.6, std=0.14142135623730948, count=2)
    """
    numbers = np.fromiter(values, dtype=np.float64)
    if numbers.size == 0:
        return None
    spread = float(numbers.std(ddof=1)) if numbers.size > 1 else None
    return Estimate(float(numbers.mean()), spread, int(numbers.size))


def smallest_sign_test_p(pairs: int) -> float:
    """The smallest p that a two-sided sign or Wilcoxon signed-rank test can reach: all differences of one sign.

    >>> smallest_sign_test_p(5)
    0.0625
    """
    return min(1.0, 2.0 ** (1 - pairs))


def t_quantile(degrees: float, level: float = 0.95) -> float:
    """How many standard errors a two-sided interval of Student's t distribution reaches to either side.

    >>> round(t_quantile(2), 3)
    4.303
    """
    from scipy.special import stdtrit  # as long to import as all else here

    return float(stdtrit(degrees, (1 + level) / 2))


def confidence_interval(summary: Estimate, level: float = 0.95) -> tuple[float, float] | None:
    r"""Bound the mean behind an estimate: :math:`\bar x \pm t_{n-1} s / \sqrt n`; none with a single value.

    >>> low, high = confidence_interval(estimate([1.0, 2.0, 3.0]))
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    if summary.std is None:
        return None
    reach = t_quantile(summary.count - 1, level) * summary.std / math.sqrt(summary.count)
    return summary.mean - reach, summary.mean + reach


def paired_comparison(differences: Sequence[float], reference: str = "the reference") -> Comparison:
    """Test whether paired differences have a mean other than zero, by the two-sided paired t-test.

    Where the test is undefined (fewer than two pairs, a spread of zero, a value that is not finite) there is a reason
    instead of a p-value.
    """
    summary = estimate(differences)

    def untested(note: str) -> Comparison:
        return Comparison(reference, summary, None, None, note)

    if summary is None:
        return untested(f"No seed and split in common with {reference}, so there is nothing to pair.")
    if not math.isfinite(summary.mean):
        return untested("A result is not a finite number, so there is no test.")
    if summary.std is None:
        return untested(f"One seed in common with {reference}: a difference, but no test; run more seeds.")
    if all(difference == 0 for difference in differences):
        return untested(f"Equal to {reference} for every seed.")
    if summary.std <= 1e-9 * abs(summary.mean):
        return untested("The difference is the same for every seed; with a spread of zero the t-test is undefined.")
    t = summary.mean / (summary.std / math.sqrt(summary.count))
    from scipy.special import stdtr  # as long to import as all else here

    p_value = float(2 * stdtr(summary.count - 1, -abs(t)))
    floor = smallest_sign_test_p(summary.count)
    note = (
        f"With {summary.count} seeds a sign or Wilcoxon test cannot get below p = {floor:g}; "
        "the t-test can, by assuming normally distributed differences."
        if floor > 0.05
        else ""
    )
    return Comparison(reference, summary, p_value, p_value, note)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for testing several hypotheses at once.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
