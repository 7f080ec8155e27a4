"""Commands as processes of their own that can be killed, without waiting for PyTorch every time they start.

They are forked off a process that has imported it already. Where the start itself is tested, ``python -m fedstrata``
is started instead (``tests/cli/test_cli_signals.py``, ``tests/cli/test_cli_start.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["forking", "fedstrata.cli", "fedstrata.api", "fedstrata.cli.showing", "fedstrata.deployment.site",
     "fedstrata.deployment.server", "fedstrata.deployment.live_keys", "fedstrata.deployment.flower.superlink",
     "fedstrata.deployment.flower.supernode", "sklearn.datasets", "torch._dynamo", "pytest", "hypothesis"]
)  # fmt: skip


class Forked:
    """A command that runs in a process of its own; what it prints goes to the end of a file.

    It is waited for and killed as a process of :mod:`subprocess` is.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        self._process = CONTEXT.Process(target=run_command, args=(log, arguments))
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


def run_command(log: Path, arguments: Sequence[str]) -> None:
    """Be a process of the command line; what it prints goes into a file."""
    from fedstrata.cli import main

    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(main(arguments))
