"""The commands of a server of real sites: server and status; and deploy, which rehearses all of it on one machine."""

from __future__ import annotations

import dataclasses
import shlex
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.cli.connections import Insecure, need_flower, proof_of_server, read_address, require_tls
from fedstrata.cli.keys import PORT
from fedstrata.cli.options import (
    EXPERIMENT_KEYS,
    ExperimentFile,
    Json,
    LearningRate,
    NoReport,
    Quiet,
    Settings,
    add_command,
    read_experiment,
)
from fedstrata.cli.passphrases import PassphraseFile
from fedstrata.cli.running import PAGE, stoppable, unused_folder
from fedstrata.cli.site import client
from fedstrata.cli.terminal import messages, print_json, print_line, results
from fedstrata.errors import FedStrataError

_DEPLOYED_KEYS = tuple(key for key in EXPERIMENT_KEYS if key not in ("clients", "engine", "chunk", "checkpoint_every"))

Out = Annotated[
    Path | None,
    typer.Option(help="The folder of the run; where an unfinished one is, it goes on. By default a new one in runs/."),
]
MinSites = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The number of sites with which a round goes on after the timeout; by default it waits for all.",
    ),
]
RoundTimeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="How long a round waits for all of its sites; by default 600.")
]
Secure = Annotated[
    bool,
    typer.Option("--secure", help="Secure aggregation: of uploads the server sees only the sum over all sites."),
]
AcceptLostState = Annotated[
    bool,
    typer.Option(
        "--accept-lost-state",
        help="Go on with a site that has lost what it kept to itself; the results then say so.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    add_command(
        app,
        deploy,
        _DEPLOYED_KEYS,
        (
            "fedstrata deploy --local 4 --method fedbn --rounds 5",
            "fedstrata deploy --local 4 experiment.toml --out runs/rehearsal",
        ),
    )
    add_command(
        app,
        server,
        _DEPLOYED_KEYS,
        (
            "fedstrata server experiment.toml --tls keys/server --sites keys/server/sites.toml --dry-run",
            "fedstrata server experiment.toml --tls keys/server --sites keys/server/sites.toml --out runs/consortium",
        ),
    )
    add_command(
        app,
        client,
        examples=("fedstrata client --server fl.example.org:9092 --site berlin --keys keys --data-root /data/scans",),
    )
    add_command(app, status, examples=("fedstrata status runs/consortium",))


def deploy(
    changes: dict[str, Any],
    local: Annotated[int, typer.Option("--local", metavar="N", min=1, help="How many sites to start on this machine.")],
    experiment_file: ExperimentFile = None,
    out: Out = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED,TIME", help="The speed and round trip time of every site's connection, such as 50mbit,80ms."
        ),
    ] = None,
    min_sites: MinSites = None,
    round_timeout: RoundTimeout = None,
    secure: Secure = False,
    accept_lost_state: AcceptLostState = False,
    learning_rate: LearningRate = None,
    settings: Settings = None,
    no_report: NoReport = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on a real server and real sites, all on this machine.

    Each site is a process of its own that holds its part of the data and talks to the server over loopback, with TLS
    and a key. The weights are those of 'fedstrata run' with as many clients.
    """
    experiment = read_experiment(experiment_file, settings, {**changes, "clients": local}, learning_rate)
    need_flower()
    from fedstrata.cli.showing import show_run
    from fedstrata.deployment.link import Link
    from fedstrata.deployment.local import model_folder, rehearse, site_names
    from fedstrata.deployment.server import Deployment
    from fedstrata.deployment.status import LOG_FILE, LogFile, StatusFile
    from fedstrata.progress import show_progress

    shaped = None if link is None else Link.read(link)
    folder = out or unused_folder(experiment)
    rules = _rules({}, min_sites, round_timeout, secure, accept_lost_state)
    deployment = Deployment(experiment, site_names(local), folder, rules, rehearsal=True)
    deployment.check()
    status = StatusFile.begin(deployment)
    with (
        stoppable(f"the same command, with --out {shlex.quote(str(folder))}", folder),
        show_progress(messages, 1, experiment.rounds, quiet) as progress,
    ):
        progress.begin(f"{experiment.method}, {local} sites")
        log = LogFile(folder / LOG_FILE, lambda line: None if quiet else print_line(line))
        rehearse(deployment, progress, status, log, shaped)
    models = {f"the model of {name}": model_folder(folder, name) for name in deployment.names}
    show_run(folder, None if no_report else folder / PAGE, json, quiet, models)


def server(
    changes: dict[str, Any],
    experiment_file: ExperimentFile = None,
    sites: Annotated[Path, typer.Option(help="The file with the names and public keys of the sites.")] = Path(
        "sites.toml"
    ),
    tls: Annotated[Path | None, typer.Option(help="The folder with server.pem and server.key.")] = None,
    mutual_tls: Annotated[
        bool,
        typer.Option(
            "--mutual-tls",
            help="Speak only with sites that show a certificate of the authority, whose ca.pem is in --tls, first.",
        ),
    ] = False,
    passphrase_file: PassphraseFile = None,
    address: Annotated[str, typer.Option(help="The address and port to listen on.")] = f"0.0.0.0:{PORT}",
    out: Out = None,
    min_sites: MinSites = None,
    round_timeout: RoundTimeout = None,
    secure: Secure = False,
    accept_lost_state: AcceptLostState = False,
    insecure: Insecure = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, and stop before anybody connects.")
    ] = False,
    learning_rate: LearningRate = None,
    settings: Settings = None,
    no_report: NoReport = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment over real sites.

    Only sites whose keys stand in the sites file are let in. Killed at any moment and started again in the same way,
    it goes on from the last whole round.
    """
    experiment = read_experiment(experiment_file, settings, changes, learning_rate)
    need_flower()
    from fedstrata.cli.showing import show_run
    from fedstrata.deployment.audit import AUDIT_FILE, AuditLog
    from fedstrata.deployment.begun import begun_sites
    from fedstrata.deployment.flower import SuperLink, serve
    from fedstrata.deployment.live_keys import LiveKeys
    from fedstrata.deployment.roll import Roll
    from fedstrata.deployment.server import Deployment
    from fedstrata.deployment.server_audit import ServerAudit
    from fedstrata.deployment.sites_file import SitesFile
    from fedstrata.deployment.status import LOG_FILE, LogFile, StatusFile
    from fedstrata.files import read_bytes
    from fedstrata.progress import show_progress
    from fedstrata.trained.model import WEIGHTS_FILE

    host, port = read_address(address)
    require_tls(host, tls is not None, insecure, "--tls FOLDER")
    file = SitesFile.read(sites)
    folder = out or unused_folder(experiment)
    roll = Roll.of(file, begun_sites(folder), folder)
    rules = _rules(vars(file.rules), min_sites, round_timeout, secure, accept_lost_state)
    deployment = Deployment(experiment, roll.names, folder, rules, removed=roll.removed)
    deployment.check()
    certificate, until = (None, None) if tls is None or insecure else proof_of_server(tls, mutual_tls, passphrase_file)
    if mutual_tls and certificate is None:
        raise FedStrataError("--mutual-tls needs TLS: give --tls FOLDER, and leave --insecure out.")
    if dry_run:
        _show_dry_run(deployment, f"{host}:{port}", until, mutual_tls, json)
        return
    status = StatusFile.begin(deployment)
    audit = ServerAudit(AuditLog(folder / AUDIT_FILE), deployment.names)
    deployment, sites_hash = dataclasses.replace(deployment, audit=audit), sha256(read_bytes(sites)).hexdigest()
    with (
        stoppable(f"the same command, with --out {shlex.quote(str(folder))}", folder),
        show_progress(messages, 1, experiment.rounds, quiet) as progress,
        SuperLink(host, port, roll.first_keys, certificate) as link,
    ):
        progress.begin(f"{experiment.method}, {len(roll.names) - len(roll.removed)} sites")
        log = LogFile(folder / LOG_FILE, lambda line: None if quiet else print_line(line))
        log(f"listening on {link.address}{'' if certificate else ', without TLS'}")
        audit.note("listening", {"address": link.address, "tls": certificate is not None, "sites_file": sites_hash})
        live = LiveKeys(link, roll, sites, None if certificate is None else certificate.certificate, log)
        serve(deployment, link, progress, status, log, revoked=live, refused=audit.refused, connected=audit.connected)
    shared = {"the shared part of the model": folder / WEIGHTS_FILE}
    show_run(folder, None if no_report else folder / PAGE, json, quiet, shared, has_data=False)
    if not json and not quiet:
        results.print("Every site has its own model where its --out says, or in its --state folder.", soft_wrap=True)


def status(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a server's run.")], json: Json = False
) -> None:
    """Tell how a server's run stands: the round, who is in, who is late, the accuracy so far."""
    from fedstrata.deployment.status import status_of
    from fedstrata.report.formats import data_size

    told = status_of(folder)
    if json:
        print_json(told)
        return
    results.print(
        f"{told['method']}: {told['state']}, {told['rounds_done']} of {told['rounds']} rounds",
        soft_wrap=True,
        markup=False,
    )
    if told["accuracy"] is not None:
        results.print(
            f"accuracy {100 * told['accuracy']:.1f} % (mean over the sites' own test samples)", soft_wrap=True
        )
    results.print(f"{data_size(told['bytes_up'])} up, {data_size(told['bytes_down'])} down", soft_wrap=True)
    if told["network_up"]:
        carried = (data_size(told[f"network_{way}"]) for way in ("up", "down"))
        results.print("on the network: {} up, {} down".format(*carried), soft_wrap=True)
    if told["state"] != "finished":
        for word, names in (("in", "answered"), ("waited for", "waiting"), ("left out", "left_out")):
            results.print(f"{word}: {', '.join(told[names]) or 'nobody'}", soft_wrap=True, markup=False)


def _rules(
    given: dict[str, Any], min_sites: int | None, round_timeout: float | None, secure: bool, accept_lost_state: bool
) -> Any:
    from fedstrata.deployment.rules import Rules

    options = {
        "min_sites": min_sites,
        "round_timeout": round_timeout,
        "secure": secure or None,
        "accept_lost_state": accept_lost_state or None,
    }
    return Rules(**{**given, **{key: value for key, value in options.items() if value is not None}})


def _show_dry_run(deployment: Any, address: str, until: str | None, mutual_tls: bool, json: bool) -> None:
    told = {
        "address": address,
        "tls": until is not None,
        **({} if until is None else {"certificate_until": until, "mutual_tls": mutual_tls}),
        "sites": [name for name in deployment.names if name not in deployment.removed],
        **({"removed_sites": list(deployment.removed)} if deployment.removed else {}),
        **deployment.describe(),
    }
    if json:
        print_json(told)
        return
    for key, value in told.items():
        results.print(f"{key.replace('_', ' ')}:{_listed(value)}", soft_wrap=True, markup=False)


def _listed(value: Any) -> str:
    """Write a value behind its name: sentences one below the other, names in a row."""
    if not isinstance(value, list):
        return f" {value}"
    if any(" " in item for item in value):
        return "".join(f"\n  - {item}" for item in value)
    return f" {', '.join(value)}"
