"""The sections that show charts: curves, clients, data and cost; none where there is nothing to show."""

from __future__ import annotations

import numpy as np

from fedstrata.report import charts, client_charts, client_view, cost_charts, formats, series
from fedstrata.report.charts import Drawing
from fedstrata.report.figures import figure, menu
from fedstrata.report.labels import metric_title, short_name
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.notes import diverged_in
from fedstrata.report.pareto import MEASURES, POINTS, Pareto, pareto
from fedstrata.report.similarity import similarities
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
        lost = _not_drawn(view, metrics, kind)
        if not rows:
            figures += [element("p", f"{title} over the rounds has no chart. {lost}")] if lost else []
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
                (
                    "Line: mean over seeds. Band: one standard deviation over seeds."
                    if any(len(group.runs) > 1 for group in view.groups)
                    else "One seed for each method."
                )
                + (f" {lost}" if lost else "")
                + _thinned(view, metrics),
                [
                    menu(kind, "shown", "Measured", options, shown, all(row.everybody for row in view.rows)),
                    menu(kind, "smoothing", "Smoothing", _smoothings(view, metrics), "value"),
                ],
            )
        )
    return Section("curves", "Accuracy and loss", join(figures), drawn) if figures else None


def _not_drawn(view: View, metrics: list[str], kind: str) -> str:
    """Say which numbers are missing from the curves because they are not finite, and of whom; nothing where none is."""
    counts = {group.label: (series.not_finite(group, metrics), len(group.runs)) for group in view.groups}
    lost = [f"{label} {diverged_in(seeds, of)}" for label, (seeds, of) in counts.items() if seeds]
    if not lost:
        return ""
    others = any(0 < seeds < of for seeds, of in counts.values())
    instead = "; a line is then the mean of the other seeds" if others else ""
    return f"Not drawn: {kind} that is not finite ({formats.listed(lost)}){instead}."


def _thinned(view: View, metrics: list[str]) -> str:
    longest, drawn = series.longest_curve(view.groups, metrics), series.points_of_a_curve(view.groups, metrics)
    if longest <= drawn:
        return ""
    return f" Of {longest:,} rounds {drawn} are drawn, those that keep a curve's shape and its peaks."


def _smoothings(view: View, metrics: list[str]) -> dict[str, str]:
    spans = series.smoothings(view.groups, metrics)
    return {"value": "none"} | {series.smoothed_column(span): f"mean of the last {span} rounds" for span in spans}


def clients(view: View, with_charts: bool) -> Section | None:
    """How the clients fare, one by one, and how equally."""
    drawn: dict[str, Drawing] = {}
    charted = _one_by_one(view, drawn) if with_charts else []
    parts = [part for part in (*charted, client_view.fairness_table(view.rows)) if part is not None]
    return Section("clients", "Clients", join(parts), drawn) if parts else None


def _one_by_one(view: View, drawn: dict[str, Drawing]) -> list[Markup | None]:
    metrics = series.client_metrics(view.groups)
    rows = series.client_rows(view.groups, metrics)
    if not rows.boxes:
        return []
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
    drawn["clients"] = client_charts.clients(rows, view.methods, view.chosen, shown)
    return [place, *_client_by_client(view, drawn), _similarity(view, drawn)]


def _client_by_client(view: View, drawn: dict[str, Drawing]) -> list[Markup | None]:
    """The heat map of clients and methods, and the names of those that fare worst."""
    found = client_view.client_table(view.groups)
    if not found.rows:
        return []
    drawn["client-table"] = client_charts.table(found.rows, found.methods, found.splits[0], client_view.COLUMNS)
    several = len(found.methods) > 1
    of_methods = {name: f"accuracy of {text}" for name, text in found.methods.items()} if several else {}
    orders = {
        "average": "accuracy" + (", mean over methods" if several else ""),
        **of_methods,
        "size": "training samples",
        "effective": "effective classes (label skew)",
        "client": "number of the client",
    }
    gains = {"": "accuracy"} | {name: f"gain over {text}" for name, text in found.methods.items()}
    caption = (
        "One column per client, last round. Above, how many training samples a client has and how many effective "
        "classes (the exponential of the entropy of its labels: 1 for a single class): the stronger, the more."
        f" {_measured(view, list(found.methods.values()))}"
    )
    if found.clients > client_view.COLUMNS:
        caption += (
            f" {found.clients:,} clients are too many for columns of their own: neighbours in the order share one of "
            f"{client_view.COLUMNS}, which shows their mean."
        )
    if found.left_out:
        caption += f" {formats.plural(found.left_out, 'further split')} left out, to keep the page small."
    place = figure(
        "client-table",
        "Client by client",
        "Accuracy of each client with each method, beside its number of samples and of effective classes.",
        caption,
        [
            menu("client-table", "sort", "Sort by", orders, "average"),
            menu("client-table", "against", "Show", gains if several else {}, ""),
            menu("client-table", "split", "Split", {title: title for title in found.splits}, found.splits[0]),
        ],
    )
    return [place, client_view.worst_clients(found)]


def _measured(view: View, methods: list[str]) -> str:
    """Say which model's accuracy is shown of each method: the headline's, which need not be the same for all."""
    by_headline: dict[str, list[str]] = {}
    for row in view.rows:
        if row.label in methods:
            by_headline.setdefault(row.headline, []).append(row.label)
    told = [
        short_name(headline).lower() + (f" ({', '.join(labels)})" if len(by_headline) > 1 else "")
        for headline, labels in by_headline.items()
    ]
    return f"Measured: {'; '.join(told)}."


def _similarity(view: View, drawn: dict[str, Drawing]) -> Markup | None:
    """How alike the clients' updates are, where runs were diagnosed for it."""
    found = similarities(view.groups)
    if not found.rows:
        return None
    drawn["similarity"] = client_charts.similarity(found)
    caption = (
        "Cosine between the updates of each two clients, all layers together, last round measured, first seed: "
        "1 where they pull the same way, 0 where they have nothing to do with each other, below where they pull apart. "
        "Clients are ordered by hierarchical clustering (average linkage), so that those that are alike stand together."
    )
    caption += f" {found.shown} of {found.clients:,} clients are shown." if found.shown < found.clients else ""
    caption += f" Left out for want of room: {formats.plural(found.left_out, 'method')}." if found.left_out else ""
    return figure(
        "similarity",
        "Which clients pull the same way",
        "Cosine between the updates of each two clients.",
        caption,
        [menu("similarity", "of", "Method", {name: name for name in found.names}, found.names[0])],
    )


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
            Cell(f"{effective:.1f}", effective),
        ]
        for split in found
        for effective in [float(series.effective_classes(split.label_counts).mean())]
    ]
    facts = table("How the data is divided", columns, cells)
    if not with_charts:
        return Section("data", "Data", facts)
    shown = [split for split in found if split.class_names == first.class_names][: series.SKEW_SPLITS]
    named = any(split.client_names for split in shown)
    rows = [
        row
        for split in shown
        for row in series.skew_rows(
            split.label_counts, split.class_names, split.client_names if named else None, split=split.title
        )
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
    alike = all(split.client_names == first.client_names for split in shown)
    chart = charts.skew(rows, clients, first.class_names, first.title, first.client_names if alike else ())
    return Section("data", "Data", join((place, facts)), {"skew": chart})


def costs(view: View, with_charts: bool) -> Section | None:
    """What the accuracy costs, in bytes and in time."""
    if not with_charts:
        return None
    cost, traffic, time = series.cost_rows(view.groups), series.traffic_rows(view.groups), series.time_rows(view.groups)
    figures: list[Markup] = []
    drawn: dict[str, Drawing] = {}
    points = pareto(view.groups)
    if points.axes:
        measures = {name: MEASURES[name] for name in points.axes}
        first = next(iter(measures))
        drawn["pareto"] = cost_charts.front(points, view.methods, view.chosen)
        drawn["cost"] = cost_charts.cost(cost, view.methods, view.chosen, first)
        several = len(view.methods) > 1
        figures += [
            figure(
                "pareto",
                "Accuracy against cost",
                "Accuracy against bytes or seconds of a whole run, one point per method, with the Pareto front.",
                (
                    "Full points, joined by steps: the Pareto front, on which no other method is as accurate for less. "
                    "Hollow points: methods behind it. "
                    if several
                    else ""
                )
                + "The accuracy is that of the results table, mean over seeds"
                + (" ± one standard deviation. " if any(len(group.runs) > 1 for group in view.groups) else ". ")
                + _axis_in_words(points),
                [
                    menu("pareto", "measure", "Cost", measures, first),
                    menu("pareto", "point", "Accuracy of", POINTS, "last"),
                ],
            ),
            figure(
                "cost",
                "Accuracy on the way there",
                "Accuracy against bytes or seconds since the beginning of the run, one line per method.",
                "The same accuracy after each round, against all that was sent or spent up to it. A method that "
                "spends nothing of what is chosen is a dotted level, its accuracy in the last round.",
                [menu("cost", "measure", "Cost", measures, first)],
            ),
        ]
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


def _axis_in_words(points: Pareto) -> str:
    """Say where the axis goes in powers of ten, and where zero is then."""
    powers = [MEASURES[name] for name, axis in points.axes.items() if axis.logarithmic]
    if not powers:
        return ""
    zero = any(axis.logarithmic and axis.zero in axis.ticks for axis in points.axes.values())
    standing = "; zero, which has no place on such an axis, stands left of it" if zero else ""
    return f"The axis goes in powers of ten where costs lie far apart ({'; '.join(powers)}){standing}."


def _extent(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
