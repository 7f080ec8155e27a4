"""Accuracy against cost as points, and the front of those that no other method beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.report.names import shortened
from fedstrata.report.series import Groups, Rows, costs_of, short

MEASURES: Mapping[str, str] = {
    "both": "bytes, both ways",
    "up": "bytes up, from clients",
    "down": "bytes down, to clients",
    "seconds": "seconds",
}
"""What accuracy can be set against."""
POINTS: Mapping[str, str] = {"last": "last round", "best": "best round, chosen on test data"}
"""Which point of a method's curve stands for it."""
Place = tuple[float, float]
NAME = 25
"""How many letters of a name stand at its point, at most."""
_WIDTH, _HEIGHT, _LETTER, _LINE, _DOWN = 480.0, 300.0, 7.0, 16.0, 28.0
"""About how many pixels the points take on a narrow page, across and up, a letter and a line of names; and how far a
name below its point is from where it would stand above it.
"""
LOGARITHMIC_FROM = 30.0
"""How many times the largest cost must be the smallest one that is not zero, for an axis in powers of ten."""


@dataclass(frozen=True)
class Axis:
    """Where the costs of one measure lie on the axis: as they are, or as powers of ten, zero then left of all others.

    There is no place for zero on an axis of powers of ten, so it stands by itself at ``zero``.
    """

    logarithmic: bool
    zero: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, costs: Sequence[float]) -> Axis:
        """Choose an axis for some costs."""
        positive = sorted(cost for cost in costs if cost > 0)
        if not positive or positive[-1] <= LOGARITHMIC_FROM * positive[0]:
            return cls(False, 0.0, tuple(_round_numbers(max(costs, default=1.0))))
        low, high = math.log10(positive[0]), math.log10(positive[-1])
        zero = math.floor(low) - 0.5
        has_zero = any(cost == 0 for cost in costs)
        decades = [float(power) for power in range(math.floor(low), math.ceil(high) + 1)]
        return cls(True, zero, (*((zero,) if has_zero else ()), *decades))

    def place(self, cost: float) -> float:
        """Find the place of a cost."""
        if not self.logarithmic:
            return cost
        return self.zero if cost == 0 else math.log10(cost)


@dataclass(frozen=True)
class Pareto:
    """What the chart draws: ``points`` of methods, the steps of the ``front``, and an axis for each measure."""

    points: Rows
    front: Rows
    axes: Mapping[str, Axis]


def pareto(groups: Groups) -> Pareto:
    """Set each method's last and best accuracy beside what had been sent or spent by then.

    A method is on the front if no other has at least its accuracy for at most its cost, one of them strictly.
    """
    points: Rows = []
    found = {group.label: costs_of(group) for group in groups}
    curves = {label: curve for label, curve in found.items() if curve is not None}
    names = dict(zip(curves, shortened(list(curves), NAME), strict=True)) if curves else {}
    axes: dict[str, Axis] = {}
    front: Rows = []
    for measure in MEASURES:
        costs = {label: curve.costs[measure] for label, curve in curves.items()}
        usable = {label: cost for label, cost in costs.items() if np.isfinite(cost).all()}
        if not any((cost > 0).any() for cost in usable.values()):
            continue
        chosen = {point: {label: _position(curves[label].series.mean, point) for label in usable} for point in POINTS}
        at = {
            (point, label): float(usable[label][position])
            for point, positions in chosen.items()
            for label, position in positions.items()
        }
        axis = axes[measure] = Axis.of(list(at.values()))
        end = max(axis.place(cost) for cost in at.values())
        for point, positions in chosen.items():
            numbers = {
                label: (at[point, label], float(curves[label].series.mean[position]))
                for label, position in positions.items()
            }
            leading = on_the_front(numbers)
            places = {label: (axis.place(cost), value) for label, (cost, value) in numbers.items()}
            turn = axis.zero + 0.6 * (end - axis.zero)
            low = below({label: places[label] for label in leading}, names, places.values(), turn)
            for label, position in positions.items():
                cost, value = numbers[label]
                series = curves[label].series
                points.append(
                    {
                        "measure": measure,
                        "point": point,
                        "method": label,
                        "name": names[label],
                        "round": int(series.rounds[position]),
                        "cost": short(cost),
                        "x": short(axis.place(cost)),
                        "value": short(value),
                        "spread": None if series.std is None else short(float(series.std[position])),
                        "standing": "on the front" if label in leading else "behind",
                        "right": axis.place(cost) > turn,
                        "below": label in low,
                    }
                )
            steps = sorted((axis.place(numbers[label][0]), numbers[label][1]) for label in leading)
            for x, value in [*steps, (end, steps[-1][1])] if steps else []:
                front.append({"measure": measure, "point": point, "x": short(x), "value": short(value)})
    return Pareto(points, front, axes)


def on_the_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Name those of (cost, value) that no other beats: none costs at most as much for at least the value.

    >>> on_the_front({"a": (1, 0.5), "b": (2, 0.7), "c": (3, 0.6), "d": (2, 0.7)})
    ['a', 'b', 'd']
    """
    return [
        name
        for name, (cost, value) in points.items()
        if not any(
            other <= cost and better >= value and (other, better) != (cost, value) for other, better in points.values()
        )
    ]


def below(front: Mapping[str, Place], names: Mapping[str, str], points: Iterable[Place], turn: float) -> set[str]:
    """Choose the points of the front whose names stand below them, since above they would run into an earlier name.

    Names stand above their points, to the right of these up to ``turn``, and to the left beyond it.
    """
    across, up = zip(*points, strict=True)
    width, height = ((max(ends) - min(ends)) or 1.0 for ends in (across, up))
    taken: list[tuple[float, float, float]] = []
    found: set[str] = set()
    for method, (x, value) in sorted(front.items(), key=lambda point: point[1]):
        at, high = x / width * _WIDTH, value / height * _HEIGHT
        long = _LETTER * len(names[method])
        left, right = (at - long, at) if x > turn else (at, at + long)
        if any(left < end and begin < right and abs(high - other) < _LINE for begin, end, other in taken):
            found.add(method)
            high -= _DOWN
        taken.append((left, right, high))
    return found


def _position(values: np.ndarray, point: str) -> int:
    finite = np.flatnonzero(np.isfinite(values))
    return int(finite[-1] if point == "last" else finite[values[finite].argmax()])


def _round_numbers(highest: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from zero to the highest."""
    rough = highest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.99)
    return [step * number for number in range(int(highest / step) + 1)]
