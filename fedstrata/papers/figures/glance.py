"""Published numbers against ours at a glance: a line for each cell, a panel for each column; and the claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedstrata.papers.figures.marks import Ruler
from fedstrata.papers.figures.panels import Figure, Panel, axis_title, named
from fedstrata.papers.judging import NOT_COMPARABLE, NOT_PUBLISHED, Judged, JudgedCell, JudgedClaim
from fedstrata.papers.reading import Recipe
from fedstrata.papers.words import deviation_words, statistics_line
from fedstrata.report.charts import NUMBERS, TICKS, Drawing, sized
from fedstrata.report.series import Rows, short

if TYPE_CHECKING:
    import altair as alt

SHAPES: Mapping[str, tuple[str, str]] = {
    "agrees": ("circle", "accent"),
    "undecided": ("cross", "faint"),
    "above": ("triangle-up", "apart"),
    "below": ("triangle-down", "apart"),
    NOT_COMPARABLE: ("square", "faint"),
    NOT_PUBLISHED: ("diamond", "faint"),
}
"""The shape and the colour of each verdict. Above is no better than below: of losses and ranks it is worse."""
SIGNS = "● agrees, ✚ undecided, ▲ above, ▼ below, ■ not comparable, ◆ not published"
_WORDS: Mapping[str, tuple[str, str]] = {
    "shown": ("circle", "accent"),
    "not shown": ("triangle-down", "apart"),
    "undecided": ("diamond", "faint"),
    NOT_COMPARABLE: ("square", "faint"),
}
_CLAIM_SIGNS = "● shown, ▼ not shown, ◆ undecided, ■ not comparable"
_ROW, _CLAIM = 26, 46
"""The heights of a row and of a claim, in pixels."""
_SHORT_ROW, _SHORT_CLAIM = 14, 38
"""How many letters of a row and of a claim there is room for where three panels stand side by side."""
_NAME_LIMIT: Mapping[str, str] = {"expr": "max(80, containerSize()[0] * 0.45 || 200)"}
"""How much of the width the names of rows may take: cut, several would be alike."""
_RING, _MARK = 150, 70
"""The sizes of hollow and of filled marks: a ring stays to be seen around a mark at the same place."""


def cells_at_a_glance(judged: Judged) -> Figure | None:
    """The published numbers and ours; columns of which nothing was run have no panel."""
    recipe = judged.recipe
    panels = []
    for column in dict.fromkeys(one.column for one in judged.cells):
        own = [one for one in judged.cells if one.column == column]
        if any(one.ours is not None for one in own):
            rows = [_row(one) for one in own if one.ours is not None or one.published.mean is not None]
            of = recipe.of_cell("", column)
            derived = recipe.told("", column).get("derived")
            title = "mean rank" if derived == "mean_rank" else _axis_of(of)
            panels.append(Panel(column, _dumbbells(rows, Ruler(title)), []))
    if not panels:
        return None
    words = f"○ published, {statistics_line(recipe)}; filled, ours: {SIGNS}, with one {deviation_words(recipe)}."
    empty = [one for one in dict.fromkeys(cell.column for cell in judged.cells) if one not in {p.title for p in panels}]
    words += f" Nothing was run of {', '.join(empty)}." if empty else ""
    long = any(len(one.row) > _SHORT_ROW for one in judged.cells)
    return Figure("glance", "Published and ours at a glance", words, tuple(panels), long)


def _axis_of(recipe: Recipe) -> str:
    """Name what a column reports."""
    if not recipe.over_clients:
        return axis_title(recipe.number, recipe.unit)
    metric = named(recipe.number)
    return f"clients better off by {metric}, %" if recipe.against else f"variance of {metric} over clients"


def _row(one: JudgedCell) -> dict[str, object]:
    ours, published = one.ours, one.published
    return {
        "row": one.row,
        "published": published.mean,
        "published_spread": published.std,
        "ours": None if ours is None else short(ours.mean, 6),
        "spread": None if ours is None or ours.std is None else short(ours.std, 6),
        "seeds": 0 if ours is None else ours.count,
        "verdict": one.verdict,
    }


def _dumbbells(rows: Rows, x: Ruler) -> Drawing:
    import altair as alt

    names = [str(row["row"]) for row in rows]
    base = alt.Chart(alt.NamedData("rows"))
    down = alt.Y("row:N").title(None).sort(names).scale(domain=names).axis(labelLimit=_NAME_LIMIT, grid=True)
    across = (
        alt.X("ours:Q").title(x.title).axis(format=NUMBERS, tickCount=TICKS).scale(zero=False, nice=True, padding=8)
    )
    told = [
        alt.Tooltip("row:N", title="row"),
        alt.Tooltip("published:Q", title="published", format=".4~g"),
        alt.Tooltip("published_spread:Q", title="± published", format=".3~g"),
        alt.Tooltip("ours:Q", title="ours", format=".4~g"),
        alt.Tooltip("spread:Q", title="± over seeds", format=".3~g"),
        alt.Tooltip("seeds:Q", title="seeds"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    both = base.transform_filter("isValid(datum.ours) && isValid(datum.published)")
    layers = [
        both.mark_rule(strokeWidth=4, opacity=0.45, style="muted").encode(y=down, x=across, x2=alt.X2("published:Q")),
        _bar(base, "published", "published_spread")
        .mark_rule(strokeWidth=1.2, style="contrast")
        .encode(y=down, x=alt.X("low:Q"), x2=alt.X2("high:Q")),
    ]
    for verdict, (shape, style) in SHAPES.items():
        if any(row["verdict"] == verdict for row in rows):
            own = base.transform_filter(f"datum.verdict === '{verdict}'")
            layers += [
                _bar(own, "ours", "spread")
                .mark_rule(strokeWidth=2.4, style=style)
                .encode(y=down, x=alt.X("low:Q"), x2=alt.X2("high:Q")),
                own.mark_point(filled=True, size=_size(shape), shape=shape, opacity=1, style=style).encode(
                    y=down, x=across, tooltip=told
                ),
            ]
    hollow = base.transform_filter("isValid(datum.published)").mark_point(
        filled=False, size=_RING, strokeWidth=1.6, style="contrast"
    )
    layers.append(hollow.encode(y=down, x=alt.X("published:Q"), tooltip=told))
    return Drawing(sized(alt.layer(*layers), _ROW * len(names)), {"rows": rows})


def _size(shape: str) -> int:
    """Triangles look smaller than they are."""
    return _MARK + 40 if shape.startswith("triangle") else _MARK


def _bar(base: alt.Chart, value: str, spread: str) -> alt.Chart:
    """The rows that have a spread, with the ends of its bar."""
    edges = {"low": f"datum.{value} - datum.{spread}", "high": f"datum.{value} + datum.{spread}"}
    return base.transform_filter(f"isValid(datum.{spread}) && isValid(datum.{value})").transform_calculate(**edges)


def claims_at_a_glance(judged: Judged) -> Figure | None:
    """Each claim that can be judged as an interval, against zero and against the published difference."""
    return _claims({"Who beats whom": [(judged.recipe, claim) for claim in judged.claims]})


def claims_of_papers(papers: Mapping[str, Sequence[tuple[Recipe, JudgedClaim]]]) -> Figure | None:
    """The same of the claims of several papers, a panel for each; only of those that speak of points."""
    return _claims({title: [one for one in claims if one[0].unit == "percent"] for title, claims in papers.items()})


def _claims(panels: Mapping[str, Sequence[tuple[Recipe, JudgedClaim]]]) -> Figure | None:
    drawn = []
    for title, claims in panels.items():
        rows = [row for _, claim in claims if (row := _claim(claim)) is not None]
        if rows:
            recipe = claims[0][0]
            unit = "points" if recipe.unit == "percent" else axis_title(recipe.number, recipe.unit)
            drawn.append(Panel(title, _intervals(rows, Ruler(f"by how much one beats the other, {unit}")), []))
    words = (
        f"Ours, as the mean over seeds with its 95 % interval: {_CLAIM_SIGNS}. ○ the published difference, with the "
        "interval that its spreads give; the upright line is zero, right of which the claim holds."
    )
    if not drawn:
        return None
    long = any(len(str(row["claim"])) > _SHORT_CLAIM for panel in drawn for row in panel.drawing.rows["rows"])
    return Figure("claims", "The claims at a glance", words, tuple(drawn), long)


def _claim(claim: JudgedClaim) -> dict[str, object] | None:
    found = claim.found
    if found is None or found.mean is None:
        return None
    where = ", ".join(filter(None, claim.columns))
    low, high = found.interval or (None, None)
    mean, reach = claim.published or (claim.stated.by, None)
    return {
        "claim": (f"{where}: " if where else "") + f"{claim.stated.row} over {claim.stated.over}",
        "ours": short(found.mean, 6),
        "low": low,
        "high": high,
        "seeds": found.seeds,
        "published": mean,
        "published_low": None if mean is None or reach is None else mean - reach,
        "published_high": None if mean is None or reach is None else mean + reach,
        "word": claim.word,
    }


def _intervals(rows: Rows, x: Ruler) -> Drawing:
    """Each claim in words, and below them its interval, so that long words have the whole width."""
    import altair as alt

    names = [str(row["claim"]) for row in rows]
    base = alt.Chart(alt.NamedData("rows"))
    down = alt.Y("claim:N").title(None).sort(names).scale(domain=names).axis(None)
    ends = _ends(rows)
    across = alt.X("ours:Q").title(x.title).axis(format=NUMBERS, tickCount=TICKS)
    across = across.scale(domain=ends, nice=True)
    told = [
        alt.Tooltip("claim:N", title="claim"),
        alt.Tooltip("ours:Q", title="ours", format="+.3~g"),
        alt.Tooltip("low:Q", title="interval from", format="+.3~g"),
        alt.Tooltip("high:Q", title="to", format="+.3~g"),
        alt.Tooltip("published:Q", title="published", format="+.3~g"),
        alt.Tooltip("seeds:Q", title="seeds"),
        alt.Tooltip("word:N", title="verdict"),
    ]
    offset = 9
    layers = [
        base.transform_calculate(zero="0")
        .mark_tick(thickness=1.5, size=24, orient="vertical", style="faint", yOffset=offset)
        .encode(x=alt.X("zero:Q"), y=down),
        base.mark_text(align="left", dy=-offset, fontSize=12, style="contrast", limit=alt.expr("width")).encode(
            x=alt.value(0), y=down, text="claim:N", tooltip=told
        ),
    ]
    for word, (shape, style) in _WORDS.items():
        if any(row["word"] == word for row in rows):
            own = base.transform_filter(f"datum.word === '{word}'")
            layers += [
                own.transform_filter("isValid(datum.low)")
                .mark_rule(strokeWidth=2.4, style=style, yOffset=offset)
                .encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"), y=down, tooltip=told),
                own.mark_point(
                    filled=True, size=_size(shape), shape=shape, opacity=1, style=style, yOffset=offset
                ).encode(x=across, y=down, tooltip=told),
            ]
    spread = base.transform_filter("isValid(datum.published_low)").mark_rule(
        strokeWidth=1.2, style="contrast", yOffset=offset
    )
    layers.append(spread.encode(x=alt.X("published_low:Q"), x2=alt.X2("published_high:Q"), y=down, tooltip=told))
    hollow = base.transform_filter("isValid(datum.published)").mark_point(
        filled=False, size=_RING, strokeWidth=1.6, style="contrast", yOffset=offset
    )
    layers.append(hollow.encode(x=alt.X("published:Q"), y=down, tooltip=told))
    return Drawing(sized(alt.layer(*layers), _CLAIM * len(names)), {"rows": rows})


def _ends(rows: Rows) -> list[float]:
    """From the least to the most that is drawn, zero and a little room included."""
    keys = ("ours", "low", "high", "published", "published_low", "published_high")
    values = [0.0, *(row[key] for row in rows for key in keys if row[key] is not None)]
    room = 0.05 * (max(values) - min(values) or 1.0)
    return [min(values) - room, max(values) + room]
