"""Figures: a place for a chart with its title, menus and caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstrata.report.labels import label_of, meaning
from fedstrata.report.markup import Markup, element


def figure(name: str, title: str, alt: str, caption: str, controls: Sequence[Markup | None] = ()) -> Markup:
    """Make place for the chart ``name``; ``alt`` says what it shows to those who cannot see it."""
    shown = [control for control in controls if control is not None]
    return element(
        "figure",
        element("h3", title),
        element("div", *shown, class_="controls") if shown else None,
        element("div", id=f"chart-{name}", class_="chart", role="img", aria_label=alt),
        element("figcaption", caption) if caption else None,
    )


def menu(
    chart: str, signal: str, title: str, options: Mapping[str, str], selected: str, everybody: bool = True
) -> Markup | None:
    """A menu that sets a parameter of a chart; none where there is nothing to choose."""
    if len(options) < 2:
        return None
    items = [
        element(
            "option", text, value=value, selected=value == selected, title=meaning(label_of(value), everybody) or None
        )
        for value, text in options.items()
    ]
    choice = element("select", *items, data_chart=chart, data_signal=signal)
    return element("label", element("span", title), choice)
