"""Writing scores into the log of a run: one number per client, and the summary over clients."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from fedstrata.engines.evaluation import Scores
from fedstrata.errors import FedStrataWarning
from fedstrata.runs.metrics import EVERYBODY, POOLED, UNDEFINED, MetricLog, describe_clients
from fedstrata.scores import Metric, compute


def note_scores(
    log: MetricLog, round: int, label: str, scores: Scores, metrics: Sequence[Metric], warned: set[str]
) -> dict[str, float]:
    """Log one number per client, and return the summary over clients for the round.

    ``metrics`` are what the experiment asks for beside accuracy and loss; of those that some clients have no number for
    is warned once, and ``warned`` remembers.
    """
    values: dict[str, float] = {}
    if not scores.clients:
        return values
    for metric, numbers in (("accuracy", scores.accuracy), ("loss", scores.loss)):
        log.add_clients(round, f"{label}.{metric}", scores.clients, numbers)
        described = describe_clients(numbers, higher_is_better=metric == "accuracy")
        values |= {f"{label}.{metric}.{name}": value for name, value in described.items()}
    pooled = {} if scores.pooled is None else compute(*scores.pooled, metrics)
    for one in metrics:
        numbers, everybody = scores.further[str(one)], pooled.get(str(one))
        if one.axes:
            _note_classes(log, round, f"{label}.{one}", scores.clients, numbers, everybody)
            continue
        log.add_clients(round, f"{label}.{one}", scores.clients, numbers)
        undefined = np.isnan(numbers) & np.isfinite(scores.loss)  # of a diverged model it is not hidden
        if undefined.any() and str(one) not in warned:
            warned.add(str(one))
            _warn_of_undefined(one, scores.clients, undefined)
        told = over_clients(one, numbers, undefined) | ({} if everybody is None else {POOLED: float(everybody)})
        values |= {f"{label}.{one}.{name}": value for name, value in told.items()}
    return values


def _note_classes(
    log: MetricLog, round: int, metric: str, clients: Sequence[int], numbers: np.ndarray, everybody: np.ndarray | None
) -> None:
    """Log the numbers of single classes: of each client, and of all together."""
    for client, own in zip(clients, numbers, strict=True):
        log.add_classes(round, metric, client, own)
    if everybody is not None:
        log.add_classes(round, metric, EVERYBODY, everybody)


def over_clients(metric: Metric, numbers: np.ndarray, undefined: np.ndarray) -> dict[str, float]:
    """Sum up over the clients that a metric is defined for, and count the others."""
    described = describe_clients(numbers[~undefined], higher_is_better=metric.higher_is_better is not False)
    if metric.higher_is_better is None:
        del described["worst10"]
    return {**described, UNDEFINED: float(undefined.sum())}


def _warn_of_undefined(metric: Metric, clients: Sequence[int], undefined: np.ndarray) -> None:
    first, count = clients[int(undefined.argmax())], int(undefined.sum())
    needs = f": it needs {metric.defined_for} among the test samples" if metric.defined_for else ""
    rest = "their mean is over the others" if count < len(clients) else "it has no mean over clients"
    warnings.warn(
        f"The metric '{metric}' is not defined for {count} of {len(clients)} clients, of which client {first} is the "
        f"first{needs}; {rest}.",
        FedStrataWarning,
        stacklevel=2,
    )
