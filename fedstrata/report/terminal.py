"""The table of a comparison in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.report.formats import data_size, duration, p_value, percent, points
from fedstrata.report.rows import ACCURACIES, Row, highest, some_dropped_out
from fedstrata.significance import Estimate

_NARROWEST = 12


def rich_table(rows: Sequence[Row], title: str | None = None, width: int = 80) -> Table:
    """Set the rows of a comparison as a table for a terminal of ``width`` columns, 80 or more.

    The highest accuracy of each column is bold and has a star, which a file or a pipe keeps; a method that is too long
    is shortened. What the columns mean, and which test stands behind p, is told by
    :func:`fedstrata.report.notes.notes`.
    """
    compared = len(rows) > 1
    heads = ["last %", "last\nten", "best", "worst\n10 %", *(["diff", "p"] if compared else []), "up", "down", "time"]
    best = highest(rows)
    lines = [_numbers(row, best, compared) for row in rows]
    if some_dropped_out(rows):
        heads.append("took\npart %")
        lines = [[*line, Text(percent(_without_spread(row.took_part)))] for row, line in zip(rows, lines, strict=True)]
    taken = [
        max(*(len(part) for part in head.split("\n")), *(len(line[place]) for line in lines), 0)
        for place, head in enumerate(heads)
    ]
    room = max(_NARROWEST, width - sum(taken) - len(heads))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("method", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, line in zip(shortened([row.label for row in rows], room), lines, strict=True):
        table.add_row(Text(name), *line)
    return table


BEST = "*"
"""What stands before the highest accuracy of a column."""


def _numbers(row: Row, best: dict[str, float], compared: bool) -> list[Text]:
    cells = []
    for name in ACCURACIES:
        value: Estimate | None = getattr(row, name)
        text = percent(value) if name == "last" else percent(_without_spread(value))
        leads = value is not None and not row.all_diverged and value.mean == best.get(name)
        cells.append(Text(f"{BEST if leads else ''}{text}", style="bold" if leads else ""))
    if compared and row.comparison is None:
        cells += [Text("ref"), Text("")]
    elif compared and row.comparison is not None:
        p = p_value(row.comparison.adjusted).replace("< 0", "<")
        cells += [Text(points(row.comparison.difference)), Text(p)]
    sizes = (data_size(_mean(row.bytes_up)), data_size(_mean(row.bytes_down)), duration(_mean(row.seconds)))
    return [*cells, *(Text(size) for size in sizes)]


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Cut names to ``width``, with an ellipsis where the least is lost: where they stay as different as possible.

    >>> shortened(["fedavg", "fedprox(mu=0.001)", "fedprox(mu=0.01)"], 12)
    ['fedavg', 'fedp…0.001)', 'fedp…=0.01)']
    """
    longest = max(map(len, names))
    head = width // 3
    room = width - head - 2

    def cut(name: str, start: int) -> str:
        """Keep the beginning, and what stands ``start`` characters after it."""
        if len(name) <= width:
            return name
        if start == 0:
            return f"{name[: width - 1]}…"
        first = min(head + start, len(name) - room)
        return f"{name[:head]}…{name[first : first + room]}{'…' if first + room < len(name) else ''}"

    starts = (0, *range(longest - head - room, 0, -1))
    ways = ([cut(name, start) for name in names] for start in starts)
    return max(ways, key=lambda way: len(set(way)))


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _without_spread(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None else Estimate(estimate.mean, None, estimate.count)
