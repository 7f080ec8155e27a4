"""Two methods, or two runs, side by side: number by number, and what differs in their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.report import formats
from fedstrata.report.groups import Group
from fedstrata.report.labels import STATISTICS, short_name
from fedstrata.report.reading import Run, unfinished
from fedstrata.report.settings import settings_that_differ, written_setting
from fedstrata.runs.summaries import headline_key, metric_value
from fedstrata.significance import Estimate, estimate

_COSTS = {
    "bytes_up": ("Bytes up, whole run", "bytes"),
    "bytes_down": ("Bytes down, whole run", "bytes"),
    "seconds": ("Seconds, whole run", "seconds"),
    "parameters": ("Parameters of the model", "number"),
}


@dataclass(frozen=True)
class Number:
    """A number that a summary holds: its name there, what it is in words, and how it is written."""

    name: str
    title: str
    kind: str

    def write(self, value: Estimate | None) -> str:
        """Write it, with its spread over seeds where there is one."""
        if value is None:
            return formats.ABSENT
        if not math.isfinite(value.mean):
            return "NaN"
        if self.kind == "percent":
            return f"{formats.percent(value, 2)} %"
        if self.kind == "bytes":
            return formats.data_size(value.mean)
        return formats.duration(value.mean) if self.kind == "seconds" else _number(value)

    def write_difference(self, first: Estimate | None, second: Estimate | None) -> str:
        """Write by how much the second is more than the first, in points where they are percentages."""
        if first is None or second is None or not math.isfinite(second.mean - first.mean):
            return formats.ABSENT
        difference = second.mean - first.mean
        if difference == 0:
            return "0"
        size = Estimate(abs(difference), None, 1)
        text = f"{100 * size.mean:.2f}" if self.kind == "percent" else self.write(size)
        return f"{'+' if difference > 0 else '−'}{text}"


@dataclass(frozen=True)
class Differences:
    """All numbers of two sides, and the settings in which they differ."""

    labels: tuple[str, str]
    numbers: tuple[tuple[Number, Estimate | None, Estimate | None], ...]
    settings: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    """What the numbers cannot show: which runs are not finished."""


def differences(first: Group[Run], second: Group[Run]) -> Differences:
    """Set two sides beside each other, each as the mean over its seeds."""
    sides = numbers_of(first), numbers_of(second)
    known = dict.fromkeys(number for side in sides for number in side)
    experiments = [side.runs[0].experiment for side in (first, second)]
    return Differences(
        (first.label, second.label),
        tuple((number, *(side.get(number) for side in sides)) for number in known),  # type: ignore[misc]
        tuple(
            (key, written_setting(experiments[0].get(key)), written_setting(experiments[1].get(key)))
            for key in settings_that_differ(experiments)
        ),
        tuple(dict.fromkeys(unfinished([*first.runs, *second.runs]))),
    )


def numbers_of(group: Group[Run]) -> dict[Number, Estimate]:
    """All numbers of a method's summaries over its seeds, those that are asked for first in front."""
    summaries = [run.summary for run in group.runs]
    headline = headline_key(str(summaries[0]["headline"]), summaries[0]["final"])
    found: dict[Number, list[float | None]] = {}
    for section, words in (("final", "last round"), ("last_ten", "mean of the last ten"), ("best", "best round")):
        values = [metric_value(summary.get(section) or {}, headline) for summary in summaries]
        found[Number(f"{section}.{headline}", f"{_title(headline)}, {words}", "percent")] = values
    for name, (title, kind) in _COSTS.items():
        found[Number(name, title, kind)] = [metric_value(summary, name) for summary in summaries]
    for metric in dict.fromkeys(metric for summary in summaries for metric in summary["final"]):
        if metric != headline:
            kind = "percent" if ".accuracy" in metric else "bytes" if metric.startswith("bytes.") else "number"
            number = Number(f"final.{metric}", _title(metric), kind)
            found[number] = [metric_value(summary["final"], metric) for summary in summaries]
    estimates = {number: estimate(value for value in values if value is not None) for number, values in found.items()}
    return {number: value for number, value in estimates.items() if value is not None}


def as_data(found: Differences) -> dict[str, Any]:
    """Give the differences as plain data."""
    names = ("first", "second")
    return {
        **dict(zip(names, found.labels, strict=True)),
        "settings": {key: dict(zip(names, values, strict=True)) for key, *values in found.settings},
        "numbers": {
            number.name: {
                "first": _plain(first),
                "second": _plain(second),
                "difference": None if first is None or second is None else second.mean - first.mean,
            }
            for number, first, second in found.numbers
        },
        "notes": list(found.notes),
    }


def page_data(groups: Sequence[Group[Run]]) -> dict[str, Any]:
    """What a page needs to set any two methods side by side: the numbers as texts, and as they are for differences."""
    of_groups = [numbers_of(group) for group in groups]
    known = list(dict.fromkeys(number for found in of_groups for number in found))
    keys = settings_that_differ([group.runs[0].experiment for group in groups])
    return {
        "numbers": [[number.title, number.kind] for number in known],
        "methods": [
            {
                "label": group.label,
                "texts": [number.write(found.get(number)) for number in known],
                "means": [_mean(found.get(number)) for number in known],
                "settings": {key: written_setting(group.runs[0].experiment.get(key)) for key in keys},
            }
            for group, found in zip(groups, of_groups, strict=True)
        ],
    }


def _plain(value: Estimate | None) -> Mapping[str, Any] | None:
    return None if value is None else {"mean": value.mean, "std": value.std, "seeds": value.count}


def _mean(value: Estimate | None) -> float | None:
    return float(f"{value.mean:.8g}") if value is not None and math.isfinite(value.mean) else None


def _number(value: Estimate) -> str:
    if value.mean == round(value.mean) and abs(value.mean) < _WHOLE and not value.std:
        return f"{value.mean:,.0f}"
    return f"{value.mean:.4g}" + ("" if value.std is None else f" ± {value.std:.3g}")


_WHOLE = 10_000_000
"""Below this, numbers without a fraction are written in full."""


def _title(metric: str) -> str:
    """Name a metric in words, with what is measured.

    >>> _title("client_after.accuracy.worst10")
    'Own model after aggregation: accuracy, mean of the worst 10 % of clients'
    """
    label, _, rest = metric.partition(".")
    *kind, last = rest.split(".") if rest else [""]
    if last in STATISTICS:
        return f"{short_name(label)}: {'.'.join(kind)}, {STATISTICS[last]}"
    name = short_name(label)[:1].upper() + short_name(label)[1:]
    return f"{name}: {rest}" if rest else name
