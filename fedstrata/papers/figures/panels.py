"""Panels of figures, and the words and rows that all kinds of charts share."""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.papers.figures.asked import Asked
from fedstrata.papers.figures.material import Material, Pair
from fedstrata.papers.of_clients import WEIGHTED
from fedstrata.papers.reading import UNIT_WORDS, unit_of
from fedstrata.report.charts import Drawing
from fedstrata.report.labels import LABELS as MODELS
from fedstrata.report.labels import STATISTICS, label_of
from fedstrata.report.layer_view import plain_quantity
from fedstrata.report.series import Rows, short

_STATISTICS = {**STATISTICS, WEIGHTED: "clients by their test samples"}
"""Papers have one that reports of runs do not have."""


@dataclass(frozen=True)
class Panel:
    """A panel of a figure: its title, its chart, and the rows that a table tells of it."""

    title: str
    drawing: Drawing
    told: Rows
    """Each with a ``line``, where it is (``at``), ``value``, ``spread`` and ``published``."""


@dataclass(frozen=True)
class Figure:
    """One thing that a recipe asks for: what it shows in words, and its panels, ``wide`` ones where names are long."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    wide: bool = False


def axis_title(metric: str, unit: str | None = None) -> str:
    """Name a metric beside an axis, with its unit.

    >>> axis_title("client_after.accuracy.mean"), axis_title("global.loss"), axis_title("oracle.error")
    ('accuracy, %', 'loss', 'Error of the masks against the oracle')
    """
    unit_words = UNIT_WORDS.get(unit_of(metric) if unit is None else unit, "")
    quantity = plain_quantity(metric)
    words = ", ".join(filter(None, (quantity.unit, unit_words)))
    return named(metric) + (f", {words}" if words else "")


def named(metric: str) -> str:
    """Name a metric in a few words.

    >>> named("client_after.accuracy.worst10"), named("client_before.f1.weighted")
    ('accuracy, mean of the worst 10 % of clients', 'f1, clients by their test samples')
    """
    label, *rest = metric.split(".")
    if label not in MODELS:
        title = plain_quantity(metric).title
        return title.replace(".", " ") if title == metric else title
    if rest and rest[-1] == "mean":
        rest = rest[:-1]
    *names, last = rest or [metric]
    return f"{' '.join(names)}, {_STATISTICS[last]}" if last in _STATISTICS else " ".join(rest or [metric])


def unit_at(material: Material, y: str) -> str:
    """The unit in which a number is drawn: that of the paper for its own, none for others."""
    return material.recipe.unit if y in ("", material.recipe.number) else "plain"


def by_panel(material: Material, asked: Asked) -> dict[str, list[tuple[str, Pair]]]:
    """Part rows and columns into panels: the lines of each, with their cells."""
    panels: dict[str, list[tuple[str, Pair]]] = {}
    for row, column in material.pairs(asked):
        title, line = (row, column) if asked.lines == "columns" else (column, row)
        panels.setdefault(title, []).append((line, (row, column)))
    return panels


def new_row(line: str, at: object, value: float | None, spread: float | None) -> dict[str, object]:
    """A row of a chart, without a published number."""
    return {
        "line": line, "at": at, "value": value, "spread": spread, "published": None, "published_spread": None,
    }  # fmt: skip


def add_published(material: Material, pair: Pair, row: dict[str, object]) -> None:
    """Set the published number of a cell beside ours."""
    published = material.recipe.published_at(*pair)
    row["published"], row["published_spread"] = published.mean, published.std


def in_order(rows: Rows) -> list[str]:
    """The lines of rows, in the order in which they come."""
    return list(dict.fromkeys(str(row["line"]) for row in rows))


def last_of_each(rows: Rows) -> Rows:
    """The last row of each line."""
    return list({row["line"]: row for row in rows}.values())


def times(value: float | None, factor: float) -> float | None:
    """Change the unit of a number that may be none."""
    return None if value is None else short(factor * value, 5)


def sentence(text: str) -> str:
    """Begin with a capital."""
    return text[:1].upper() + text[1:]


def metric_words(metric: str) -> str:
    """Say what a metric is."""
    label = label_of(metric)
    return MODELS[label].meaning if label in MODELS else plain_quantity(metric).explanation
