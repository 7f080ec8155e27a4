"""The chart of ranks: methods on an axis of mean ranks, and which of them cannot be told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstrata.ranks import indistinguishable
from fedstrata.report.charts import Drawing, sized
from fedstrata.report.names import fitting
from fedstrata.report.series import Rows

_ROW = 26
"""The height of a row, in pixels."""


def rank_rows(mean: Mapping[str, float], difference: float) -> dict[str, Rows]:
    """Lay a chart out, row by row: the critical difference, the bars that join methods, the methods, best first."""
    bars = [
        {"row": f"bar {number}", "from": mean[joined[0]], "to": mean[joined[-1]], "methods": ", ".join(joined)}
        for number, joined in enumerate(indistinguishable(mean, difference), start=1)
    ]
    order = sorted(mean, key=lambda method: mean[method])
    top = bars[0]["row"] if bars else order[0]
    return {
        "difference": [{"row": _DIFFERENCE, "from": 1.0, "to": 1.0 + difference, "difference": difference}],
        "bars": bars,
        "methods": [{"row": method, "method": method, "rank": mean[method], "begins": top} for method in order],
    }


_DIFFERENCE = "critical difference"


def critical_difference_chart(mean: Mapping[str, float], difference: float) -> Drawing:
    """Draw the mean ranks of methods, with a bar over those that differ by less than the critical difference.

    After Demšar 2006, figure 1. Each method has a row, which its name stands beside, and a thin line goes up from its
    rank to the bars.
    """
    import altair as alt

    rows = rank_rows(mean, difference)
    order = [str(row["row"]) for name in ("difference", "bars", "methods") for row in rows[name]]
    low, high = 1.0, max(float(len(mean)), 1.0 + difference)
    x = alt.X("rank:Q").title("mean rank (1: the best)").axis(tickMinStep=1, format="d", orient="top", grid=False)
    x = x.scale(domain=[low, high], nice=False, padding=34)
    begins, ends = alt.X("from:Q").scale(domain=[low, high], nice=False, padding=34), alt.X2("to:Q")
    axis: dict[str, Any] = {
        "title": None,
        "ticks": False,
        "domain": False,
        "labelLimit": 240,
        "labelPadding": 8,
        "grid": False,
    }
    label = f"indexof(datum.value, 'bar ') === 0 ? '' : ({fitting(order, 'datum.value', str(axis['labelLimit']))})"
    y, top = (
        alt.Y(f"{field}:N").sort(order).scale(domain=order, padding=0).axis(alt.Axis(labelExpr=label, **axis))
        for field in ("row", "begins")
    )
    methods, bars = alt.Chart(alt.NamedData("methods")), alt.Chart(alt.NamedData("bars"))
    told = [alt.Tooltip("method:N", title="method"), alt.Tooltip("rank:Q", title="mean rank", format=".2f")]
    layers = [
        methods.mark_rule(strokeWidth=1, style="muted").encode(x=x, y=top, y2=alt.Y2("row:N")),
        alt.Chart(alt.NamedData("difference"))
        .mark_rule(strokeWidth=2, style="faint")
        .encode(x=begins, x2=ends, y=y, tooltip=[alt.Tooltip("difference:Q", format=".3f")]),
        bars.mark_rule(strokeWidth=6, strokeCap="round", style="contrast").encode(
            x=begins, x2=ends, y=y, tooltip=[alt.Tooltip("methods:N", title="not told apart")]
        ),
        methods.mark_circle(size=110, opacity=1, style="accent").encode(x=x, y=y, tooltip=told),
        methods.mark_text(align="left", dx=10, fontSize=12, style="contrast").encode(
            x=x, y=y, text=alt.Text("rank:Q", format=".2f")
        ),
    ]
    return Drawing(sized(alt.layer(*layers), _ROW * len(order)), rows)
