"""Client by client: how each fares with each method, beside how much data it has and of how many classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.report import formats
from fedstrata.report.markup import Markup
from fedstrata.report.reading import Run
from fedstrata.report.series import Groups, Rows, effective_classes, short
from fedstrata.report.tables import Cell, Column, Line, table

CELLS = 60_000
"""How many numbers of single clients a page holds, over all methods and splits."""
CLIENTS = 5_000
"""How many clients of a split are looked at, at most."""
COLUMNS = 200
"""How many columns the chart has at most; neighbours in its order share one where there are more clients."""
NAMED = 10
"""How many of the clients that fare worst are named."""


@dataclass(frozen=True)
class ClientTable:
    """One row for each client of each split: its number, samples, effective classes, and an accuracy for each method.

    The methods have the columns ``m0``, ``m1`` and so on, ``average`` is the mean over those that tested the client.
    """

    rows: Rows
    splits: tuple[str, ...]
    methods: Mapping[str, str]
    """The label of the method of each column."""
    left_out: int
    """Of how many splits there is no room."""
    clients: int
    """How many clients the largest split has."""


def client_table(groups: Groups) -> ClientTable:
    """Gather the headline accuracy of every client in the last round, method by method; runs of one split together."""
    members: dict[tuple[int, str], dict[str, Run]] = {}
    for group in groups:
        for run in group.runs:
            metric = _metric(run)
            if metric in run.clients and "label_counts" in run.data:
                members.setdefault((int(run.experiment["seed"]), run.split_hash), {})[group.label] = run
    labels = [group.label for group in groups if any(group.label in runs for runs in members.values())]
    methods = {f"m{place}": label for place, label in enumerate(labels)}
    rows: Rows = []
    titles: list[str] = []
    most = 0
    for (seed, split), runs in members.items():
        found = _of_split(runs, methods)
        if titles and len(rows) * (len(methods) + 5) + len(found) * (len(methods) + 5) > CELLS:
            continue
        titles.append(f"seed {seed}, split {split[:8]}")
        most = max(most, len(found))
        rows += [{"split": titles[-1], **row} for row in found]
    return ClientTable(rows, tuple(titles), methods, len(members) - len(titles), most)


def worst_clients(clients: ClientTable) -> Markup | None:
    """Name the clients that fare worst over all methods, with what may explain it."""
    measured = [row for row in clients.rows if row["average"] is not None]
    if len(measured) < 2:
        return None
    worst = sorted(measured, key=lambda row: float(row["average"]))[:NAMED]
    several = len(clients.methods) > 1
    columns = [
        Column("Client", numeric=False),
        *([Column("Split", numeric=False)] if len(clients.splits) > 1 else []),
        Column("Training samples"),
        Column("Effective classes", "Exponential of the entropy of the client's labels: 1 for one class"),
        Column("Accuracy, %", "In the last round" + (", mean over the methods" if several else "")),
        *([Column("Best with", numeric=False), Column("there, %")] if several else []),
    ]
    cells: list[Line] = []
    for row in worst:
        best = max((name for name in clients.methods if row[name] is not None), key=lambda name: float(row[name]))
        line: list[Cell | str] = [f"client {row['client']}"]
        line += [str(row["split"])] if len(clients.splits) > 1 else []
        line += [
            Cell(f"{row['size']:,}", float(row["size"])),
            Cell(f"{row['effective']:.1f}", float(row["effective"])),
            _percent(row["average"]),
        ]
        line += [clients.methods[best], _percent(row[best])] if several else []
        cells.append(line)
    return table(f"The {formats.plural(len(cells), 'client')} that fare worst", columns, cells)


def _of_split(runs: Mapping[str, Run], methods: Mapping[str, str]) -> Rows:
    first = next(iter(runs.values()))
    counts = np.asarray(first.data["label_counts"], dtype=np.int64)[:CLIENTS]
    effective = effective_classes(counts)
    values = {name: _by_client(runs.get(label)) for name, label in methods.items()}
    rows: Rows = []
    for client in range(len(counts)):
        own: dict[str, Any] = {name: short(values[name].get(client, math.nan), digits=3) for name in methods}
        told = [value for value in own.values() if value is not None]
        rows.append(
            {
                "client": client,
                "size": int(counts[client].sum()),
                "effective": round(float(effective[client]), 2),
                "average": short(float(np.mean(told))) if told else None,
                **own,
            }
        )
    return rows


def _by_client(run: Run | None) -> dict[int, float]:
    if run is None:
        return {}
    clients, values = run.clients[_metric(run)]
    return dict(zip(clients.tolist(), values.tolist(), strict=True))


def _metric(run: Run) -> str:
    return f"{run.summary['headline']}.accuracy"


def _percent(value: float) -> Cell:
    return Cell(f"{100 * value:.1f}", value)
