"""Methods over several datasets: mean ranks, the Friedman test and the critical difference of Nemenyi's.

After Janez Demšar: "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7, 2006. Accuracies on
different datasets cannot be averaged with any meaning, ranks can: 1 is the best method on a dataset, and equals share
the mean of their ranks. A table is a mapping from a method to its numbers, one for each dataset (or setting), in the
same order for every method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedstrata.errors import FedStrataError

Table = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Friedman:
    """What the Friedman test says of a table: whether its methods differ at all.

    ``statistic`` is Friedman's chi-square with k - 1 degrees of freedom, corrected for ties, and ``p_value`` its p.
    ``f_statistic`` is Iman and Davenport's, which is less conservative, F-distributed with k - 1 and (k - 1)(N - 1)
    degrees of freedom; infinite where all datasets order the methods alike. All are NaN where nothing differs.
    """

    statistic: float
    p_value: float
    f_statistic: float
    f_p_value: float
    methods: int
    datasets: int


@dataclass(frozen=True)
class RankCorrelation:
    """How alike two orders are: 1 where they are the same, -1 where one is the other's reverse, NaN without an order.

    ``spearman`` is the correlation of the ranks, ``kendall`` Kendall's tau-b, in which ties count for neither side.
    """

    spearman: float
    kendall: float
    count: int


def ranks(table: Table, higher_is_better: bool = True) -> dict[str, list[float]]:
    """Rank the methods on each dataset, 1 for the best; equals share the mean of their ranks, NaN is the worst.

    >>> ranks({"a": [0.9, 0.5], "b": [0.8, 0.7], "c": [0.8, 0.6]})
    {'a': [1.0, 3.0], 'b': [2.5, 1.0], 'c': [2.5, 2.0]}
    """
    from scipy.stats import rankdata

    numbers = _checked(table)
    worst_last = np.where(np.isnan(numbers), -math.inf, numbers if higher_is_better else -numbers)
    ranked = rankdata(-worst_last, axis=0)
    return {method: [float(rank) for rank in row] for method, row in zip(table, ranked, strict=True)}


def mean_ranks(table: Table, higher_is_better: bool = True) -> dict[str, float]:
    """Average each method's ranks over the datasets, in the order of the table.

    >>> mean_ranks({"a": [0.9, 0.5], "b": [0.8, 0.7], "c": [0.8, 0.6]})
    {'a': 2.0, 'b': 1.75, 'c': 2.25}
    """
    return {method: sum(row) / len(row) for method, row in ranks(table, higher_is_better).items()}


def friedman(table: Table) -> Friedman:
    r"""Test whether methods differ over datasets (at least three methods and two datasets), by their ranks.

    :math:`\chi^2 = N \sum_j (\bar R_j - \frac{k + 1}{2})^2 / v`, where v is the variance of ranks within a dataset,
    k (k + 1) / 12 without ties; Iman and Davenport's statistic is :math:`F = (N - 1) \chi^2 / (N (k - 1) - \chi^2)`.
    """
    from scipy.special import chdtrc, fdtrc

    ranked = np.array(list(ranks(table).values()))
    methods, datasets = ranked.shape
    if methods < 3 or datasets < 2:
        raise FedStrataError(
            f"The Friedman test compares at least 3 methods over at least 2 datasets; here are {methods} and "
            f"{datasets}. Compare two methods by a paired test over seeds."
        )
    spread = ((ranked - (methods + 1) / 2) ** 2).sum() / (datasets * (methods - 1))
    if spread == 0:
        return Friedman(math.nan, math.nan, math.nan, math.nan, methods, datasets)
    statistic = datasets * float(((ranked.mean(axis=1) - (methods + 1) / 2) ** 2).sum() / spread)
    left = datasets * (methods - 1) - statistic
    f_statistic = (datasets - 1) * statistic / left if left > 1e-9 else math.inf
    f_p_value = (
        0.0 if math.isinf(f_statistic) else float(fdtrc(methods - 1, (methods - 1) * (datasets - 1), f_statistic))
    )
    return Friedman(statistic, float(chdtrc(methods - 1, statistic)), f_statistic, f_p_value, methods, datasets)


def critical_difference(methods: int, datasets: int, level: float = 0.95) -> float:
    r"""By how much the mean ranks of two methods must differ, at least, for Nemenyi's test to tell them apart.

    :math:`CD = q_\alpha \sqrt{k (k + 1) / (6 N)}` for k methods and N datasets, with the studentized range's quantile
    for infinitely many degrees of freedom divided by :math:`\sqrt 2`. All pairs are compared at once.

    >>> round(critical_difference(4, 14, 0.90), 2)  # Demšar 2006, section 3.2.4, has 1.12 from a rounded q
    1.12
    """
    from scipy.stats import studentized_range

    if methods < 2 or datasets < 1:
        raise FedStrataError(f"A critical difference is one of at least 2 methods over a dataset, not of {methods}.")
    quantile = float(studentized_range.ppf(level, methods, math.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * datasets))


def indistinguishable(mean: Mapping[str, float], difference: float) -> list[tuple[str, ...]]:
    """Gather the methods whose mean ranks lie within the critical difference, best first: the bars of its plot.

    A bar joins at least two methods, and none is part of a longer one.

    >>> indistinguishable({"a": 1.0, "b": 1.8, "c": 2.5, "d": 4.0}, 1.0)
    [('a', 'b'), ('b', 'c')]
    """
    order = sorted(mean, key=lambda method: mean[method])
    bars: list[tuple[str, ...]] = []
    reached = 0
    for first, method in enumerate(order):
        last = max(place for place in range(first, len(order)) if mean[order[place]] - mean[method] < difference)
        if last > first and last > reached:
            bars.append(tuple(order[first : last + 1]))
            reached = last
    return bars


def rank_correlation(ones: Sequence[float], others: Sequence[float]) -> RankCorrelation:
    """Compare two orders of the same methods, such as the published and ours, by the numbers that make them.

    >>> rank_correlation([70.1, 68.2, 71.0], [60.0, 61.0, 65.0])
    RankCorrelation(spearman=0.5, kendall=0.3333333333333333, count=3)
    """
    if len(ones) != len(others):
        raise FedStrataError(
            f"Two orders of the same methods have a number for each; here are {len(ones)} and {len(others)}."
        )
    from scipy.stats import rankdata

    first, second = (rankdata(numbers) - (len(ones) + 1) / 2 for numbers in (ones, others))
    if np.isnan([*ones, *others]).any() or not first.any() or not second.any():
        return RankCorrelation(math.nan, math.nan, len(ones))
    spearman = float(first @ second) / math.sqrt(float(first @ first) * float(second @ second))
    pairs = [np.sign(np.subtract.outer(numbers, numbers)) for numbers in (first, second)]
    untied = math.sqrt(float((pairs[0] ** 2).sum()) * float((pairs[1] ** 2).sum()))
    return RankCorrelation(spearman, float((pairs[0] * pairs[1]).sum()) / untied, len(ones))


def _checked(table: Table) -> npt.NDArray[np.float64]:
    counts = {len(row) for row in table.values()}
    if len(counts) != 1 or counts == {0}:
        raise FedStrataError(
            f"Methods are ranked on the datasets that all of them have, at least one; the rows have "
            f"{', '.join(map(str, sorted(counts))) or 'no'} numbers. Leave out what not all have."
        )
    return np.array(list(table.values()), dtype=np.float64)
