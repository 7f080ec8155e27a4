"""Commands as processes of their own that can be killed, without waiting for PyTorch every time they start.

They are forked off a process that has imported it already. Where the start itself is tested, ``python -m fedstrata``
is started instead (``tests/cli/test_cli_signals.py``, ``tests/cli/test_cli_start.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["forking", "fedstrata.cli", "fedstrata.api", "fedstrata.cli.showing", "fedstrata.deployment.site",
     "fedstrata.deployment.server", "fedstrata.deployment.live_keys", "fedstrata.deployment.flower.superlink",
     "fedstrata.deployment.flower.supernode", "sklearn.datasets", "torch._dynamo", "pytest", "hypothesis"]
)  # fmt: skip


class Forked:
    """A command that runs in a process of its own, in a ``folder``; what it prints goes to the end of a file.

    Its complaints go to the end of ``errors``, where given. It also finds modules and packages in the folders of
    ``path``. It is waited for and killed as a process of :mod:`subprocess` is.
    """

    def __init__(
        self,
        log: Path,
        *arguments: str,
        folder: Path | None = None,
        errors: Path | None = None,
        path: Sequence[Path] = (),
    ) -> None:
        self.log = log
        self._process = CONTEXT.Process(target=run_command, args=(arguments, log, errors or log, folder, path))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.log.stem, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def finished(
    *arguments: str, folder: Path, path: Sequence[Path] = (), timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Wait for a command, as :func:`subprocess.run` does, and tell what it printed and complained."""
    with TemporaryDirectory() as place:
        printed, complained = Path(place) / "out", Path(place) / "errors"
        process = Forked(printed, *arguments, folder=folder, errors=complained, path=path)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, printed.read_text(), complained.read_text())


def run_command(
    arguments: Sequence[str], log: Path, errors: Path, folder: Path | None, path: Sequence[Path] = ()
) -> None:
    """Be a process of the command line, or a script of Python; what it prints goes into files."""
    for stream, place in ((1, log), (2, errors)):
        with place.open("ab") as file:
            os.dup2(file.fileno(), stream)
    if folder is not None:
        os.chdir(folder)
    sys.path[:0] = map(str, path)
    if arguments[0].endswith(".py"):
        runpy.run_path(arguments[0], run_name="__main__")
        return
    from fedstrata.cli import main

    sys.exit(main(arguments))
