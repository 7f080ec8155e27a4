"""The command that shows runs while they go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstrata.cli.options import Json, add_command
from fedstrata.cli.terminal import Stopped, messages, print_plain, telling

if TYPE_CHECKING:
    from fedstrata.report.serving import PageServer

_POLITE = 4
"""How far drawing stands back behind the runs that it shows."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    add_command(
        app,
        watch,
        examples=(
            "fedstrata watch runs",
            "fedstrata watch runs/compare --open",
            "fedstrata watch runs --host 0.0.0.0   # also on a phone; the address that is printed holds a token",
        ),
    )


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUNS]...", help="Folders of runs, or folders that hold such folders; by default runs."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where to serve the page. By default for this machine alone; for others (0.0.0.0) only with a token, "
            "which is made for it.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="The port; 0 for any that is free.", min=0, max=65535)] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token on this machine, too, where it has other users.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None,
    json: Json = False,
) -> None:
    """Show runs in a browser while they go on.

    New rounds and new runs appear on the page by themselves, and a run that has stopped or died is shown so. The
    address of the page is printed; Ctrl-C ends it, and the runs go on.
    """
    with telling("loading what reads and draws runs", json):
        from fedstrata.files import to_json
        from fedstrata.report.serving import PageServer, is_local
        from fedstrata.report.watching import Watcher

    places = runs or [Path("runs")]
    missing = [place for place in places if not place.is_dir()]
    server = PageServer(Watcher(places, title), host, port, token)
    print_plain(" ".join(to_json({"url": server.url}).split()) + "\n" if json else f"{server.url}\n")
    sys.stdout.flush()
    if missing and not json:
        messages.print(f"There is no folder '{missing[0]}' yet; the page waits for it.", soft_wrap=True)
    if not is_local(host) and not json:
        messages.print(
            "Who has this address sees the page, and it travels without encryption: use it in a network that you "
            "trust.",
            soft_wrap=True,
        )
    if open_page:
        webbrowser.open(server.url)
    os.nice(_POLITE)
    _serve(server)


def _serve(server: PageServer) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    asked: list[int] = []
    ended = threading.Event()

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        ended.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        while not ended.wait(1.0):
            pass
    finally:
        server.shutdown()
        server.server_close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    raise Stopped("The page is served no more. Runs are not touched by that.", 128 + asked[0])
