"""A rehearsal: a server and its sites as processes of one machine, with TLS and keys as between real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from fedstrata import files
from fedstrata.callbacks import Listener
from fedstrata.deployment.audit import AUDIT_FILE, AuditLog
from fedstrata.deployment.federation import Standing
from fedstrata.deployment.flower.serving import serve
from fedstrata.deployment.flower.superlink import ServerCertificate, SuperLink
from fedstrata.deployment.keys import AUTHORITY, CERTIFICATE, SERVER_KEY, SITE_KEY, SITES_FILE, make_keys
from fedstrata.deployment.link import Link, ShapedLinks
from fedstrata.deployment.own_parameters import local_parameters
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.server_audit import ServerAudit
from fedstrata.deployment.sites_file import SitesFile
from fedstrata.errors import FedStrataError
from fedstrata.plugins import require_imports
from fedstrata.runs.folder import RunFolder

LOOPBACK = "127.0.0.1"
_PLACE = ".rehearsal"
"""The folder for what the processes of the sites say, beside the sites' own folders."""
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
    with ExitStack() as stack:
        place = stack.enter_context(_own_place(deployment.out))
        make_keys(place / "keys", [LOOPBACK, "localhost"], deployment.names)
        server = place / "keys" / "server"
        certificate = ServerCertificate(server / CERTIFICATE, server / SERVER_KEY)
        members = SitesFile.read(server / SITES_FILE).members
        superlink = stack.enter_context(SuperLink(LOOPBACK, 0, [member.public_key for member in members], certificate))
        keys = _taken_keys(place, deployment.names)
        addresses = [superlink.address] * len(members)
        if link is not None:
            addresses = stack.enter_context(ShapedLinks(superlink.address, link, len(members))).addresses
        sites = stack.enter_context(LocalSites(deployment, addresses, place, keys))
        audit = ServerAudit(AuditLog(deployment.out / AUDIT_FILE), deployment.names)
        return serve(
            replace(deployment, audit=audit),
            superlink,
            listener,
            watch,
            log,
            sites.check,
            refused=audit.refused,
            connected=audit.connected,
        )


@contextmanager
def _own_place(out: Path) -> Iterator[Path]:
    """Give the processes of a rehearsal a folder of their own, beside the sites'; what a killed one left there goes."""
    place = sites_folder(out) / _PLACE
    files.make_folder(place, private=True)
    lock = files.WriteLock(place)
    try:
        for entry in place.iterdir():
            if entry.name != files.LOCK_FILE:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield place
        shutil.rmtree(place)
    finally:
        shutil.rmtree(place / "keys", ignore_errors=True)
        lock.release()


def _taken_keys(place: Path, names: Sequence[str]) -> list[bytes]:
    """Take the private keys of the sites from the disk, where nobody needs any of them once the server has begun."""
    keys = [files.read_bytes(place / "keys" / "sites" / name / SITE_KEY) for name in names]
    (place / "keys" / "server" / AUTHORITY).rename(place / AUTHORITY)
    shutil.rmtree(place / "keys")
    return keys


class LocalSites:
    """The processes of the sites; they end with this one."""

    def __init__(self, deployment: Deployment, addresses: Sequence[str], place: Path, keys: Sequence[bytes]) -> None:
        self.names = deployment.names
        self.out = deployment.out
        self.keys = keys
        self.logs = [place / f"{name}.log" for name in self.names]
        self.commands = [
            client_command(
                addresses[number],
                name,
                place,
                sites_folder(deployment.out) / name,
                "--key-on-stdin",
                *("--part", str(number), "--poll", str(_POLL_SECONDS), "--parent", str(os.getpid())),
                *("--min-samples", "1", "--out", str(model_folder(deployment.out, name))),
                *_own_data(deployment),
                *_own_imports(deployment, place / "imports"),
            )
            for number, name in enumerate(self.names)
        ]
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LocalSites:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
        for command, log, key in zip(self.commands, self.logs, self.keys, strict=True):
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    env=environment,
                    start_new_session=True,
                )
            self.processes.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as pipe:  # one that has ended at once is told of later
                pipe.write(key)
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
