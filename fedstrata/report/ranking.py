"""Methods that were run at several settings: their ranks, and whether these tell methods apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedstrata.ranks import Friedman, critical_difference, friedman, mean_ranks
from fedstrata.report import formats
from fedstrata.report.charts import Drawing
from fedstrata.report.figures import figure
from fedstrata.report.groups import Group, setting_of
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.rank_charts import critical_difference_chart
from fedstrata.report.reading import Run
from fedstrata.report.rows import Row
from fedstrata.report.tables import Cell, Column, Line, table
from fedstrata.report.view import Section, View
from fedstrata.significance import Estimate

LEAST_METHODS, LEAST_SETTINGS = 3, 2

Measure = Callable[[Row], Estimate | None]
MEASURES: Mapping[str, tuple[str, Measure, bool]] = {
    "Accuracy": ("Mean rank by the accuracy in the last round", lambda row: row.last, True),
    "Worst 10 %": ("Mean rank by the mean accuracy of the worst tenth of the clients", lambda row: row.worst, True),
    "Fairness": ("Mean rank by the variance of the accuracy over clients, of which less is better",
                 lambda row: row.fairness, False),
    "Incentive": ("Mean rank by the part of the clients that fare better than with both local and fedavg",
                  lambda row: row.incentive, True),
}  # fmt: skip
"""What methods are ranked by: the head of its column, what it is, where a row has it, and whether more is better."""


def rank_table(
    groups: Sequence[Group[Run]], rows: Sequence[Row], measure: Measure = lambda row: row.last
) -> dict[str, list[float]]:
    """Set methods against settings, with means over seeds, for those methods that have the number at every setting.

    A setting is all of an experiment but the method and the seed. Empty with fewer than three methods or two settings.
    A method that diverged has NaN, which is ranked as the worst.
    """
    by_label = {row.label: row for row in rows}
    settings = list(dict.fromkeys(setting_of(group) for group in groups))
    found: dict[str, dict[str, float]] = {}
    for group in groups:
        value = measure(by_label[group.label])
        if value is not None:
            method = str(group.runs[0].experiment.get("method"))
            found.setdefault(method, {})[setting_of(group)] = value.mean
    whole = {
        method: [values[setting] for setting in settings]
        for method, values in found.items()
        if len(values) == len(settings)
    }
    return whole if len(whole) >= LEAST_METHODS and len(settings) >= LEAST_SETTINGS else {}


def ranks_as_data(groups: Sequence[Group[Run]], rows: Sequence[Row]) -> dict[str, Any]:
    """Give the ranks by accuracy and what tests say of them as plain data; nothing where methods cannot be ranked."""
    accuracies = rank_table(groups, rows)
    if not accuracies:
        return {}
    tested = friedman(accuracies)
    return {
        "mean": mean_ranks(accuracies),
        "settings": tested.datasets,
        "friedman": {"statistic": tested.statistic, "p": tested.p_value},
        "critical_difference": critical_difference(tested.methods, tested.datasets),
    }


def ranking(view: View, with_charts: bool) -> Section | None:
    """Rank the methods that were run at every setting, as a table and as a plot of critical differences."""
    accuracies = rank_table(view.groups, view.rows)
    if not accuracies:
        return None
    tested = friedman(accuracies)
    parts: list[Markup] = [element("p", _in_words(tested))]
    drawn: dict[str, Drawing] = {}
    if with_charts:
        difference = critical_difference(tested.methods, tested.datasets)
        drawn["ranks"] = critical_difference_chart(mean_ranks(accuracies), difference)
        parts.append(
            figure(
                "ranks",
                "Mean ranks and critical difference",
                "Methods on an axis of mean ranks; bars join methods that cannot be told apart.",
                f"Ranks by accuracy at each setting, in the mean over {formats.plural(tested.datasets, 'setting')}; "
                "equals share their ranks. A bar joins methods whose mean ranks differ by less than the critical "
                f"difference of Nemenyi's test, {difference:.2f} at the level of 95 %. The test takes settings as "
                "independent: values of one setting on the same data are less than that.",
            )
        )
    parts.append(_table(view, accuracies))
    return Section("ranks", "Ranks over settings", join(parts), drawn)


def _in_words(tested: Friedman) -> str:
    if math.isnan(tested.statistic):
        return "All methods are equal at every setting."
    differ = "differ" if tested.p_value < 0.05 else "cannot be told apart"
    return (
        f"Over {tested.datasets} settings the {tested.methods} methods {differ} by the Friedman test: "
        f"chi-square {tested.statistic:.2f}, p = {tested.p_value:.2g}."
    )


def _table(view: View, accuracies: Mapping[str, Sequence[float]]) -> Markup:
    columns, ranked = [Column("Method", numeric=False)], []
    for head, (hint, measure, higher) in MEASURES.items():
        values = rank_table(view.groups, view.rows, measure)
        if values:
            columns.append(Column(head, hint, group="Mean rank"))
            ranked.append(mean_ranks(values, higher))
    order = sorted(accuracies, key=lambda method: ranked[0][method])
    cells: list[Line] = [[method, *(_cell(ranks, method) for ranks in ranked)] for method in order]
    return table("Mean ranks over the settings; 1 is the best", columns, cells)


def _cell(ranks: Mapping[str, float], method: str) -> Cell | str:
    if method not in ranks:
        return ""
    return Cell(f"{ranks[method]:.2f}", ranks[method], best=ranks[method] == min(ranks.values()))
