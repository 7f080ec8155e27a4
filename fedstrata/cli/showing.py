"""What a run or a comparison gave, for people and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fedstrata.cli.terminal import messages, new_table, print_json, results
from fedstrata.experiment import Experiment
from fedstrata.plugins import require_imports
from fedstrata.report import read_run, read_runs, rich_table, write_report
from fedstrata.report.formats import data_size, duration, plural
from fedstrata.report.further import STATISTICS, asked_for
from fedstrata.report.groups import group_runs
from fedstrata.report.labels import meaning, short_name
from fedstrata.report.notes import notes
from fedstrata.report.paper_figures import INDEX, FiguresAsked, write_figures
from fedstrata.report.ranking import ranks_as_data
from fedstrata.report.reading import unfinished
from fedstrata.report.rows import ACCURACIES, Row, comparison_rows
from fedstrata.report.summary import accuracies, took_part
from fedstrata.report.terminal import BEST
from fedstrata.runs.summaries import epsilon_spent, everybody_took_part, sites_without_state


def show_run(
    folder: Path,
    page: Path | None,
    json: bool,
    quiet: bool,
    models: Mapping[str, Path] | None = None,
    has_data: bool = True,
) -> None:
    """Write the report of a finished run, and print its summary.

    ``models`` are places to tell beside it. Without data here nothing is suggested that would need it.
    """
    models = models or {}
    run = read_run(folder)
    _write_page([folder], page)
    if json:
        told = {"models": {name: str(place) for name, place in models.items()}} if models else {}
        print_json({**run.summary, **told, "out": str(folder), "report": None if page is None else str(page)})
    elif not quiet:
        experiment = run.folder.experiment
        results.print(summary_of_run(experiment, run.summary))
        _print_places({"run": folder, "report": page, **models})
        if not has_data:
            return
        results.print(
            Text.assemble("\nNext, see it beside another method:\n  ", (next_command(experiment), "bold")),
            soft_wrap=True,
        )


def show_comparison(
    folders: Sequence[Path],
    page: Path | None,
    json: bool,
    quiet: bool,
    *,
    title: str | None = None,
    out: Path | None = None,
    figures: FiguresAsked | None = None,
    failed: Mapping[str, str] | None = None,
    reference: str | None = None,
) -> None:
    """Write the report over several runs, which lie in ``out`` if they were made together, and print their table.

    Methods are tested against the ``reference``, if none against the first one.
    In JSON it is told which others have ``failed``, and why; on a terminal the error of the command says so.
    """
    runs = read_runs(folders)
    rows = comparison_rows(runs, reference)
    not_finished = unfinished(runs)
    _write_page(folders, page, title, reference)
    if figures is not None:
        with messages.status("drawing figures"):
            write_figures(folders, figures, title, reference)
    if json:
        print_json(
            {
                "methods": [comparison_as_data(row) for row in rows],
                "notes": [*notes(rows), *not_finished],
                **({"ranks": ranks} if (ranks := ranks_as_data(group_runs(runs), rows)) else {}),
                "runs": [str(run.path) for run in runs],
                "report": None if page is None else str(page),
                "out": None if out is None else str(out),
                **({} if failed is None else {"failed": dict(failed)}),
                **({} if figures is None else {"figures": str(figures.folder / INDEX)}),
            }
        )
    elif not quiet:
        told = (Text(sentence, style="dim") for sentence in not_finished)
        results.print(Group(rich_table(rows, width=results.width), *explanation(rows), *told))
        _print_places({"report": page, **({} if figures is None else {"figures": figures.folder})})


def comparison_as_data(row: Row) -> dict[str, Any]:
    """Give a row of a comparison as plain data, its label under the name ``method``."""
    values = dataclasses.asdict(row)
    return {"method": values.pop("label"), **values}


_NOTHING_MEASURED = "No client has test samples, so nothing was measured."


def explanation(rows: Sequence[Row]) -> list[Text]:
    """Say what the numbers of a comparison mean."""
    if not any(getattr(row, name) is not None for row in rows for name in ACCURACIES):
        return [Text(sentence, style="dim") for sentence in ("", _NOTHING_MEASURED, *notes(rows))]
    headlines, everybody = dict.fromkeys(row.headline for row in rows), all(row.everybody for row in rows)
    said = [f"{short_name(headline)}: {meaning(headline, everybody)}" for headline in headlines]
    columns = "Accuracies in percent. worst 10 %: the mean of the worst tenth of the clients in the last round."
    columns += f" {BEST}: the highest of a column." if len(rows) > 1 else ""
    return [Text(sentence, style="dim") for sentence in ("", columns, *said, *notes(rows))]


def summary_of_run(experiment: Experiment, summary: Mapping[str, Any]) -> RenderableType:
    """Set the result of a run as text: what it cost, and each accuracy under its name, the most telling one first."""
    head = Text.assemble((f"{summary['method']} on {experiment.data}", "bold"))
    setting = Text(
        f"{plural(experiment.clients or 0, 'client')} ({experiment.partition or 'their own data'}), "
        f"{experiment.model}, seed {experiment.seed}, {plural(summary['rounds'], 'round')}: "
        f"{duration(summary['seconds'])}, {data_size(summary['bytes_up'])} up, {data_size(summary['bytes_down'])} down"
    )
    spent = epsilon_spent(summary)
    told = [] if spent is None else [Text(f"epsilon spent by the client that took part most often: {spent:.3g}")]
    lost = sites_without_state(summary)
    if lost:
        told.append(Text(f"sites that had lost their state and went on without it: {lost}"))
    ended = f"stopped after round {summary['rounds']} of {experiment.rounds}: {summary.get('stopped')}"
    stopped = [] if "stopped" not in summary else [Text(ended)]
    chosen = [] if "validated" not in summary else [Text(_chosen(summary))]
    dropped = [] if took_part(summary) is None else [Text(took_part(summary) or "")]
    further = (*_further(summary), *_costs(summary))
    return Group(
        head, setting, *stopped, *dropped, *told, *chosen, "", *_measured(summary), *further, *_meaning(summary)
    )


def _measured(summary: Mapping[str, Any]) -> list[RenderableType]:
    """Set the accuracies of the last round as a table, or say that there are none."""
    measured = accuracies(summary)
    if not measured:
        return [Text(_NOTHING_MEASURED)]
    headings = ("mean", "std over\nclients", "worst 10 %\nof clients")
    table = new_table("accuracy in the last round, in %", *headings, right=headings)
    for label, values in measured.items():
        table.add_row(short_name(label), *map(_percent, values), style="bold" if label == summary["headline"] else "")
    return [table]


def _meaning(summary: Mapping[str, Any]) -> list[RenderableType]:
    """Say what the accuracy is that stands for a run, where it has one."""
    headline = summary["headline"]
    said = f"{short_name(headline)}: {meaning(headline, everybody_took_part(summary))}"
    return ["", Text(said, style="dim")] if accuracies(summary) else []


def _costs(summary: Mapping[str, Any]) -> list[RenderableType]:
    """Set what each diagnostic took, where there were any."""
    costs = summary.get("cost_of_diagnostics", {})
    if not costs:
        return []
    table = new_table("diagnostic", "time in\na round", "memory", right=("time in\na round", "memory"))
    for name, cost in costs.items():
        table.add_row(name, f"{1000 * cost['seconds_per_round']:,.1f} ms", data_size(cost["peak_bytes"]))
    return ["", table]


def _further(summary: Mapping[str, Any]) -> list[RenderableType]:
    """Set what was asked for beside accuracy and loss, of the headline's model and of the global one."""
    final, label = summary["final"], summary["headline"]
    asked = asked_for(final, label)
    if not asked:
        return []
    table = new_table(
        "in the last round", "all\nsamples", "mean", "std over\nclients", "worst 10 %\nof clients", "clients\nwithout",
        right=("all\nsamples", "mean", "std over\nclients", "worst 10 %\nof clients", "clients\nwithout"),
    )  # fmt: skip
    for name in asked:
        *values, without = [final.get(f"{label}.{name}.{statistic}") for statistic in STATISTICS]
        table.add_row(name, *("" if value is None else f"{value:.3f}" for value in values), f"{without or 0:.0f}")
        if f"global.{name}" in final:
            value = final[f"global.{name}"]
            table.add_row(f"{name}, global model", "" if value is None else f"{value:.3f}")
    return ["", table]


def _chosen(summary: Mapping[str, Any]) -> str:
    """Tell which model was kept, by the validation samples, and what it reaches."""
    values, headline = summary["validated"], f"{summary['headline']}.accuracy.mean"
    own = f"{_percent(values.get(headline))} %"
    if "validated_rounds" in summary:
        rounds, adapted = summary["validated_rounds"], summary.get("validated_adapted")
        after = "" if adapted is None else f" or adapted after the last ({sum(adapted)} of {len(adapted)} clients)"
        return (
            f"kept for each client: its best model on its own validation samples, of rounds {min(rounds)} to "
            f"{max(rounds)}{after}, with {_percent(values['client_validation.accuracy.mean'])} %; "
            f"{short_name(summary['headline'])}: {own}"
        )
    judged = values.get("validation.accuracy", values.get("client_validation.accuracy.mean"))
    reached = f", {short_name(summary['headline'])}: {_percent(values[headline])} %" if headline in values else ""
    return (
        f"best on the validation samples, and kept: round {summary['validated_round']} with "
        f"{_percent(judged)} %{reached}"
    )


def next_command(experiment: Experiment) -> str:
    """Write the command that compares this experiment with another method."""
    other = "fedbn" if experiment.method == "fedavg" else experiment.method
    parts = ["fedstrata", "compare", f"fedavg, {other}", "--seeds", "3"]
    for field in dataclasses.fields(experiment):
        value = getattr(experiment, field.name)
        if value == field.default or field.name == "method":
            continue
        if field.name == "imports":
            parts += [part for file in require_imports(value).values() for part in ("--import", str(file.path))]
            continue
        name = field.name.replace("_", "-")
        parts += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return shlex.join(parts)


def _write_page(
    folders: Sequence[Path], page: Path | None, title: str | None = None, reference: str | None = None
) -> None:
    if page is not None:
        with messages.status("writing the report"):
            write_report(folders, page, title, reference)


def _print_places(places: Mapping[str, Path | None]) -> None:
    width = max(map(len, places))
    for name, place in places.items():
        if place is not None:
            results.print(Text.assemble(f"\n{name:<{width}}  ", (str(place), "bold")), soft_wrap=True, end="")
    results.print()


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f}"
