"""The command that sets two runs side by side: diff."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedstrata.cli.options import Json, add_command
from fedstrata.cli.running import run_folders
from fedstrata.cli.terminal import new_table, print_json, results, telling
from fedstrata.errors import FedStrataError

if TYPE_CHECKING:
    from fedstrata.report import Run
    from fedstrata.report.groups import Group

Side = Annotated[Path, typer.Argument(help="The folder of a run, or of the seeds of one method.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    add_command(
        app,
        diff,
        examples=(
            "fedstrata diff runs/compare/fedavg-seed0 runs/compare/fedbn-seed0",
            "fedstrata diff runs/a runs/b --json",
        ),
    )


def diff(first: Side, second: Side, json: Json = False) -> None:
    """Set two runs side by side: the settings that differ, and every number with its difference.

    A folder that holds several seeds of one method counts as one side, with the mean over its seeds.
    """
    with telling("loading what reads runs", json):
        from fedstrata.report.differences import as_data, differences

    found = differences(*_sides(first, second))
    if json:
        print_json(as_data(found))
        return
    names = found.labels
    if found.settings:
        settings = new_table("setting", *names)
        for line in found.settings:
            settings.add_row(*line)
        results.print(settings)
        results.print()
    table = new_table("number", *names, "difference", right=(*names, "difference"))
    for number, a, b in found.numbers:
        table.add_row(number.title, number.write(a), number.write(b), number.write_difference(a, b))
    results.print(table)
    said = "Numbers of the last round unless they say otherwise; the difference of accuracies is in percentage points."
    results.print()
    for sentence in (said, *found.notes):
        results.print(Text(sentence, style="dim"))


def _sides(first: Path, second: Path) -> list[Group[Run]]:
    """Read each side as one method; two of the same name are told apart by their folders."""
    import dataclasses

    from fedstrata.report import read_runs
    from fedstrata.report.groups import group_runs

    sides = []
    for path in (first, second):
        groups = group_runs(read_runs(run_folders([path])))
        if len(groups) != 1:
            held = ", ".join(group.label for group in groups) or "no run"
            raise FedStrataError(
                f"'{path}' holds {len(groups)} methods ({held}), and a side is one: give the folder of one run, or use "
                "'fedstrata report', whose page sets any two side by side."
            )
        if not any(run.series for run in groups[0].runs):
            raise FedStrataError(f"The run in '{path}' has no numbers yet; give one that has begun.")
        sides.append(groups[0])
    if sides[0].label == sides[1].label:
        sides = [dataclasses.replace(side, label=str(path)) for side, path in zip(sides, (first, second), strict=True)]
    return sides
