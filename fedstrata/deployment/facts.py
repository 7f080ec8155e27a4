"""Numbers and scores in the facts of replies: how a site writes them, and how a server reads them as hostile input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedstrata.data.channels import Statistics
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.protocol import ProtocolError
from fedstrata.engines.evaluation import Scores
from fedstrata.engines.server import ServerSide
from fedstrata.flops import Cost
from fedstrata.scores import Metric

LARGEST = 1e100
"""No honest number is larger, and those of many sites can still be added up."""


def finite_or_none(value: float) -> float | None:
    """Write a number; JSON has none that is not finite."""
    return value if math.isfinite(value) else None


def number_in(facts: Mapping[str, Any], name: str, low: float = -LARGEST, high: float = LARGEST) -> float:
    """Read a finite number."""
    value = facts.get(name)
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # whole numbers have no end
        number = math.inf
    if not math.isfinite(number):
        raise RefusedReply(f"its {name} is no finite number")
    if not low <= number <= high:
        raise RefusedReply(f"its {name} is {number:g}, outside {low:g} to {high:g}")
    return number


def whole_numbers_in(facts: Mapping[str, Any], name: str, low: int, high: int = 2**40) -> tuple[int, ...]:
    """Read a list of whole numbers from ``low`` to ``high``."""
    values = facts.get(name)
    if not isinstance(values, list) or not all(type(value) is int and low <= value <= high for value in values):
        raise RefusedReply(f"its {name} is no list of whole numbers from {low} to {high}")
    return tuple(values)


def cost_to_facts(cost: Cost) -> dict[str, float]:
    """Write what local training took one site."""
    return {"flops": float(cost.dense), "sparse_flops": float(cost.sparse)}


def cost_from_facts(facts: Mapping[str, Any]) -> Cost:
    """Read what local training took a site."""
    numbers = (number_in(facts, name, low=0.0) for name in ("flops", "sparse_flops"))
    return Cost(*(torch.tensor([number], dtype=torch.float64) for number in numbers))


def scores_to_facts(scores: Scores, metrics: Sequence[Metric] = (), classes_too: bool = True) -> dict[str, Any]:
    """Write one site's scores; a site without test samples has none.

    Without ``classes_too``, what metrics tell of single classes stays here, as if it were not defined.
    """
    if not scores.clients:
        return {}
    facts: dict[str, Any] = {
        "accuracy": finite_or_none(float(scores.accuracy[0])),
        "loss": finite_or_none(float(scores.loss[0])),
    }
    if metrics:
        facts["metrics"] = {
            str(metric): _numbers_or_none(scores.further[str(metric)][0])
            if classes_too or not metric.tells_of_classes
            else None
            for metric in metrics
        }
    return facts


def _numbers_or_none(values: np.ndarray) -> float | list[float | None] | None:
    return [finite_or_none(value) for value in values.tolist()] if values.ndim else finite_or_none(float(values))


def scores_from_facts(site: int, facts: Any, metrics: Sequence[Metric] = (), classes: int = 0) -> Scores:
    """Read a site's scores; none where it has no test samples. What it does not tell of a metric is NaN."""
    if not isinstance(facts, dict):
        raise RefusedReply("its scores are missing")
    if not facts:
        return Scores((), np.empty(0), np.empty(0))
    accuracy, loss = number_in(facts, "accuracy", 0.0, 1.0), number_in(facts, "loss")
    told = facts.get("metrics", {})
    if not isinstance(told, dict) or set(told) != {str(metric) for metric in metrics}:
        raise RefusedReply("its metrics are not those that were asked for")
    further = {str(metric): _read_metric(told, metric, classes)[None] for metric in metrics}
    return Scores((site,), np.array([accuracy]), np.array([loss]), further)


def read_scores(side: ServerSide, site: int, facts: Any) -> Scores:
    """Read a site's scores as the run asks for them."""
    return scores_from_facts(site, facts, side.setting.metrics, side.declared.label_counts.shape[1])


def _read_metric(told: Mapping[str, Any], metric: Metric, classes: int) -> np.ndarray:
    name, shape = str(metric), (classes,) * metric.axes
    if told[name] is None:
        return np.full(shape, math.nan)
    if not shape:
        return np.array(number_in(told, name))
    if not isinstance(told[name], list) or len(told[name]) != classes:
        raise RefusedReply(f"its {name} is no list of a number for each class")
    return np.array([math.nan if value is None else number_in({name: value}, name) for value in told[name]])


def statistics_to_facts(statistics: Statistics | None) -> dict[str, Any] | None:
    """Write mean and deviation."""
    return None if statistics is None else {name: list(values) for name, values in statistics._asdict().items()}


def statistics_from_facts(value: Any) -> Statistics | None:
    """Read mean and deviation, at a site or from the server's own disk."""
    if value is None:
        return None
    lists: list[Any] = [value.get(name) for name in Statistics._fields] if isinstance(value, dict) else []
    if not lists or not all(
        isinstance(numbers, list) and all(type(number) is float and math.isfinite(number) for number in numbers)
        for numbers in lists
    ):
        raise ProtocolError("A mean and a deviation came that are no numbers.")
    mean, deviation = (tuple(numbers) for numbers in lists)
    if len(mean) != len(deviation) or not all(number > 0 for number in deviation):
        raise ProtocolError("A mean and a deviation came that do not fit together.")
    return Statistics(mean, deviation)


def normalisation_to_facts(by: str | Statistics | None) -> str | dict[str, Any] | None:
    """Write by what samples are normalised: the name of a way, or mean and deviation."""
    return by if isinstance(by, str) else statistics_to_facts(by)


def normalisation_from_facts(value: Any) -> str | Statistics | None:
    """Read by what samples are normalised."""
    return value if isinstance(value, str) else statistics_from_facts(value)
