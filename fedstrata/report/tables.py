"""Tables with a caption, which scroll inside their own box and can be sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedstrata.report.formats import ABSENT
from fedstrata.report.markup import Markup, breakable, element, join


@dataclass(frozen=True)
class Column:
    """The head of a column; ``group`` is written once above neighbouring columns that share it."""

    title: str
    hint: str = ""
    numeric: bool = True
    group: str = ""


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number it is sorted by."""

    text: str
    number: float | None = None
    best: bool = False
    hint: str = ""


Line = Sequence[Cell | str]


def table(caption: str, columns: Sequence[Column], rows: Sequence[Line], sortable: bool = True) -> Markup:
    """Build a table; the first cell of each row is the heading of the row."""
    can_sort = sortable and len(rows) > 1
    heads = element("tr", *(_head(column, can_sort) for column in columns))
    body = join(
        element("tr", *(_cell(*pair, heading=place == 0) for place, pair in enumerate(zip(row, columns, strict=True))))
        for row in rows
    )
    content = element(
        "table",
        element("caption", caption),
        element("thead", _groups(columns), heads),
        element("tbody", body),
        class_="sortable" if can_sort else None,
    )
    return element("div", content, class_="table-box", tabindex="0", role="region", aria_label=caption)


def _groups(columns: Sequence[Column]) -> Markup | None:
    if not any(column.group for column in columns):
        return None
    cells: list[Markup] = []
    start = 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or columns[end].group != columns[start].group:
            name = columns[start].group
            scope = {"scope": "colgroup", "class_": "group"} if name else {}
            cells.append(element("th" if name else "td", name, colspan=str(end - start), **scope))
            start = end
    return element("tr", *cells)


def _head(column: Column, can_sort: bool) -> Markup:
    kind = "number" if column.numeric else None
    inner: Markup | str = column.title
    if can_sort:
        inner = element("button", column.title, type="button", title=column.hint or None)
        return element("th", inner, scope="col", class_=kind, aria_sort="none")
    return element("th", inner, scope="col", class_=kind, title=column.hint or None)


def _cell(cell: Cell | str, column: Column, heading: bool) -> Markup:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    classes = " ".join(
        name
        for name, holds in (("number", column.numeric), ("best", cell.best), ("absent", cell.text == ABSENT))
        if holds
    )
    return element(
        "th" if heading else "td",
        cell.text if column.numeric else breakable(cell.text),
        class_=classes or None,
        data_sort=None if cell.number is None else repr(cell.number),
        title=cell.hint or None,
        scope="row" if heading else None,
    )
