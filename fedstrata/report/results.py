"""The results as tables: the headline, and every labelled number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedstrata.report import formats
from fedstrata.report.labels import LABELS, label_of, meaning, short_name
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.notes import notes, reference_name
from fedstrata.report.rows import Row, highest, lowest, some_dropped_out, some_validated
from fedstrata.report.tables import Cell, Column, Line, table
from fedstrata.report.view import Section, View
from fedstrata.runs.metrics import POOLED, UNDEFINED
from fedstrata.runs.summaries import diverged, metric_value
from fedstrata.significance import Estimate, estimate

_STATISTICS = {
    "mean": "mean", "std": "std over clients", "worst10": "worst 10 %", POOLED: "all samples",
    UNDEFINED: "clients without",
}  # fmt: skip
_Shown = tuple[Column, Callable[[Row], Cell | str]]


def results(view: View) -> Section:
    """The table that a reader looks for first, with the notes without which it could be misread."""
    return Section("results", "Results", join((comparison_table(view.rows), _all_numbers(view))))


def comparison_table(rows: Sequence[Row], sortable: bool = True) -> Markup:
    """Set the rows of a comparison as a table, with notes below it."""
    columns, cells = comparison_cells(rows)
    body = (
        table("Accuracy, traffic and time of each method", columns, cells, sortable),
        element("ul", *(element("li", note) for note in comparison_notes(rows)), class_="notes"),
    )
    return join(body)


def comparison_cells(rows: Sequence[Row]) -> tuple[list[Column], list[Line]]:
    """The columns of a comparison, and what each row shows in them, for every kind of table."""
    columns = _columns(rows, list(dict.fromkeys(row.headline for row in rows)))
    return [column for column, _ in columns], [[write(row) for _, write in columns] for row in rows]


def comparison_notes(rows: Sequence[Row]) -> list[str]:
    """The sentences without which the table of a comparison could be misread."""
    headlines = list(dict.fromkeys(row.headline for row in rows))
    everybody = all(row.everybody for row in rows)
    told = f"Accuracy: {short_name(headlines[0]).lower()}. {meaning(headlines[0], everybody)}" if headlines else ""
    measured = [told] if len(headlines) == 1 else []
    measured += ["Bold: the best of a column, which says nothing of chance."] if len(rows) > 1 else []
    return [*measured, *notes(rows)]


def _columns(rows: Sequence[Row], headlines: list[str]) -> list[_Shown]:
    """The columns with what each shows of a row; columns that would say the same everywhere are left out."""
    best = highest(rows)
    least = lowest(rows)

    def cost(name: str, written: Callable[[float], str]) -> Callable[[Row], Cell]:
        shown = {
            written(value.mean) for row in rows if (value := getattr(row, name)) is not None and not row.all_diverged
        }

        def write(row: Row) -> Cell:
            value: Estimate | None = getattr(row, name)
            if value is None:
                return Cell(formats.ABSENT)
            text = written(value.mean)
            best = len(shown) > 1 and not row.all_diverged and text == written(least[name])
            return Cell(text, value.mean, best=best)

        return write

    def accuracy(name: str) -> Callable[[Row], Cell]:
        def write(row: Row) -> Cell:
            value: Estimate | None = getattr(row, name)
            number = None if value is None else value.mean
            leads = number is not None and not row.all_diverged and number == best.get(name)
            return Cell(formats.percent(value), number, best=leads)

        return write

    group = "Accuracy, %"
    columns: list[_Shown] = [
        (Column("Method", numeric=False), lambda row: row.label),
        (Column("Last round", "Accuracy in the last round, in percent", group=group), accuracy("last")),
        (
            Column("Last ten", "Mean accuracy of the last ten evaluations, in percent", group=group),
            accuracy("last_ten"),
        ),
        (Column("Best round", "Accuracy in the best round, a choice made on test data", group=group), accuracy("best")),
        (
            Column("Worst 10 %", "Mean accuracy of the worst 10 % of clients, last round", group=group),
            accuracy("worst"),
        ),
        (Column("Up", "Bytes from the clients to the server", group="Traffic"), cost("bytes_up", formats.data_size)),
        (
            Column("Down", "Bytes from the server to the clients", group="Traffic"),
            cost("bytes_down", formats.data_size),
        ),
        (Column("Time", "Wall-clock time of a run"), cost("seconds", formats.duration)),
    ]
    if len(rows) > 1:
        group = f"Against {reference_name(rows)}"
        columns[5:5] = [
            (Column("Points", "Difference in the last round, in percentage points", group=group), _difference),
            (Column("p", "Paired t-test over seeds, corrected after Holm", group=group), _p_value),
        ]
    if some_validated(rows):
        hint = "Accuracy of the models that were best on validation samples: the number to report"
        columns.insert(4, (Column("Chosen", hint, group="Accuracy, %"), accuracy("validated")))
    if len(headlines) > 1:
        hint = "After what each client's own model was tested, on its own test set"
        columns.insert(1, (Column("After", hint, numeric=False), lambda row: Cell(_on_one_line(row.headline))))
    if some_dropped_out(rows):
        hint = (
            "Of the clients that were asked, those whose replies were merged, in percent, in the mean over the rounds"
        )
        columns.append((Column("Took part, %", hint), lambda row: _took_part(row.took_part)))
    if any(row.network_up for row in rows):
        group = "On the network"
        columns += [
            (Column("Up", "Bytes that the server received, over HTTP", group=group), lambda row: _size(row.network_up)),
            (Column("Down", "Bytes that the server sent, over HTTP", group=group), lambda row: _size(row.network_down)),
        ]
    if len({len(row.seeds) for row in rows}) > 1:
        columns.append((Column("Seeds"), lambda row: Cell(str(len(row.seeds)), float(len(row.seeds)))))
    return columns


def _on_one_line(headline: str) -> str:
    """Say which model was tested in words that stay together, so that a long table stays short."""
    return short_name(headline).removeprefix("Own model after ").replace(" ", "\u00a0").replace("-", "\u2011")


def _difference(row: Row) -> Cell:
    if row.comparison is None:
        return Cell("reference")
    difference = row.comparison.difference
    return Cell(formats.points(difference), None if difference is None else difference.mean)


def _p_value(row: Row) -> Cell:
    if row.comparison is None:
        return Cell(formats.ABSENT)
    return Cell(formats.p_value(row.comparison.adjusted), row.comparison.adjusted, hint=row.comparison.note)


def _size(value: Estimate | None) -> Cell:
    return Cell(formats.ABSENT) if value is None else Cell(formats.data_size(value.mean), value.mean)


def _took_part(value: Estimate | None) -> Cell:
    return Cell(formats.ABSENT) if value is None else Cell(f"{100 * value.mean:.1f}", value.mean)


def _all_numbers(view: View) -> Markup | None:
    metrics = [
        metric
        for metric in dict.fromkeys(metric for run in view.runs for metric in run.summary["final"])
        if label_of(metric) in LABELS or ".accuracy" in metric
    ]
    if not metrics:
        return None
    columns = [
        Column("Method", numeric=False),
        *(Column(_statistic(metric), group=_measure(metric)) for metric in metrics),
    ]
    columns_of_cells = [_of_all_methods(view, metric) for metric in metrics]
    cells: list[Line] = [
        [group.label, *(column[place] for column in columns_of_cells)] for place, group in enumerate(view.groups)
    ]
    return element(
        "details",
        element("summary", "Every labelled number of the last round"),
        table("Last round, mean ± standard deviation over seeds; accuracies in percent", columns, cells),
    )


def _of_all_methods(view: View, metric: str) -> list[Cell]:
    """Write a number of every method; the best is marked where it is plain which way is better."""
    found = []
    for group in view.groups:
        values = (metric_value(run.summary["final"], metric) for run in group.runs)
        found.append(estimate(value for value in values if value is not None))
    lost = [all(diverged(run.summary) for run in group.runs) for group in view.groups]
    judged = [one for one, without in zip(found, lost, strict=True) if not without]
    means = [one.mean for one in judged if one is not None and math.isfinite(one.mean)]
    best = None
    if len(means) > 1 and not metric.endswith((".std", UNDEFINED)):
        best = max(means) if ".accuracy" in metric else min(means) if ".loss" in metric else None
    write = formats.percent if ".accuracy" in metric else formats.number
    return [
        Cell(write(one), None if one is None else one.mean, best=one is not None and not without and one.mean == best)
        for one, without in zip(found, lost, strict=True)
    ]


def _measure(metric: str) -> str:
    label, _, rest = metric.partition(".")
    kind = rest.rsplit(".", 1)[0] if rest.rsplit(".", 1)[-1] in _STATISTICS else rest
    return f"{short_name(label)}: {kind}"


def _statistic(metric: str) -> str:
    return _STATISTICS.get(metric.rsplit(".", 1)[-1], "value")
