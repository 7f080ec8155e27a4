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
from fedstrata.report.layer_scales import Scale, round_step
from fedstrata.report.layer_view import ROLES, LayerFacts, LayerView, MetricView

if TYPE_CHECKING:
    import altair as alt

_KINDS = {"conv": "convolution", "linear": "linear", "attention": "attention", "embedding": "embedding", "norm": "norm"}
_SNOWFLAKE = "M-1,0L1,0M-0.5,-0.87L0.5,0.87M-0.5,0.87L0.5,-0.87"
_STRIPE = "M-1.8,-0.35H1.8V0.35H-1.8Z"
_CHECKED = "M-1,-1H0V0H1V1H0V0H-1Z"
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
_CANVAS_FROM = 9_000
"""From how many cells at once on they are painted, not kept as elements of the page one by one."""
_ENDS = {"cosine": ("awake", "asleep"), "inertia.cosine": ("awake", "asleep"), "inertia.step": ("awake", "asleep")}


def layers(view: LayerView, chosen: Sequence[str], shown: str, against: str = "") -> Drawing:
    """Draw the layer view."""
    import altair as alt

    most = max(len(metric.layers) for metric in view.metrics.values())
    step = max(7, min(30, 520 // most))
    head, foot = -(-24 // step), -(-28 // step)
    base = _panels(view, step, head, foot)
    first_line = base.transform_filter("datum.place === 0")
    parts = [
        *_spacing(first_line, head, foot),
        *_cells(base),
        *_marks(base, step),
        *_network(base, step),
        *_titles(first_line, view.methods, head),
        *_rounds(first_line, head),
        *_dots(base, view.methods, head, step),
        *_legend(first_line, head, foot),
        *_signs(view, first_line),
    ]
    chart = alt.layer(*parts).resolve_scale(color="independent", shape="independent", size="independent")
    chart = chart.add_params(*_parameters(view, chosen, shown, against, head, foot))
    cells = COLOURS * max(len(metric.layers) * len(metric.columns) for metric in view.metrics.values())
    chart = chart.properties(
        width="container",
        height=alt.Step(step),
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        **({"usermeta": {"embedOptions": {"renderer": "canvas"}}} if cells > _CANVAS_FROM else {}),
    )
    return Drawing(chart, {"rows": view.rows()})


def _parameters(
    view: LayerView, chosen: Sequence[str], shown: str, against: str, head: int, foot: int
) -> list[alt.Parameter]:
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
    told = any(layer.kind for layer in view.layers.values())
    longest = max(len(name) for metric in view.metrics.values() for name in metric.layers)
    values = {
        "chosen": list(chosen),
        "shown": shown,
        "against": against,
        "methods": list(view.methods),
        "facts": facts,
        "metrics": {name: _metric(metric, view.layers) for name, metric in view.metrics.items()},
        "largest": max((layer.parameters or 0 for layer in view.layers.values()), default=0),
    }
    expressions = {
        "narrow": "width < 600",
        "metric": "metrics[shown]",
        "lines": "length(metric.layers)",
        "scale": "against === '' ? metric.scale : metric.difference",
        "tall": f"lines + {head + foot}",
        "names": f"min({6.6 * longest + 6}, width * (narrow ? 0.3 : 0.17))",
        "network": ("narrow ? 54 : 104" if told else "0"),
        "roles": ("narrow ? 0 : 16" if told else "0"),
        "left": "roles + names + network + 10",
        "dots": "narrow ? width - left - 12 : max(150, 0.19 * width)",
        "room": "width - left - (narrow ? 0 : dots + 34)",
        "most_across": "max(1, floor((room + 18) / (narrow ? 260 : 158)))",
        "title_room": f"(room + 18) / min(most_across, max(1, min({COLOURS}, length(chosen)))) - 34",
    }
    return [
        *(alt.param(name=name, value=value) for name, value in values.items()),
        *(alt.param(name=name, expr=expression) for name, expression in expressions.items()),
    ]


def _metric(metric: MetricView, facts: Mapping[str, LayerFacts]) -> dict[str, Any]:
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
        if 0.25 < at < 0.85:
            inner.append({"at": round(at, 4), "text": f"{number:.0f}", "align": "center"})
    return [ends[0], *inner, ends[1]]


def _panels(view: LayerView, step: int, head: int, foot: int) -> alt.Chart:
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
        .transform_joinaggregate(panels="max(rank)")
        .transform_calculate(
            place="indexof(metric.layers, datum.layer)",
            across="ceil(datum.panels / ceil(datum.panels / most_across))",
            column="(datum.rank - 1) % datum.across",
            begin="floor((datum.rank - 1) / datum.across) * tall",
            begin_last="ceil(datum.panels / datum.across) * tall",
            panel="(room + 18) / datum.across - 18",
            start="left + datum.column * (datum.panel + 18)",
            slot=f"datum.begin + {head} + datum.place",
            other_key=other,
        )
        .transform_lookup(lookup="other_key", from_=found, as_=["others", "other_last"])
    )


def _spacing(first_line: alt.Chart, head: int, foot: int) -> list[alt.Chart]:
    """Lines that are empty have a height too: the scale counts only what it sees."""
    every = "sequence(0, datum.begin_last + (narrow ? tall + 1 : 0) + 3)"
    return [
        first_line.transform_filter("datum.rank === 1")
        .transform_calculate(slots=every)
        .transform_flatten(["slots"])
        .mark_point(opacity=0, size=0)
        .encode(x=_pixel("start"), y=_line("slots"))
    ]


def _cells(base: alt.Chart) -> list[alt.Chart]:
    """The heat maps."""
    import altair as alt

    cells = (
        base.transform_calculate(at="sequence(0, length(datum.values))")
        .transform_calculate(spreads="isValid(datum.spreads) ? datum.spreads : datum.values")
        .transform_flatten(["values", "spreads", "at"])
        .transform_filter("isValid(datum.values)")
        .transform_calculate(
            other="isValid(datum.others) ? datum.others[datum.at] : null",
            number=_shown_number("datum.values", "datum.other"),
        )
        .transform_filter("isValid(datum.number)")
        .transform_calculate(
            shade=_share("datum.number"),
            left_edge="datum.start + datum.panel * datum.at / length(metric.rounds)",
            right_edge="min(datum.left_edge + datum.panel / length(metric.rounds) + 1, datum.start + datum.panel)",
            **_about_layer(),
            round="metric.rounds[datum.at]",
            value=_written("datum.values"),
            difference="against === '' ? '' : format(datum.number, '+.3~g')",
            deviation="length(metric.rounds) > 0 && datum.spread_known ? '± ' + format(datum.spreads, '.2~g') : ''",
        )
    )
    tooltip = [
        *_tooltips(),
        alt.Tooltip("round:N", title="round"),
        alt.Tooltip("value:N", title="value, mean over seeds"),
        alt.Tooltip("deviation:N", title="over seeds"),
        alt.Tooltip("difference:N", title="difference"),
    ]
    x, x2, y = _pixel("left_edge"), alt.X2("right_edge:Q"), _line("slot")
    drawn = []
    for two, colours in (("scale.two", "ramp"), ("!scale.two", "heatmap")):
        colour = alt.Color("shade:Q").scale(domain=[0, 1], range=colours, clamp=True, interpolate="rgb").legend(None)
        rects = cells.transform_filter(two).mark_rect(height={"band": 0.94}, strokeWidth=0)
        drawn.append(rects.encode(x=x, x2=x2, y=y, color=colour, tooltip=tooltip))
    return drawn


def _marks(base: alt.Chart, step: int) -> list[alt.Chart]:
    """Rows that did not travel, layers that are masked, and frozen ones."""
    import altair as alt

    stays = base.transform_filter("datum.mark === 'stays at clients'").transform_calculate(
        end="datum.start + datum.panel", middle="datum.start + datum.panel / 2", **_about_layer()
    )
    outline: dict[str, Any] = {"fillOpacity": 0, "strokeDash": [3, 3], "strokeWidth": 1, "height": {"band": 0.76}}
    rect = stays.mark_rect(**outline, stroke=alt.expr("'gray'"), style="faint")
    drawn = [rect.encode(x=_pixel("start"), x2=alt.X2("end:Q"), y=_line("slot"), tooltip=_tooltips())]
    if step >= 11:
        words = stays.mark_text(fontSize=min(11, step - 2), style="faint", fontStyle="italic")
        drawn.append(words.encode(x=_pixel("middle"), y=_line("slot"), text="mark:N"))
    marked = base.transform_calculate(beside="datum.start + datum.panel + 8", **_about_layer())
    size = min(34, 1.6 * step)
    for words, shape, filled in (("weights masked", _CHECKED, True), ("frozen", _SNOWFLAKE, False)):
        points = marked.transform_filter(f"datum.mark === '{words}'").mark_point(
            shape=shape, filled=filled, size=size, strokeWidth=1.2, style="contrast", opacity=0.9
        )
        drawn.append(points.encode(x=_pixel("beside"), y=_line("slot"), tooltip=_tooltips()))
    return drawn


def _network(base: alt.Chart, step: int) -> list[alt.Chart]:
    """The layers as blocks along a line, with role, kind and size; once for each line of panels."""
    import altair as alt

    every = -(-10 // step)
    rows = base.transform_filter("datum.column === 0").transform_calculate(
        **_about_layer(),
        name_edge="roles + names",
        spine="roles + names + 8 + (narrow ? 40 : 62) / 2",
        half="(narrow ? 20 : 31) * (0.25 + 0.75 * max(0, log(max(10, facts[datum.layer].size || 10)) - log(10))"
        " / max(0.1, log(max(11, largest)) - log(10)))",
        block_start="datum.spine - datum.half",
        block_end="datum.spine + datum.half",
        size_edge="roles + names + 8 + 66",
        count="facts[datum.layer].size ? format(facts[datum.layer].size, '.2~s') : ''",
        short="facts[datum.layer].short",
        begins="indexof(metric.begins, datum.layer) >= 0",
    )
    tooltip = _tooltips(method=False)
    font = min(12, step + 1)
    names = rows.transform_filter(f"datum.place % {every} === 0").mark_text(
        align="right", fontSize=font, limit=alt.expr("names"), dir="rtl", style="contrast"
    )
    drawn = [names.encode(x=_pixel("name_edge"), y=_line("slot"), text="layer:N", tooltip=tooltip)]
    known = rows.transform_filter("network > 0 && isValid(facts[datum.layer].size)")
    spine = known.transform_filter("datum.place > 0").mark_rect(
        width=2, height=0.26 * step, yOffset=-0.5 * step, style="muted"
    )
    drawn.append(spine.encode(x=_pixel("spine"), y=_line("slot")))
    block: dict[str, Any] = {"cornerRadius": 3, "height": {"band": 0.74}}
    across = {"x": _pixel("block_start"), "x2": alt.X2("block_end:Q"), "y": _line("slot")}
    for kinds, style, opacity in (
        ("indexof(['linear', 'embedding'], datum.short) >= 0", "accent", 0.4),
        ("datum.short === 'norm'", "muted", 0.5),
        ("indexof(['linear', 'embedding', 'norm'], datum.short) < 0", "muted", 0.75),
    ):
        drawn.append(known.transform_filter(kinds).mark_rect(**block, style=style, opacity=opacity).encode(**across, tooltip=tooltip))
    normed = known.transform_filter("facts[datum.layer].norm")
    stripe = normed.mark_rect(height=max(1.5, 0.09 * step), yOffset=0.43 * step, style="accent", opacity=0.85)
    drawn.append(stripe.encode(**across, tooltip=tooltip))
    if step >= 12:
        inside = known.transform_filter("datum.half >= 17").mark_text(fontSize=9, style="contrast")
        drawn.append(inside.encode(x=_pixel("spine"), y=_line("slot"), text="short:N"))
        sizes = known.transform_filter("!narrow").mark_text(fontSize=10, align="left", style="faint")
        drawn.append(sizes.encode(x=_pixel("size_edge"), y=_line("slot"), text="count:N"))
        sided = rows.transform_filter("roles > 0 && datum.role").transform_calculate(side="roles - 1")
        for begins, height, offset in (("!datum.begins", 1.0, 0.0), ("datum.begins", 0.84, 0.08)):
            bar = sided.transform_filter(begins).mark_rect(
                width=1.5, height={"band": height}, yOffset=offset * step, style="muted"
            )
            drawn.append(bar.encode(x=_pixel("side"), y=_line("slot")))
        roles = rows.transform_filter("roles > 0 && datum.begins").mark_text(
            angle=270, fontSize=10, align="right", baseline="top", style="faint", dy=0
        )
        drawn.append(roles.encode(x=alt.XValue(0), y=_line("slot"), text="role:N"))
    return drawn


def _titles(first_line: alt.Chart, methods: Sequence[str], head: int) -> list[alt.Chart]:
    """The name of each method above its heat map, with the sign that it has among the dots."""
    import altair as alt

    titled = first_line.transform_calculate(
        above=f"datum.begin + {head - 1}", sign="datum.start + 5", words_start="datum.start + 15"
    )
    title = titled.mark_text(
        align="left", fontSize=12, fontWeight=600, style="contrast", limit=alt.expr("title_room")
    )
    return [
        titled.mark_point(filled=True, size=55, opacity=1).encode(
            x=_pixel("sign"), y=_line("above"), color=_colour(methods), shape=_shape(methods)
        ),
        title.encode(x=_pixel("words_start"), y=_line("above"), text="method:N", tooltip="method:N"),
    ]


def _rounds(first_line: alt.Chart, head: int) -> list[alt.Chart]:
    """Some rounds below each heat map."""
    ticks = (
        first_line.transform_calculate(tick="metric.ticks")
        .transform_flatten(["tick"])
        .transform_filter("datum.panel > 110 || datum.tick.align !== 'center'")
        .transform_calculate(
            below=f"datum.begin + {head} + lines",
            across="datum.start + datum.panel * datum.tick.at",
            text="datum.tick.text",
        )
    )
    return [
        ticks.transform_filter(f"datum.tick.align === '{align}'")
        .mark_text(align=align, fontSize=11, style="faint")
        .encode(x=_pixel("across"), y=_line("below"), text="text:N")
        for align in ("left", "center", "right")
    ]


def _dots(base: alt.Chart, methods: Sequence[str], head: int, step: int) -> list[alt.Chart]:
    """The last round: a dot for each layer and method; on the right, or below where there is no room."""
    import altair as alt

    placed = base.transform_calculate(
        number=_shown_number("datum.last", "datum.other_last"),
        dots_start="narrow ? left : width - dots",
        dots_begin="narrow ? datum.begin_last : 0",
        line=f"datum.dots_begin + {head} + datum.place",
    )
    share = "max(0, min(1, " + _share("datum.number") + "))"
    dots = (
        placed.transform_filter("isValid(datum.number)")
        .transform_calculate(
            across=f"datum.dots_start + dots * {share}",
            **_about_layer(),
            value=_written("datum.last"),
            deviation="isValid(datum.last_spread) ? '± ' + format(datum.last_spread, '.2~g') : ''",
            difference="against === '' ? '' : format(datum.number, '+.3~g')",
        )
    )
    tooltip = [
        *_tooltips(),
        alt.Tooltip("value:N", title="last round"),
        alt.Tooltip("deviation:N", title="over seeds"),
        alt.Tooltip("difference:N", title="difference"),
    ]
    one = placed.transform_filter("datum.rank === 1")
    guides = one.transform_calculate(dots_end="datum.dots_start + dots")
    ticks = (
        one.transform_filter("datum.place === 0")
        .transform_calculate(ticks="scale.ticks")
        .transform_flatten(["ticks"])
        .transform_calculate(
            across=f"datum.dots_start + dots * {_share('datum.ticks')}",
            below=f"datum.dots_begin + {head} + lines",
            above=f"datum.dots_begin + {head - 1}",
            text=_written("datum.ticks"),
        )
    )
    heading = one.transform_filter("datum.place === 0").transform_calculate(
        above=f"datum.dots_begin + {head - 1}",
        words="against === '' ? 'after the last round' : 'last round, difference to ' + against",
    )
    names = one.transform_filter("narrow").transform_calculate(edge="roles + names")
    return [
        guides.mark_rule(strokeDash=[1, 3], style="muted", opacity=0.8).encode(
            x=_pixel("dots_start"), x2=alt.X2("dots_end:Q"), y=_line("line")
        ),
        ticks.mark_text(fontSize=11, style="faint").encode(x=_pixel("across"), y=_line("below"), text="text:N"),
        heading.mark_text(align="left", fontSize=12, fontWeight=600, style="contrast", limit=alt.expr("dots")).encode(
            x=_pixel("dots_start"), y=_line("above"), text="words:N"
        ),
        names.mark_text(align="right", fontSize=min(12, step + 1), limit=alt.expr("names"), dir="rtl", style="contrast")
        .encode(x=_pixel("edge"), y=_line("line"), text="layer:N"),
        dots.mark_point(filled=True, size=max(24, min(64, 3 * step)), opacity=0.95).encode(
            x=_pixel("across"), y=_line("line"), color=_colour(methods), shape=_shape(methods), tooltip=tooltip
        ),
    ]


def _legend(first_line: alt.Chart, head: int, foot: int) -> list[alt.Chart]:
    """The scale of colours, with its numbers and what its ends mean, and what the signs mean."""
    import altair as alt

    one = first_line.transform_filter("datum.rank === 1").transform_calculate(
        top="datum.begin_last + (narrow ? tall : 0)", long="min(320, width - (narrow ? 24 : left))", from_x="narrow ? 12 : left"
    )
    shades = (
        one.transform_calculate(shade="sequence(0, 64)")
        .transform_flatten(["shade"])
        .transform_calculate(
            line="datum.top + 1",
            left_edge="datum.from_x + datum.long * datum.shade / 64",
            right_edge="min(datum.left_edge + datum.long / 64 + 1, datum.from_x + datum.long)",
            share="(datum.shade + 0.5) / 64",
        )
    )
    numbers = (
        one.transform_calculate(ticks="scale.ticks")
        .transform_flatten(["ticks"])
        .transform_calculate(
            line="datum.top + 2",
            across=f"datum.from_x + datum.long * {_share('datum.ticks')}",
            text=_written("datum.ticks"),
        )
    )
    heading = one.transform_calculate(
        line="datum.top",
        words="(against === '' ? metric.title : metric.title + ': difference to ' + against)"
        " + (scale.log ? ', logarithmic' : '')",
    )
    drawn = []
    for two, colours in (("scale.two", "ramp"), ("!scale.two", "heatmap")):
        colour = alt.Color("share:Q").scale(domain=[0, 1], range=colours, interpolate="rgb").legend(None)
        rects = shades.transform_filter(two).mark_rect(height={"band": 0.7}, strokeWidth=0)
        drawn.append(
            rects.encode(x=_pixel("left_edge"), x2=alt.X2("right_edge:Q"), y=_line("line"), color=colour)
        )
    for place, align, end in ((0, "left", "datum.from_x + 6"), (1, "right", "datum.from_x + datum.long - 6")):
        meaning = one.transform_calculate(line="datum.top + 1", across=end, text=f"scale.ends[{place}]")
        words = meaning.mark_text(align=align, fontSize=11, fontWeight=600, style="inverse")
        drawn.append(words.encode(x=_pixel("across"), y=_line("line"), text="text:N"))
    drawn.append(numbers.mark_text(fontSize=11, style="faint").encode(x=_pixel("across"), y=_line("line"), text="text:N"))
    drawn.append(
        heading.mark_text(align="left", fontSize=12, style="contrast").encode(
            x=_pixel("from_x"), y=_line("line"), text="words:N"
        )
    )
    return drawn


def _signs(view: LayerView, first_line: alt.Chart) -> list[alt.Chart]:
    """What the signs beside rows mean, as far as there are any."""
    signs = (
        ("weights masked", _CHECKED, True, view.masked),
        ("frozen", _SNOWFLAKE, False, view.frozen),
        ("norm on its output", _STRIPE, True, {"": [name for name, layer in view.layers.items() if layer.norm]}),
    )
    drawn = []
    for number, (words, shape, filled, marked) in enumerate(sign for sign in signs if any(sign[3].values())):
        one = first_line.transform_filter("datum.rank === 1").transform_calculate(
            line="datum.begin_last + (narrow ? tall + 3 : 1)",
            at=f"(narrow ? 10 : left + min(320, width - left) + 60) + {130 * number}",
            text_at="datum.at + 10",
            words=f"'{words}'",
        )
        style = "accent" if shape == _STRIPE else "contrast"
        sign = one.mark_point(shape=shape, filled=filled, size=40, strokeWidth=1.2, style=style, opacity=0.9)
        drawn.append(sign.encode(x=_pixel("at"), y=_line("line")))
        text = one.mark_text(align="left", fontSize=11, style="faint")
        drawn.append(text.encode(x=_pixel("text_at"), y=_line("line"), text="words:N"))
    return drawn


def _about_layer() -> dict[str, str]:
    return {
        "role": "facts[datum.layer].role",
        "kind": "facts[datum.layer].kind + (facts[datum.layer].norm ? ', with a norm' : '')",
        "parameters": "facts[datum.layer].size === null ? '' : format(facts[datum.layer].size, ',')",
        "spread_known": "isValid(datum.last_spread)",
    }


def _tooltips(method: bool = True) -> list[alt.Tooltip]:
    import altair as alt

    shown = ["method"] if method else []
    shown += ["layer", "role", "kind", "parameters", *(["mark"] if method else [])]
    return [alt.Tooltip(f"{name}:N", title=name) for name in shown]


def _shown_number(value: str, other: str) -> str:
    """The number itself, or its difference to another method; of logarithmic scales, in powers of ten."""
    difference = (
        f"metric.scale.log ? (log(max({value}, metric.scale.low)) - log(max({other}, metric.scale.low))) / LN10"
        f" : {value} - {other}"
    )
    return f"against === '' ? {value} : (isValid({value}) && isValid({other}) ? ({difference}) : null)"


def _share(number: str) -> str:
    """Where on the scale a number lies, from 0 to 1."""
    return (
        f"(scale.log ? (log(max({number}, scale.low)) - log(scale.low)) / (log(scale.high) - log(scale.low))"
        f" : ({number} - scale.low) / (scale.high - scale.low))"
    )


def _written(number: str) -> str:
    return f"format({number}, '.3~g')"


def _pixel(name: str) -> alt.X:
    import altair as alt

    return alt.X(f"{name}:Q", scale=None, axis=None)


def _line(name: str) -> alt.Y:
    import altair as alt

    return alt.Y(f"{name}:O", axis=None, scale=alt.Scale(paddingInner=0, paddingOuter=0))


def _colour(methods: Sequence[str]) -> alt.Color:
    import altair as alt

    return alt.Color("order:N").scale(domain=list(range(len(methods))), range="category").legend(None)


def _shape(methods: Sequence[str]) -> alt.Shape:
    import altair as alt

    shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(methods))]
    return alt.Shape("order:N").scale(domain=list(range(len(methods))), range=shapes).legend(None)
