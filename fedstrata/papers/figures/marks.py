"""The panels of redrawn figures, in Altair. They take plain rows, as the charts of the report do.

A row of lines and bars has the ``line`` that it belongs to, where it is (``at``), our ``value`` with its ``spread``
over seeds, and the ``published`` number with its own. Published numbers are hollow, ours are filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from fedstrata.report.charts import COLOURS, LABEL_LIMIT, NUMBERS, TICKS, Drawing, dash_of, sized
from fedstrata.report.layer_scales import Scale, round_step
from fedstrata.report.series import Rows

if TYPE_CHECKING:
    import altair as alt

HEIGHT = 230
_DECADE = 10
_TURNING: Literal["ramp"] = "ramp"
_ONE_WAY: Literal["heatmap"] = "heatmap"
LEFT_TITLE: dict[str, Any] = {"titleAlign": "left", "titleX": 0, "titleLimit": 400}
"""The title of a vertical axis begins above it, since a panel has no room beside it."""


@dataclass(frozen=True)
class Ruler:
    """What an axis shows: its title, and names in an order where it shows names instead of numbers."""

    title: str
    names: tuple[str, ...] = ()
    rounds: bool = False
    logarithmic: bool = False


def lines(
    rows: Rows, names: Sequence[str], x: Ruler, y: Ruler, dots: bool, dashed: Sequence[str] = (), ordered: bool = False
) -> Drawing:
    """A line for each name, with a band or bars of one deviation over seeds; ``dots`` marks each of its points.

    Where there are several lines of a name, ``dashed`` are the values of ``kind`` by which they differ. Names that are
    ``ordered``, such as layers by their depth, have colours from one end of a scale to the other.
    """
    import altair as alt

    base = alt.Chart(alt.NamedData("rows"))
    across = _across(rows, x)
    colour = _colour(names, thick=not dashed, ordered=ordered)
    several: dict[str, Any] = {"detail": "kind:N"} if dashed else {}
    strokes: dict[str, Any] = {} if ordered else {"strokeDash": _dash(names)}
    if dashed:
        strokes = {"strokeDash": _dash(dashed, "kind", apart=True)}
    up = alt.Y("value:Q").title(y.title).scale(**_numbers(y)).axis(**_ticks(rows, y), **LEFT_TITLE)
    told = [
        alt.Tooltip("line:N", title="line"),
        *([alt.Tooltip("kind:N", title="row")] if dashed else []),
        alt.Tooltip("at:N", title=x.title),
        alt.Tooltip("value:Q", title="ours", format=".4~g"),
        *_if_any(rows, "spread", "± over seeds"),
        *_if_any(rows, "published", "published"),
    ]
    layers: list[alt.Chart] = []
    if any(row["spread"] is not None for row in rows):
        edges = {"low": _lower(rows, y, "value", "spread"), "high": "datum.value + datum.spread"}
        spread = base.transform_filter("isValid(datum.spread)").transform_calculate(**edges)
        mark = spread.mark_rule(opacity=0.7) if dots else spread.mark_area(opacity=0.14)
        layers.append(mark.encode(x=across, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), color=colour, **several))
    ours = base.transform_filter("isValid(datum.value)")
    line = ours.mark_line() if dashed else ours.mark_line(strokeWidth=2)
    layers.append(line.encode(x=across, y=up, color=colour, **strokes))
    point: dict[str, Any] = {"size": 60, "opacity": 1.0} if dots or _single(rows) else {"size": 90, "opacity": 0.0}
    layers.append(ours.mark_circle(**point).encode(x=across, y=up, color=colour, tooltip=told))
    layers += _published(rows, base, across, y, colour, told)
    return Drawing(sized(alt.layer(*layers), HEIGHT), {"rows": rows})


def bars(rows: Rows, names: Sequence[str], x: Ruler) -> Drawing:
    """A bar for each row, with its deviation over seeds, and the published number as a hollow mark."""
    import altair as alt

    base = alt.Chart(alt.NamedData("rows"))
    down = alt.Y("line:N").title(None).sort(list(names)).scale(domain=list(names)).axis(labelLimit=LABEL_LIMIT)
    across = alt.X("value:Q").title(x.title).axis(format=NUMBERS, grid=True, tickCount=TICKS)
    told = [
        alt.Tooltip("line:N", title="row"),
        alt.Tooltip("value:Q", title="ours", format=".4~g"),
        *_if_any(rows, "spread", "± over seeds"),
        *_if_any(rows, "published", "published"),
    ]
    edges = {"low": "datum.value - datum.spread", "high": "datum.value + datum.spread"}
    layers = [
        base.mark_bar(height={"band": 0.62}, style="accent", opacity=0.75).encode(x=across, y=down, tooltip=told),
        base.transform_filter("isValid(datum.spread)")
        .transform_calculate(**edges)
        .mark_rule(strokeWidth=2, style="contrast")
        .encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"), y=down),
    ]
    if any(row["published"] is not None for row in rows):
        hollow = base.transform_filter("isValid(datum.published)").mark_point(
            filled=False, size=70, strokeWidth=2, style="contrast"
        )
        layers.append(hollow.encode(x=alt.X("published:Q"), y=down, tooltip=told))
    return Drawing(sized(alt.layer(*layers), 28 * len(names)), {"rows": rows})


def steps(rows: Rows, names: Sequence[str], x: Ruler, y: Ruler) -> Drawing:
    """Histograms over each other, as outlines."""
    import altair as alt

    across = alt.X("at:Q").title(x.title).axis(format=NUMBERS, tickCount=TICKS).scale(nice=False)
    up = alt.Y("value:Q").title(y.title).axis(format=NUMBERS, tickCount=5, **LEFT_TITLE)
    told = [alt.Tooltip("line:N"), alt.Tooltip("at:Q", title=x.title), alt.Tooltip("value:Q", title=y.title)]
    base = alt.Chart(alt.NamedData("rows"))
    layers = [
        base.mark_area(interpolate="step", opacity=0.1).encode(x=across, y=up.stack(None), color=_colour(names)),
        base.mark_line(interpolate="step", strokeWidth=1.6).encode(
            x=across, y=up, color=_colour(names), strokeDash=_dash(names), tooltip=told
        ),
    ]
    return Drawing(sized(alt.layer(*layers), HEIGHT), {"rows": rows})


def heat(rows: Rows, names: Sequence[str], scale: Scale, title: str) -> Drawing:
    """A heat map: names downwards, rounds across; a column may stand for several rounds."""
    import altair as alt

    base = alt.Chart(alt.NamedData("rows")).transform_calculate(begins="datum.at - 0.5", ends="datum.until + 0.5")
    down = alt.Y("line:N").title(None).sort(list(names)).scale(domain=list(names))
    down = down.axis(labelLimit={"expr": "max(90, 0.42 * (containerSize()[0] || 380))"}, labelOverlap="greedy")
    across = alt.X("begins:Q").title("round").scale(nice=False, zero=False)
    across = across.axis(values=round_values(rows[0]["at"], rows[-1]["until"]), format="d", grid=False)
    told = [
        alt.Tooltip("line:N", title="layer"),
        alt.Tooltip("at:Q", title="round"),
        alt.Tooltip("value:Q", title=title, format=".4~g"),
    ]
    marks = base.mark_rect().encode(x=across, x2=alt.X2("ends:Q"), y=down, color=_heat(scale, title), tooltip=told)
    return Drawing(sized(marks, max(8, min(22, 420 // len(names))) * len(names)), {"rows": rows})


def matrix(rows: Rows, scale: Scale, title: str) -> Drawing:
    """A heat map of pairs of clients, in one order in both directions."""
    import altair as alt

    plain = alt.Axis(labels=False, ticks=False, domain=False)
    told = [
        alt.Tooltip("client:N", title="client"),
        alt.Tooltip("other:N", title="and client"),
        alt.Tooltip("value:Q", title=title, format=".4~g"),
    ]
    marks = alt.Chart(alt.NamedData("rows")).mark_rect()
    chart = marks.encode(
        x=alt.X("across:O").title("clients, in one order in all matrices").axis(plain),
        y=alt.Y("down:O").title(None).axis(plain),
        color=_heat(scale, title),
        tooltip=told,
    )
    return Drawing(sized(chart, 280), {"rows": rows})


def clients(rows: Rows, y: Ruler, x: Ruler) -> Drawing:
    """A dot for each client."""
    import altair as alt

    up = alt.Y("value:Q").title(y.title).scale(zero=False).axis(format=NUMBERS, tickCount=5, **LEFT_TITLE)
    across = alt.X("at:Q").title(x.title).scale(zero=False).axis(format=NUMBERS, tickCount=TICKS)
    told = [alt.Tooltip("client:N"), alt.Tooltip("at:Q", title=x.title), alt.Tooltip("value:Q", format=".4~g")]
    marks = alt.Chart(alt.NamedData("rows")).mark_circle(size=45, opacity=0.7, style="accent")
    return Drawing(sized(marks.encode(x=across, y=up, tooltip=told), HEIGHT), {"rows": rows})


def _across(rows: Rows, x: Ruler) -> alt.X:
    import altair as alt

    if x.names:
        scale = alt.X("at:N").sort(list(x.names)).scale(domain=list(x.names), type="point", padding=0.4)
        angle = 0 if len(x.names) * max(map(len, x.names)) < 36 else -40
        return scale.title(x.title).axis(labelAngle=angle, labelLimit=110, labelOverlap=False, grid=True)
    if x.rounds:
        noted = [int(row["at"]) for row in rows]
        values = round_values(min(noted), max(noted))
        return alt.X("at:Q").title(x.title).axis(values=values, format="d").scale(nice=False, zero=False)
    places = sorted({float(row["at"]) for row in rows})
    gaps = [after - before for before, after in pairwise(places)]
    even = bool(gaps) and max(gaps) <= (1 + 1e-6) * min(gaps)
    wide = places[0] > 0 and places[-1] / places[0] >= _DECADE and not even
    axis = alt.X("at:Q").title(x.title).axis(values=places, format=NUMBERS, grid=False, labelOverlap="greedy")
    return axis.scale(**({"type": "log"} if wide else {"zero": False}), nice=False, padding=14)


def _numbers(y: Ruler) -> dict[str, Any]:
    return {"type": "log"} if y.logarithmic else {"zero": False, "nice": True}


def _lower(rows: Rows, y: Ruler, value: str, spread: str) -> str:
    """The lower end of a bar, as an expression; on a logarithmic axis one that reaches zero ends below all numbers.

    There is no zero on such an axis, and a single number that is none would leave the whole axis without a scale.
    """
    lower = f"datum.{value} - datum.{spread}"
    if not y.logarithmic:
        return lower
    numbers = [float(row[key]) for row in rows for key in ("value", "published") if row[key] is not None]
    bottom = 10.0 ** (math.ceil(math.log10(min(number for number in numbers if number > 0))) - 1)
    return f"max({lower}, {bottom:.0e})"


def _ticks(rows: Rows, y: Ruler) -> dict[str, Any]:
    """Powers of ten alone where an axis is logarithmic; all others would be a thicket of lines."""
    values = [float(row["value"]) for row in rows if row["value"] is not None]
    if not y.logarithmic or min(values) <= 0:
        return {"format": NUMBERS, "tickCount": 5}
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    step = max(1, math.ceil((high - low) / 5))
    return {
        "format": ".1~e" if low < -3 or high > 5 else NUMBERS,
        "values": [float(f"1e{one}") for one in range(low, high + 1, step)],
    }


def round_values(first: int, last: int) -> list[int]:
    """The rounds that are written along an axis: all of a few, else round numbers.

    >>> round_values(2, 4), round_values(2, 300)
    ([2, 3, 4], [100, 200, 300])
    """
    if last - first < 6:
        return list(range(first, last + 1))
    step = int(round_step((last - first) / 5))
    return list(range(step * math.ceil(first / step), last + 1, step))


def _colour(names: Sequence[str], thick: bool = True, ordered: bool = False) -> alt.Color:
    import altair as alt

    scale = alt.Color("line:O" if ordered else "line:N").sort(list(names)).scale(domain=list(names))
    return scale.legend(_legend(names, thick=thick)) if len(names) > 1 else scale.legend(None)


def _dash(names: Sequence[str], field: str = "line", apart: bool = False) -> alt.StrokeDash:
    """Dashes that go with the colours of lines, or such that tell lines of one colour ``apart``."""
    import altair as alt

    dashes = [list(dash_of(COLOURS * place if apart else place)) for place in range(len(names))]
    dash = alt.StrokeDash(f"{field}:N").sort(list(names)).scale(domain=list(names), range=dashes)
    return dash.legend(_legend(names, apart, thick=True)) if len(names) > 1 else dash.legend(None)


def _legend(names: Sequence[str], above: bool = False, thick: bool = False) -> alt.Legend:
    """A legend of strokes below the chart or above it, as thick as the lines or all ``thick``."""
    import altair as alt

    # Not by what is left beside the axis, which is known too late.
    columns = alt.expr(f"max(1, floor(((containerSize()[0] || 380) - 50) / {40 + 6.6 * max(map(len, names)):.0f}))")
    strokes: dict[str, Any] = {"symbolStrokeWidth": 2.5} if thick else {}
    place: dict[str, Any] = {"orient": "top", "offset": 34} if above else {"orient": "bottom"}
    return alt.Legend(
        **place, **strokes, title=None, columns=columns, symbolType="stroke", symbolSize=220 if not above else 500,
        symbolOpacity=1, labelLimit=260,
    )  # fmt: skip


def _published(
    rows: Rows, base: alt.Chart, across: alt.X, y: Ruler, colour: alt.Color, told: list[alt.Tooltip]
) -> list[alt.Chart]:
    """Hollow marks, with dashed bars where a spread was published."""
    import altair as alt

    if all(row["published"] is None for row in rows):
        return []
    there = base.transform_filter("isValid(datum.published)")
    edges = {
        "below": _lower(rows, y, "published", "published_spread"),
        "above": "datum.published + datum.published_spread",
    }
    spread = there.transform_filter("isValid(datum.published_spread)").transform_calculate(**edges)
    return [
        spread.mark_rule(strokeDash=[2, 2]).encode(x=across, y=alt.Y("below:Q"), y2=alt.Y2("above:Q"), color=colour),
        there.mark_point(filled=False, size=70, strokeWidth=1.8, opacity=1).encode(
            x=across, y=alt.Y("published:Q"), color=colour, tooltip=told
        ),
    ]


def _heat(scale: Scale, title: str) -> alt.Color:
    import altair as alt

    domain = [scale.low, scale.high]
    colour = alt.Color("value:Q").scale(
        type="log" if scale.logarithmic else "linear", domain=domain, clamp=True, interpolate="rgb",
        range=_TURNING if scale.diverging else _ONE_WAY,
    )  # fmt: skip
    ticks = alt.Legend(
        title=title,
        orient="bottom",
        gradientLength=150,
        values=scale.ticks(),
        format=NUMBERS,
        titleLimit={"expr": "max(150, width)"},
    )
    return colour.legend(ticks)


def _if_any(rows: Rows, column: str, title: str) -> list[alt.Tooltip]:
    import altair as alt

    told = any(row.get(column) is not None for row in rows)
    return [alt.Tooltip(f"{column}:Q", title=title, format=".4~g")] if told else []


def _single(rows: Rows) -> bool:
    """Tell whether some line has one point only, which no line would show."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["line"]] = counts.get(row["line"], 0) + 1
    return min(counts.values(), default=0) == 1
