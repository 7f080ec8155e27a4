"""What one sees in the layer view, in sentences made from its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.report.formats import listed
from fedstrata.report.layer_view import ROLES, LayerView, MetricView

INERTIA = "cosine"
_SMALL = 0.05
"""Below which part of the scale a difference is not worth a sentence."""


@dataclass(frozen=True)
class _Level:
    """Where some layers of a method are: the mean over layers, and its deviation over seeds."""

    method: str
    mean: float
    spread: float


def finding(view: LayerView, metric: MetricView) -> str:
    """Say which methods differ most in the middle layers, or that there is nothing to see.

    Methods are compared in the last round that all runs have. In the reference round itself, to which all are equal by
    definition, there is nothing to say but what is shown.
    """
    if metric.name == INERTIA and metric.common_round == metric.columns[0][0]:
        return metric.quantity.title
    layers, words = _of_role(view, metric, "middle")
    many = words.endswith("s")
    levels = [level for method in metric.tables if (level := _level(metric, method, layers)) is not None]
    if not levels:
        return f"{metric.quantity.title}: no numbers of a last round that all runs have."
    if len(levels) == 1:
        return _within(view, metric, levels[0].method)
    low, high = (choose(levels, key=lambda level: level.mean) for choose in (min, max))
    extent = _number(metric, low.mean)
    when = _when(metric)
    verb = ("are" if many else "is") if when else "end" if many else "ends"
    if not _apart(metric, low, high) or _number(metric, high.mean) == extent:
        if _number(metric, high.mean) != extent:
            extent = f"{extent} to {_number(metric, high.mean)}"
        among = "all methods" if len(levels) == len(view.methods) else "the methods shown"
        return f"{_subject(metric)}: {when}{words} {verb} alike in {among}, at {extent}."
    if metric.name == INERTIA:
        keep, come = ("keep", "they come") if many else ("keeps", "it comes")
        said = (
            f"{when}in {high.method} {words} {keep} a cosine of {_number(metric, high.mean)} to round "
            f"{metric.columns[0][0]}; in {low.method} {come} down to {_number(metric, low.mean)}."
        )
        return said[0].upper() + said[1:]
    return (
        f"{_subject(metric)}: {when}{words} {verb} at {_number(metric, high.mean)} in {high.method}, "
        f"at {_number(metric, low.mean)} in {low.method}."
    )


def kept_norms(view: LayerView) -> str:
    """Say in which methods the norm layers did not travel, as far as it is known which layers are norms."""
    norms = {name for name, layer in view.layers.items() if layer.kind == "norm"}
    keeping = [method for method in view.methods if norms and norms <= view.stays[method]]
    if not keeping:
        return ""
    everywhere = len(keeping) == len(view.methods) > 1
    return f"Norm layers stay at the clients in {'all methods' if everywhere else listed(keeping)}."


def _within(view: LayerView, metric: MetricView, method: str) -> str:
    """Compare the roles inside one method."""
    found: list[tuple[str, _Level]] = []
    for role in ROLES:
        layers, words = _of_role(view, metric, role)
        level = _level(metric, method, layers)
        if level is not None and (words.split()[1] == role or not found):
            found.append((words, level))
    levels = [level for _, level in found]
    low, high = (choose(levels, key=lambda level: level.mean) for choose in (min, max))
    if len(found) == 1 or not _apart(metric, low, high):
        alike = f"{_when(metric)}all layers of {method} {'are' if _when(metric) else 'end'} alike"
        return f"{_subject(metric)}: {alike}, near {_number(metric, levels[0].mean)}."
    parts = [f"{words} at {_number(metric, level.mean)}" for words, level in found]
    return f"{_subject(metric)}: in {method}, {_when(metric) or 'after the last round, '}{listed(parts)}."


def _of_role(view: LayerView, metric: MetricView, role: str) -> tuple[list[int], str]:
    """The lines of the layers with a role, and how they are called; where there are none of it, of all layers."""
    weighted = [name for name in metric.layers if view.layers[name].role in ROLES]
    roles = {name: view.layers[name].role for name in weighted}
    if not weighted:  # A run that does not tell the roles: by the places.
        roles = dict.fromkeys(metric.layers, "middle")
        roles |= {metric.layers[0]: "first", metric.layers[-1]: "last"} if len(metric.layers) > 2 else {}
    lines = [line for line, name in enumerate(metric.layers) if roles.get(name) == role]
    if not lines:
        return list(range(len(metric.layers))), "the layers"
    return lines, f"the {role} layer" + ("" if len(lines) == 1 else "s")


def _level(metric: MetricView, method: str, lines: Sequence[int]) -> _Level | None:
    table = metric.tables[method]
    if table.common is None:
        return None
    values = table.common[list(lines)]
    known = np.isfinite(values)
    if not known.any():
        return None
    spreads = np.zeros(1) if table.common_spread is None else table.common_spread[list(lines)][known]
    return _Level(method, float(values[known].mean()), float(np.nan_to_num(spreads).mean()))


def _when(metric: MetricView) -> str:
    """Name the round in which methods are compared, where it is not the last one of all of them."""
    if metric.common_round == metric.columns[-1][1]:
        return ""
    return f"after round {metric.common_round}, the last that all runs have, "


def _apart(metric: MetricView, low: _Level, high: _Level) -> bool:
    """Whether two levels differ by more than what seeds do, and by enough to be seen on the scale."""
    scale = metric.scale
    if scale.logarithmic:
        floor = scale.low
        reach = math.log10(scale.high / scale.low)
        seen = math.log10(max(high.mean, floor) / max(low.mean, floor)) / reach
    else:
        seen = (high.mean - low.mean) / (scale.high - scale.low)
    return seen > _SMALL and high.mean - low.mean > 2 * math.hypot(low.spread, high.spread)


def _number(metric: MetricView, value: float) -> str:
    bounded = metric.quantity.low is not None and metric.quantity.high is not None
    return f"{value:.2f}" if bounded else f"{value:.2g}"


def _subject(metric: MetricView) -> str:
    return metric.quantity.title
