"""The layer view as one chart: the network, a heat map of layers and rounds for each method, the last round as dots.

The panels are laid out by hand, in pixels across and in lines of equal height down, so that one chart serves a wide
page, a phone and a column of a paper: what fits beside each other stands there, the rest goes below. Parameters:
``chosen`` (methods), ``shown`` (the metric) and ``against`` (the method to subtract, or nothing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.report.charts import COLOURS, Drawing
from fedstrata.report.layer_legend import legend, signs
from fedstrata.report.layer_network import network
from fedstrata.report.layer_places import (
    CHECKED,
    DIFFERENCE,
    SNOWFLAKE,
    Lines,
    about_method,
    line_of,
    method_colour,
    method_shape,
    pixel,
    share_of_scale,
    shown_number,
    written,
)
from fedstrata.report.layer_scales import Scale, round_step
from fedstrata.report.layer_view import ROLES, LayerFacts, LayerView, MetricView
from fedstrata.report.names import fitting

if TYPE_CHECKING:
    import altair as alt

_KINDS = {"conv": "convolution", "linear": "linear", "attention": "attention", "embedding": "embedding", "norm": "norm"}
_CANVAS_FROM = 9_000
"""From how many cells at once on they are painted, not kept as elements of the page one by one."""
_ENDS = {"cosine": ("awake", "asleep"), "inertia.cosine": ("awake", "asleep"), "inertia.step": ("awake", "asleep")}


def layers(view: LayerView, chosen: Sequence[str], shown: str, against: str = "") -> Drawing:
    """Draw the layer view."""
    import altair as alt

    most = max(len(metric.layers) for metric in view.metrics.values())
    step = max(7, min(30, 520 // most))
    lines = Lines(step)
    base = _panels(view, lines)
    first_line = base.transform_filter("datum.place === 0")
    parts = [
        *_spacing(first_line),
        *_cells(base),
        *_marks(base, step),
        *network(base, step),
        *_titles(first_line, view.methods, lines),
        *_rounds(first_line, lines),
        *_dots(base, view.methods, lines),
        *legend(first_line, lines),
        *signs(view, first_line, lines),
    ]
    chart = alt.layer(*parts).resolve_scale(color="independent", shape="independent", size="independent")
    chart = chart.add_params(*_parameters(view, chosen, shown, against, lines))
    cells = COLOURS * max(len(metric.layers) * len(metric.columns) for metric in view.metrics.values())
    chart = chart.properties(
        width="container",
        height=step * most,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        **({"usermeta": {"embedOptions": {"renderer": "canvas"}}} if cells > _CANVAS_FROM else {}),
    )
    return Drawing(chart, {"rows": view.rows()})


def _parameters(view: LayerView, chosen: Sequence[str], shown: str, against: str, lines: Lines) -> list[alt.Parameter]:
    import altair as alt

    facts = {
        name: {
            "kind": _KINDS.get(layer.kind, layer.kind),
            "short": layer.kind if layer.kind in _KINDS else "",
            "role": layer.role,
            "size": layer.parameters,
            "norm": layer.norm,
        }
        for name, layer in view.layers.items()
    }
    having = [
        f"(metric.has[{place}] && indexof(chosen, methods[{place}]) >= 0 && against !== methods[{place}])"
        for place in range(len(view.methods))
    ]
    told = any(layer.kind for layer in view.layers.values())
    longest = max(len(name) for metric in view.metrics.values() for name in metric.layers)
    values = {
        "chosen": list(chosen),
        "shown": shown,
        "against": against,
        "methods": list(view.methods),
        "facts": facts,
        "metrics": {name: _metric(metric, view.methods, view.layers) for name, metric in view.metrics.items()},
        "largest": max((layer.parameters or 0 for layer in view.layers.values()), default=0),
    }
    expressions = {
        "narrow": "width < 600",
        "metric": "metrics[shown]",
        "lines": "length(metric.layers)",
        "scale": "against === '' ? metric.scale : metric.difference",
        "tall": f"lines + {lines.head + lines.foot}",
        "names": f"min({6.6 * longest + 6}, width * (narrow ? 0.3 : 0.17))",
        "network": ("narrow ? 54 : 104" if told else "0"),
        "roles": ("narrow ? 0 : 16" if told else "0"),
        "left": "roles + names + network + 10",
        "dots": "narrow ? width - left - 12 : max(150, 0.19 * width)",
        "room": "width - left - (narrow ? 0 : dots + 34)",
        "most_across": "max(1, floor((room + 18) / (narrow ? 260 : 136)))",
        "panels": f"min({COLOURS}, {' + '.join(having)})",
        "across": "max(1, ceil(panels / ceil(panels / most_across)))",
        "all_lines": f"panels ? ceil(panels / across) * tall + {lines.below} : 1",
        "height": f"{lines.step} * all_lines",
        "panel": "(room + 18) / across - 18",
    }
    return [
        *(alt.param(name=name, value=value) for name, value in values.items()),
        *(alt.param(name=name, expr=expression) for name, expression in expressions.items()),
    ]


def _metric(metric: MetricView, methods: Sequence[str], facts: Mapping[str, LayerFacts]) -> dict[str, Any]:
    """What the chart must know of a metric beside its numbers."""
    weighted = [name for name in metric.layers if facts[name].role in ROLES]
    roles = [
        (name, facts[name].role != facts[before].role if before else True)
        for before, name in zip(["", *weighted], weighted, strict=False)
    ]
    ends = _ENDS.get(metric.name, ("", ""))
    rounds = [f"{first}" if first == last else f"{first} to {last}" for first, last in metric.columns]
    unit = f" ({metric.quantity.unit})" if metric.quantity.unit else ""
    return {
        "title": metric.quantity.title + unit,
        "layers": list(metric.layers),
        "begins": [name for name, role in roles if role],
        "rounds": rounds,
        "ticks": round_ticks(metric.columns),
        "has": [method in metric.tables for method in methods],
        "scale": _scale(metric.scale, *ends),
        "difference": _scale(metric.difference, "lower", "higher"),
    }


def _scale(scale: Scale, low: str, high: str) -> dict[str, Any]:
    return {
        "low": scale.low,
        "high": scale.high,
        "log": scale.logarithmic,
        "two": scale.diverging,
        "ticks": scale.ticks(),
        "ends": [low, high],
    }


def round_ticks(columns: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """What is written below a heat map, and where (0 at its left edge, 1 at its right): the first round, the last, and
    round numbers between them.

    >>> [tick["text"] for tick in round_ticks([(first, first + 1) for first in range(1, 100, 2)])]
    ['round 1', '50', '100']
    """
    first, last = columns[0][0], columns[-1][1]
    ends = [{"at": 0.0, "text": f"round {first}", "align": "left"}, {"at": 1.0, "text": str(last), "align": "right"}]
    if len(columns) < 3:
        return ends[: len(columns)]
    step = round_step((last - first) / 3)
    inner = []
    for number in np.arange(step * (first // step + 1), last, step):
        column = next(place for place, (_, end) in enumerate(columns) if end >= number)
        at = (column + 0.5) / len(columns)
        if 0.45 < at < 0.85:  # beside the first one, on a narrow page too
            inner.append({"at": round(at, 4), "text": f"{number:.0f}", "align": "center"})
    return [ends[0], *inner, ends[1]]


def _panels(view: LayerView, lines: Lines) -> alt.Chart:
    """The chosen rows, each with the place of its panel and its line in it."""
    import altair as alt

    other = f"against === '' ? -1 : indexof(methods, against) * {view.stride} + datum.key % {view.stride}"
    found = alt.LookupData(data=alt.NamedData("rows"), key="key", fields=["values", "last"])
    return (
        alt.Chart(alt.NamedData("rows"))
        .transform_filter("datum.metric === shown && indexof(chosen, datum.method) >= 0 && datum.method !== against")
        .transform_calculate(order="indexof(methods, datum.method)")
        .transform_window(rank="dense_rank()", sort=[alt.SortField("order")])
        .transform_filter(f"datum.rank <= {COLOURS}")
        .transform_calculate(
            place="indexof(metric.layers, datum.layer)",
            column="(datum.rank - 1) % across",
            begin="floor((datum.rank - 1) / across) * tall",
            begin_last="ceil(panels / across) * tall",
            start="left + datum.column * (panel + 18)",
            slot=f"datum.begin + {lines.head} + datum.place",
            other_key=other,
        )
        .transform_lookup(lookup="other_key", from_=found, as_=["others", "other_last"])
    )


def _spacing(first_line: alt.Chart) -> list[alt.Chart]:
    """Lines that are empty have a height too: the scale counts only what it sees."""
    return [
        first_line.transform_filter("datum.rank === 1")
        .transform_calculate(slots="sequence(0, all_lines)")
        .transform_flatten(["slots"])
        .mark_point(opacity=0, size=0)
        .encode(x=pixel("start"), y=line_of("slots"))
    ]


def _cells(base: alt.Chart) -> list[alt.Chart]:
    """The heat maps."""
    import altair as alt

    cells = (
        base.transform_calculate(at="sequence(0, length(datum.values))")
        .transform_calculate(known="isValid(datum.spreads)", spreads="datum.known ? datum.spreads : datum.at")
        .transform_flatten(["values", "spreads", "at"])
        .transform_filter("isValid(datum.values)")
        .transform_calculate(
            other="isValid(datum.others) ? datum.others[datum.at] : null",
            number=shown_number("datum.values", "datum.other"),
        )
        .transform_filter("isValid(datum.number)")
        .transform_calculate(
            shade=share_of_scale("datum.number"),
            left_edge="datum.start + panel * datum.at / length(metric.rounds)",
            right_edge="min(datum.left_edge + panel / length(metric.rounds) + 1, datum.start + panel)",
        )
    )
    tooltip = about_method(
        round="metric.rounds[datum.at]",
        value=f"{written('datum.values')} + (datum.known ? ' ± ' + format(datum.spreads, '.2~g') + ' over seeds' : '')",
        difference=DIFFERENCE,
    )
    x, x2, y = pixel("left_edge"), alt.X2("right_edge:Q"), line_of("slot")
    drawn = []
    for two, colours in (("scale.two", "ramp"), ("!scale.two", "heatmap")):
        colour = alt.Color("shade:Q").scale(domain=[0, 1], range=colours, clamp=True, interpolate="rgb").legend(None)
        rects = cells.transform_filter(two).mark_rect(height={"band": 0.94}, strokeWidth=0, tooltip=tooltip)
        drawn.append(rects.encode(x=x, x2=x2, y=y, color=colour))
    return drawn


def _marks(base: alt.Chart, step: int) -> list[alt.Chart]:
    """Rows that did not travel, layers that are masked, and frozen ones."""
    import altair as alt

    stays = base.transform_filter("datum.mark === 'stays at clients'").transform_calculate(
        end="datum.start + panel", middle="datum.start + panel / 2"
    )
    outline: dict[str, Any] = {"fillOpacity": 0, "strokeDash": [3, 3], "strokeWidth": 1, "height": {"band": 0.76}}
    rect = stays.mark_rect(**outline, stroke=alt.expr("'gray'"), style="faint")
    drawn = [rect.encode(x=pixel("start"), x2=alt.X2("end:Q"), y=line_of("slot"))]
    if step >= 11:
        words = stays.mark_text(fontSize=min(11, step - 2), style="faint", fontStyle="italic")
        drawn.append(words.encode(x=pixel("middle"), y=line_of("slot"), text="mark:N"))
    marked = base.transform_calculate(beside="datum.start + panel + 8")
    size = min(34, 1.6 * step)
    for words, shape, filled in (("weights masked", CHECKED, True), ("frozen", SNOWFLAKE, False)):
        points = marked.transform_filter(f"datum.mark === '{words}'").mark_point(
            shape=shape,
            filled=filled,
            size=size,
            strokeWidth=1.2,
            style="contrast",
            opacity=0.9,
            tooltip=about_method(),
        )
        drawn.append(points.encode(x=pixel("beside"), y=line_of("slot")))
    return drawn


def _titles(first_line: alt.Chart, methods: Sequence[str], lines: Lines) -> list[alt.Chart]:
    """The name of each method above its heat map, with the sign that it has among the dots."""
    import altair as alt

    titled = first_line.transform_calculate(
        above=f"datum.begin + {lines.title}", sign="datum.start + 5", words_start="datum.start + 15"
    )
    titled = titled.transform_calculate(written=fitting(methods, "datum.method", "panel - 16"))
    title = titled.mark_text(align="left", fontSize=12, fontWeight=600, style="contrast", limit=alt.expr("panel - 16"))
    return [
        titled.mark_point(filled=True, size=55, opacity=1).encode(
            x=pixel("sign"), y=line_of("above"), color=method_colour(methods), shape=method_shape(methods)
        ),
        title.encode(x=pixel("words_start"), y=line_of("above"), text="written:N", tooltip="method:N"),
    ]


def _rounds(first_line: alt.Chart, lines: Lines) -> list[alt.Chart]:
    """Some rounds below each heat map."""
    ticks = (
        first_line.transform_calculate(tick="metric.ticks")
        .transform_flatten(["tick"])
        .transform_filter("panel > 110 || datum.tick.align !== 'center'")
        .transform_calculate(
            below=f"datum.begin + {lines.head + lines.numbers} + lines",
            across="datum.start + panel * datum.tick.at",
            text="datum.tick.text",
        )
    )
    return [
        ticks.transform_filter(f"datum.tick.align === '{align}'")
        .mark_text(align=align, fontSize=11, style="faint")
        .encode(x=pixel("across"), y=line_of("below"), text="text:N")
        for align in ("left", "center", "right")
    ]


def _dots(base: alt.Chart, methods: Sequence[str], lines: Lines) -> list[alt.Chart]:
    """The last round: a dot for each layer and method; on the right, or below where there is no room."""
    import altair as alt

    placed = base.transform_calculate(
        number=shown_number("datum.last", "datum.other_last"),
        dots_start="narrow ? left : width - dots",
        dots_begin="narrow ? datum.begin_last : 0",
        line=f"datum.dots_begin + {lines.head} + datum.place",
    )
    share = "max(0, min(1, " + share_of_scale("datum.number") + "))"
    dots = placed.transform_filter("isValid(datum.number)").transform_calculate(
        across=f"datum.dots_start + dots * {share}",
    )
    spread = "(isValid(datum.last_spread) ? ' ± ' + format(datum.last_spread, '.2~g') + ' over seeds' : '')"
    tooltip = about_method(last_round=f"{written('datum.last')} + {spread}", difference=DIFFERENCE)
    one = placed.transform_filter("datum.rank === 1")
    guides = one.transform_calculate(dots_end="datum.dots_start + dots")
    ticks = (
        one.transform_filter("datum.place === 0")
        .transform_calculate(ticks="scale.ticks")
        .transform_flatten(["ticks"])
        .transform_calculate(
            across=f"datum.dots_start + dots * {share_of_scale('datum.ticks')}",
            below=f"datum.dots_begin + {lines.head + lines.numbers} + lines",
            text=written("datum.ticks"),
        )
    )
    heading = one.transform_filter("datum.place === 0").transform_calculate(
        above=f"datum.dots_begin + {lines.title}",
        words="against === '' ? 'after the last round' : 'last round, difference'",
    )
    names = one.transform_filter("narrow").transform_calculate(edge="roles + names")
    return [
        guides.mark_rule(strokeDash=[1, 3], style="muted", opacity=0.8).encode(
            x=pixel("dots_start"), x2=alt.X2("dots_end:Q"), y=line_of("line")
        ),
        ticks.mark_text(fontSize=11, style="faint").encode(x=pixel("across"), y=line_of("below"), text="text:N"),
        heading.mark_text(align="left", fontSize=12, fontWeight=600, style="contrast", limit=alt.expr("dots")).encode(
            x=pixel("dots_start"), y=line_of("above"), text="words:N"
        ),
        names.mark_text(
            align="right", fontSize=min(12, lines.step + 1), limit=alt.expr("names"), dir="rtl", style="contrast"
        ).encode(x=pixel("edge"), y=line_of("line"), text="layer:N"),
        dots.mark_point(filled=True, size=max(24, min(64, 3 * lines.step)), opacity=0.95, tooltip=tooltip).encode(
            x=pixel("across"),
            y=line_of("line"),
            color=method_colour(methods),
            shape=method_shape(methods),
        ),
    ]
