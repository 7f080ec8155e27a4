"""Where weights lie, and how far clients are apart: rows of histograms and matrices, from the diagnostics of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstrata.papers.figures import marks
from fedstrata.report.charts import Drawing
from fedstrata.report.layer_scales import scale_of
from fedstrata.report.layer_view import plain_quantity
from fedstrata.report.reading import Run
from fedstrata.report.series import Rows, short
from fedstrata.report.similarity import clustered, matrix_of

BINS = 80
_EDGES, _MERGED = "weights.edges", "weights.merged"
_TAIL = 0.001
"""Which part of the weights, at both ends together, is left out of sight, so that the rest can be seen."""


def histogram_rows(line: str, run: Run) -> Rows:
    """The histogram of all layers together, each by its number of weights; nothing where a run has none."""
    found = _layers(run)
    if not found:
        return []
    reach = _reach(found)
    edges = np.linspace(-reach, reach, BINS + 1)
    total = sum(size for size, _, _ in found)
    parts = sum(size / total * rebinned(own, shares, edges) for size, own, shares in found)
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        {"line": line, "at": short(float(middle)), "value": short(100 * float(part))}
        for middle, part in zip(middles, np.asarray(parts), strict=True)
    ]


def rebinned(edges: np.ndarray, parts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Put the parts of a histogram into other bins, as if each bin were filled evenly.

    >>> rebinned(np.array([0.0, 2.0, 4.0]), np.array([0.5, 0.5]), np.array([0.0, 1.0, 4.0])).tolist()
    [0.25, 0.75]
    """
    filled = np.concatenate(([0.0], np.cumsum(parts)))
    moved: np.ndarray = np.diff(np.interp(wanted, edges, filled))
    return moved


def _layers(run: Run) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Of each layer in the last round that has histograms: how many weights, the edges, and the part in each bin."""
    columns = run.diagnostics
    chosen = np.isin(columns["metric"], (_EDGES, _MERGED))
    if not chosen.any():
        return []
    chosen &= columns["round"] == columns["round"][chosen].max()
    sizes = {str(row["layer"]): int(row.get("parameters") or 1) for row in run.layer_facts.get("layers", ())}
    found = []
    for layer in dict.fromkeys(columns["layer"][chosen].tolist()):
        edges, merged = (_of(columns, chosen & (columns["layer"] == layer) & (columns["metric"] == name))
                         for name in (_EDGES, _MERGED))  # fmt: skip
        if len(edges) == len(merged) + 1:
            found.append((sizes.get(str(layer), 1), edges, merged))
    return found


def _of(columns: object, chosen: np.ndarray) -> np.ndarray:
    places, values = columns["other"][chosen], columns["value"][chosen]  # type: ignore[index]
    ordered: np.ndarray = values[np.argsort(places)]
    return ordered


def _reach(layers: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> float:
    """How far from zero nearly all weights lie."""
    middles = np.concatenate([np.abs(edges[:-1] + edges[1:]) / 2 for _, edges, _ in layers])
    masses = np.concatenate([size * parts for size, _, parts in layers])
    order = np.argsort(middles)
    filled = np.cumsum(masses[order])
    place = int(np.searchsorted(filled, (1 - _TAIL) * filled[-1]))
    return float(middles[order][min(place, len(order) - 1)]) or 1.0


def matrix_panels(run: Run, metrics: Sequence[str]) -> dict[str, Drawing]:
    """A matrix of the clients for each metric that a run has, all in the order of the first."""
    found = {metric: matrix for metric in metrics if (matrix := matrix_of(run, metric)) is not None}
    panels: dict[str, Drawing] = {}
    order: np.ndarray | None = None
    for metric, (numbers, values) in found.items():
        quantity = plain_quantity(metric)
        if order is None:
            distances = quantity.low == 0 and quantity.high is None
            largest = float(np.nanmax(values)) or 1.0
            order = numbers[clustered(1 - values / largest if distances else values)]
        places = [int(np.flatnonzero(numbers == client)[0]) for client in order if client in numbers]
        rows = [
            {
                "down": down,
                "across": across,
                "client": int(numbers[first]),
                "other": int(numbers[second]),
                "value": short(float(values[first, second])),
            }
            for down, first in enumerate(places)
            for across, second in enumerate(places)
            if np.isfinite(values[first, second])
        ]
        panels[metric] = marks.matrix(rows, scale_of(quantity, values.ravel()), quantity.title)
    return panels
