"""The sections that show charts: curves, clients, data and cost; none where there is nothing to show."""

from __future__ import annotations

import numpy as np

from fedstrata.report import charts, series
from fedstrata.report.charts import Drawing
from fedstrata.report.figures import figure, menu
from fedstrata.report.labels import metric_title
from fedstrata.report.markup import Markup, join
from fedstrata.report.tables import Cell, Column, Line, table
from fedstrata.report.view import Section, View


def curves(view: View, with_charts: bool) -> Section | None:
    """Accuracy and loss over the rounds."""
    if not with_charts:
        return None
    figures: list[Markup] = []
    drawn: dict[str, Drawing] = {}
    for kind, title in (("accuracy", "Accuracy"), ("loss", "Loss")):
        metrics = series.metric_names(view.groups, kind)
        rows = series.curve_rows(view.groups, metrics)
        if not rows:
            continue
        headline = view.rows[0].headline
        shown = next(
            (name for name in (f"{headline}.{kind}.mean", f"{headline}.{kind}") if name in metrics), metrics[0]
        )
        drawn[kind] = charts.curves(rows, view.methods, view.chosen, shown, kind, percent=kind == "accuracy")
        options = {metric: metric_title(metric) for metric in metrics}
        figures.append(
            figure(
                kind,
                title,
                f"{title} over the rounds, one line per method.",
                "Line: mean over seeds. Band: one standard deviation over seeds."
                if any(len(group.runs) > 1 for group in view.groups)
                else "One seed for each method.",
                [menu(kind, "shown", "Measured", options, shown, all(row.everybody for row in view.rows))],
            )
        )
    return Section("curves", "Accuracy and loss", join(figures), drawn) if figures else None


def clients(view: View, with_charts: bool) -> Section | None:
    """How the clients fare, one by one."""
    metrics = series.client_metrics(view.groups) if with_charts else []
    rows = series.client_rows(view.groups, metrics)
    if not rows.boxes:
        return None
    headline = f"{view.rows[0].headline}.accuracy"
    shown = headline if headline in metrics else metrics[0]
    clients = sum(int(box["clients"]) for box in rows.boxes)
    thinned = f" {len(rows.points):,} of {clients:,} points are drawn." if len(rows.points) < clients else ""
    options = {metric: metric_title(metric) for metric in metrics}
    place = figure(
        "clients",
        "Accuracy of each client",
        "Accuracy of every client in the last round, one row per method.",
        "One point per client and seed, last round. Bar: the middle half of the clients. Stroke: the median." + thinned,
        [menu("clients", "shown", "Measured", options, shown, all(row.everybody for row in view.rows))],
    )
    return Section("clients", "Clients", place, {"clients": charts.clients(rows, view.methods, view.chosen, shown)})


def data(view: View, with_charts: bool) -> Section | None:
    """Which client has how much of what."""
    found = series.splits(view.groups)
    if not found:
        return None
    first = found[0]
    columns = [
        Column("Split", numeric=False),
        Column("Clients"),
        Column("Training samples", "smallest to largest client"),
        Column("Test samples", "smallest to largest client"),
        Column("Classes per client", "smallest to largest client"),
        Column("Effective classes", "exponential of the entropy of a client's labels, mean over clients"),
    ]
    cells: list[Line] = [
        [
            split.title,
            Cell(f"{len(split.sizes):,}", float(len(split.sizes))),
            Cell(_extent(split.sizes), float(split.sizes.mean())),
            Cell(_extent(split.test_sizes), float(split.test_sizes.mean())),
            Cell(_extent((split.label_counts > 0).sum(1)), float((split.label_counts > 0).sum(1).mean())),
            Cell(f"{_effective_classes(split.label_counts):.1f}", _effective_classes(split.label_counts)),
        ]
        for split in found
    ]
    facts = table("How the data is divided", columns, cells)
    if not with_charts:
        return Section("data", "Data", facts)
    shown = [split for split in found if split.class_names == first.class_names][: series.SKEW_SPLITS]
    rows = [
        row for split in shown for row in series.skew_rows(split.label_counts, split.class_names, split=split.title)
    ]
    clients = max(len(split.sizes) for split in shown)
    bubbles = charts.skew_is_bubbles(clients, len(first.class_names))
    caption = (
        f"{'The size of a bubble' if bubbles else 'The strength of the colour'} is the number of training samples."
    )
    if clients > series.SKEW_CLIENTS:
        caption += f" The first {series.SKEW_CLIENTS} of {clients:,} clients are shown."
    if len(shown) < len(found):
        caption += f" {len(shown)} of {len(found)} splits are shown."
    place = figure(
        "skew",
        "Which client has which classes",
        "Number of training samples of each class at each client.",
        caption,
        [menu("skew", "split", "Split", {split.title: split.title for split in shown}, first.title)],
    )
    chart = charts.skew(rows, clients, first.class_names, first.title)
    return Section("data", "Data", join((place, facts)), {"skew": chart})


def costs(view: View, with_charts: bool) -> Section | None:
    """What the accuracy costs, in bytes and in time."""
    if not with_charts:
        return None
    cost, traffic, time = series.cost_rows(view.groups), series.traffic_rows(view.groups), series.time_rows(view.groups)
    figures: list[Markup] = []
    drawn: dict[str, Drawing] = {}
    if cost:
        measures = {
            "both": "bytes, both ways",
            "up": "bytes up, from clients",
            "down": "bytes down, to clients",
            "seconds": "seconds",
        }
        drawn["cost"] = charts.cost(cost, view.methods, view.chosen)
        figures.append(
            figure(
                "cost",
                "Accuracy against cost",
                "Accuracy against bytes or seconds since the beginning of the run, one line per method.",
                "The accuracy of the results table, against all that was sent or spent up to that round.",
                [menu("cost", "measure", "Cost", measures, "both")],
            )
        )
    if any(row["bytes"] for row in traffic):
        drawn["traffic"] = charts.traffic(traffic, view.methods)
        figures.append(
            figure(
                "traffic",
                "Bytes of a whole run",
                "Bytes up and down of a whole run, one bar per method.",
                "Up: from the clients to the server; down: the other way. Bytes of the encoded messages of all "
                "clients, set-up included; mean over seeds.",
            )
        )
    if any(row["seconds"] for row in time):
        drawn["time"] = charts.time(time, view.methods)
        figures.append(
            figure(
                "time",
                "Seconds of a whole run",
                "Seconds of a whole run by phase, one bar per method.",
                "Wall-clock time, mean over seeds. Only runs on the same, otherwise idle machine can be compared.",
            )
        )
    return Section("cost", "Bytes and time", join(figures), drawn) if figures else None


def _extent(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _effective_classes(label_counts: np.ndarray) -> float:
    """The mean over clients of the exponential of the entropy of their labels: 1 for one class, C for C equal ones."""
    shares = label_counts / label_counts.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    return float(np.exp(entropy).mean())
