"""What is computed over clients of all runs together: how unequally they fare, and who has a reason to take part.

Each client's number is summed up over the runs first, as the paper does with its runs (their mean, or their median),
and one number is computed of these: so does the released code of PLayer-FL, whose clients are the same in every run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedstrata.fairness import fairness, incentive_of
from fedstrata.papers.reading import INCENTIVE, Recipe
from fedstrata.runs.metrics import higher_is_better
from fedstrata.significance import Estimate
from fedstrata.verdicts import Middle

Clients = Mapping[int, Sequence[float]]
"""The numbers of all clients of a row, by the seeds of its runs."""
_RESAMPLED = 500
"""How often runs are drawn anew, with replacement: the standard error is then known to a thirtieth of itself."""


def number_over_clients(recipe: Recipe, own: Clients, against: Sequence[Clients] = ()) -> Estimate | None:
    """Compute the number of a part for a row, of the seeds that it and the rows ``against`` which it stands all have.

    The deviation is the standard error of the number, by a bootstrap over runs; a single run has none.
    """
    seeds = [seed for seed in sorted(own) if all(seed in other for other in against)]
    if not seeds:
        return None
    rows = [np.array([one[seed] for seed in seeds], dtype=np.float64) for one in (own, *against)]
    compute = _incentive_of(recipe) if recipe.over_clients == INCENTIVE else _variance_of

    def number(runs: np.ndarray) -> float:
        return compute([_middles(of_row[runs], recipe.middle) for of_row in rows])

    everything, draws = np.arange(len(seeds)), np.random.default_rng(0)
    drawn = [number(draws.choice(everything, len(seeds))) for _ in range(_RESAMPLED)] if len(seeds) > 1 else []
    return Estimate(number(everything), float(np.std(drawn)) if drawn else None, len(seeds))


def _middles(of_runs: np.ndarray, middle: Middle) -> np.ndarray:
    """Sum the runs of each client up ``[runs, clients]``, of those in which it has a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a client without any number has no middle
        found: np.ndarray = np.nanmedian(of_runs, 0) if middle == "median" else np.nanmean(of_runs, 0)
    return found


def _variance_of(middles: Sequence[np.ndarray]) -> float:
    return fairness(list(_known(middles[0]).values()))


def _incentive_of(recipe: Recipe) -> Callable[[Sequence[np.ndarray]], float]:
    """The part of the clients, in percent, that fare better than in all rows against which it is measured."""
    higher = higher_is_better(f"{recipe.number}.mean") is not False

    def compute(middles: Sequence[np.ndarray]) -> float:
        return 100 * incentive_of(*map(_known, middles), higher_is_better=higher)

    return compute


def _known(middles: np.ndarray) -> dict[int, float]:
    """The clients that have a number in any run, by their places."""
    return {client: value for client, value in enumerate(middles.tolist()) if not math.isnan(value)}
