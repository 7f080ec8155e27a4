"""What a method means for single clients: how unequally it serves them, and who is better off for taking part.

Measures of Ahmed Elhussein, Gamze Gürsoy: "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo
Federated Learning", arXiv 2502.08829, Appendix A.1. A client's performance is any number of which more is better, such
as its accuracy on its own test samples.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from fedstrata.errors import FedStrataError


class RunOfClients(Protocol):
    """What is asked of a run."""

    @property
    def client_accuracies(self) -> Mapping[int, float]:
        """Each client's accuracy on its own test samples when the run was last tested, by the client's number."""


def fairness(performances: Sequence[float] | np.ndarray) -> float:
    r"""Measure how unequally clients fare (Eq. A.5): 0 where all fare alike.

    :math:`\frac{1}{C} \sum_c (P_c - \bar P)^2` over the C clients. They are the whole population, so the variance
    divides by their number. Without clients it is NaN.

    >>> fairness([0.5, 1.0])
    0.0625
    """
    numbers = np.asarray(performances, dtype=np.float64)
    return float(numbers.var()) if numbers.size else math.nan


def worst_clients(performances: Mapping[int, float], count: int | None = None) -> list[int]:
    """Name the clients that fare worst, the worst first; by default a tenth of them, at least one.

    NaN, the performance of a model that diverged, is the worst; of equals the lower number comes first.

    >>> worst_clients({0: 0.9, 1: 0.4, 2: 0.7, 3: 0.4}, 3)
    [1, 3, 2]
    """
    wanted = math.ceil(len(performances) / 10) if count is None else count
    order = sorted(
        performances, key=lambda client: (not math.isnan(performances[client]), performances[client], client)
    )
    return order[:wanted]


def incentive(run: RunOfClients, local_run: RunOfClients, fedavg_run: RunOfClients) -> float:
    r"""Tell which part of the clients has a reason to take part (Eq. A.6).

    :math:`\frac{1}{C} \sum_c \mathbb{1}\{P_c > \max(S_c, G_c)\}`: those that do strictly better than both with the
    model that they train alone (``local``) and with that of FedAvg, on the same test samples. Compare runs of the same
    seed and split. The clients are those that were tested in all three; without any it is NaN.
    """
    return incentive_of(run.client_accuracies, local_run.client_accuracies, fedavg_run.client_accuracies)


def incentive_of(own: Mapping[int, float], *others: Mapping[int, float], higher_is_better: bool = True) -> float:
    """Do the same with the clients' performances themselves, by their numbers; of a loss, less is better.

    >>> incentive_of({0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.8, 1: 0.8, 2: 0.6}, {0: 0.5, 1: 0.1, 2: 0.75})
    0.3333333333333333
    """
    if not others:
        raise FedStrataError(
            "The incentive compares performances with those of other runs, and there are none; give those of 'local' "
            "and of 'fedavg' too."
        )
    clients = own.keys() & set.intersection(*(set(other) for other in others))
    better = operator.gt if higher_is_better else operator.lt
    better_off = [all(better(own[client], other[client]) for other in others) for client in clients]
    return sum(better_off) / len(better_off) if better_off else math.nan
