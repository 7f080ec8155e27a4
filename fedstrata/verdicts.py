"""What our runs say of a published number and of a published claim, in one word, with the numbers behind it.

Words are given by rules that are fixed before the numbers are known, and that seldom speak where there is little to go
by: a single seed decides no claim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedstrata.errors import FedStrataError
from fedstrata.ranks import critical_difference, friedman, mean_ranks, rank_correlation
from fedstrata.significance import confidence_interval, estimate, paired_comparison, smallest_sign_test_p, t_quantile

__all__ = [
    "Claim",
    "cell_verdict",
    "claim_verdict",
    "critical_difference",
    "deviation_of",
    "difference_of_groups",
    "friedman",
    "mean_ranks",
    "rank_correlation",
]

CellWord = Literal["agrees", "undecided", "above", "below", "diverged", "not run"]
ClaimWord = Literal["shown", "not shown", "undecided"]
Spread = Literal["deviation", "interval95", "error", "layers"]
"""What a paper writes behind ±: the standard deviation over runs, half of the 95 % confidence interval of the number
before it, the standard error of that number, or a deviation over layers, which says nothing of runs."""
Middle = Literal["mean", "median"]
"""What a paper takes of its runs."""

PRACTICAL = 1.0
"""The size below which a difference is none in practice: one point of a percentage."""
TELLING = 5.0
"""In multiples of that, the longest reach within which to agree says something: five points of a percentage."""


@dataclass(frozen=True)
class Claim:
    """What paired seeds say of a claim that one method beats another.

    ``mean`` is the mean difference and ``interval`` its confidence interval, none with a single seed. ``p_value`` is
    two-sided, and ``test`` names where it comes from, or why there is none. ``about`` tells whether the published size
    of the difference lies in the interval; none where no size was published or there is no interval.
    """

    word: ClaimWord
    mean: float | None
    interval: tuple[float, float] | None
    p_value: float | None
    test: str
    about: bool | None
    seeds: int


def variance_of_middle(middle: Middle, runs: int) -> float:
    r"""The variance of a mean or a median of so many runs, in units of the variance of one run.

    That of a mean is 1 / n. That of a median of normal numbers is close to :math:`\pi / (2 (n - 1) + \pi)`: exactly 1
    for one, 0.440 for three (0.449 is right), and :math:`\pi / 2` times that of the mean for many.

    >>> variance_of_middle("mean", 4), round(variance_of_middle("median", 3), 3)
    (0.25, 0.44)
    """
    return 1 / runs if middle == "mean" else math.pi / (2 * (runs - 1) + math.pi)


def deviation_of(spread: float | None, kind: Spread, runs: int, middle: Middle = "mean") -> float | None:
    r"""Find the standard deviation of single runs behind what a paper writes after ±; none where it does not tell.

    Half of an interval of 95 % is :math:`t_{n - 1} \, s / \sqrt n` around a mean. Around a median it comes from a
    bootstrap, whose percentiles lie 1.96 standard errors of the median from it. A single run has no deviation.

    >>> deviation_of(1.2, "deviation", 3), round(deviation_of(1.2, "error", 4), 3)
    (1.2, 2.4)
    >>> round(deviation_of(1.4, "interval95", 10), 3), round(deviation_of(1.4, "interval95", 10, "median"), 3)
    (1.957, 1.853)
    """
    if spread is None or math.isnan(spread) or runs < 2 or kind == "layers":
        return None
    if kind == "deviation":
        return spread
    error = spread / (1 if kind == "error" else t_quantile(runs - 1) if middle == "mean" else _NORMAL_95)
    return error / math.sqrt(variance_of_middle(middle, runs))


_NORMAL_95 = 1.959964


def difference_of_groups(
    one: tuple[float, float | None, int], other: tuple[float, float | None, int], middle: Middle = "mean"
) -> tuple[float, float | None]:
    r"""Tell how far two published numbers are apart, and half of the 95 % interval of that by their own spreads.

    Each is a mean (or a median), the standard deviation and the number of the runs behind it. Which runs belong
    together is not published, so the interval is that of two independent groups (:func:`reach_of_difference`); there
    is none where a deviation is missing.

    >>> difference_of_groups((47.84, 0.47, 3), (43.08, 0.45, 3))  # doctest: +ELLIPSIS
    (4.76..., 1.04...)
    """
    difference = one[0] - other[0]
    if one[1] is None or other[1] is None or min(one[2], other[2]) < 2:
        return difference, None
    return difference, reach_of_difference(one[1:], other[1:], middle)


def reach_of_difference(
    one: tuple[float | None, int], other: tuple[float | None, int], middle: Middle = "mean"
) -> float:
    r"""Half of the 95 % interval of the difference between two groups of runs, by their deviations and numbers.

    Each group has its own deviation, as in Welch's test: with :math:`v_i = s_i^2 / n_i` (or the variance of a median)
    it is :math:`t_\nu \sqrt{v_1 + v_2}`, where :math:`\nu = (v_1 + v_2)^2 / (v_1^2 / (n_1 - 1) + v_2^2 / (n_2 - 1))`.
    Pooled, the deviation of many runs would stand for that of a few that differ more. A group without one, such as a
    single run, is taken to have the other's; without any there is no interval, and this is zero. At least two degrees
    of freedom are assumed, because with one (two runs beside a number without a deviation) the interval reaches 12.7
    standard errors, and nearly everything agrees. Two runs that differ more than a paper's many
    disagree with them too often: with a deviation of 8.4 beside 2.9 over fifty runs, in one case of eight.

    >>> round(reach_of_difference((1.0, 3), (1.0, 3)), 3), round(reach_of_difference((2.9, 50), (8.4, 6)), 1)
    (2.267, 8.8)
    """
    known = [(spread, runs) for spread, runs in (one, other) if spread is not None and runs > 1 and spread == spread]
    if not known:
        return 0.0
    spreads = [spread if (spread, runs) in known else known[0][0] for spread, runs in (one, other)]
    parts = [
        float(spread or 0.0) ** 2 * variance_of_middle(middle, runs)
        for spread, (_, runs) in zip(spreads, (one, other), strict=True)
    ]
    variance = sum(parts)
    if variance == 0:
        return 0.0
    degrees = float(known[0][1] - 1)
    if len(known) == 2:
        shares = zip((part / variance for part in parts), known, strict=True)  # whose squares are never too small
        degrees = 1 / sum(share**2 / (runs - 1) for share, (_, runs) in shares)
    return t_quantile(max(degrees, 2)) * math.sqrt(variance)


def allowed_difference(
    std: float | None,
    ours: Sequence[float],
    published_seeds: int = 3,
    margin: float = PRACTICAL,
    middle: Middle = "mean",
) -> float:
    """By how much our runs and a published number may differ and agree: that of :func:`cell_verdict`.

    >>> round(allowed_difference(0.5, [74.9]), 2), allowed_difference(0.2, [70.9, 71.0, 71.1])
    (2.48, 1.0)
    """
    summary = estimate(ours)
    own = (None, 1) if summary is None else (summary.std, summary.count)
    return max(margin, reach_of_difference((std, published_seeds), own, middle))


def cell_verdict(
    mean: float,
    std: float | None,
    ours: Sequence[float],
    published_seeds: int = 3,
    margin: float = PRACTICAL,
    middle: Middle = "mean",
) -> CellWord:
    """Tell whether our runs agree with a published mean, or lie above or below it.

    They agree where the means differ by no more than the 95 % interval of such a difference between two groups of runs
    of the same thing (:func:`reach_of_difference`), or by no more than ``margin``. Where that interval reaches farther
    than :data:`TELLING` margins, runs are too few or differ too much to say so, and it is ``undecided``; numbers that
    differ by more than that are above or below all the same. Where the paper has a ``median``, ours is one too.
    ``std`` is a standard deviation over runs: see :func:`deviation_of` where a paper gives something else, and
    ``published_seeds`` is the number of these runs.

    The margin is there because two correct programs (other libraries, preprocessing, splits) differ by about a point
    with spreads over seeds that are much smaller; it alone decides where neither side has a spread. It is in the unit
    of the numbers: give another one where that is not a percentage.

    >>> cell_verdict(71.2, 0.5, [70.9, 71.9, 71.3])
    'agrees'
    >>> cell_verdict(71.2, 0.5, [74.9])
    'above'
    >>> cell_verdict(71.2, None, [61.0, 75.2])
    'undecided'
    >>> cell_verdict(71.2, None, [])
    'not run'
    """
    if not ours:
        return "not run"
    within = allowed_difference(std, ours, published_seeds, margin, middle)
    return number_verdict(mean, middle_of(ours, middle), within, TELLING * margin)


def reach_of_statistic(error: float | None, runs: int, published_runs: int = 3) -> float:
    r"""By how much a number that is computed of all our runs together may differ from one of all of a paper's.

    Papers tell no error of such a number. It is taken to be ours, :math:`e` of n runs, but for their number m:
    :math:`1.96 \, e \sqrt{1 + n / m}`; zero without any.

    >>> round(reach_of_statistic(0.0025, 50, 50), 4)
    0.0069
    """
    return 0.0 if error is None else _NORMAL_95 * error * math.sqrt(1 + runs / published_runs)


def number_verdict(published: float, ours: float, within: float, telling: float = math.inf) -> CellWord:
    """Tell whether a number of ours is, but for so much, the published one; ``telling`` is how much that may be.

    A number of runs that diverged is neither above nor below.

    >>> number_verdict(0.084, 0.089, 0.0069), number_verdict(0.08, 0.089, 0.0069)
    ('agrees', 'above')
    >>> number_verdict(95.0, 66.3, 57.0, 5.0), number_verdict(0.6, math.nan, 0.1)
    ('undecided', 'diverged')
    """
    if not math.isfinite(ours):
        return "diverged"
    # Published numbers are rounded: what equals the reach but for the last bit is within it.
    if abs(ours - published) <= within + 1e-9:
        return "agrees" if within <= telling else "undecided"
    return "above" if ours > published else "below"


def middle_of(values: Sequence[float], middle: Middle) -> float:
    """Take the mean or the median of some runs, as a paper does; there is none of runs of which one is no number.

    >>> middle_of([1.0, 2.0, 6.0], "mean"), middle_of([1.0, 2.0, 6.0], "median")
    (3.0, 2.0)
    """
    if any(map(math.isnan, values)):
        return math.nan
    return statistics.median(values) if middle == "median" else sum(values) / len(values)


def claim_verdict(
    differences: Sequence[float], by: float | None = None, practical: float = PRACTICAL, level: float = 0.95
) -> Claim:
    """Tell whether one method beats another, by the differences of runs of the same seed (more is better).

    - ``shown``: the confidence interval of the mean difference (Student's t, paired seeds) lies above 0. Whether it is
      about as large as published is another question, which ``about`` answers.
    - ``not shown``: the interval lies below 0, or below the size that would count: half of what was published (``by``),
      or ``practical`` where no size was. Methods that are equal with every seed are a case of it.
    - ``undecided``: all else, and always with one seed, or where a result is not a finite number.

    Where all seeds have the same difference there is no spread to go by; then the sign test decides, which needs six
    seeds at the level of 95 %.

    >>> claim_verdict([2.0, 4.0, 3.0, 3.0], by=3.5).word
    'shown'
    >>> claim_verdict([5.0], by=4.8).word
    'undecided'
    """
    if by is not None and by <= 0:
        raise FedStrataError(
            f"A claim says by how much one method beats another, a number above 0, not {by:g}. Turn the claim round."
        )
    summary = estimate(differences)
    seeds = len(differences)
    if summary is None:
        return Claim("undecided", None, None, None, "no seed has both", None, 0)
    if not math.isfinite(summary.mean):
        return Claim("undecided", summary.mean, None, None, "a result is not a finite number", None, seeds)
    if summary.std is None:
        return Claim("undecided", summary.mean, None, None, "one seed: no test", None, seeds)
    tested = paired_comparison(differences)
    size = practical if by is None else by / 2
    if tested.p_value is None:
        low = high = summary.mean
        p_value: float | None = 1.0 if low == 0 else smallest_sign_test_p(seeds)
        test = "sign test: the same difference with every seed"
        decided = low == 0 or smallest_sign_test_p(seeds) <= 1 - level
    else:
        interval = confidence_interval(summary, level)
        assert interval is not None
        low, high = interval
        p_value, test, decided = tested.p_value, "paired t-test", True
    word: ClaimWord = "undecided"
    if decided and low > 0:
        word = "shown"
    elif decided and high < size:
        word = "not shown"
    return Claim(word, summary.mean, (low, high), p_value, test, None if by is None else low <= by <= high, seeds)
