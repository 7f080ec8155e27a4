"""The table of a comparison in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedstrata.report.formats import data_size, duration, p_value, percent, points
from fedstrata.significance import ACCURACIES, Estimate, Row, highest, some_dropped_out

_NARROWEST = 12


def rich_table(rows: Sequence[Row], title: str | None = None, width: int = 80) -> Table:
    """Set the rows of a comparison as a table for a terminal of ``width`` columns, 80 or more.

    The highest accuracy of each column is bold, and a long method goes over several lines. What the columns mean, and
    which test stands behind p, is told by :func:`fedstrata.significance.notes`.
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
    for row, line in zip(rows, lines, strict=True):
        table.add_row(Text("\n".join(_fold(row.label, room))), *line)
    return table


def _numbers(row: Row, best: dict[str, float], compared: bool) -> list[Text]:
    cells = []
    for name in ACCURACIES:
        value: Estimate | None = getattr(row, name)
        text = percent(value) if name == "last" else percent(_without_spread(value))
        cells.append(Text(text, style="bold" if value is not None and value.mean == best.get(name) else ""))
    if compared and row.comparison is None:
        cells += [Text("ref"), Text("")]
    elif compared and row.comparison is not None:
        p = p_value(row.comparison.adjusted).replace("< 0", "<")
        cells += [Text(points(row.comparison.difference)), Text(p)]
    sizes = (data_size(_mean(row.bytes_up)), data_size(_mean(row.bytes_down)), duration(_mean(row.seconds)))
    return [*cells, *(Text(size) for size in sizes)]


def _fold(label: str, width: int) -> list[str]:
    """Break a name into lines of at most ``width``, between its parts where that is possible.

    >>> _fold("fedprox(mu=0.001)+lips+lws", 18)
    ['fedprox(mu=0.001)+', 'lips+lws']
    """
    lines = [""]
    for piece in re.findall(r"[^+,]*[+,]?\s*", label):
        for start in range(0, len(piece), width):
            part = piece[start : start + width]
            if len(lines[-1]) + len(part.rstrip()) <= width:
                lines[-1] += part
            else:
                lines.append(part)
    return [line.strip() for line in lines]


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _without_spread(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None else Estimate(estimate.mean, None, estimate.count)
