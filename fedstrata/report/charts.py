"""The charts, in Altair. They take plain rows and know nothing of runs, pages or files.

Colours and fonts come from a theme that is applied when a chart is drawn, so that one chart serves a light and a dark
page. Charts with several methods have a parameter ``chosen``: the methods in colour, in front of all others in grey.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedstrata.errors import FedStrataError
from fedstrata.report.names import fitting
from fedstrata.report.series import SKEW_CLIENTS, Rows, distinct, skew_rows

if TYPE_CHECKING:
    import altair as alt

    Chart = alt.Chart | alt.LayerChart | alt.FacetChart

HOW_TO_GET_CHARTS = "pip install 'fedstrata[report]'"

COLOURS = 8
"""How many methods can be told apart by colour; beyond that, dashes repeat the colours."""
NAMED_CLIENTS = 24
"""How many clients stand by their names along an axis, at most; more of them stand by their numbers."""
_LETTERS_IN_A_LINE = 50
"""How many letters have room side by side below an axis, on a narrow page too."""
_DASHES: tuple[tuple[int, ...], ...] = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3), (4, 2, 1, 2), (12, 4), (1, 3))


@dataclass(frozen=True)
class Theme:
    """The colours of charts on one background; those of methods stay apart for eyes without green or red cones too."""

    text: str
    faint: str
    grid: str
    muted: str
    accent: str
    methods: tuple[str, ...]
    parts: tuple[str, ...]
    heat: tuple[str, ...]
    """From the low to the high end of a scale with a turning point in its middle."""
    depth: tuple[float, float]
    """Which stretch of the scale 'viridis', by which lines in an order are coloured, is seen on the background."""


LIGHT = Theme(
    text="#3a414a",
    faint="#5d6671",
    grid="#e4e7eb",
    muted="#b9c0c8",
    accent="#2c6cb0",
    methods=("#4c7ac0", "#a43911", "#428351", "#83226c", "#a38427", "#2a45a4", "#1984a4", "#3c3024"),
    parts=("#2c6cb0", "#8fb6de", "#c8551b", "#e9b08f", "#23825c", "#93c7b0", "#8552b0", "#c9aee0"),
    heat=("#17417c", "#3a78b7", "#8fbcdc", "#f3f0ea", "#efb587", "#d6742e", "#9c450a"),
    depth=(0.0, 0.88),
)
DARK = Theme(
    text="#d5dae0",
    faint="#a3adb8",
    grid="#333a42",
    muted="#5b6570",
    accent="#7db3ec",
    methods=("#1288ee", "#f09c64", "#3b8b6d", "#d0a8f8", "#f1c342", "#ea6081", "#66cfd1", "#b45400"),
    parts=("#7db3ec", "#3f6c9c", "#f0935f", "#98583a", "#5fc79b", "#36775c", "#c39ae6", "#735293"),
    heat=("#a6d4ff", "#5b9cd9", "#33618f", "#2b3037", "#8c5428", "#da8541", "#ffc894"),
    depth=(0.25, 1.0),
)


@dataclass(frozen=True)
class Drawing:
    """A chart and the rows it names. They meet in the specification only, since Altair would check every row."""

    chart: Chart
    rows: Mapping[str, Rows] = field(default_factory=dict)

    def specification(self) -> dict[str, Any]:
        """Return the Vega-Lite specification with its data."""
        specification: dict[str, Any] = self.chart.to_dict(validate=False)
        return {**specification, "datasets": {**specification.get("datasets", {}), **self.rows}}


def charts_are_possible() -> bool:
    """Tell whether the extra ``report`` is installed."""
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        return False
    return True


def require_charts() -> None:
    """Refuse with a sentence where the extra ``report`` is not installed."""
    if not charts_are_possible():
        raise FedStrataError(f"Charts need the extra 'report'; install it with: {HOW_TO_GET_CHARTS}")


def theme_config(theme: Theme) -> dict[str, Any]:
    """Write a theme as the configuration of a Vega-Lite chart."""
    return {
        "background": None,
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif",
        "view": {"stroke": None},
        "axis": {
            "labelColor": theme.faint,
            "titleColor": theme.text,
            "titleFontWeight": "normal",
            "titleFontSize": 12,
            "labelFontSize": 12,
            "gridColor": theme.grid,
            "domainColor": theme.grid,
            "tickColor": theme.grid,
            "titlePadding": 10,
            "labelPadding": 6,
        },
        "axisX": {"grid": False, "labelFlush": False, "labelOverlap": "greedy"},
        "axisY": {
            "domain": False,
            "ticks": False,
            "titleAngle": 0,
            "titleAlign": "right",
            "titleAnchor": "end",
            "titleX": -6,
            "titleY": -12,
        },
        "title": {"color": theme.text, "fontSize": 14, "subtitleColor": theme.faint, "subtitleFontSize": 12},
        "legend": {
            "labelColor": theme.text,
            "titleColor": theme.text,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "columnPadding": 18,
            "rowPadding": 4,
        },
        "range": {
            "category": list(theme.methods),
            "ramp": list(theme.heat),
            "diverging": list(theme.parts),
            "heatmap": [theme.grid, theme.accent],
            "ordinal": {"scheme": "viridis", "extent": list(theme.depth)},
        },
        "style": {
            "muted": {"color": theme.muted},
            "faint": {"color": theme.faint},
            "inverse": {"color": theme.grid},
            "accent": {"color": theme.accent},
            "contrast": {"color": theme.text},
            "apart": {"color": theme.parts[2]},
        },
    }


def _round_axis(rows: Rows) -> dict[str, Any]:
    """Ticks at rounds; of a few rounds at each, since between two of them there would be a third that is rounded."""
    rounds = sorted({int(row["round"]) for row in rows})
    return {"values": rounds, "format": "d"} if len(rounds) <= _FEW_ROUNDS else {
        "tickMinStep": 1, "format": "d", "tickCount": TICKS
    }  # fmt: skip


def curves(rows: Rows, methods: Sequence[str], chosen: Sequence[str], shown: str, title: str, percent: bool) -> Drawing:
    """One line per method over the rounds, with a band of one standard deviation, for the metric ``shown``.

    The parameter ``smoothing`` names the column that is drawn; beside a smoothed line the raw one stays, faint.
    """
    import altair as alt

    base = alt.Chart(alt.NamedData("rows")).transform_filter("datum.metric === shown")
    base = base.transform_calculate(drawn="datum[smoothing]")
    y = alt.Y("drawn:Q").title(title).axis(**number_axis(percent)).scale(zero=False, nice=True)
    x = alt.X("round:Q").title("round").axis(**_round_axis(rows)).scale(nice=False)
    tooltip = [
        alt.Tooltip("method:N", title="method"),
        alt.Tooltip("round:Q", title="round"),
        alt.Tooltip("value:Q", title="mean over seeds", format=".2%" if percent else ".4~g"),
        *spread_of_seeds(rows, ".2%" if percent else ".3~g"),
    ]
    low, high = "datum.drawn - datum.spread", "datum.drawn + datum.spread"
    edges = {"low": f"max(0, {low})", "high": f"min(1, {high})"} if percent else {"low": low, "high": high}
    band = base.transform_filter(f"{IN_COLOUR} && isValid(datum.spread)").transform_calculate(**edges)
    band = band.mark_area(opacity=alt.expr("length(chosen) > 4 ? 0.07 : 0.14"))
    band = band.encode(x=x, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), color=method_colour(methods))
    raw = base.transform_filter(f"smoothing !== 'value' && {IN_COLOUR}").mark_line(strokeWidth=1, opacity=0.3)
    raw = raw.encode(x=x, y=alt.Y("value:Q"), color=method_colour(methods))
    layers = alt.layer(band, raw, *method_lines(base, x, y, methods, tooltip))
    params = (chosen_methods(chosen), alt.param(name="shown", value=shown), alt.param(name="smoothing", value="value"))
    return Drawing(sized(layers.add_params(*params), 320), {"rows": rows})


def bytes_in_words(expression: str) -> str:
    """Write a number of bytes on an axis, such as 15 MB."""
    return f"replace(format({expression}, '.3~s'), regexp('([a-zA-Zµ]*)$'), '\u00a0$1') + 'B'"


def traffic(rows: Rows, methods: Sequence[str]) -> Drawing:
    """Bytes of a whole run, up and down, one bar per method."""
    import altair as alt

    label = bytes_in_words("datum.value")
    return _bars(
        rows,
        methods,
        alt.X("bytes:Q").title(None).axis(labelExpr=label, grid=True, tickCount=TICKS),
        "direction",
        ".4~s",
    )


def time(rows: Rows, methods: Sequence[str]) -> Drawing:
    """Seconds of a whole run by phase, one bar per method."""
    import altair as alt

    return _bars(rows, methods, alt.X("seconds:Q").axis(grid=True, tickCount=TICKS), "phase", ",.2f")


def skew(rows: Rows, clients: int, class_names: Sequence[str], split: str, client_names: Sequence[str] = ()) -> Drawing:
    """Draw who has which classes, one split at a time (parameter ``split``); few clients with names stand by these."""
    import altair as alt

    base = alt.Chart(alt.NamedData("rows")).transform_filter("datum.split === split")
    who = "who" if any("who" in row for row in rows) else "client"
    marks = _skew_marks(base, clients, class_names, client_names, who).add_params(alt.param(name="split", value=split))
    return Drawing(marks, {"rows": rows})


def skew_chart(
    label_counts: np.ndarray | Sequence[Sequence[int]], class_names: Sequence[str], client_names: Sequence[str] = ()
) -> Chart:
    """Draw the label skew of one split: ``label_counts`` is ``[clients, classes]``, as of ``Split.label_counts``.

    ``client_names`` are those of ``Split.client_names``, where clients have names.
    """
    require_charts()
    import altair as alt

    counts = np.asarray(label_counts, dtype=np.int64)
    if counts.ndim != 2 or counts.shape[1] != len(class_names):
        raise FedStrataError(
            f"Label counts of shape {list(counts.shape)} do not fit {len(class_names)} class names; "
            "give one row per client and one column per class."
        )
    rows = skew_rows(counts, class_names, client_names or None)
    base = alt.Chart(alt.InlineData(values=rows))
    return _skew_marks(base, len(counts), class_names, client_names, "who" if client_names else "client")


def skew_is_bubbles(clients: int, classes: int) -> bool:
    """Tell whether bubbles would be large enough to be seen; else the chart is a heat map."""
    return clients <= 60 and classes <= 30


def _skew_marks(
    base: alt.Chart, clients: int, class_names: Sequence[str], client_names: Sequence[str], who: str
) -> Chart:
    """A bubble per client and class; a heat map where there are too many for bubbles.

    The column ``who`` tells what a client is called that is pointed at. Where all names have room below the axis, they
    stand there.
    """
    import altair as alt

    shown = min(clients, SKEW_CLIENTS)
    x = alt.X("client:O").title("client").scale(domain=list(range(shown)))
    left = 0.0
    if len(client_names) == clients <= NAMED_CLIENTS:
        label = f"{json.dumps(list(client_names))}[datum.value]"
        slanted = sum(map(len, client_names)) > _LETTERS_IN_A_LINE
        limit = _SLANTED_LIMIT if slanted else LABEL_LIMIT
        x = x.axis(labelAngle=-_SLANT if slanted else 0, labelExpr=label, labelLimit=limit, labelOverlap=False)
        left = _left_of_slanted(client_names) if slanted else 0.0
    else:
        x = x.axis(labelAngle=0, labelOverlap="parity", labelSeparation=8)
    y = alt.Y("class:N").title("class").sort(list(class_names)).scale(domain=list(class_names))
    y = y.axis(labelLimit=LABEL_LIMIT, labelOverlap="greedy", labelSeparation=2, minExtent=left)
    tooltip = [
        alt.Tooltip(f"{who}:O", title="client"),
        alt.Tooltip("class:N"),
        alt.Tooltip("count:Q", title="samples"),
        alt.Tooltip("share:Q", title="of the client's samples", format=".0%"),
    ]
    if skew_is_bubbles(clients, len(class_names)):
        step = 24
        largest = alt.expr(f"pow(min({step}, width / {shown}), 2) * 0.72")
        legend = alt.Legend(orient="bottom", title="samples", tickCount=4, symbolStrokeWidth=0)
        size = alt.Size("count:Q").scale(zero=True, range=[0, largest]).legend(legend)
        marks = base.mark_circle(style="accent", opacity=0.8).encode(x=x, y=y, size=size, tooltip=tooltip)
    else:
        step = 20 if len(class_names) <= 30 else 5
        colour = alt.Color("count:Q").scale(zero=True).legend(title="samples", orient="bottom", gradientLength=160)
        marks = base.mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip)
    return sized(marks, step * len(class_names))


_SLANT = 35
_SLANTED_LIMIT = 150


def _left_of_slanted(names: Sequence[str]) -> float:
    """How many pixels slanted names reach beyond the left end of their axis, which a chart leaves no room for itself.

    Places along the axis are taken as those of a narrow page, so that there is rather too much room than too little.
    """
    reach = math.cos(math.radians(_SLANT))
    return max(
        0.0,
        *(min(_SLANTED_LIMIT, 7 * len(name)) * reach - 12 * (2 * place + 1) for place, name in enumerate(names)),
    )


def with_legend(
    drawing: Drawing, methods: Sequence[str], chosen: Sequence[str], title: str = "", width: int = 760
) -> dict[str, Any]:
    """Return the specification of a chart that stands alone, away from the page and its list of methods.

    The methods ``chosen`` are in colour and, where the chart names them nowhere else, in a legend above it, in as many
    columns as ``width`` has room for. Charts with the methods along an axis, and those of one method, need none.
    """
    specification = drawing.specification()
    params = [
        {**param, "value": list(chosen)} if param["name"] == "chosen" else param
        for param in specification.get("params", [])
    ]
    encodings = list(encodings_of(specification))
    named = any(encoding.get(axis, {}).get("field") == "method" for encoding in encodings for axis in ("x", "y"))
    if len(methods) > 1 and not named:
        for encoding in encodings:
            for channel in ("color", "strokeDash"):
                if encoding.get(channel, {}).get("field") == "method":
                    encoding[channel]["legend"] = {
                        **METHOD_LEGEND,
                        "columns": legend_columns(chosen, width),
                        "labelExpr": fitting(chosen, "datum.label", str(_LABEL_OF_LEGEND)),
                    }
    heading = {"title": {"text": title, "anchor": "start"}} if title else {}
    return {**specification, **heading, **({"params": params} if params else {})}


def legend_columns(methods: Sequence[str], width: int) -> int:
    """How many columns of methods stand side by side in a width. It must not hang on what is left beside the axis."""
    longest = max((len(method) for method in methods), default=0)
    return max(1, (width - 60) // (50 + min(7 * longest, _LABEL_OF_LEGEND)))


_LABEL_OF_LEGEND = 240
METHOD_LEGEND: Mapping[str, Any] = {
    "orient": "top",
    "title": None,
    "direction": "horizontal",
    "values": {"expr": "chosen"},
    "symbolType": "stroke",
    "symbolSize": 300,
    "symbolStrokeWidth": 2,
    "symbolOpacity": 1,
    "labelLimit": _LABEL_OF_LEGEND,
    "offset": 22,
}
"""The legend of the methods in colour, for charts that have left the page; it follows the parameter ``chosen``."""


def encodings_of(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Find what all marks of a specification encode."""
    if "encoding" in part:
        yield part["encoding"]
    for inner in ("layer", "hconcat", "vconcat", "concat"):
        for one in part.get(inner, ()):
            yield from encodings_of(one)
    if "spec" in part:
        yield from encodings_of(part["spec"])


_PARTS: Literal["diverging"] = (
    "diverging"  # A theme can set only the ranges that Vega-Lite names; this one is free for the parts of bars.
)
IN_COLOUR = "indexof(chosen, datum.method) >= 0"
IN_GREY = "indexof(chosen, datum.method) < 0"
"""Whether the method of a row stands in front, in its colour, or behind."""
_FEW_ROUNDS = 6
NUMBERS = ".6~g"
"""How numbers are written on an axis. Without digits of its own, a format takes as many as the step between ticks has,
and 0.0125 beside 0.08 becomes 0.01.
"""
TICKS: Mapping[str, str] = {"expr": "ceil(width / 80)"}
"""As many as there is room for."""
_ROOM_FOR_LABELS = "max(80, containerSize()[0] * 0.3 || 200)"
LABEL_LIMIT: Mapping[str, str] = {"expr": _ROOM_FOR_LABELS}
"""How much of the width names along an axis may take."""


def chosen_methods(methods: Sequence[str]) -> alt.Parameter:
    """The parameter that holds the methods in colour."""
    import altair as alt

    return alt.param(name="chosen", value=list(methods))


def spread_of_seeds(rows: Rows, number_format: str) -> list[alt.Tooltip]:
    """The standard deviation over seeds for those that are pointed at, where there are several seeds."""
    import altair as alt

    if all(row["spread"] is None for row in rows):
        return []
    return [alt.Tooltip("spread:Q", title="± over seeds", format=number_format)]


def number_axis(percent: bool) -> dict[str, Any]:
    """How an axis writes its numbers."""
    return {"format": "~%" if percent else NUMBERS, "tickCount": 6}


def name_axis(names: Sequence[str]) -> dict[str, Any]:
    """How an axis writes names of which some may be too long for it: cut where they stay as different as possible."""
    label = fitting(names, "datum.value", _ROOM_FOR_LABELS)
    return {"labelLimit": LABEL_LIMIT, **({} if label == "datum.value" else {"labelExpr": label})}


def method_colour(methods: Sequence[str]) -> alt.Color:
    """A colour for each method, by its place; the list of methods beside the charts is their legend."""
    import altair as alt

    return alt.Color("method:N").scale(domain=list(methods)).legend(None)


def method_lines(
    base: alt.Chart, x: alt.X, y: alt.Y, methods: Sequence[str], tooltip: list[alt.Tooltip]
) -> list[alt.Chart]:
    """Lines in grey behind, lines in colour before them, and invisible points that answer to the pointer."""
    import altair as alt

    colour = method_colour(methods)
    dashes = [list(dash_of(position)) for position in range(len(methods))]
    dash = alt.StrokeDash("method:N").scale(domain=list(methods), range=dashes).legend(None)
    front, back = base.transform_filter(IN_COLOUR), base.transform_filter(IN_GREY)
    near = alt.selection_point(name="near", on="pointerover", clear="pointerout", fields=["method", "round"])
    pointed = alt.condition(near, alt.value(1), alt.value(0), empty=False)
    points = front.mark_circle(size=160).encode(x=x, y=y, color=colour, opacity=pointed, tooltip=tooltip)
    single = front.transform_joinaggregate(points="count()", groupby=["method"]).transform_filter("datum.points === 1")
    return [
        back.mark_line(strokeWidth=1, opacity=0.7, style="muted").encode(x=x, y=y, detail="method:N"),
        front.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash),
        single.mark_circle(size=60).encode(x=x, y=y, color=colour),
        points.properties(name="points").add_params(near),
    ]


def dash_of(position: int) -> tuple[int, ...]:
    """The dashes of a method's line: solid for the first eight, which have colours of their own."""
    return _DASHES[position // COLOURS % len(_DASHES)]


def _bars(rows: Rows, methods: Sequence[str], x: alt.X, part: str, number_format: str) -> Drawing:
    import altair as alt

    parts = distinct(rows, part)
    quantity = "bytes" if part == "direction" else "seconds"
    colour = alt.Color(f"{part}:N").scale(domain=parts, range=_PARTS).legend(alt.Legend(orient="top", title=None))
    tooltip = [alt.Tooltip("method:N"), alt.Tooltip(f"{part}:N"), alt.Tooltip(f"{quantity}:Q", format=number_format)]
    y = alt.Y("method:N").title(None).sort(list(methods)).axis(**name_axis(methods))
    ordered = [{**row, "position": parts.index(row[part])} for row in rows]
    bars = alt.Chart(alt.NamedData("rows")).mark_bar(height={"band": 0.62})
    chart = bars.encode(x=x, y=y, color=colour, order=alt.Order("position:Q"), tooltip=tooltip)
    step = 30 if len(methods) <= COLOURS else 20
    return Drawing(sized(chart, step * len(methods)), {"rows": ordered})


def sized(chart: Chart, height: int) -> Chart:
    """As wide as the place it is drawn in."""
    import altair as alt

    return chart.properties(
        width="container", height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    )
