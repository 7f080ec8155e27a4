"""Small curves of text, one for each layer, for a terminal in which a run goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedstrata.diagnostics import quantity_of
from fedstrata.report.names import shortened

BLOCKS = "▁▂▃▄▅▆▇█"
LAYERS = 12
"""How many layers are shown; of more, these many from the first to the last."""
WIDTH = 32
_NAME = 18
_METRICS = ("inertia.cosine", "cosine", "update")
"""What is shown: the first of these that the last round has."""


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Draw numbers as blocks from ``low`` to ``high``; what is no number is a gap.

    >>> sparkline([0.0, 0.5, 1.0, float("nan")], 0.0, 1.0)
    '▁▅█ '
    """
    reach = high - low

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        place = (value - low) / reach if reach > 0 else 0.5
        return BLOCKS[min(len(BLOCKS) - 1, max(0, int(place * len(BLOCKS))))]

    return "".join(map(block, values))


class Trail:
    """The numbers of one layer so far, as at most ``width`` means of equally many rounds: it does not grow for ever.

    >>> trail = Trail(width=2)
    >>> for value in (1.0, 3.0, 5.0, 7.0):
    ...     trail.add(value)
    >>> trail.values, trail.last
    ([2.0, 6.0], 7.0)
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._sums: list[tuple[float, int]] = []
        self._rounds_in_each = 1
        self.last = math.nan

    def add(self, value: float) -> None:
        """Take note of the next round."""
        self.last = value
        if self._sums and self._sums[-1][1] < self._rounds_in_each:
            total, count = self._sums[-1]
            self._sums[-1] = (total + value, count + 1)
            return
        if len(self._sums) == self._width:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [(first[0] + second[0], first[1] + second[1]) for first, second in pairs]
            self._rounds_in_each *= 2
        self._sums.append((value, 1))

    @property
    def values(self) -> list[float]:
        """The means."""
        return [total / count for total, count in self._sums]


class LayerTrails:
    """The layers of the run that goes on."""

    def __init__(self) -> None:
        self._trails: dict[str, dict[str, Trail]] = {}
        self._metric: str | None = None

    def note(self, layers: Mapping[str, Mapping[str, float]]) -> None:
        """Take note of a round: of each metric, the numbers of the layers."""
        self._metric = next((metric for metric in _METRICS if metric in layers), self._metric)
        for metric in _METRICS:
            trails = self._trails.setdefault(metric, {})
            for layer, value in layers.get(metric, {}).items():
                trails.setdefault(layer, Trail()).add(value)

    def lines(self, room: int) -> list[str]:
        """Draw the layers in up to ``room`` lines, with a line that says what they are; nothing where that is little.

        A metric with bounds, as a cosine, has one scale for all layers; the others are drawn each on its own.
        """
        trails = self._trails.get(self._metric or "", {})
        shown = spread_out(list(trails), min(LAYERS, room - 1))
        if self._metric is None or len(shown) < 2:
            return []
        quantity = quantity_of(self._metric)
        curves = {name: trails[name].values for name in shown}
        together = quantity is not None and quantity.high is not None
        everything = [value for values in curves.values() for value in values if math.isfinite(value)]
        names = dict(zip(shown, shortened(shown, _NAME), strict=True))
        lines = [f"  {self._metric if quantity is None else quantity.title}, layer by layer"]
        for name, values in curves.items():
            scale = everything if together else [value for value in values if math.isfinite(value)]
            low, high = (min(scale), max(scale)) if scale else (0.0, 0.0)
            curve = sparkline(values, low, high)
            lines.append(f"  {names[name]:<{max(map(len, names.values()))}}  {curve:<{WIDTH}}  {trails[name].last:.3g}")
        return lines


def spread_out(names: Sequence[str], most: int) -> list[str]:
    """Choose at most so many names, from the first to the last, at equal distances.

    >>> spread_out(["a", "b", "c", "d", "e"], 3), spread_out(["a", "b"], 3), spread_out(["a", "b"], 1)
    (['a', 'c', 'e'], ['a', 'b'], [])
    """
    if len(names) <= most:
        return list(names)
    if most < 2:
        return []
    return [names[round(place * (len(names) - 1) / (most - 1))] for place in range(most)]
