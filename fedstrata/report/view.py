"""What every section of the report looks at, and what it hands back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedstrata.report import charts
from fedstrata.report.charts import Drawing
from fedstrata.report.formats import listed, plural
from fedstrata.report.groups import Group, group_runs
from fedstrata.report.markup import Markup
from fedstrata.report.reading import Run, names_of
from fedstrata.report.rows import Row, accuracy_or_nothing, comparison_rows


@dataclass(frozen=True)
class View:
    """The runs of a report, in one order everywhere: that of the rows of its table, of its colours and of its legend.

    ``chosen`` are the methods shown in colour first.
    """

    title: str
    groups: list[Group[Run]]
    rows: list[Row]
    methods: list[str]
    chosen: list[str]

    @classmethod
    def of(cls, runs: Sequence[Run], title: str | None, reference: str | None = None) -> View:
        """Group the runs and decide on title and colours."""
        rows = comparison_rows(runs, reference)
        if len(rows) > charts.COLOURS:
            # The reference stays the first, whatever its rank: everything is compared with it.
            rows = [rows[0], *sorted(rows[1:], key=accuracy_or_nothing, reverse=True)]
        methods = [row.label for row in rows]
        groups = sorted(group_runs(runs), key=lambda group: methods.index(group.label))
        return cls(title or _default_title(groups), groups, rows, methods, methods[: charts.COLOURS])

    @property
    def runs(self) -> list[Run]:
        """All runs that count, method by method."""
        return [run for group in self.groups for run in group.runs]

    def names(self) -> dict[Path, str]:
        """Short names of the runs, also of those that repeat others."""
        return names_of(run for group in self.groups for run in (*group.runs, *group.repeated))


@dataclass(frozen=True)
class Section:
    """A part of the page with its charts, by the names of the figures that they are drawn into."""

    anchor: str
    title: str
    body: Markup
    charts: Mapping[str, Drawing] = field(default_factory=dict)


def _default_title(groups: Sequence[Group[Run]]) -> str:
    datasets = " and ".join(dict.fromkeys(str(run.data["dataset"]) for group in groups for run in group.runs))
    labels = [group.label for group in groups]
    if len(labels) > 4:
        methods = {str(run.experiment["method"]) for group in groups for run in group.runs}
        settings = f" in {len(labels)} settings" if len(labels) > len(methods) else ""
        return f"{plural(len(methods), 'method')}{settings} on {datasets}"
    return f"{listed(labels)} on {datasets}"
