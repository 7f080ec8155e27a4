"""The summary of one run: its accuracies by their names, in a line, and as a small table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstrata.report.formats import ABSENT, data_size, duration, plural
from fedstrata.report.labels import LABELS, meaning, short_name
from fedstrata.report.markup import element, join
from fedstrata.report.tables import Column, table
from fedstrata.runs.summaries import everybody_took_part, headline_value


def accuracies(summary: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """List each accuracy of the last round under its label, the most telling one first: mean, deviation, worst tenth.

    A global model on a set that nobody owns has one accuracy, and neither of the others.
    """
    final = summary["final"]
    labels = [label for label in LABELS if f"{label}.accuracy" in final or f"{label}.accuracy.mean" in final]
    labels.sort(key=lambda label: label != summary["headline"])
    return {
        label: [
            final.get(f"{label}.accuracy", final.get(f"{label}.accuracy.mean")),
            *(final.get(f"{label}.accuracy.{statistic}") for statistic in ("std", "worst10")),
        ]
        for label in labels
    }


def summary_line(summary: Mapping[str, Any]) -> str:
    """Tell a run in a line."""
    accuracy = headline_value(summary)
    reached = "no accuracy" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
    stopped = " (stopped early)" if "stopped" in summary else ""
    return (
        f"{summary['method']} on {summary['data']}, {plural(summary['clients'], 'client')}, "
        f"{plural(summary['rounds'], 'round')}{stopped}: {reached}"
    )


def accuracies_as_html(summary: Mapping[str, Any]) -> str:
    """Draw the accuracies of a run as a table, for a notebook."""
    columns = [Column("Accuracy in the last round, %", numeric=False)]
    columns += [Column(title) for title in ("mean", "std over clients", "worst 10 % of clients")]
    rows = [[short_name(label), *map(_percent, values)] for label, values in accuracies(summary).items()]
    headline = summary["headline"]
    cost = (
        f"{duration(summary['seconds'])}, {data_size(summary['bytes_up'])} up, {data_size(summary['bytes_down'])} down"
    )
    said = [cost, f"{short_name(headline)}: {meaning(headline, everybody_took_part(summary))}"]
    said += [] if took_part(summary) is None else [f"{took_part(summary)}."]
    if "stopped" in summary:
        said.insert(0, f"Stopped after round {summary['rounds']}: {summary['stopped']}.")
    return join(
        (
            element("p", element("strong", summary_line(summary))),
            table("Accuracies", columns, rows, sortable=False),
            *(element("p", sentence) for sentence in said),
        )
    )


def took_part(summary: Mapping[str, Any]) -> str | None:
    """Tell how many of the clients that were asked had their replies merged, where it was not all."""
    fraction = summary.get("took_part", 1.0)
    if fraction == 1.0:
        return None
    return f"Took part: {100 * fraction:.1f} % of the clients that were asked, in the mean over the rounds"


def _percent(fraction: float | None) -> str:
    return ABSENT if fraction is None else f"{100 * fraction:.1f}"
