"""Client by client: how each fares with each method, beside how much data it has and of how many classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.report import formats
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.reading import Run
from fedstrata.report.rows import Row
from fedstrata.report.series import Groups, Rows, effective_classes, short
from fedstrata.report.tables import Cell, Column, Line, table
from fedstrata.runs.naming import called
from fedstrata.significance import Estimate

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

    Where clients have names, these stand in the column ``name``.

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
    """Name the clients that fare worst over all methods, half of them at most, with what may explain it.

    Where all fare alike nobody is named, nor is a method with which another one keeps up.
    """
    measured = [row for row in clients.rows if row["average"] is not None]
    if len(measured) < 2:
        return None
    by_accuracy = sorted(measured, key=lambda row: float(row["average"]))
    worst = by_accuracy[: min(NAMED, len(measured) // 2)]
    if worst[0]["average"] == by_accuracy[-1]["average"]:
        return None
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
        told = {name: float(row[name]) for name in clients.methods if row[name] is not None}
        best = max(told.values())
        leading = [clients.methods[name] for name, value in told.items() if value == best]
        line: list[Cell | str] = [_on_one_line(str(row.get("name", f"client {row['client']}")))]
        line += [str(row["split"])] if len(clients.splits) > 1 else []
        line += [
            Cell(f"{row['size']:,}", float(row["size"])),
            Cell(f"{row['effective']:.1f}", float(row["effective"])),
            _percent(row["average"]),
        ]
        line += [leading[0] if len(leading) == 1 else formats.ABSENT, _percent(best)] if several else []
        cells.append(line)
    heading = f"The {len(cells)} clients that fare worst" if len(cells) > 1 else "The client that fares worst"
    if worst[-1]["average"] == by_accuracy[len(worst)]["average"]:
        heading = f"{len(cells)} of the clients that fare worst"
    return table(heading, columns, cells)


def _on_one_line(client: str) -> str:
    """Keep a client's number beside its word, at the end of its name or alone."""
    name, word, number = client.rpartition("client ")
    return f"{name}client\u00a0{number}" if word else client


def fairness_table(rows: Sequence[Row]) -> Markup | None:
    """Tell how unequally each method serves its clients, and which part of them has a reason to take part.

    There is a table where methods can be compared, and the incentive in it where some method has one.
    """
    if sum(row.fairness is not None for row in rows) < 2:
        return None
    told = [row.incentive.mean for row in rows if row.incentive is not None]
    least = _only_best(min, [row.fairness.mean for row in rows if row.fairness is not None])
    most = _only_best(max, told)
    columns = [
        Column("Method", numeric=False),
        Column("Fairness", "Variance of the clients' accuracies in the last round: 0 where all fare alike"),
    ]
    if told:
        hint = "Clients that fare better than with both local and fedavg of the same seed, in percent"
        columns.append(Column("Incentive, %", hint))
    cells: list[Line] = [
        [
            row.label,
            _estimated(row.fairness, formats.number(row.fairness, digits=4), least),
            *([_estimated(row.incentive, formats.percent(row.incentive), most)] if told else []),
        ]
        for row in rows
    ]
    said = (
        "Fairness is the variance of the clients' accuracies in the last round, mean over seeds: less is fairer, which "
        "says nothing of how good they are. "
    )
    if told:
        said += (
            "The incentive is the part of the clients that fare better than with both local (alone) and fedavg, of the "
            "same seed."
        )
    return join((table("How equally the clients fare", columns, cells), element("p", said.strip())))


def _only_best(choose: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """Choose the best of several numbers, where there are several."""
    finite = [value for value in values if math.isfinite(value)]
    return choose(finite) if len(finite) > 1 else None


def _estimated(value: Estimate | None, text: str, best: float | None) -> Cell:
    return Cell(text, None if value is None else value.mean, best=value is not None and value.mean == best)


def _of_split(runs: Mapping[str, Run], methods: Mapping[str, str]) -> Rows:
    first = next(iter(runs.values()))
    counts = np.asarray(first.data["label_counts"], dtype=np.int64)[:CLIENTS]
    effective = effective_classes(counts)
    names = next((run.client_names for run in runs.values() if run.client_names), ())
    values = {name: _by_client(runs.get(label)) for name, label in methods.items()}
    rows: Rows = []
    for client in range(len(counts)):
        own: dict[str, Any] = {name: short(values[name].get(client, math.nan), digits=3) for name in methods}
        told = [value for value in own.values() if value is not None]
        rows.append(
            {
                "client": client,
                **({"name": called(client, names)} if names else {}),
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
