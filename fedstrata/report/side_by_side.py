"""The section in which any two methods stand side by side."""

from __future__ import annotations

import json

from fedstrata.report.differences import differences, page_data
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.rows import accuracy_or_nothing
from fedstrata.report.tables import Cell, Column, table
from fedstrata.report.view import Section, View


def side_by_side(view: View) -> Section | None:
    """Two methods number by number, with the settings in which they differ; menus choose others where there are more.

    At first, these are the reference and the most accurate of the others.
    """
    if len(view.groups) < 2:
        return None
    best = max(range(1, len(view.rows)), key=lambda place: accuracy_or_nothing(view.rows[place]))
    found = differences(view.groups[0], view.groups[best])
    first, second = found.labels
    settings = table(
        "Settings that differ",
        [Column("Setting", numeric=False), Column(first, numeric=False), Column(second, numeric=False)],
        [list(line) for line in found.settings],
        sortable=False,
    )
    numbers = table(
        "All numbers of the summaries: of the last round unless they say otherwise, mean ± standard deviation over "
        "seeds; differences of accuracies in percentage points",
        [Column("Number", numeric=False), Column(first), Column(second), Column("Difference")],
        [
            [number.title, Cell(number.write(a)), Cell(number.write(b)), Cell(number.write_difference(a, b))]
            for number, a, b in found.numbers
        ],
        sortable=False,
    )
    menus = None
    if len(view.groups) > 2:
        menus = element("div", _menu("First", view, 0), _menu("Second", view, best), class_="controls")
    data = Markup(json.dumps(page_data(view.groups), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))
    block = element("script", data, type="application/json", id="side-by-side-data") if menus else None
    body = element("div", menus, settings, numbers, block, class_="side-by-side")
    return Section("side-by-side", "Two side by side", join((body,)))


def _menu(title: str, view: View, chosen: int) -> Markup:
    options = [
        element("option", method, value=str(place), selected=place == chosen)
        for place, method in enumerate(view.methods)
    ]
    return element("label", element("span", title), element("select", *options, data_side=title.lower()))
