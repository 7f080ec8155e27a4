"""The redrawn figures on the page: panels side by side, their numbers as tables, and what could not be drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count

from fedstrata.papers.figures.glance import cells_at_a_glance, claims_at_a_glance
from fedstrata.papers.figures.kinds import draw
from fedstrata.papers.figures.material import Material, Pair
from fedstrata.papers.figures.panels import Figure
from fedstrata.papers.judging import Judged
from fedstrata.report.charts import HOW_TO_GET_CHARTS, Drawing
from fedstrata.report.figures import figure
from fedstrata.report.formats import ABSENT, number
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.tables import Cell, Column, table
from fedstrata.report.view import Section
from fedstrata.significance import Estimate

OURS = "Lines and filled marks are ours, the mean over seeds with one standard deviation"
PUBLISHED = "hollow marks are published, at the last round where the axis is that of rounds."
ALONE = "The paper's text has no numbers of this figure to set beside ours."
_WITHOUT_SEEDS = ("clients", "matrices", "histogram")
"""Kinds of charts that show one run each."""
_LINES_OF_A_TABLE = 200


def redrawn_section(material: Material, with_charts: bool, prefix: str = "") -> Section | None:
    """The paper's figure from our runs; nothing where the recipe asks for none.

    Names of charts begin with ``prefix``, which tells papers apart that share a page.
    """
    asked = material.recipe.charts
    if not asked:
        return None
    title = f"The paper's {_named(material.recipe.part)}, redrawn"
    if not with_charts:
        said = element("p", f"It is not drawn here. For charts: {HOW_TO_GET_CHARTS}, and then run the same command.")
        return Section("redrawn", title, said)
    figures = [figure for one in asked for figure in draw(material, one)]
    charts = Charts(prefix + material.recipe.part)
    of_seeds = any(one.kind not in _WITHOUT_SEEDS for one in asked)
    what = f"{OURS}; {PUBLISHED}" if material.recipe.published else f"{OURS}. {ALONE}" if of_seeds else ALONE
    body: list[Markup | None] = [
        element("p", f"{material.recipe.title}. {what}"),
        *(shown(one, charts) for one in figures),
    ]
    if not figures:
        body = [element("p", f"{material.recipe.title}. Nothing of it could be drawn.")]
    body.append(_said(missing_words(material)))
    return Section("redrawn", title, join(body), charts.drawn)


def glance(judged: Judged, with_charts: bool, prefix: str = "") -> tuple[Markup | None, dict[str, Drawing]]:
    """The picture above a table, and that of its claims."""
    if not with_charts:
        return None, {}
    cells = None if judged.recipe.charts else cells_at_a_glance(judged)
    found = [one for one in (cells, claims_at_a_glance(judged)) if one is not None]
    charts = Charts(prefix + judged.recipe.part)
    return join([shown(one, charts) for one in found]) if found else None, charts.drawn


def missing_words(material: Material) -> list[str]:
    """Say what is not drawn, and why."""
    return [
        f"Not drawn: {_listed(_named_cells(material, pairs))}: {reason}." for reason, pairs in material.missing.items()
    ]


def _named_cells(material: Material, pairs: Sequence[Pair]) -> list[str]:
    """Name cells, and rows and columns of which all are among them by themselves."""
    recipe = material.recipe
    left = list(pairs)
    named = []
    for place, names in ((1, recipe.columns), (0, recipe.rows)):
        for name in names:
            own = [(row, column) for row in recipe.rows for column in recipe.columns if (row, column)[place] == name]
            run = [pair for pair in own if recipe.has_run(*pair)]
            if len(run) > 1 and all(pair in left for pair in run):
                named.append(name)
                left = [pair for pair in left if pair not in run]
    return [*named, *(", ".join(filter(None, pair)) for pair in left)]


class Charts:
    """Charts by names that no other one has; all begin with that of their part."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.drawn: dict[str, Drawing] = {}

    def add(self, words: Sequence[str], drawing: Drawing) -> str:
        """Name a chart by words."""
        whole = (re.sub(r"(?<!\d)\.(?=\d)", "0.", one) for one in words)  # .1 is not 1
        plain = (re.sub(r"[^a-z0-9]+", "-", one.lower()).strip("-") for one in whole)
        first = "-".join([self.part, *filter(None, plain)])
        further = (f"{first}-{place}" for place in count(2))
        name = next(one for one in chain([first], further) if one not in self.drawn)
        self.drawn[name] = drawing
        return name


def shown(one: Figure, charts: Charts) -> Markup:
    """A figure as markup; its charts get their names."""
    panels = []
    for panel in one.panels:
        title = panel.title or one.title
        name = charts.add((one.name, panel.title), panel.drawing)
        alt = one.title + (f": {panel.title}" if panel.title else "")
        panels.append(figure(name, title, alt, ""))
    return join(
        (
            element("h3", one.title) if one.panels[0].title else None,
            element("p", one.caption, class_="hint") if one.caption else None,
            element("div", *panels, class_="panels wide" if one.wide else "panels"),
            _numbers(one),
        )
    )


def _numbers(one: Figure) -> Markup | None:
    """The numbers that a figure shows, of lines over rounds those in the last round, for those who cannot see it."""
    lines = list(_lines(one))
    if not lines:
        return None
    heads = ["panel", "line", "at", "ours", "published"]
    columns = [Column(head, numeric=head in ("ours", "published")) for head in heads]
    shown = [column for column in columns if any(line[heads.index(column.title)].text for line in lines)]
    rows = [[line[heads.index(column.title)] for column in shown] for line in lines[:_LINES_OF_A_TABLE]]
    left = len(lines) - len(rows)
    caption = one.title + (f"; {left} more lines are left out" if left else "")
    return element("details", element("summary", "The same as a table"), table(caption, shown, rows))


def _lines(one: Figure) -> Iterator[list[Cell]]:
    for panel in one.panels:
        for row in panel.told:
            ours, published = (_estimate(row[key], row[spread]) for key, spread in _PAIRS)
            at = row["at"]
            yield [
                Cell(panel.title),
                Cell(str(row["line"])),
                Cell(f"{at:g}" if isinstance(at, int | float) else str(at)),
                Cell(_written(ours), None if ours is None else ours.mean),
                Cell(_written(published) if published else "", None if published is None else published.mean),
            ]


_PAIRS = (("value", "spread"), ("published", "published_spread"))


def _estimate(mean: float | None, std: float | None) -> Estimate | None:
    return None if mean is None else Estimate(mean, std, 0)


def _written(value: Estimate | None) -> str:
    if value is None:
        return ABSENT
    digits = 2 if abs(value.mean) >= 1 else 4
    return f"{value.mean:.3g}" if 0 < abs(value.mean) < 0.001 else number(value, digits)


def _said(lines: Sequence[str]) -> Markup | None:
    return element("ul", *(element("li", line) for line in lines), class_="notes") if lines else None


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return "; ".join(listed) if len(listed) <= 8 else f"{'; '.join(listed[:6])} and {len(listed) - 6} more"


def _named(part: str) -> str:
    """Write the name of a part as papers do: Figure A.3 for ``figureA3``."""
    found = re.fullmatch(r"(figure|table)([A-Z]?)(\d+)", part)
    if found is None:
        return part
    word, appendix, place = found.groups()
    return f"{word} {appendix}.{place}" if appendix else f"{word} {place}"
