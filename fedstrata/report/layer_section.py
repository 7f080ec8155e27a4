"""The section that shows what happens in the layers."""

from __future__ import annotations

from fedstrata.report import charts, layer_charts
from fedstrata.report.figures import menu
from fedstrata.report.layer_findings import finding, kept_norms
from fedstrata.report.layer_view import LayerView, MetricView, first_metric
from fedstrata.report.markup import Markup, element
from fedstrata.report.view import Section, View

NAME = "layers"
_SHOWN = f"{NAME}/shown"


def layers(view: View, with_charts: bool) -> Section | None:
    """What was measured layer by layer; none where nothing was."""
    layer_view = LayerView.of(view.groups, view.methods) if with_charts else None
    if layer_view is None:
        return None
    shown = first_metric(layer_view)
    drawing = layer_charts.layers(layer_view, view.chosen, shown)
    return Section(NAME, "Inside the layers", _figure(view, layer_view, shown), {NAME: drawing})


def _figure(view: View, layer_view: LayerView, shown: str) -> Markup:
    metrics = layer_view.metrics
    findings = [
        element("h3", finding(layer_view, metric), data_of=_SHOWN, data_value=name, hidden=name != shown)
        for name, metric in metrics.items()
    ]
    against = {"": "nothing: the numbers themselves", **{method: method for method in view.methods}}
    controls = [
        menu(NAME, "shown", "Measured", {name: metric.quantity.title for name, metric in metrics.items()}, shown),
        menu(NAME, "against", "Difference to", against, "") if len(view.methods) > 1 else None,
    ]
    given = [control for control in controls if control is not None]
    explanations = [
        element("span", explanation(metric), data_of=_SHOWN, data_value=name, hidden=name != shown)
        for name, metric in metrics.items()
    ]
    return element(
        "figure",
        *findings,
        element("div", *given, class_="controls") if given else None,
        element(
            "div",
            id=f"chart-{NAME}",
            class_="chart",
            role="img",
            aria_label="For each method a heat map: a line for each layer from the input on, a column for each round. "
            "Beside it the network, and the last round as dots.",
        ),
        element("figcaption", *explanations, " ", reading_aid(layer_view, len(view.methods))),
    )


def explanation(metric: MetricView) -> str:
    """Say what the colours of a metric mean, and what was done to its numbers."""
    said = [metric.quantity.explanation]
    if metric.averaged:
        said.append(f"A column is the mean of {metric.rounds_in_a_column} rounds.")
    if metric.scale.clipped:
        said.append("Numbers beyond the ends of the scale have the colours of its ends.")
    return " ".join(sentence for sentence in said if sentence)


def reading_aid(view: LayerView, methods: int) -> str:
    """Say how to read the chart."""
    said = ["Layers from the input (top) to the output, mean over seeds, one scale for all methods."]
    if any(layer.parameters is not None for layer in view.layers.values()):
        said.append("The width of a block is the number of its parameters, on a logarithmic scale.")
    said.append(kept_norms(view))
    if methods > charts.COLOURS:
        said.append(f"Up to {charts.COLOURS} of the methods in colour are shown at once.")
    if view.left_out:
        said.append(f"There is no room here for {', '.join(view.left_out)}; a report over fewer runs has it.")
    return " ".join(sentence for sentence in said if sentence)
