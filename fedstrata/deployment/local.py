"""A rehearsal: a server and its sites as processes of one machine, with TLS and keys as between real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from fedstrata.callbacks import Listener
from fedstrata.deployment.federation import Standing
from fedstrata.deployment.flower.serving import serve
from fedstrata.deployment.flower.superlink import ServerCertificate, SuperLink
from fedstrata.deployment.keys import CERTIFICATE, SERVER_KEY, SITES_FILE, make_keys
from fedstrata.deployment.link import Link, ShapedLinks
from fedstrata.deployment.own_parameters import local_parameters
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.sites_file import SitesFile
from fedstrata.errors import FedStrataError
from fedstrata.plugins import require_imports
from fedstrata.runs.folder import RunFolder

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.1
_SECONDS_TO_END = 10.0


def site_names(count: int) -> list[str]:
    """Name the sites of a rehearsal."""
    return [f"site-{number + 1}" for number in range(count)]


def sites_folder(out: Path) -> Path:
    """Tell where the sites of a rehearsal keep what is theirs: beside the run folder, which is the server's."""
    return out.with_name(f"{out.name}-sites")


def model_folder(out: Path, name: str) -> Path:
    """Tell where a site of a rehearsal keeps its own model of the end of the run."""
    return sites_folder(out) / name / "model"


def rehearse(
    deployment: Deployment,
    listener: Listener | None = None,
    watch: Callable[[Standing], None] = lambda standing: None,
    log: Callable[[str], None] = lambda line: None,
    link: Link | None = None,
) -> dict[str, Any]:
    """Run a deployment on this machine: the server here, each site a process of its own, over loopback with TLS.

    With a ``link``, every site's connection is as slow and as far as that.
    """
    deployment = replace(deployment, rehearsal=True)
    deployment.check()
    with tempfile.TemporaryDirectory(prefix="fedstrata-keys-") as temporary:
        keys = Path(temporary) / "keys"
        make_keys(keys, [LOOPBACK, "localhost"], deployment.names)
        members = SitesFile.read(keys / "server" / SITES_FILE).members
        certificate = ServerCertificate(keys / "server" / CERTIFICATE, keys / "server" / SERVER_KEY)
        with ExitStack() as stack:
            keys_of_sites = [member.public_key for member in members]
            superlink = stack.enter_context(SuperLink(LOOPBACK, 0, keys_of_sites, certificate))
            addresses = [superlink.address] * len(members)
            if link is not None:
                addresses = stack.enter_context(ShapedLinks(superlink.address, link, len(members))).addresses
            sites = stack.enter_context(LocalSites(deployment, addresses, keys))
            return serve(deployment, superlink, listener, watch, log, sites.check)


class LocalSites:
    """The processes of the sites; they end with this one."""

    def __init__(self, deployment: Deployment, addresses: Sequence[str], keys: Path) -> None:
        self.names = deployment.names
        self.out = deployment.out
        self.logs = [keys.parent / f"{name}.log" for name in self.names]
        self.commands = [
            client_command(
                addresses[number],
                name,
                keys / "sites" / name,
                sites_folder(deployment.out) / name,
                *("--part", str(number), "--poll", str(_POLL_SECONDS), "--parent", str(os.getpid())),
                *("--min-samples", "1", "--out", str(model_folder(deployment.out, name))),
                *_own_data(deployment),
                *_own_imports(deployment, keys.parent / "imports"),
            )
            for number, name in enumerate(self.names)
        ]
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LocalSites:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
        for command, log in zip(self.commands, self.logs, strict=True):
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        env=environment,
                        start_new_session=True,
                    )
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """Stop where a site has ended by itself, with its last words."""
        for name, process, log in zip(self.names, self.processes, self.logs, strict=True):
            finished = process.poll() == 0 and RunFolder(self.out).finished
            if process.poll() is not None and not finished:
                words = log.read_text(errors="replace").strip().splitlines()
                raise FedStrataError(f"{name} has ended: {words[-1] if words else f'code {process.returncode}'}")


def client_command(address: str, name: str, keys: Path, state: Path, *more: str) -> list[str]:
    """Write the command that starts a site."""
    return [
        *(sys.executable, "-m", "fedstrata", "client", "--server", address, "--site", name),
        *("--keys", str(keys), "--state", str(state), *more),
    ]


def _own_imports(deployment: Deployment, folder: Path) -> list[str]:
    """Give the sites copies of what this process has imported, so that nobody can change it meanwhile."""
    arguments = []
    for name, file in require_imports(deployment.experiment.imports).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(file.content)
        arguments += ["--import", str(folder / name)]
    return arguments


def _own_data(deployment: Deployment) -> Sequence[str]:
    experiment = deployment.experiment
    root = () if experiment.data_root is None else ("--data-root", experiment.data_root)
    own = [("--set", f"{key}={getattr(experiment, key)}") for key in local_parameters(experiment)]
    return "--device", experiment.device, *root, *(argument for pair in own for argument in pair)
