"""From runs to the rows that charts draw: plain data, averaged over seeds, thinned where there is too much of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.report.groups import Group
from fedstrata.report.reading import Run
from fedstrata.runs.naming import called
from fedstrata.runs.summaries import headline_key

Rows = list[dict[str, Any]]
Groups = Sequence[Group[Run]]

CURVE_POINTS = 10_000
"""How many points all curves of one chart may have together, so that a page stays small."""
SMOOTHINGS = (5, 20)
"""Over how many rounds curves can be smoothed."""
COST_POINTS = 4_000
"""The same for accuracy against cost."""
CLIENT_POINTS = 4_000
"""How many clients the distribution chart may show one by one."""
SKEW_CLIENTS = 200
"""How many clients the label-skew chart shows at most."""
SKEW_SPLITS = 5
"""How many splits the label-skew chart offers at most."""


@dataclass(frozen=True)
class Series:
    """A metric over the rounds that all seeds of a group have; ``std`` is none with a single seed."""

    rounds: np.ndarray
    mean: np.ndarray
    std: np.ndarray | None


def over_seeds(group: Group[Run], metric: str, finite: bool = False) -> Series | None:
    """Average a metric over the seeds that have it, at the rounds that all of those have; none without such a round.

    Of seeds that diverged the mean is no number; if only what is ``finite`` counts, it is that of the other seeds.
    """
    found = [run.series[metric] for run in group.runs if metric in run.series]
    if not found:
        return None
    common = found[0][0]
    for rounds, _ in found[1:]:
        common = np.intersect1d(common, rounds)
    if not len(common):
        return None
    values = np.stack([values[np.searchsorted(rounds, common)] for rounds, values in found])
    if finite:
        return Series(common, *_of_finite(values))
    return Series(common, values.mean(0), values.std(0, ddof=1) if len(values) > 1 else None)


def _of_finite(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The mean and the sample deviation of what is finite in each column; NaN where there is too little of it."""
    known = np.isfinite(values)
    count = known.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(0) / count
        if len(values) == 1:
            return mean, None
        squares = np.where(known, values - mean, 0.0) ** 2
        return mean, np.sqrt(squares.sum(0) / np.where(count > 1, count - 1, np.nan))


def thin(x: np.ndarray, y: np.ndarray, limit: int) -> np.ndarray:
    """Choose at most ``limit`` (three or more) points of a curve that keep its shape, peaks included: their positions.

    Largest triangle three buckets (Steinarsson, "Downsampling time series for visual representation", 2013): of each
    bucket the point that spans the largest triangle with the point chosen before it and the mean of the next bucket.
    """
    count = len(x)
    if count <= limit:
        return np.arange(count)
    edges = np.linspace(1, count - 1, limit - 1).astype(int)
    chosen = [0]
    for bucket in range(limit - 2):
        start, end = edges[bucket], edges[bucket + 1]
        after = slice(end, edges[bucket + 2]) if bucket + 2 < len(edges) else slice(count - 1, count)
        next_x, next_y = x[after].mean(), y[after].mean()
        last_x, last_y = x[chosen[-1]], y[chosen[-1]]
        area = np.abs((last_x - next_x) * (y[start:end] - last_y) - (last_x - x[start:end]) * (next_y - last_y))
        chosen.append(int(start + area.argmax()))
    return np.array([*chosen, count - 1])


def metric_names(groups: Groups, kind: str) -> list[str]:
    """List the metrics of the round table that a chart of ``kind`` (``accuracy`` or ``loss``) can show."""
    names = dict.fromkeys(metric for group in groups for run in group.runs for metric in run.series)
    endings = (f".{kind}", f".{kind}.mean", f".{kind}.worst10")
    return [metric for metric in names if metric.endswith(endings)]


def curve_rows(groups: Groups, metrics: Sequence[str]) -> Rows:
    """One row per method, metric and round: the mean over seeds, and the standard deviation as its spread.

    Of seeds that diverged what is finite counts; :func:`not_finite` tells where that is not all of them. Where there
    are rounds enough, the same value smoothed stands beside it, computed before anything is thinned.
    """
    limit = points_of_a_curve(groups, metrics)
    spans = smoothings(groups, metrics)
    rows: Rows = []
    for group in groups:
        for metric in metrics:
            series = over_seeds(group, metric, finite=True)
            if series is None:
                continue
            smooth = {smoothed_column(span): running_mean(series.rounds, series.mean, span) for span in spans}
            finite = np.flatnonzero(np.isfinite(series.mean))
            kept = finite[thin(series.rounds[finite], series.mean[finite], limit)]
            for position in kept:
                rows.append(
                    {
                        "method": group.label,
                        "metric": metric,
                        "round": int(series.rounds[position]),
                        "value": short(float(series.mean[position])),
                        "spread": None if series.std is None else short(float(series.std[position])),
                        **{name: short(float(values[position])) for name, values in smooth.items()},
                    }
                )
    return rows


def not_finite(group: Group[Run], metrics: Sequence[str]) -> int:
    """Count the seeds of which curves leave something out, because it is not finite."""
    return sum(
        any(not np.isfinite(run.series[metric][1]).all() for metric in metrics if metric in run.series)
        for run in group.runs
    )


def points_of_a_curve(groups: Groups, metrics: Sequence[str]) -> int:
    """How many points each curve of a chart may have."""
    return int(np.clip(CURVE_POINTS / max(1, len(groups) * len(metrics)), 30, 500))


def longest_curve(groups: Groups, metrics: Sequence[str]) -> int:
    """In how many rounds the metric that was noted most often was noted."""
    curves = (run.series for group in groups for run in group.runs)
    return max((len(curve[metric][0]) for curve in curves for metric in metrics if metric in curve), default=0)


def smoothings(groups: Groups, metrics: Sequence[str]) -> list[int]:
    """List the spans over which it makes sense to smooth: those of which the longest curve has two or more."""
    return [span for span in SMOOTHINGS if longest_curve(groups, metrics) >= 2 * span]


def smoothed_column(span: int) -> str:
    """Name the column with the values smoothed over ``span`` rounds."""
    return f"over_{span}"


def running_mean(rounds: np.ndarray, values: np.ndarray, span: int) -> np.ndarray:
    """At each round, the mean of what was noted in it and the ``span - 1`` rounds before; what is not finite is passed.

    >>> running_mean(np.array([1, 2, 3, 6]), np.array([1.0, 3.0, 5.0, 9.0]), 2).tolist()
    [1.0, 2.0, 4.0, 9.0]
    """
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    begin, end = np.searchsorted(rounds, rounds - span, side="right"), np.arange(1, len(rounds) + 1)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = (sums[end] - sums[begin]) / (counts[end] - counts[begin])
    return mean


@dataclass(frozen=True)
class CostCurve:
    """The headline accuracy of a method, and what had been sent or spent by the end of each of its rounds."""

    series: Series
    costs: Mapping[str, np.ndarray]


def costs_of(group: Group[Run]) -> CostCurve | None:
    """Set the headline accuracy beside the bytes and seconds since the beginning; none where there is no accuracy."""
    series = over_seeds(group, _headline_metric(group))
    if series is None or not np.isfinite(series.mean).any():
        return None
    up, down = (_cumulative(group, metric, series.rounds) for metric in ("bytes.up", "bytes.down"))
    seconds = np.mean([_at(*run.cumulative_seconds(), series.rounds) for run in group.runs], axis=0)
    return CostCurve(series, {"up": up, "down": down, "both": up + down, "seconds": seconds})


def cost_rows(groups: Groups) -> Rows:
    """The headline accuracy beside what it took to get there: bytes and seconds since the beginning of the run."""
    limit = int(np.clip(COST_POINTS / max(1, len(groups)), 40, 200))
    rows: Rows = []
    for group in groups:
        curve = costs_of(group)
        if curve is None:
            continue
        series = curve.series
        finite = np.flatnonzero(np.isfinite(series.mean))
        for position in finite[thin(series.rounds[finite], series.mean[finite], limit)]:
            rows.append(
                {
                    "method": group.label,
                    "round": int(series.rounds[position]),
                    "value": short(float(series.mean[position])),
                    **{name: short(float(curve.costs[name][position])) for name in ("up", "down", "seconds")},
                }
            )
    return rows


def traffic_rows(groups: Groups) -> Rows:
    """Bytes of a whole run in each direction, as the mean over seeds."""
    rows: Rows = []
    for group in groups:
        for direction, key in (("up", "bytes_up"), ("down", "bytes_down")):
            values = [float(run.summary[key]) for run in group.runs if run.summary.get(key) is not None]
            if values:
                rows.append({"method": group.label, "direction": direction, "bytes": float(np.mean(values))})
    return rows


def time_rows(groups: Groups) -> Rows:
    """Seconds of a whole run in each phase, as the mean over seeds."""
    rows: Rows = []
    for group in groups:
        totals = [run.timings.totals() for run in group.runs]
        for phase in dict.fromkeys(phase for total in totals for phase in total):
            seconds = float(np.mean([total.get(phase, 0.0) for total in totals]))
            rows.append({"method": group.label, "phase": phase, "seconds": short(seconds)})
    return rows


def client_metrics(groups: Groups) -> list[str]:
    """List the accuracies that were measured client by client."""
    names = dict.fromkeys(metric for group in groups for run in group.runs for metric in run.clients)
    return [metric for metric in names if metric.endswith(".accuracy")]


@dataclass(frozen=True)
class ClientRows:
    """The clients of all seeds in the last round that has them, one by one (thinned) and as boxes."""

    points: Rows
    boxes: Rows


def client_rows(groups: Groups, metrics: Sequence[str]) -> ClientRows:
    """Gather the last value of every client; of too many, evenly spaced ones from the worst to the best."""
    limit = max(20, CLIENT_POINTS // max(1, len(groups) * len(metrics)))
    points: Rows = []
    boxes: Rows = []
    for group in groups:
        for metric in metrics:
            members = _last_of_clients(group, metric)
            if not members:
                continue
            common = {"method": group.label, "metric": metric}
            values = np.array([value for value, _, _ in members])
            low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
            boxes.append(
                {
                    **common,
                    "low": short(float(low)),
                    "median": short(float(median)),
                    "high": short(float(high)),
                    "mean": short(float(values.mean())),
                    "clients": len(members),
                }
            )
            shown = np.unique(np.linspace(0, len(members) - 1, min(limit, len(members))).astype(int))
            for number, position in enumerate(shown):
                value, client, seed = members[position]
                points.append(
                    {
                        **common,
                        "value": short(value),
                        "client": client,
                        "seed": seed,
                        "offset": round((number * 0.6180339887) % 1, 3),
                    }
                )
    return ClientRows(points, boxes)


@dataclass(frozen=True)
class SplitCounts:
    """The label counts of one split of the data and the runs that used it."""

    title: str
    label_counts: np.ndarray
    class_names: tuple[str, ...]
    sizes: np.ndarray
    test_sizes: np.ndarray
    client_names: Sequence[str] = ()


def splits(groups: Groups) -> list[SplitCounts]:
    """List the distinct splits of the runs that tell of it, in the order in which they appear."""
    found: dict[str, Run] = {}
    for group in groups:
        for run in (run for run in group.runs if "label_counts" in run.data):
            found.setdefault(run.split_hash, run)
    datasets = {str(run.data["dataset"]) for run in found.values()}
    partitions = {str(run.experiment.get("partition")) for run in found.values()}
    result = []
    for split, run in found.items():
        title = [
            *([str(run.data["dataset"])] if len(datasets) > 1 else []),
            *([str(run.experiment.get("partition"))] if len(partitions) > 1 else []),
            f"seed {run.experiment['seed']}",
            f"split {split[:8]}",
        ]
        result.append(
            SplitCounts(
                ", ".join(title),
                np.asarray(run.data["label_counts"], dtype=np.int64),
                tuple(str(name) for name in run.data["class_names"]),
                np.asarray(run.data["sizes"], dtype=np.int64),
                np.asarray(run.data["test_sizes"], dtype=np.int64),
                run.client_names,
            )
        )
    return result


def effective_classes(label_counts: np.ndarray) -> np.ndarray:
    """The exponential of the entropy of each client's labels: 1 for one class, C for C equal ones, 0 without samples.

    >>> effective_classes(np.array([[5, 0], [3, 3]])).round(6).tolist()
    [1.0, 2.0]
    """
    sizes = label_counts.sum(1, keepdims=True)
    shares = label_counts / np.maximum(sizes, 1)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    found: np.ndarray = np.where(sizes[:, 0] > 0, np.exp(entropy), 0.0)
    return found


def skew_rows(
    label_counts: np.ndarray, class_names: Sequence[str], client_names: Sequence[str] | None = None, **common: str
) -> Rows:
    """One row for each class that a client has: how many samples, and what share of the client's samples.

    With ``client_names``, which may be empty for some splits of a chart, ``who`` tells what the client is called.
    """
    sizes = label_counts.sum(1)
    return [
        {
            **common,
            "client": int(client),
            **({} if client_names is None else {"who": called(int(client), client_names)}),
            "class": class_names[label],
            "count": int(label_counts[client, label]),
            "share": short(float(label_counts[client, label] / sizes[client])),
        }
        for client, label in np.argwhere(label_counts[:SKEW_CLIENTS] > 0)
    ]


def distinct(rows: Iterable[dict[str, Any]], column: str) -> list[str]:
    """List the values of a column in the order of their appearance."""
    return list(dict.fromkeys(row[column] for row in rows))


def _headline_metric(group: Group[Run]) -> str:
    summary = group.runs[0].summary
    return headline_key(str(summary["headline"]), summary["final"])


def _cumulative(group: Group[Run], metric: str, rounds: np.ndarray) -> np.ndarray:
    """The running total of a metric, as the mean over the seeds that have it; nothing where none has."""
    totals = [
        _at(noted, np.cumsum(values), rounds)
        for noted, values in (run.series[metric] for run in group.runs if metric in run.series)
    ]
    return np.mean(totals, axis=0) if totals else np.full(len(rounds), math.nan)


def _at(noted: np.ndarray, totals: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Read a running total off at other rounds: what had been reached by the end of each."""
    return np.concatenate(([0.0], totals))[np.searchsorted(noted, rounds, side="right")]


def _last_of_clients(group: Group[Run], metric: str) -> list[tuple[float, int | str, int]]:
    """The finite values of all clients of all seeds, from the worst to the best, each with its client and seed."""
    found = sorted(
        (float(value), int(client), int(run.experiment["seed"]), place)
        for place, run in enumerate(group.runs)
        if metric in run.clients
        for client, value in zip(*run.clients[metric], strict=True)
        if math.isfinite(value)
    )
    return [(value, group.runs[place].pointed_at(client), seed) for value, client, seed, place in found]


def short(value: float, digits: int = 4) -> float | None:
    """Round to a few digits, which no screen can tell from more; JSON has no NaN, so none stands for it."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
