"""The command that looks into finished runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedstrata.cli.completing import completing
from fedstrata.cli.loading import loading_pytorch
from fedstrata.cli.options import Json, Quiet, add_command
from fedstrata.cli.terminal import messages, new_table, print_json, results


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    add_command(app, diagnose, examples=("fedstrata diagnose runs/a", "fedstrata diagnose runs/* --diagnose fisher"))


def diagnose(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of finished runs.")],
    chosen: Annotated[
        str,
        typer.Option(
            "--diagnose",
            metavar="TEXT",
            help="What to compute, such as 'fisher'; by default all that finished runs tell.",
            autocompletion=completing("diagnostics"),
        ),
    ] = "all",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute diagnostics of finished runs from what their folders keep: the last models, and the data.

    The numbers are written into the folder 'diagnosis' of each run, from where reports read them; the metrics of the
    run stay as they are. Most diagnostics look at the rounds themselves: ask for them with 'fedstrata run --diagnose'.
    """
    with loading_pytorch(quiet):
        from fedstrata.diagnostics.choosing import by_reason
        from fedstrata.report.formats import data_size
        from fedstrata.runs.afterwards import diagnose as compute

    found = []
    for run in runs:
        with messages.status(f"diagnosing {run}"):
            found.append(compute(run, chosen))
    if json:
        print_json([{**dataclasses.asdict(one), "out": str(one.out)} for one in found])
        return
    if quiet:
        return
    table = new_table("run", "diagnostic", "numbers", "time", "memory", right=("numbers", "time", "memory"))
    for one in found:
        for name, rows in one.rows.items():
            cost = one.costs[name]
            table.add_row(str(one.out), name, f"{rows:,}", f"{cost['seconds']:.2f} s", data_size(cost["peak_bytes"]))
    results.print(table)
    for reason, names in by_reason(found[0].left_out).items():
        results.print(Text(f"Not {', '.join(names)}: {reason}.", style="dim"), soft_wrap=True)
