"""The charts of single clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedstrata.report.charts import (
    COLOURS,
    IN_COLOUR,
    IN_GREY,
    LABEL_LIMIT,
    TICKS,
    Drawing,
    chosen_methods,
    method_colour,
    sized,
)
from fedstrata.report.series import ClientRows


def clients(rows: ClientRows, methods: Sequence[str], chosen: Sequence[str], shown: str) -> Drawing:
    """Every client as a point, the middle half of the clients as a bar, the median as a stroke; one line per method."""
    import altair as alt

    y = alt.Y("method:N").title(None).sort(list(methods)).axis(labelLimit=LABEL_LIMIT)
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
