"""The command that draws what happens inside the layers into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedstrata.cli.options import Json, Quiet, add_command
from fedstrata.cli.running import run_folders
from fedstrata.cli.terminal import print_json, results, telling
from fedstrata.spec import split_outside


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    add_command(
        app,
        picture,
        examples=(
            "fedstrata picture runs/compare -o layers.png",
            "fedstrata picture runs/compare --methods 'fedbn, lips' --metric update -o layers.svg",
            "fedstrata picture runs/compare --against fedbn -o difference.pdf",
        ),
    )


def picture(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs, folders that hold such folders, or published ones as in results/."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write: .png, .svg, .pdf, or .html with menus.")
    ] = Path("layers.png"),
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to show of the layers; by default their inertia (cosine).")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="LIST", help="The methods to show, separated by commas; by default all.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Show the differences of the others to this method.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title; by default what one sees, in a sentence.")] = None,
    width: Annotated[int, typer.Option(min=280, max=4000, help="The width of the picture, in points.")] = 1100,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw what happens inside the layers: a heat map of layers and rounds for each method.

    Beside it the network, and the last round as dots. This needs the extra 'report': pip install 'fedstrata[report]'.
    """
    with telling("loading what reads and draws runs", quiet):
        from fedstrata.report import write_layer_picture

    chosen = [] if methods is None else [part.strip() for part in split_outside(methods, ",") if part.strip()]
    path = write_layer_picture(run_folders(runs), output, metric, chosen, against, title, width)
    if json:
        print_json({"picture": str(path)})
    elif not quiet:
        results.print(Text.assemble("picture  ", (str(path), "bold")), soft_wrap=True)
