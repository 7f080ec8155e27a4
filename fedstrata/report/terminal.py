"""The table of a comparison in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.report.formats import data_size, duration, p_value, percent, points
from fedstrata.report.names import shortened
from fedstrata.report.rows import ACCURACIES, Row, highest, some_dropped_out, some_validated
from fedstrata.significance import Estimate

_NARROWEST = 12


def rich_table(rows: Sequence[Row], title: str | None = None, width: int = 80) -> Table:
    """Set the rows of a comparison as a table for a terminal of ``width`` columns, 80 or more.

    The highest accuracy of each column is bold and has a star, which a file or a pipe keeps; a method that is too long
    is shortened. The mean of the last ten evaluations gives way to what validation samples have chosen, where there is
    not enough room for both. What the columns mean, and which test stands behind p, is told by
    :func:`fedstrata.report.notes.notes`.
    """
    compared = len(rows) > 1
    shown = [name for name in ACCURACIES if name != "validated" or some_validated(rows)]
    columns, room = _columns(rows, shown, compared, width)
    if "validated" in shown and room < min(_NARROWEST, max(len(row.label) for row in rows)):
        columns, room = _columns(rows, [name for name in shown if name != "last_ten"], compared, width)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("method", no_wrap=True)
    for head in columns:
        table.add_column(head, justify="right", no_wrap=True)
    names = shortened([row.label for row in rows], max(_NARROWEST, room))
    for name, *cells in zip(names, *columns.values(), strict=True):
        table.add_row(Text(name), *cells)
    return table


BEST = "*"
"""What stands before the highest accuracy of a column."""


_HEADS = {"last": "last %", "last_ten": "last\nten", "best": "best", "validated": "chosen", "worst": "worst\n10 %"}


def _columns(
    rows: Sequence[Row], accuracies: Sequence[str], compared: bool, width: int
) -> tuple[dict[str, list[Text]], int]:
    """Write the numbers under their headings, and tell how much room they leave for the names of the methods."""
    best = highest(rows)
    columns = {_HEADS[name]: [_accuracy(row, name, best) for row in rows] for name in accuracies}
    if compared:
        columns["diff"] = [Text("ref" if row.comparison is None else points(row.comparison.difference)) for row in rows]
        columns["p"] = [
            Text("" if row.comparison is None else p_value(row.comparison.adjusted).replace("< 0", "<")) for row in rows
        ]
    columns["up"] = [Text(data_size(_mean(row.bytes_up))) for row in rows]
    columns["down"] = [Text(data_size(_mean(row.bytes_down))) for row in rows]
    columns["time"] = [Text(duration(_mean(row.seconds))) for row in rows]
    if some_dropped_out(rows):
        columns["took\npart %"] = [Text(percent(_without_spread(row.took_part))) for row in rows]
    taken = [max(*map(len, head.split("\n")), *map(len, cells), 0) for head, cells in columns.items()]
    return columns, width - sum(taken) - len(columns)


def _accuracy(row: Row, name: str, best: dict[str, float]) -> Text:
    value: Estimate | None = getattr(row, name)
    text = percent(value) if name == "last" else percent(_without_spread(value))
    leads = value is not None and not row.all_diverged and value.mean == best.get(name)
    return Text(f"{BEST if leads else ''}{text}", style="bold" if leads else "")


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _without_spread(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None else Estimate(estimate.mean, None, estimate.count)
