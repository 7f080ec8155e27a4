"""What experiments asked for beside accuracy and loss, as tables: over clients, by class, and confusion matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedstrata.report import formats
from fedstrata.report.charts import Drawing
from fedstrata.report.client_charts import by_class
from fedstrata.report.figures import figure, menu
from fedstrata.report.groups import Group
from fedstrata.report.labels import short_name
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.reading import Run
from fedstrata.report.series import Rows, short
from fedstrata.report.tables import Cell, Column, Line, table
from fedstrata.report.view import Section, View
from fedstrata.runs.metrics import EVERYBODY, POOLED, UNDEFINED
from fedstrata.runs.summaries import metric_value
from fedstrata.scores import ALWAYS
from fedstrata.significance import estimate

STATISTICS = {
    POOLED: ("All samples", "Of the test samples of all clients together, each tested by its own client's model"),
    "mean": ("Mean", "Mean over the clients for which it is defined"),
    "std": ("Std", "Standard deviation over these clients"),
    "worst10": ("Worst 10 %", "Mean of the worst 10 % of these clients"),
    UNDEFINED: ("Without", "Clients whose test samples do not define it"),
}
"""What is told of a metric over the clients: the head of its column, and what it is."""


CLASSES = 100
"""How many classes the chart shows at most."""


def further(view: View, with_charts: bool) -> Section | None:
    """The metrics that were asked for, of the model that the headline is about, in the last round."""
    drawn: dict[str, Drawing] = {}
    chart = _class_chart(view, drawn) if with_charts else None
    parts = [_over_clients(view), chart, *_by_class(view), *_confusions(view)]
    shown = [part for part in parts if part is not None]
    if not shown:
        return None
    labels = ", ".join(dict.fromkeys(short_name(row.headline).lower() for row in view.rows))
    said = element("p", f"In the last round, as the mean ± standard deviation over seeds. Measured: {labels}.")
    return Section("further", "Further metrics", join((said, *shown)), drawn)


def asked_for(final: Mapping[str, Any], label: str) -> list[str]:
    """Find the metrics beside accuracy and loss that a summary has of a label, over its clients.

    >>> asked_for({"client_after.accuracy.mean": 0.5, "client_after.f1.mean": 0.4, "global.f1": 0.3}, "client_after")
    ['f1']
    """
    begin, end = f"{label}.", ".mean"
    means = [name[len(begin) : -len(end)] for name in final if name.startswith(begin) and name.endswith(end)]
    return [name for name in means if name not in ALWAYS]


def _over_clients(view: View) -> Markup | None:
    names = dict.fromkeys(
        name for run in view.runs for name in asked_for(run.summary["final"], run.summary["headline"])
    )
    if not names:
        return None
    columns = [Column("Method", numeric=False)]
    columns += [Column(head, hint, group=name) for name in names for head, hint in STATISTICS.values()]
    cells: list[Line] = []
    for group in view.groups:
        line: list[Cell | str] = [group.label]
        for name in names:
            for statistic in STATISTICS:
                values = _finals(group, f"{name}.{statistic}")
                line.append(_count(values) if statistic == UNDEFINED else _cell(values))
        cells.append(line)
    return table("Over the clients", columns, cells)


def _finals(group: Group[Run], metric: str) -> list[float]:
    values = [metric_value(run.summary["final"], f"{run.summary['headline']}.{metric}") for run in group.runs]
    return [value for value in values if value is not None]


def _cell(values: Iterable[float]) -> Cell:
    found = estimate(values)
    return Cell(formats.number(found), None if found is None else found.mean)


def _count(values: Iterable[float]) -> Cell:
    """Show how many clients it is, in the mean over seeds."""
    found = estimate(values)
    return _cell(()) if found is None else Cell(f"{found.mean:g}", found.mean)


def _class_chart(view: View, drawn: dict[str, Drawing]) -> Markup | None:
    """Each class with a point for each method, those with which the methods have most trouble on top."""
    names = _names(view, matrices=False)
    if not names:
        return None
    classes = [str(one) for one in view.runs[0].data["class_names"]]
    rows: Rows = []
    for name in names:
        for group in view.groups:
            found = [_of_last_round(run, name) for run in group.runs]
            for place, own in enumerate(classes):
                value = estimate(one[place] for one in found if place in one)
                if value is not None:
                    spread = None if value.std is None else short(value.std)
                    told = {"metric": name, "method": group.label, "class": own}
                    rows.append({**told, "value": short(value.mean), "spread": spread})
    if not rows:
        return None
    means = {
        own: [row["value"] for row in rows if row["class"] == own and row["metric"] == names[0]] for own in classes
    }
    tested = sorted((own for own in classes if means[own]), key=lambda own: float(np.mean(means[own])))
    ordered = tested[:CLASSES]
    drawn["classes"] = by_class(
        [row for row in rows if row["class"] in set(ordered)], view.methods, view.chosen, ordered, names[0]
    )
    left = f" The {CLASSES} hardest of {len(tested)} classes are shown." if len(ordered) < len(tested) else ""
    if len(tested) < len(classes):
        left += f" Not shown, for want of a number: {len(classes) - len(tested)} of {len(classes)} classes."
    return figure(
        "classes",
        "Class by class",
        "A number for each class and method in the last round.",
        "Mean over seeds, over all test samples of the clients together; the class that is hardest on top." + left,
        [menu("classes", "shown", "Metric", {name: name for name in names}, names[0])],
    )


def _by_class(view: View) -> list[Markup]:
    """One table for each metric of single classes, a row for each method."""
    tables = []
    for name in _names(view, matrices=False):
        classes = [str(one) for one in view.runs[0].data["class_names"]]
        cells: list[Line] = []
        for group in view.groups:
            found = [_of_last_round(run, name) for run in group.runs]
            of_each = [[own[place] for own in found if place in own] for place in range(len(classes))]
            cells.append([group.label, *(_cell(values) for values in of_each)])
        heads = [Column("Method", numeric=False), *(Column(one) for one in classes)]
        tables.append(table(f"{name}, all test samples of the clients together", heads, cells))
    return tables


def _confusions(view: View) -> list[Markup]:
    """One table for each method, in which the seeds are added up."""
    tables = []
    for name in _names(view, matrices=True):
        for group in view.groups:
            classes = [str(one) for one in group.runs[0].data["class_names"]]
            counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
            for run in group.runs:
                for (true, predicted), value in _of_last_round(run, name, matrices=True).items():
                    counts[true, predicted] += round(value)
            heads = [Column("True class", numeric=False), *(Column(one, group="Predicted") for one in classes)]
            rows: list[Line] = [
                [own, *(Cell(f"{count}", float(count), best=row == column) for column, count in enumerate(line))]
                for row, (own, line) in enumerate(zip(classes, counts.tolist(), strict=True))
            ]
            caption = f"{group.label}: {name}, all test samples of the clients together"
            tables.append(element("details", element("summary", caption), table(caption, heads, rows, sortable=False)))
    return tables


def _names(view: View, matrices: bool) -> list[str]:
    """Find the metrics of single classes, or the matrices, of the headline's model over all samples."""
    found: dict[str, None] = {}
    for run in view.runs:
        columns = run.classes
        chosen = (columns["client"] == EVERYBODY) & ((columns["predicted"] != EVERYBODY) == matrices)
        label = f"{run.summary['headline']}."
        names = dict.fromkeys(str(name) for name in columns["metric"][chosen])
        found |= {name.removeprefix(label): None for name in names if name.startswith(label)}
    return list(found)


def _of_last_round(run: Run, name: str, matrices: bool = False) -> dict[Any, float]:
    """Read a metric of all samples in the last round that has it: by class, or by true and predicted class."""
    columns = run.classes
    chosen = (columns["client"] == EVERYBODY) & (columns["metric"] == f"{run.summary['headline']}.{name}")
    if not chosen.any():
        return {}
    chosen &= columns["round"] == columns["round"][chosen].max()
    places = columns["class"][chosen].tolist()
    if matrices:
        places = list(zip(places, columns["predicted"][chosen].tolist(), strict=True))
    return dict(zip(places, columns["value"][chosen].tolist(), strict=True))
