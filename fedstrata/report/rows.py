"""A comparison of methods over seeds, one row for each, as plain data for the terminal and the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.errors import unknown_name
from fedstrata.fairness import fairness, incentive
from fedstrata.report.groups import ComparableRun, Group, R, differing_settings, group_runs, seed_of, setting_of
from fedstrata.runs.summaries import (
    diverged,
    epsilon_spent,
    everybody_took_part,
    headline_key,
    headline_value,
    metric_value,
    sites_without_state,
)
from fedstrata.significance import Comparison, Estimate, estimate, holm, paired_comparison

MANY_METHODS = 12
"""With more methods than this, a comparison is ordered by rank."""
_USUAL_REFERENCE = "fedavg"
_ALONE = "local"
ACCURACIES = ("last", "last_ten", "best", "validated", "worst")
"""The columns of a :class:`Row` that hold accuracies; ``validated`` is shown where some row has it."""
COSTS = ("bytes_up", "bytes_down", "seconds")
"""The columns of a :class:`Row` that hold what a method costs."""


@dataclass(frozen=True)
class Row:
    """One method of a comparison. Accuracies are fractions; none stands for a number that its runs do not have.

    ``last``, ``last_ten`` and ``best`` are the headline accuracy in the last round, as the mean of the last ten
    evaluations and in the best round; ``worst`` is the mean over the worst tenth of the clients in the last round.
    ``comparison`` is none for the reference. ``epsilon`` is the privacy that the client which took part most often has
    spent, for methods that keep an account of it. ``bytes`` are those of the encoded messages, ``network`` those that a
    real network carried, where there was one. ``took_part`` is the fraction of the asked clients whose replies
    were merged, in the mean over the rounds; ``everybody`` tells that it was all of them, in the tests too.
    ``without_state`` is how many real sites went on without the state that they had lost. ``incentive`` is the part of
    the clients that fare better than with ``local`` and with ``fedavg`` of the same seed, where both are compared too.
    ``validated`` is the headline accuracy of the models that were best on validation samples, where some were held out:
    each of its own round, unlike ``best``, which looks at the test samples to find its round.
    ``fairness`` is the variance of the clients' accuracies in the last round. ``aggregation`` are the seconds that the
    server took to make models of replies, which ``seconds`` contain; ``flops`` are the operations of the clients'
    training with all weights, ``sparse_flops`` those with the weights that are not zero.
    ``settings`` is what differs between the rows beside the method, such as what was swept. ``diverged`` is how many of
    the runs ended with a training loss that is not a finite number; where all did, there is no fairness nor incentive.
    ``ended`` tells of each run that ended early after which round it did, and how many it was to have.
    """

    label: str
    headline: str
    seeds: tuple[int, ...]
    last: Estimate | None
    last_ten: Estimate | None
    best: Estimate | None
    worst: Estimate | None
    bytes_up: Estimate | None
    bytes_down: Estimate | None
    seconds: Estimate | None
    comparison: Comparison | None
    epsilon: Estimate | None = None
    network_up: Estimate | None = None
    network_down: Estimate | None = None
    took_part: Estimate | None = None
    everybody: bool = True
    without_state: int = 0
    incentive: Estimate | None = None
    validated: Estimate | None = None
    fairness: Estimate | None = None
    aggregation: Estimate | None = None
    flops: Estimate | None = None
    sparse_flops: Estimate | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    diverged: int = 0
    ended: tuple[tuple[int, int], ...] = ()

    @property
    def all_diverged(self) -> bool:
        """Whether no run came to anything: its accuracies are those of chance, and it is the best in nothing."""
        return 0 < len(self.seeds) <= self.diverged


def comparison_rows(runs: Sequence[ComparableRun], reference: str | None = None) -> list[Row]:
    """Build the rows of a comparison, one per method, tested against ``reference``, which stands first.

    That is a label or a method, which is then the reference at each setting; if none, the first method. Runs are paired
    by seed and split: the same clients with the same data, so that only the method differs. Rows stand in the order of
    the runs; many of them are easier to read by rank, so they follow the reference, which is then FedAvg if it is
    there, by their accuracy.
    """
    groups = group_runs(runs)
    if not groups:
        return []
    by_label = {group.label: group for group in groups}
    if reference is not None:
        groups = _with_first(reference, groups)
    settings = None if reference in by_label else _settings_with_a_reference(groups)
    many = settings is None and len(groups) > MANY_METHODS
    usual = by_label[_USUAL_REFERENCE] if many and not reference and _USUAL_REFERENCE in by_label else groups[0]
    against = {group.label: usual if settings is None else settings[setting_of(group)] for group in groups}
    comparisons = {
        group.label: _compare(group, against[group.label]) for group in groups if group is not against[group.label]
    }
    tested = {label: comparison.p_value for label, comparison in comparisons.items() if comparison.p_value is not None}
    for label, adjusted in zip(tested, holm(list(tested.values())), strict=True):
        comparisons[label] = dataclasses.replace(comparisons[label], adjusted=adjusted)
    differing = differing_settings([group.runs[0].experiment for group in groups])
    rows = [
        dataclasses.replace(
            _row(group, comparisons.get(group.label)), incentive=_incentive(group, groups), settings=told
        )
        for group, told in zip(groups, differing, strict=True)
    ]
    return sorted(rows, key=lambda row: (row.comparison is not None, -accuracy_or_nothing(row))) if many else rows


def _with_first(reference: str, groups: Sequence[Group[R]]) -> list[Group[R]]:
    """Put first what is to be the reference: a group by its label, or all groups of a method."""
    labels = [group.label for group in groups]
    if reference not in labels and reference not in map(_method, groups):
        raise unknown_name("method in this comparison called", reference, labels)
    return sorted(groups, key=lambda group: group.label != reference and _method(group) != reference)


def _settings_with_a_reference(groups: Sequence[Group[R]]) -> dict[str, Group[R]] | None:
    """Find what to test against at each setting, where the same first method was run at several: that method."""
    first: dict[str, Group[R]] = {}
    for group in groups:
        first.setdefault(setting_of(group), group)
    methods = {str(group.runs[0].experiment.get("method")) for group in first.values()}
    return first if len(methods) == 1 and 1 < len(first) < len(groups) else None


def accuracy_or_nothing(row: Row) -> float:
    """The accuracy that methods are ranked by; those without one, and those that diverged, come last."""
    return -1.0 if row.last is None or row.all_diverged or not math.isfinite(row.last.mean) else row.last.mean


def some_dropped_out(rows: Iterable[Row]) -> bool:
    """Tell whether in some round of some run clients were asked whose replies were not merged."""
    return any(row.took_part is not None and row.took_part.mean < 1 for row in rows)


def some_validated(rows: Iterable[Row]) -> bool:
    """Tell whether some models were chosen by validation samples: what these reach is the number to report."""
    return any(row.validated is not None for row in rows)


def highest(rows: Sequence[Row]) -> dict[str, float]:
    """Find the highest mean of each column of accuracies, where a table of several methods wants to point at it."""
    found = {name: _means_of(name, rows) for name in ACCURACIES}
    finite = {name: [mean for mean in means if math.isfinite(mean)] for name, means in found.items()}
    return {name: max(means) for name, means in finite.items() if means and len(rows) > 1}


def lowest(rows: Sequence[Row]) -> dict[str, float]:
    """Find the lowest mean of each column of costs, where they differ."""
    found = {name: set(_means_of(name, rows)) for name in COSTS}
    return {name: min(means) for name, means in found.items() if len(means) > 1}


def _means_of(name: str, rows: Sequence[Row]) -> list[float]:
    """The means of a column among which there is a best: not of methods that diverged, however little they cost."""
    return [value.mean for row in rows if (value := getattr(row, name)) is not None and not row.all_diverged]


def _compare(group: Group[R], against: Group[R]) -> Comparison:
    theirs = {(seed_of(run), run.split_hash): headline_value(run.summary) for run in against.runs}
    differences = []
    for run in group.runs:
        ours, other = headline_value(run.summary), theirs.get((seed_of(run), run.split_hash))
        if ours is not None and other is not None:
            differences.append(ours - other)
    return paired_comparison(differences, against.label)


def _incentive(group: Group[R], groups: Sequence[Group[R]]) -> Estimate | None:
    """Tell which part of the clients is better off than alone and than with FedAvg, over the seeds that all have."""
    alone, averaged = (_runs_of(method, groups, setting_of(group)) for method in (_ALONE, _USUAL_REFERENCE))
    if _method(group) in (_ALONE, _USUAL_REFERENCE) or all(diverged(run.summary) for run in group.runs):
        return None
    places = [((seed_of(run), run.split_hash), run) for run in group.runs]
    return estimate(
        part
        for place, run in places
        if place in alone and place in averaged and math.isfinite(part := incentive(run, alone[place], averaged[place]))
    )


def _runs_of(method: str, groups: Sequence[Group[R]], setting: str) -> dict[tuple[int, str], R]:
    """Find the runs of a method by seed and split, those at the same setting where there are any.

    Where several configurations have it otherwise, none stands for it.
    """
    everywhere = [group for group in groups if _method(group) == method]
    found = [group for group in everywhere if setting_of(group) == setting] or everywhere
    return {(seed_of(run), run.split_hash): run for run in found[0].runs} if len(found) == 1 else {}


def _method(group: Group[R]) -> str:
    return str(group.runs[0].experiment.get("method", ""))


def _row(group: Group[R], comparison: Comparison | None) -> Row:
    summaries = [run.summary for run in group.runs]
    headline = str(summaries[0]["headline"])

    def over_seeds(section: str, suffix: str = "") -> Estimate | None:
        found = []
        for summary in summaries:
            values = summary.get(section) or {}
            key = headline_key(headline, values)
            found.append(metric_value(values, f"{key.removesuffix('.mean')}{suffix}" if suffix else key))
        return estimate(value for value in found if value is not None)

    def total(name: str) -> Estimate | None:
        return estimate(float(summary[name]) for summary in summaries if summary.get(name) is not None)

    lost = sum(map(diverged, summaries))
    told = group.runs if lost < len(summaries) else ()
    return Row(
        label=group.label,
        headline=headline,
        seeds=tuple(seed_of(run) for run in group.runs),
        last=over_seeds("final"),
        last_ten=over_seeds("last_ten"),
        best=over_seeds("best"),
        worst=over_seeds("final", ".worst10"),
        validated=over_seeds("validated"),
        bytes_up=total("bytes_up"),
        bytes_down=total("bytes_down"),
        network_up=total("network_up"),
        network_down=total("network_down"),
        seconds=total("seconds"),
        comparison=comparison,
        took_part=total("took_part"),
        everybody=all(map(everybody_took_part, summaries)),
        epsilon=estimate(spent for summary in summaries if (spent := epsilon_spent(summary)) is not None),
        without_state=sum(map(sites_without_state, summaries)),
        fairness=estimate(fairness(list(run.client_accuracies.values())) for run in told if run.client_accuracies),
        aggregation=total("aggregation_seconds"),
        flops=total("train_flops"),
        sparse_flops=total("train_sparse_flops"),
        diverged=lost,
        ended=tuple(
            (int(run.summary["rounds"]), int(run.experiment["rounds"]))
            for run in group.runs
            if "stopped" in run.summary
        ),
    )
