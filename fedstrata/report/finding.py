"""The result in a sentence or two, which claims no more than the seeds can carry."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedstrata.report import formats
from fedstrata.report.labels import short_name
from fedstrata.report.markup import Markup, element
from fedstrata.report.notes import diverged_in
from fedstrata.report.rows import Row, accuracy_or_nothing, comparison_rows
from fedstrata.report.view import View
from fedstrata.significance import Comparison, Estimate

LEVEL = 0.05
"""Below this p, after Holm's correction, two methods are told apart."""


def finding(view: View) -> list[str]:
    """Say which method is the most accurate, from which others the seeds do not tell it apart, and who fares worst."""
    measured = [row for row in view.rows if row.last is not None]
    if not measured:
        return ["No accuracy was measured."]
    datasets = list(dict.fromkeys(str(run.experiment.get("data", "")) for run in view.runs))
    if len(datasets) > 1:
        return [f"The runs are on {formats.listed(datasets)}; accuracies on different data are not compared."]
    top = max(measured, key=accuracy_or_nothing)
    seeds = f" over {formats.plural(len(top.seeds), 'seed')}" if len(top.seeds) > 1 else ""
    said = ["Accuracy in the last round: " if len(measured) == 1 else "Highest accuracy in the last round: "]
    tied = [row for row in measured if row is top or (row.last == top.last and row.all_diverged == top.all_diverged)]
    names = _listed([element("strong", row.label) for row in tied])
    said += [Markup(names), " alike" if len(tied) > 1 else "", f", {_in_percent(top.last)}{seeds}"]
    divergent = [
        f"{'It' if len(tied) == 1 else row.label} {diverged_in(row.diverged, len(row.seeds))}"
        for row in tied
        if row.diverged
    ]
    lost = f"{formats.listed(divergent)}. " if divergent else ""
    if len(measured) == 1:
        said.append(f" ({short_name(top.headline).lower()}). {lost}")
        said += [] if seeds else ["One seed: another may give another number. "]
        return said + _worst(view, top)
    said.append(f". {lost}")
    if all(len(row.seeds) == 1 for row in measured):
        said.append("One seed each decides nothing: the order of methods may be chance. ")
    else:
        said += _told_apart(view, top)
    return said + _worst(view, top if len(tied) == 1 else None)


def _told_apart(view: View, top: Row) -> list[str]:
    """Compare the best with the reference, as the table does, and then name all others that may be as good."""
    against_top = {row.label: row.comparison for row in comparison_rows(view.runs, top.label) if row.comparison}
    if top.comparison is None:
        first = max((row for row in view.rows if row is not top), key=accuracy_or_nothing).label
        comparison, sign = against_top[first], -1
    else:
        first, comparison, sign = top.comparison.reference, top.comparison, 1
    rest = [label for label, one in against_top.items() if label != first and _may_be_equal(one)]
    nor = f"Nor is it from {_listed(rest)}. " if rest and not _is_told_apart(comparison) else ""
    also = f"It is not distinguishable from {_listed(rest)}. " if rest and not nor else ""
    return [_against(first, comparison, sign), nor or also]


def _against(other: str, comparison: Comparison, sign: int) -> str:
    difference = comparison.difference
    if difference is None or comparison.adjusted is None:
        return f"Not tested against {other}: {comparison.note} "
    p = formats.p_value(comparison.adjusted)
    tested = f"p\u00a0{p}" if p.startswith("<") else f"p\u00a0=\u00a0{p}"
    over = f"over {formats.plural(difference.count, 'seed')}"
    if not _is_told_apart(comparison):
        return f"It is not distinguishable from {other} {over} ({tested}). "
    points = formats.points(Estimate(sign * difference.mean, None, difference.count)).removeprefix("+")
    return f"That is {points} points above {other} {over} ({tested}). "


def _is_told_apart(comparison: Comparison) -> bool:
    return comparison.adjusted is not None and comparison.adjusted < LEVEL


def _may_be_equal(comparison: Comparison) -> bool:
    """Whether a test was possible, and did not tell the two apart."""
    return comparison.adjusted is not None and not _is_told_apart(comparison)


def _worst(view: View, top: Row | None) -> list[str]:
    """Say with which method the worst clients fare best; of the leading one, where no other does better for them."""
    measured = {
        row.label: row.worst
        for row in view.rows
        if row.worst is not None and math.isfinite(row.worst.mean) and (row is top or not row.all_diverged)
    }
    if not measured:
        return []
    best = _alone(max(measured.values(), key=lambda worst: worst.mean))
    leading = [label for label, worst in measured.items() if _alone(worst) == best]
    if top is not None and top.label in leading:
        return [f"The worst 10\u00a0% of its clients reach {_in_percent(top.worst)}."]
    if len(leading) > 1:
        return []
    name = element("strong", leading[0])
    return ["The worst 10\u00a0% of clients fare best with ", name, f": {_in_percent(measured[leading[0]])}."]


def _alone(value: Estimate) -> str:
    """Write a mean as it is shown, without its spread: means that are written alike are not told apart."""
    return formats.percent(Estimate(value.mean, None, value.count))


def _in_percent(value: Estimate | None) -> str:
    return f"{formats.percent(value)} %".replace(" ", "\u00a0")


def _listed(names: Sequence[str]) -> str:
    """Name a few, and count the rest.

    >>> _listed(["a", "b", "c"]), _listed(list("abcdefg"))
    ('a, b and c', 'a, b, c and 4 others')
    """
    if len(names) > _NAMED:
        return f"{', '.join(names[: _NAMED - 1])} and {len(names) - _NAMED + 1} others"
    return formats.listed(names)


_NAMED = 4
