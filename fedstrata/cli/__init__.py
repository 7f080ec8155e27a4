"""The command line. What needs PyTorch is imported when a command runs, so that help comes at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fedstrata._version import __version__
from fedstrata.cli import (
    auditing,
    beginning,
    data,
    deployment,
    diagnosing,
    differing,
    keys,
    listing,
    papers,
    picturing,
    running,
    using,
    watching,
)
from fedstrata.cli.mistakes import explain_usage
from fedstrata.cli.terminal import print_error, print_plain

app = typer.Typer(
    name="fedstrata",
    help="Layer-wise and sparse federated learning: run methods, compare them, see what they do.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (
    running, papers, watching, diagnosing, differing, picturing, using, deployment, keys, auditing, listing, data,
    beginning,
):  # fmt: skip
    group.register(app)

WELCOME = f"""\
FedStrata {__version__}: layer-wise and sparse federated learning.

Begin with one of these:
  fedstrata run --method fedbn                   20 clients share the digits of scikit-learn; no download
  fedstrata compare "fedavg, fedbn, local"       the same for several methods, with a table and a report
  fedstrata methods                              what can be run, combined and compared
  fedstrata --help                               everything else
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a bug, 2 a mistake that one sentence explains."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return (
            app(args=None if arguments is None else list(arguments), prog_name="fedstrata", standalone_mode=False) or 0
        )
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        print_error(explain_usage(error))
        return 2


def _print_version(asked: bool) -> None:
    if asked:
        print_plain(f"fedstrata {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _welcome(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print_plain(WELCOME)


@app.command("version")
def _version() -> None:
    """Print the version."""
    _print_version(True)
