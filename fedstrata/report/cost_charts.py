"""The charts of what accuracy costs: the Pareto front, and the way there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fedstrata.report.charts import (
    IN_COLOUR,
    IN_GREY,
    TICKS,
    Drawing,
    bytes_in_words,
    chosen_methods,
    method_colour,
    method_lines,
    number_axis,
    sized,
    spread_of_seeds,
)
from fedstrata.report.pareto import Pareto
from fedstrata.report.series import Rows

_COST = f"(measure === 'seconds' ? format({{0}}, ',~r') + '\u00a0s' : {bytes_in_words('{0}')})"


def front(rows: Pareto, methods: Sequence[str], chosen: Sequence[str]) -> Drawing:
    """A point for each method, the front of those that no other beats as steps, all others hollow.

    The parameters ``measure`` and ``point`` choose what the accuracy is set against, and which round it is of.
    """
    import altair as alt

    shown = "datum.measure === measure && datum.point === point"
    points = alt.Chart(alt.NamedData("points")).transform_filter(shown)
    steps = alt.Chart(alt.NamedData("front")).transform_filter(shown)
    axes = {name: {"log": axis.logarithmic, "zero": axis.zero} for name, axis in rows.axes.items()}
    axis_of = f"({json.dumps(axes)})[measure]"
    ticks = {name: list(axis.ticks) for name, axis in rows.axes.items()}
    powers = _COST.format("pow(10, datum.value)")
    label = f"{axis_of}.log ? (datum.value === {axis_of}.zero ? '0' : {powers}) : {_COST.format('datum.value')}"
    x = (
        alt.X("x:Q")
        .title(None)
        .axis(values=alt.expr(f"({json.dumps(ticks)})[measure]"), labelExpr=label, grid=False, labelFlush=False)
    )
    x = x.scale(zero=False, nice=False, padding=18)
    y = alt.Y("value:Q").title("accuracy").axis(**number_axis(True)).scale(zero=False, nice=False, padding=18)
    colour = method_colour(methods)
    tooltip = [
        alt.Tooltip("method:N", title="method"),
        alt.Tooltip("standing:N", title="standing"),
        alt.Tooltip("value:Q", title="accuracy", format=".2%"),
        *spread_of_seeds(rows.points, ".2%"),
        alt.Tooltip("written:N", title="cost"),
        alt.Tooltip("round:Q", title="after round"),
    ]
    points = points.transform_calculate(written=_COST.format("datum.cost"))
    leading = points.transform_filter("datum.standing === 'on the front'")
    behind = points.transform_filter("datum.standing !== 'on the front'")
    bars = points.transform_filter(f"{IN_COLOUR} && isValid(datum.spread)").transform_calculate(
        low="datum.value - datum.spread", high="datum.value + datum.spread"
    )
    hollow: dict[str, Any] = {"size": 70, "filled": False, "strokeWidth": 1.25}
    name: dict[str, Any] = {"dy": alt.expr("datum.below ? 17 : -11"), "fontSize": 12, "limit": 180, "style": "contrast"}
    left, right = (
        leading.transform_filter(side).encode(x=x, y=y, text="name:N") for side in ("!datum.right", "datum.right")
    )
    layers = alt.layer(
        alt.Chart(alt.NamedData("begins")).transform_filter(shown).mark_point(opacity=0).encode(x=x, y=y),
        steps.mark_line(interpolate="step-after", strokeWidth=1.25, strokeDash=[5, 3], style="faint").encode(x=x, y=y),
        bars.mark_rule(opacity=0.35).encode(x=x, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), color=colour),
        behind.transform_filter(IN_GREY).mark_point(**hollow, style="muted").encode(x=x, y=y, tooltip=tooltip),
        behind.transform_filter(IN_COLOUR)
        .mark_point(**hollow, opacity=0.9)
        .encode(x=x, y=y, color=colour, tooltip=tooltip),
        leading.transform_filter(IN_GREY).mark_circle(size=110, style="muted").encode(x=x, y=y, tooltip=tooltip),
        leading.transform_filter(IN_COLOUR)
        .mark_circle(size=130, opacity=1)
        .encode(x=x, y=y, color=colour, tooltip=tooltip),
        left.mark_text(**name, align="left", dx=2),
        right.mark_text(**name, align="right", dx=-2),
    )
    first = next(iter(rows.axes))
    params = (chosen_methods(chosen), alt.param(name="measure", value=first), alt.param(name="point", value="last"))
    # A linear axis begins at zero, so that one sees how many times as much a method costs.
    begins = [{**row, "x": 0.0} for row in rows.points if not rows.axes[row["measure"]].logarithmic]
    return Drawing(
        sized(layers.add_params(*params), 340), {"points": rows.points, "front": rows.front, "begins": begins}
    )


def cost(rows: Rows, methods: Sequence[str], chosen: Sequence[str], measure: str) -> Drawing:
    """Accuracy on the way: against the bytes or seconds up to each round, by the parameter ``measure``.

    A method that costs nothing of it would be an upright stroke at zero; its last accuracy is a level line instead.
    """
    import altair as alt

    base = (
        alt.Chart(alt.NamedData("rows"))
        .transform_calculate(both="datum.up + datum.down", cost="datum[measure]")
        .transform_filter("isValid(datum.cost)")
        .transform_joinaggregate(most="max(cost)", end="max(round)", groupby=["method"])
    )
    label = _COST.format("datum.value")
    x = alt.X("cost:Q").title(None).axis(labelExpr=label, tickCount=TICKS).scale(zero=True, nice=False)
    y = alt.Y("value:Q").title("accuracy").axis(**number_axis(True)).scale(zero=False, nice=True)
    tooltip = [
        alt.Tooltip("method:N", title="method"),
        alt.Tooltip("round:Q", title="after round"),
        alt.Tooltip("value:Q", title="accuracy", format=".2%"),
        alt.Tooltip("up:Q", title="bytes up", format=".3~s"),
        alt.Tooltip("down:Q", title="bytes down", format=".3~s"),
        alt.Tooltip("seconds:Q", title="seconds", format=",.1f"),
    ]
    free = base.transform_filter("datum.most === 0 && datum.round === datum.end")
    level: dict[str, Any] = {"strokeDash": [3, 3], "strokeWidth": 1.5}
    layers = alt.layer(
        free.transform_filter(IN_GREY).mark_rule(**level, style="muted").encode(y=y),
        free.transform_filter(IN_COLOUR).mark_rule(**level).encode(y=y, color=method_colour(methods), tooltip=tooltip),
        *method_lines(base.transform_filter("datum.most > 0"), x, y, methods, tooltip),
    )
    return Drawing(
        sized(layers.add_params(chosen_methods(chosen), alt.param(name="measure", value=measure)), 320), {"rows": rows}
    )
