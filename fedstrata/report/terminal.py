"""The table of a comparison in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.report.formats import data_size, duration, p_value, percent, points
from fedstrata.statistics import Estimate, Row


def rich_table(rows: Sequence[Row], title: str | None = None) -> Table:
    """Set the rows of a comparison as a table that fits 80 columns; the highest accuracy of each column is bold.

    What the columns mean, and which test stands behind p, is told by :func:`fedstrata.statistics.notes`.
    """
    compared = len(rows) > 1
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    table.add_column("method", overflow="fold", ratio=1, min_width=12)
    heads = ["last %", "last\nten", "best", "worst\n10 %"]
    heads += ["diff", "p"] if compared else []
    for head in [*heads, "up", "down", "time"]:
        table.add_column(head, justify="right", no_wrap=True)
    highest = {name: _highest(rows, name) for name in ("last", "last_ten", "best", "worst")}
    for row in rows:

        def accuracy(name: str, write: Callable[[Estimate | None], str], row: Row = row) -> Text:
            value: Estimate | None = getattr(row, name)
            top = compared and value is not None and value.mean == highest[name]
            return Text(write(value), style="bold" if top else "")

        cells = [
            Text(row.label),
            accuracy("last", percent),
            *(accuracy(name, _mean_percent) for name in ("last_ten", "best", "worst")),
        ]
        if compared:
            comparison = row.comparison
            cells.append(Text(points(comparison.difference) if comparison else "ref"))
            cells.append(Text(p_value(comparison.adjusted).replace("< 0", "<") if comparison else ""))
        cells += [Text(data_size(_mean(row.bytes_up))), Text(data_size(_mean(row.bytes_down)))]
        cells.append(Text(duration(_mean(row.seconds))))
        table.add_row(*cells)
    return table


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _mean_percent(value: Estimate | None) -> str:
    return percent(None if value is None else Estimate(value.mean, None, value.count))


def _highest(rows: Sequence[Row], name: str) -> float | None:
    return max((value.mean for row in rows if (value := getattr(row, name)) is not None), default=None)
