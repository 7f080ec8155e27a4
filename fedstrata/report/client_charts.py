"""The charts of single clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedstrata.report.charts import (
    COLOURS,
    IN_COLOUR,
    IN_GREY,
    LABEL_LIMIT,
    NUMBERS,
    TICKS,
    Drawing,
    chosen_methods,
    method_colour,
    name_axis,
    sized,
    spread_of_seeds,
)
from fedstrata.report.series import ClientRows, Rows
from fedstrata.report.similarity import Similarities


def clients(rows: ClientRows, methods: Sequence[str], chosen: Sequence[str], shown: str) -> Drawing:
    """Every client as a point, the middle half of the clients as a bar, the median as a stroke; one line per method."""
    import altair as alt

    y = alt.Y("method:N").title(None).sort(list(methods)).axis(**name_axis(methods))
    colour = method_colour(methods)
    points = alt.Chart(alt.NamedData("points")).transform_filter("datum.metric === shown")
    boxes = alt.Chart(alt.NamedData("boxes")).transform_filter("datum.metric === shown")
    offset = alt.YOffset("offset:Q").scale(domain=[-0.35, 1.35])
    value = (
        alt.X("value:Q").title("accuracy").axis(grid=True, format="~%", tickCount=TICKS).scale(zero=False, nice=True)
    )
    about_client = [
        alt.Tooltip("method:N", title="method"),
        alt.Tooltip("client:N", title="client"),
        alt.Tooltip("seed:N", title="seed"),
        alt.Tooltip("value:Q", title="accuracy", format=".1%"),
    ]
    about_box = [
        alt.Tooltip("method:N", title="method"),
        alt.Tooltip("clients:Q", title="clients, over all seeds"),
        alt.Tooltip("mean:Q", title="mean", format=".1%"),
        alt.Tooltip("low:Q", title="lower quartile", format=".1%"),
        alt.Tooltip("median:Q", title="median", format=".1%"),
        alt.Tooltip("high:Q", title="upper quartile", format=".1%"),
    ]
    dot: dict[str, Any] = {"size": 22, "opacity": 0.5}
    in_colour, in_grey = points.transform_filter(IN_COLOUR), points.transform_filter(IN_GREY)
    step = 40 if len(methods) <= COLOURS else 22
    bar: dict[str, Any] = {"size": 0.66 * step, "opacity": 0.28, "cornerRadius": 3}
    low, high = alt.X("low:Q"), alt.X2("high:Q")
    layers = alt.layer(
        boxes.transform_filter(IN_GREY).mark_bar(**bar, style="muted").encode(x=low, x2=high, y=y, tooltip=about_box),
        boxes.transform_filter(IN_COLOUR).mark_bar(**bar).encode(x=low, x2=high, y=y, color=colour, tooltip=about_box),
        in_grey.mark_circle(**dot, style="muted").encode(x=value, y=y, yOffset=offset, tooltip=about_client),
        in_colour.mark_circle(**dot).encode(x=value, y=y, yOffset=offset, color=colour, tooltip=about_client),
        boxes.mark_tick(thickness=2, size=0.66 * step, style="contrast").encode(x=alt.X("median:Q"), y=y),
    )
    params = (chosen_methods(chosen), alt.param(name="shown", value=shown))
    return Drawing(sized(layers.add_params(*params), step * len(methods)), {"points": rows.points, "boxes": rows.boxes})


def table(rows: Rows, methods: Mapping[str, str], split: str, columns: int) -> Drawing:
    """A heat map with the clients side by side in a chosen order: a row for each method, and above them their data.

    ``split`` chooses the clients, ``sort`` the column that orders them, ``against`` the column of the method over which
    gains are shown, or nothing for accuracies. Where there are more clients than ``columns``, neighbours share one.
    """
    import altair as alt

    reference = "(against === '' ? 0 : datum[against])"
    order = f"sort === 'client' || sort === 'size' || sort === 'effective' ? datum[sort] : datum[sort] - {reference}"
    base = (
        alt.Chart(alt.NamedData("rows"))
        .transform_filter("datum.split === split")
        .transform_calculate(order=order)
        .transform_window(rank="row_number()", sort=[alt.SortField("order"), alt.SortField("client")])
        .transform_joinaggregate(total="count()")
        .transform_calculate(place=f"floor((datum.rank - 1) * min(1, {columns} / datum.total))")
    )
    samples, classes = "training samples", "effective classes"
    names = [samples, classes, " ", *methods.values()]
    x = alt.X("place:O").title("clients, sorted").axis(labels=False, ticks=False)
    y = alt.Y("line:N").title(None).scale(domain=names).sort(names)
    y = y.axis(**name_axis(list(methods.values())))
    one = "'client ' + datum.first"
    groups: dict[str, Any] = {
        "clients": "count()",
        "first": "min(client)",
        "size": "mean(size)",
        "effective": "mean(effective)",
    }
    if any("name" in row for row in rows):
        groups["name"] = "min(name)"
        one = f"(isValid(datum.name) ? datum.name : {one})"
    who = f"datum.clients === 1 ? {one} : datum.clients + ' clients, ' + datum.first + ' and others'"
    about = [
        alt.Tooltip("who:N", title="who"),
        alt.Tooltip("line:N", title="row"),
        alt.Tooltip("value:Q", title="accuracy or gain", format=".1%"),
        alt.Tooltip("size:Q", title=samples, format=",.0f"),
        alt.Tooltip("effective:Q", title=classes, format=".1f"),
    ]
    label = f"({json.dumps(methods)})[datum.column]"
    cells = (
        base.transform_fold(list(methods), as_=["column", "own"])
        .transform_filter(f"isValid(datum.own) && isValid({reference})")
        .transform_calculate(line=label, gain=f"datum.own - {reference}")
        .transform_aggregate(value="mean(gain)", groupby=["place", "line"], **groups)
        .transform_calculate(who=who)
    )
    hidden = {"accuracy": "against === '' ? 1 : 0", "gain": "against === '' ? 0 : 1"}

    def legend(kind: str) -> alt.Legend:
        seen = alt.expr(hidden[kind])
        return alt.Legend(
            title=kind,
            orient="bottom",
            format="~%",
            gradientLength=160,
            gradientOpacity=seen,
            labelOpacity=seen,
            titleOpacity=seen,
        )

    shade = alt.Color("value:Q").scale(zero=False, nice=True).legend(legend("accuracy"))
    turning = alt.Color("value:Q").scale(domainMid=0, range=_TURNING, interpolate="rgb").legend(legend("gain"))
    plain, gained = (cells.transform_filter(f"against {sign} ''").mark_rect() for sign in ("===", "!=="))
    strength = alt.Opacity("share:Q").scale(zero=True, range=[0.03, 0.85]).legend(None)
    about_data = [about[0], about[3], about[4]]
    data = [
        base.transform_aggregate(groupby=["place"], **groups)
        .transform_calculate(line=repr(line), share=f"datum.{column}", who=who)
        .mark_rect(style="contrast")
        .encode(x=x, y=y, opacity=strength, tooltip=about_data)
        for line, column in ((samples, "size"), (classes, "effective"))
    ]
    chart = alt.layer(
        *data,
        plain.encode(x=x, y=y, color=shade, tooltip=about),
        gained.encode(x=x, y=y, color=turning, tooltip=about),
    ).resolve_scale(color="independent", opacity="independent")
    params = [alt.param(name=name, value=value) for name, value in _TABLE_BEGINS.items()]
    params.append(alt.param(name="split", value=split))
    step = 26 if len(methods) <= COLOURS else 16
    return Drawing(sized(chart.add_params(*params), step * len(names)), {"rows": rows})


_TURNING: Literal["ramp"] = "ramp"
"""The colours of a scale with a turning point, by the name under which a theme can set them."""
_TABLE_BEGINS = {"sort": "average", "against": ""}


def similarity(found: Similarities) -> Drawing:
    """A matrix of one method at a time (parameter ``of``), whose clients are ordered by clustering."""
    import altair as alt

    base = alt.Chart(alt.NamedData("rows")).transform_filter("datum.method === of")
    plain = alt.Axis(labels=False, ticks=False)
    about = [
        alt.Tooltip("client:N", title="client"),
        alt.Tooltip("other:N", title="and client"),
        alt.Tooltip("value:Q", title="cosine", format=".3f"),
    ]
    colour = alt.Color("value:Q").scale(domain=[-1, 1], domainMid=0, range=_TURNING, interpolate="rgb")
    marks = base.mark_rect().encode(
        x=alt.X("column:O").title("clients, by clustering").axis(plain),
        y=alt.Y("row:O").title(None).axis(plain),
        color=colour.legend(title="cosine", orient="bottom", gradientLength=160),
        tooltip=about,
    )
    chart = sized(marks.add_params(alt.param(name="of", value=found.names[0])), 420)
    return Drawing(chart, {"rows": found.rows})


def by_class(rows: Rows, methods: Sequence[str], chosen: Sequence[str], classes: Sequence[str], shown: str) -> Drawing:
    """A line for each class, a point for each method, for one metric at a time (parameter ``shown``)."""
    import altair as alt

    base = alt.Chart(alt.NamedData("rows")).transform_filter("datum.metric === shown")
    y = alt.Y("class:N").title(None).sort(list(classes)).scale(domain=list(classes))
    y = y.axis(labelLimit=LABEL_LIMIT, grid=True)
    follows_the_menu: Any = {"signal": "shown"}  # Vega-Lite hands it on to Vega; its own titles of axes are texts only
    x = alt.X("value:Q").title(follows_the_menu).scale(zero=False, nice=True)
    x = x.axis(grid=False, tickCount=TICKS, format=NUMBERS)
    about = [
        alt.Tooltip("class:N", title="class"),
        alt.Tooltip("method:N", title="method"),
        alt.Tooltip("value:Q", title="mean over seeds", format=".3f"),
        *spread_of_seeds(rows, ".3f"),
    ]
    spans = base.transform_filter(IN_COLOUR).transform_aggregate(low="min(value)", high="max(value)", groupby=["class"])
    chart = alt.layer(
        spans.mark_rule(strokeWidth=1, style="muted").encode(y=y, x=alt.X("low:Q"), x2=alt.X2("high:Q")),
        base.transform_filter(IN_GREY).mark_circle(size=30, style="muted", opacity=0.6).encode(x=x, y=y, tooltip=about),
        base.transform_filter(IN_COLOUR)
        .mark_circle(size=80, opacity=0.9)
        .encode(x=x, y=y, color=method_colour(methods), tooltip=about),
    )
    params = (chosen_methods(chosen), alt.param(name="shown", value=shown))
    step = 22 if len(classes) <= 30 else 13
    return Drawing(sized(chart.add_params(*params), step * len(classes)), {"rows": rows})
