"""Comparing methods over seeds: means, spreads and paired tests, as plain data for the terminal and the page."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.fairness import fairness, incentive
from fedstrata.spec import parse


class ComparableRun(Protocol):
    """What a comparison needs of a run: its configuration, its numbers, and which split of the data it saw."""

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The keys and values of the experiment."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The summary of the run: ``headline``, ``final``, ``last_ten``, ``best``, bytes and seconds."""

    @property
    def split_hash(self) -> str:
        """The fingerprint of the split."""

    @property
    def client_accuracies(self) -> Mapping[int, float]:
        """Each client's accuracy behind the headline when it was last tested, by the client's number."""


R = TypeVar("R", bound=ComparableRun)


@dataclass(frozen=True)
class Group(Generic[R]):
    """The runs that differ in their seed only: one per seed, in the order of the seeds.

    ``repeated`` are further runs of a seed that is already there: no new evidence, and left out of every mean.
    """

    label: str
    runs: tuple[R, ...]
    repeated: tuple[R, ...] = ()


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its sample standard deviation (n - 1), which a single seed does not have."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class Comparison:
    """The difference to a reference method over the seeds that both have.

    ``p_value`` is that of the two-sided paired t-test, ``adjusted`` the same after Holm's correction over all methods
    of the comparison; both are none where no test is possible, and ``note`` then says why.
    """

    reference: str
    difference: Estimate | None
    p_value: float | None
    adjusted: float | None
    note: str


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
    ``fairness`` is the variance of the clients' accuracies in the last round. ``aggregation`` are the seconds that the
    server took to make models of replies, which ``seconds`` contain; ``flops`` are the operations of the clients'
    training with all weights, ``sparse_flops`` those with the weights that are not zero.
    ``settings`` is what differs between the rows beside the method, such as what was swept.
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
    fairness: Estimate | None = None
    aggregation: Estimate | None = None
    flops: Estimate | None = None
    sparse_flops: Estimate | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def group_runs(runs: Sequence[R]) -> list[Group[R]]:
    """Gather the seeds of each configuration, in the order in which configurations first appear.

    A group is labelled by its method; where several configurations share a method, by what else differs between those.
    """
    members: dict[str, dict[int, R]] = {}
    repeated: dict[str, list[R]] = {}
    for run in runs:
        seen = members.setdefault(_configuration(run), {})
        if _seed(run) in seen:
            repeated.setdefault(_configuration(run), []).append(run)
        else:
            seen[_seed(run)] = run
    labels = _labels([next(iter(seen.values())).experiment for seen in members.values()])
    return [
        Group(label, tuple(seen[seed] for seed in sorted(seen)), tuple(repeated.get(configuration, ())))
        for label, (configuration, seen) in zip(labels, members.items(), strict=True)
    ]


def estimate(values: Iterable[float]) -> Estimate | None:
    """Mean and sample standard deviation; none without values.

    >>> estimate([0.5, 0.7])
    Estimate(mean=0.6, std=0.14142135623730948, count=2)
    """
    numbers = np.fromiter(values, dtype=np.float64)
    if numbers.size == 0:
        return None
    spread = float(numbers.std(ddof=1)) if numbers.size > 1 else None
    return Estimate(float(numbers.mean()), spread, int(numbers.size))


def smallest_sign_test_p(pairs: int) -> float:
    """The smallest p that a two-sided sign or Wilcoxon signed-rank test can reach: all differences of one sign.

    >>> smallest_sign_test_p(5)
    0.0625
    """
    return min(1.0, 2.0 ** (1 - pairs))


def t_quantile(degrees: int, level: float = 0.95) -> float:
    """How many standard errors a two-sided interval of Student's t distribution reaches to either side.

    >>> round(t_quantile(2), 3)
    4.303
    """
    from scipy.special import stdtrit  # as long to import as all else here

    return float(stdtrit(degrees, (1 + level) / 2))


def confidence_interval(summary: Estimate, level: float = 0.95) -> tuple[float, float] | None:
    r"""Bound the mean behind an estimate: :math:`\bar x \pm t_{n-1} s / \sqrt n`; none with a single value.

    >>> low, high = confidence_interval(estimate([1.0, 2.0, 3.0]))
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    if summary.std is None:
        return None
    reach = t_quantile(summary.count - 1, level) * summary.std / math.sqrt(summary.count)
    return summary.mean - reach, summary.mean + reach


def paired_comparison(differences: Sequence[float], reference: str = "the reference") -> Comparison:
    """Test whether paired differences have a mean other than zero, by the two-sided paired t-test.

    Where the test is undefined (fewer than two pairs, a spread of zero, a value that is not finite) there is a reason
    instead of a p-value.
    """
    summary = estimate(differences)

    def untested(note: str) -> Comparison:
        return Comparison(reference, summary, None, None, note)

    if summary is None:
        return untested(f"No seed and split in common with {reference}, so there is nothing to pair.")
    if not math.isfinite(summary.mean):
        return untested("A result is not a finite number, so there is no test.")
    if summary.std is None:
        return untested(f"One seed in common with {reference}: a difference, but no test; run more seeds.")
    if all(difference == 0 for difference in differences):
        return untested(f"Equal to {reference} for every seed.")
    if summary.std <= 1e-9 * abs(summary.mean):
        return untested("The difference is the same for every seed; with a spread of zero the t-test is undefined.")
    t = summary.mean / (summary.std / math.sqrt(summary.count))
    from scipy.special import stdtr  # as long to import as all else here

    p_value = float(2 * stdtr(summary.count - 1, -abs(t)))
    floor = smallest_sign_test_p(summary.count)
    note = (
        f"With {summary.count} seeds a sign or Wilcoxon test cannot get below p = {floor:g}; "
        "the t-test can, by assuming normally distributed differences."
        if floor > 0.05
        else ""
    )
    return Comparison(reference, summary, p_value, p_value, note)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for testing several hypotheses at once.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def comparison_rows(runs: Sequence[ComparableRun], reference: str | None = None) -> list[Row]:
    """Build the rows of a comparison, one per method, tested against ``reference`` (a label; the first method if none).

    Runs are paired by seed and split: the same clients with the same data, so that only the method differs. Rows stand
    in the order of the runs; many of them are easier to read by rank, so they follow the reference, which is then
    FedAvg if it is there, by their accuracy.
    """
    groups = group_runs(runs)
    if not groups:
        return []
    by_label = {group.label: group for group in groups}
    if reference is not None and reference not in by_label:
        raise unknown_name("method in this comparison called", reference, by_label)
    settings = _settings_with_a_reference(groups) if reference is None else None
    many = settings is None and len(groups) > MANY_METHODS
    usual = by_label[reference or (_USUAL_REFERENCE if many and _USUAL_REFERENCE in by_label else groups[0].label)]
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


def setting_of(group: Group[R]) -> str:
    """Tell apart what a group's runs share with those of other methods: everything but the method and the seed."""
    kept = {key: value for key, value in group.runs[0].experiment.items() if key not in {"method", *NOT_DISTINGUISHING}}
    return json.dumps(kept, sort_keys=True, default=str)


def _settings_with_a_reference(groups: Sequence[Group[R]]) -> dict[str, Group[R]] | None:
    """Find what to test against at each setting, where the same first method was run at several: that method."""
    first: dict[str, Group[R]] = {}
    for group in groups:
        first.setdefault(setting_of(group), group)
    methods = {str(group.runs[0].experiment.get("method")) for group in first.values()}
    return first if len(methods) == 1 and 1 < len(first) < len(groups) else None


def reference_name(rows: Sequence[Row]) -> str:
    """Name what the rows are tested against, in few words."""
    references = list(dict.fromkeys(row.comparison.reference for row in rows if row.comparison is not None))
    if len(references) < 2:
        return references[0] if references else rows[0].label
    return f"{references[0].split(' [', 1)[0]} at the same setting"


def accuracy_or_nothing(row: Row) -> float:
    """The accuracy that methods are ranked by; those without one come last."""
    return -1.0 if row.last is None or not np.isfinite(row.last.mean) else row.last.mean


def notes(rows: Sequence[Row]) -> list[str]:
    """Say in sentences what a table of these rows cannot show: how many seeds, which test, where none was possible."""
    compared = [(row, row.comparison) for row in rows if row.comparison is not None]
    tested = [comparison for _, comparison in compared if comparison.p_value is not None]
    counts = sorted({len(row.seeds) for row in rows})
    said = []
    if counts == [1]:
        each = " each" if len(rows) > 1 else ""
        said.append(f"One seed{each}: no standard deviation over seeds, and no test.")
    elif counts:
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        said.append(f"Mean ± sample standard deviation over {seeds} seeds.")
    if tested:
        correction = f", corrected after Holm for {len(tested)} methods" if len(tested) > 1 else ""
        said.append(f"p: two-sided paired t-test over seeds against {reference_name(rows)}{correction}.")
    if counts != [1]:
        reasons: dict[str, list[str]] = {}
        for row, comparison in compared:
            if comparison.note:
                reasons.setdefault(comparison.note, []).append(row.label)
        for note, labels in reasons.items():
            said.append(note if len(labels) == len(compared) else f"{_listed(labels)}: {note}")
    if some_dropped_out(rows):
        said.append(
            "took part: of the clients that were asked, those whose replies were merged, in the mean over the rounds."
        )
    better_off = [f"{row.label} {100 * row.incentive.mean:.0f} %" for row in rows if row.incentive is not None]
    if better_off:
        said.append(
            f"Clients that fare better than with both local and fedavg, of the same seed: {_listed(better_off)}."
        )
    spent = [f"{row.label} {row.epsilon.mean:.3g}" for row in rows if row.epsilon is not None]
    if spent:
        said.append(f"Epsilon spent by the client that took part most often: {_listed(spent)}.")
    lost = [f"{row.label} {row.without_state}" for row in rows if row.without_state]
    if lost:
        said.append(f"Sites that had lost their state and went on without it: {_listed(lost)}.")
    return said


def some_dropped_out(rows: Iterable[Row]) -> bool:
    """Tell whether in some round of some run clients were asked whose replies were not merged."""
    return any(row.took_part is not None and row.took_part.mean < 1 for row in rows)


MANY_METHODS = 12
"""With more methods than this, a comparison is ordered by rank."""
_USUAL_REFERENCE = "fedavg"
_ALONE = "local"
WITHOUT_STATE = "sites.without_state"
"""The metric that counts the real sites which have gone on without the state that they had lost."""

ACCURACIES = ("last", "last_ten", "best", "worst")
"""The columns of a :class:`Row` that hold accuracies."""


def highest(rows: Sequence[Row]) -> dict[str, float]:
    """Find the highest mean of each column of accuracies, where a table of several methods wants to point at it."""
    found = {name: [value.mean for row in rows if (value := getattr(row, name)) is not None] for name in ACCURACIES}
    finite = {name: [mean for mean in means if math.isfinite(mean)] for name, means in found.items()}
    return {name: max(means) for name, means in finite.items() if means and len(rows) > 1}


COSTS = ("bytes_up", "bytes_down", "seconds")
"""The columns of a :class:`Row` that hold what a method costs."""


def lowest(rows: Sequence[Row]) -> dict[str, float]:
    """Find the lowest mean of each column of costs, where they differ."""
    found = {name: {value.mean for row in rows if (value := getattr(row, name)) is not None} for name in COSTS}
    return {name: min(means) for name, means in found.items() if len(means) > 1}


def headline_key(headline: str, values: Mapping[str, Any]) -> str:
    """The metric that stands for a run: the mean over clients where the label is about clients."""
    over_clients = f"{headline}.accuracy.mean"
    return over_clients if over_clients in values else f"{headline}.accuracy"


def metric_value(values: Mapping[str, Any], key: str) -> float | None:
    """Read a number of a summary: none where it is absent, NaN where the JSON has null, which is how NaN is saved."""
    if key not in values:
        return None
    return math.nan if values[key] is None else float(values[key])


NOT_DISTINGUISHING = frozenset({"seed", "data_root", "checkpoint_every", "metrics", "diagnose", "chunk", "replay"})
"""Keys of an experiment that do not make it another configuration."""


def _configuration(run: ComparableRun) -> str:
    kept = {key: value for key, value in run.experiment.items() if key not in NOT_DISTINGUISHING}
    return json.dumps(kept, sort_keys=True, default=str)


def _seed(run: ComparableRun) -> int:
    return int(run.experiment.get("seed", 0))


def _labels(experiments: Sequence[Mapping[str, Any]]) -> list[str]:
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for experiment in experiments:
        by_method.setdefault(str(experiment.get("method", "")), []).append(experiment)
    told = {method: iter(_short_names(differing_settings(same))) for method, same in by_method.items()}
    labels = []
    for experiment in experiments:
        method = str(experiment.get("method", ""))
        parts = [f"{key}={'none' if value is None else value}" for key, value in next(told[method]).items()]
        labels.append(f"{method} [{', '.join(parts)}]" if parts else method)
    return labels


def differing_settings(experiments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tell for each experiment what makes it another than the others, beside seed and method.

    Where a text names the same component everywhere, it is the parameters that differ.

    >>> differing_settings([{"partition": "dirichlet(alpha=0.1)"}, {"partition": "dirichlet(alpha=0.5)"}])
    [{'partition.alpha': 0.1}, {'partition.alpha': 0.5}]
    """
    keys = dict.fromkeys(key for one in experiments for key in one if key != "method" and _varies(key, experiments))
    found: list[dict[str, Any]] = [{} for _ in experiments]
    for key in keys:
        values = [one.get(key) for one in experiments]
        for place, differing in enumerate(_differing_parameters(key, values) or [{key: value} for value in values]):
            found[place] |= differing
    return found


def _differing_parameters(key: str, texts: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Tell the parameters in which texts of one component differ; none where it is not one, or they have no names."""
    calls = []
    for text in texts:
        try:
            calls.append(parse(text) if isinstance(text, str) else ())
        except FedStrataError:
            return None
    if {len(call) for call in calls} != {1} or len({call[0].name for call in calls}) > 1:
        return None
    if any(call[0].positional for call in calls):
        return None
    given = [dict(call[0].keywords) for call in calls]
    names = [name for name in dict.fromkeys(name for one in given for name in one) if _varies(name, given)]
    if any(name not in one for name in names for one in given):
        return None  # a default that is not written here
    return [{f"{key}.{name}": one[name] for name in names} for one in given]


def _short_names(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the keys that parameters belong to, where they can be told apart without."""
    keys = list(dict.fromkeys(key for one in settings for key in one))
    ends = [key.rsplit(".", 1)[-1] for key in keys]
    names = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
    return [{names[key]: value for key, value in one.items()} for one in settings]


def _varies(key: str, experiments: Sequence[Mapping[str, Any]]) -> bool:
    return key not in NOT_DISTINGUISHING and len({repr(experiment.get(key)) for experiment in experiments}) > 1


def _headline(run: ComparableRun) -> float | None:
    final = run.summary.get("final", {})
    return metric_value(final, headline_key(run.summary["headline"], final))


def _compare(group: Group[R], against: Group[R]) -> Comparison:
    theirs = {(_seed(run), run.split_hash): _headline(run) for run in against.runs}
    differences = []
    for run in group.runs:
        ours, other = _headline(run), theirs.get((_seed(run), run.split_hash))
        if ours is not None and other is not None:
            differences.append(ours - other)
    return paired_comparison(differences, against.label)


def _incentive(group: Group[R], groups: Sequence[Group[R]]) -> Estimate | None:
    """Tell which part of the clients is better off than alone and than with FedAvg, over the seeds that all have."""
    alone, averaged = (_runs_of(method, groups, setting_of(group)) for method in (_ALONE, _USUAL_REFERENCE))
    if _method(group) in (_ALONE, _USUAL_REFERENCE):
        return None
    places = [((_seed(run), run.split_hash), run) for run in group.runs]
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
    return {(_seed(run), run.split_hash): run for run in found[0].runs} if len(found) == 1 else {}


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

    return Row(
        label=group.label,
        headline=headline,
        seeds=tuple(_seed(run) for run in group.runs),
        last=over_seeds("final"),
        last_ten=over_seeds("last_ten"),
        best=over_seeds("best"),
        worst=over_seeds("final", ".worst10"),
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
        fairness=estimate(
            fairness(list(run.client_accuracies.values())) for run in group.runs if run.client_accuracies
        ),
        aggregation=total("aggregation_seconds"),
        flops=total("train_flops"),
        sparse_flops=total("train_sparse_flops"),
    )


def everybody_took_part(summary: Mapping[str, Any]) -> bool:
    """Tell whether every reply that was asked for was merged, and every client told how it fared in the end."""
    final = summary.get("final") or {}
    answered = metric_value(final, f"{summary['headline']}.answered")
    return summary.get("took_part", 1.0) == 1.0 and answered is None


def epsilon_spent(summary: Mapping[str, Any]) -> float | None:
    """Read off a run's summary what it has spent of privacy, if its method keeps an account."""
    return metric_value(summary.get("final") or {}, "privacy.epsilon")


def sites_without_state(summary: Mapping[str, Any]) -> int:
    """Read off a run's summary how many sites have gone on without the state that they had lost."""
    return int(metric_value(summary.get("final") or {}, WITHOUT_STATE) or 0)


def _listed(labels: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(labels[:limit])
    return shown if len(labels) <= limit else f"{shown} and {len(labels) - limit} more"
