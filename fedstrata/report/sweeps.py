"""What a setting does: the final accuracy, and the inertia of the middle layers, against a number that was swept.

Nothing marks a sweep: runs that differ in one number, whatever it is, are a line of such a chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.errors import FedStrataError
from fedstrata.report.charts import NUMBERS, Drawing, number_axis
from fedstrata.report.figures import figure
from fedstrata.report.groups import NOT_DISTINGUISHING, Group
from fedstrata.report.labels import short_name
from fedstrata.report.markup import Markup, join
from fedstrata.report.names import fitting
from fedstrata.report.reading import Run
from fedstrata.report.series import Groups, Rows
from fedstrata.report.view import Section, View
from fedstrata.runs.summaries import headline_value
from fedstrata.runs.sweeping import METHOD, parameters_of
from fedstrata.significance import estimate
from fedstrata.spec import parse

if TYPE_CHECKING:
    pass

AXES = 4
"""How many swept settings get charts of their own; a table tells of more."""
_DECADE = 10
_LABEL_LIMIT = 400


@dataclass(frozen=True)
class Axis:
    """A number that differs, and the runs along it: the label of each line, and its groups by their value."""

    name: str
    lines: Mapping[str, Mapping[float, Group[Run]]]


def sweeps(view: View, with_charts: bool) -> Section | None:
    """Show the final accuracy and the inertia against each setting that differs between the runs."""
    if not with_charts:
        return None
    figures: list[Markup] = []
    drawn: dict[str, Drawing] = {}
    for number, axis in enumerate(axes(view.groups)[:AXES]):
        for measure, title, meaning in (
            ("accuracy", "Accuracy", f"{short_name(view.rows[0].headline)}, in the last round."),
            ("inertia", "Inertia", _INERTIA),
        ):
            rows = sweep_rows(axis, measure)
            if not rows:
                continue
            name = f"sweep-{number}-{measure}"
            drawn[name] = _chart(rows, axis, measure)
            figures.append(
                figure(
                    name,
                    f"{title} against {axis.name}",
                    f"{title} in the last round against {axis.name}, one line per method.",
                    f"{meaning} Mean over seeds; bars: one standard deviation over seeds.",
                )
            )
    return Section("sweeps", "Against the settings", join(figures), drawn) if figures else None


_INERTIA = (
    "Mean cosine, over the middle layers, of the last round's weights to those of the reference round: 1 is a layer "
    "that has kept its direction since then. Middle layers: those that travel, but the first and the last."
)


def axes(groups: Groups) -> list[Axis]:
    """Find the numbers in which runs differ that are otherwise the same."""
    flat = [_settings(group.runs[0].experiment) for group in groups]
    varying = [key for key in dict.fromkeys(key for one in flat for key in one) if len(_values(flat, key)) > 1]
    found = []
    for name in varying:
        lines: dict[str, dict[float, Group[Run]]] = {}
        for group, settings in zip(groups, flat, strict=True):
            value = settings.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                alike = [one for one in flat if one.get(METHOD) == settings.get(METHOD)]
                others = {
                    key: settings.get(key)
                    for key in varying
                    if key != name and (key == METHOD or len(_values(alike, key)) > 1)
                }
                lines.setdefault(_label(group, name, others), {})[float(value)] = group
        along = {label: dict(sorted(points.items())) for label, points in lines.items() if len(points) > 1}
        if along:
            found.append(Axis(name, along))
    return found


def _values(flat: Iterable[Mapping[str, Any]], key: str) -> set[str]:
    return {repr(one.get(key)) for one in flat}


def _label(group: Group[Run], axis: str, others: Mapping[str, Any]) -> str:
    """Name a line: its method, without what the axis shows, and what else differs between runs of this method."""
    method = str(group.runs[0].experiment.get(METHOD))
    shown = str(others[METHOD]) if axis.startswith(f"{METHOD}.") and METHOD in others else method
    if axis.startswith(f"{METHOD}.") and METHOD not in others:
        shown = "+".join(call.name for call in parse(method))
    beside = [
        f"{key.rsplit('.', 1)[-1]}={value}"
        for key, value in others.items()
        if value is not None and (key != METHOD and (not key.startswith(f"{METHOD}.") or axis.startswith(METHOD)))
    ]
    return f"{shown} [{', '.join(beside)}]" if beside else shown


def _settings(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Spread an experiment out: its keys and, of those that name components, the names and every parameter."""
    flat: dict[str, Any] = {}
    for key, value in experiment.items():
        if key in NOT_DISTINGUISHING:
            continue
        try:
            parameters = parameters_of(key, value)
            flat[key] = "+".join(call.name for call in parse(value))
            flat |= parameters
        except (FedStrataError, KeyError, AttributeError):  # no component, or one that is not known here
            flat[key] = value
    return flat


def sweep_rows(axis: Axis, measure: str) -> Rows:
    """One row for each point of each line: where it is, its mean over seeds and its deviation."""
    rows: Rows = []
    for label, points in axis.lines.items():
        for at, group in points.items():
            measured = [headline_value(run.summary) if measure == "accuracy" else inertia(run) for run in group.runs]
            found = estimate(value for value in measured if value is not None and math.isfinite(value))
            if found is not None:
                rows.append({"line": label, "at": at, "value": found.mean, "spread": found.std})
    return rows


def inertia(run: Run) -> float | None:
    """The mean cosine of the middle layers in the last round to the reference round, where it was measured."""
    columns = {name: np.asarray(run.layers[name]) for name in ("metric", "round", "value")}
    chosen = columns["metric"] == "cosine"
    if not chosen.any():
        return None
    last = chosen & (columns["round"] == columns["round"][chosen].max())
    middle = columns["value"][last][1:-1]
    return float(middle.mean()) if len(middle) else None


def _chart(rows: Rows, axis: Axis, measure: str) -> Drawing:
    """Draw a line for each method, with bars of one deviation; values that span a decade stand on a log scale."""
    import altair as alt

    places = sorted({float(row["at"]) for row in rows})
    wide = places[0] > 0 and places[-1] / places[0] >= _DECADE
    percent = measure == "accuracy"
    base = alt.Chart(alt.NamedData("rows"))
    x = alt.X("at:Q").title(axis.name).axis(values=places, format=NUMBERS, grid=False)
    x = x.scale(**({"type": "log"} if wide else {"zero": False}), nice=False, padding=16)
    y = alt.Y("value:Q").title("accuracy" if percent else "cosine").axis(**number_axis(percent))
    y = y.scale(zero=False)
    names = list(dict.fromkeys(str(row["line"]) for row in rows))
    legend = alt.Legend(
        orient="bottom",
        title=None,
        columns=_columns(alt, names),
        symbolType="stroke",
        labelLimit=_LABEL_LIMIT,
        labelExpr=fitting(names, "datum.label", f"min({_LABEL_LIMIT}, width - 30)"),
    )
    colour = alt.Color("line:N").sort(names).scale(domain=names).legend(legend)
    tooltip = [
        alt.Tooltip("line:N", title="method"),
        alt.Tooltip("at:Q", title=axis.name),
        alt.Tooltip("value:Q", title="mean over seeds", format=".2%" if percent else ".4~g"),
        alt.Tooltip("spread:Q", title="± over seeds", format=".2%" if percent else ".3~g"),
    ]
    edges = {"low": "datum.value - datum.spread", "high": "datum.value + datum.spread"}
    bars = base.transform_filter("isValid(datum.spread)").transform_calculate(**edges)
    layers = alt.layer(
        bars.mark_rule(opacity=0.6).encode(x=x, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), color=colour),
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        base.mark_circle(size=70, opacity=1).encode(x=x, y=y, color=colour, tooltip=tooltip),
    )
    fitted = alt.AutoSizeParams(type="fit-x", contains="padding")
    return Drawing(layers.properties(width="container", height=280, autosize=fitted), {"rows": rows})


def _columns(alt: Any, names: Sequence[str]) -> Any:
    """As many names of lines in a row as fit."""
    return alt.expr(f"max(1, floor(width / {40 + 7 * max(map(len, names))}))")
