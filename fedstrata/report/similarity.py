"""How alike the clients' updates are: matrices in which those that are alike stand together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstrata.report.reading import Run
from fedstrata.report.series import Groups, Rows, short

METRIC = "drift.similarity"
CELLS = 20_000
"""How many cells the matrices of a page have together."""
CLIENTS = 80
"""How many clients a matrix shows at most."""


@dataclass(frozen=True)
class Similarities:
    """The cells of all matrices, by the name of each; ``shown`` of ``clients`` clients where they are too many."""

    rows: Rows
    names: tuple[str, ...]
    clients: int
    shown: int
    left_out: int


def similarities(groups: Groups) -> Similarities:
    """Gather a matrix for each method that has one: of its first seed, all layers together, in the last round."""
    rows: Rows = []
    names: list[str] = []
    clients = shown = left_out = 0
    for group in groups:
        found = next(((run, matrix) for run in group.runs if (matrix := matrix_of(run)) is not None), None)
        if found is None:
            continue
        run, (numbers, values) = found
        order = clustered(values)
        kept = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), CLIENTS)).astype(int))]
        if rows and len(rows) + len(kept) ** 2 > CELLS:
            left_out += 1
            continue
        names.append(group.label)
        clients, shown = max(clients, len(order)), max(shown, len(kept))
        rows += [
            {
                "method": group.label,
                "row": down,
                "column": across,
                "client": run.pointed_at(int(numbers[first])),
                "other": run.pointed_at(int(numbers[second])),
                "value": short(float(values[first, second])),
            }
            for down, first in enumerate(kept)
            for across, second in enumerate(kept)
            if np.isfinite(values[first, second])
        ]
    return Similarities(rows, tuple(names), clients, shown, left_out)


def clustered(similarity: np.ndarray) -> np.ndarray:
    """Order clients by average-linkage clustering of 1 - similarity, the leaves turned so that neighbours are alike.

    Bar-Joseph, Gifford and Jaakkola, "Fast optimal leaf ordering for hierarchical clustering", Bioinformatics 17, 2001.
    Pairs without a number count as unlike.
    """
    count = len(similarity)
    if count < 3:
        return np.arange(count)
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    known = np.nan_to_num((similarity + similarity.T) / 2, nan=0.0)
    distance = np.clip(1.0 - known, 0.0, None)
    np.fill_diagonal(distance, 0.0)
    # To turn the leaves takes the cube of their number.
    order: np.ndarray = leaves_list(
        linkage(squareform(distance, checks=False), "average", optimal_ordering=count <= 300)
    )
    return order


def matrix_of(run: Run, metric: str = METRIC) -> tuple[np.ndarray, np.ndarray] | None:
    """The clients and a metric of all pairs of them in the last round that has it, all layers together, if any has."""
    columns = run.diagnostics
    chosen = (columns["metric"] == metric) & (columns["layer"] == "")
    if not chosen.any():
        return None
    chosen &= columns["round"] == columns["round"][chosen].max()
    client, other, value = (columns[name][chosen] for name in ("client", "other", "value"))
    numbers = np.unique(np.concatenate((client, other)))
    matrix = np.full((len(numbers), len(numbers)), np.nan)
    matrix[np.searchsorted(numbers, client), np.searchsorted(numbers, other)] = value
    return numbers, matrix
