"""The commands for real sites: server, client, status; and deploy, which rehearses all of it on one machine."""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import logging
import os
import shlex
import signal
import ssl
import sys
import threading
import warnings
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.keys import PORT
from fedstrata.cli.options import (
    EXPERIMENT_KEYS,
    ExperimentFile,
    Imports,
    Json,
    LearningRate,
    NoReport,
    Quiet,
    Settings,
    add_command,
    read_experiment,
    read_setting,
)
from fedstrata.cli.passphrases import PassphraseFile, passphrase_of
from fedstrata.cli.running import PAGE, stoppable, unused_folder
from fedstrata.cli.terminal import Stopped, messages, print_json, print_line, results
from fedstrata.errors import FedStrataError, FedStrataWarning

if TYPE_CHECKING:
    from fedstrata.deployment.flower import ServerCertificate

DEFAULT_PORT = PORT
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
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS: everything travels in plain text, weights included.")
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
    _need_flower()
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
    address: Annotated[str, typer.Option(help="The address and port to listen on.")] = f"0.0.0.0:{DEFAULT_PORT}",
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
    _need_flower()
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
    _require_tls(host, tls is not None, insecure, "--tls FOLDER")
    file = SitesFile.read(sites)
    folder = out or unused_folder(experiment)
    roll = Roll.of(file, begun_sites(folder), folder)
    rules = _rules(vars(file.rules), min_sites, round_timeout, secure, accept_lost_state)
    deployment = Deployment(experiment, roll.names, folder, rules, removed=roll.removed)
    deployment.check()
    certificate, until = (None, None) if tls is None or insecure else _certificate(tls, mutual_tls, passphrase_file)
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


def client(
    server: Annotated[str, typer.Option(help="The address and port of the server.")],
    site: Annotated[str, typer.Option(help="The name of this site.")],
    keys: Annotated[Path, typer.Option(help="The folder with site.key and ca.pem, as 'fedstrata keys' made it.")],
    data: Annotated[
        str | None, typer.Option(help="This site's dataset; by default what the server's experiment says.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where this site's data lies.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where this site keeps its state; by default here, in site-NAME.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where this site's own model goes in the end; by default into its state folder.")
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set paths of this machine, or what may be fetched, in the server's experiment, such as "
            "model='vit(weights=/data/vit.safetensors)'; may be repeated.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, or cuda if there is one.")] = "auto",
    poll: Annotated[float, typer.Option(metavar="SECONDS", help="How often to ask the server for work.")] = 1.0,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="POLICY.TOML",
            help="This site's own policy; what breaks it is refused here. The options below can only tighten it.",
        ),
    ] = None,
    secure_only: Annotated[
        bool, typer.Option("--secure-only", help="Take part only if the server sees nothing but sums of uploads.")
    ] = False,
    no_statistics: Annotated[
        bool,
        typer.Option(
            "--no-statistics",
            help="Give no sums of the samples away, by which 'normalise' finds their mean at all sites.",
        ),
    ] = False,
    min_samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Give no sums of fewer training samples than this away; by default 5."),
    ] = None,
    lifetime_epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="EPSILON",
            help="Spend no more than this in all runs together, and take part in none without noise.",
        ),
    ] = None,
    lifetime_delta: Annotated[
        float | None, typer.Option(metavar="DELTA", help="The delta at which that is counted; by default 1e-5.")
    ] = None,
    passphrase_file: PassphraseFile = None,
    imports: Imports = None,
    part: Annotated[int | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
    key_on_stdin: Annotated[bool, typer.Option("--key-on-stdin", hidden=True)] = False,
    insecure: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """Take part in a server's run with this site's own data.

    Data, personal layers and everything else that a method keeps to its clients stay in this site's folders. The site
    may be stopped and started at any time; it waits for the server and goes on where it was. When the server says that
    the run is finished, the site has saved its own model, and ends. No code comes from the server: where it uses
    components of other people, give their files with --import.
    """
    _need_flower()
    from fedstrata.deployment.federation import FINISHED
    from fedstrata.deployment.flower import SuperNode, app_of
    from fedstrata.deployment.keys import AUTHORITY, SITE_KEY, read_private_key
    from fedstrata.deployment.policy import read_rules
    from fedstrata.deployment.site import Site
    from fedstrata.deployment.site_data import SiteData
    from fedstrata.files import WriteLock, make_folder
    from fedstrata.plugins import import_files

    import_files(imports or ())
    rules, policy_hash = read_rules(
        policy,
        secure_only=secure_only or None,
        statistics=False if no_statistics else None,
        min_samples=min_samples,
        lifetime_epsilon=lifetime_epsilon,
        lifetime_delta=lifetime_delta,
    )
    host, _ = read_address(server)
    authority = keys / AUTHORITY if (keys / AUTHORITY).is_file() and not insecure else None
    _require_tls(host, authority is not None, insecure, f"'{keys / AUTHORITY}'")
    passphrase = None if key_on_stdin else passphrase_of(keys / SITE_KEY, passphrase_file)
    key = _piped_key() if key_on_stdin else read_private_key(keys / SITE_KEY, passphrase)
    if authority is not None:
        _checked_dates(authority, "fedstrata keys renew --authority, where the authority is")
    shown = None if authority is None else _shown_by_site(keys, site, passphrase)
    folder = state or Path(f"site-{site}")
    make_folder(folder, private=True)
    lock = WriteLock(folder)

    def log(line: str) -> None:
        if not quiet:
            print_line(f"{site}: {line}")

    root, texts = None if data_root is None else str(data_root), dict(map(read_setting, own or ()))
    samples = SiteData(data, root, device, part, own=texts)
    here = Site(folder, samples, log, rules=rules, out=out)
    here.audit.start(site=site, server=server, tls=authority is not None, policy=policy_hash, rules=vars(rules))
    node = SuperNode(
        server,
        app_of(lambda context: here),
        key,
        authority,
        poll,
        log,
        connected=lambda: here.audit.note("connected", server=server),
        is_over=lambda: here.end is not None,
        idle=here.teller.idle,
        tls=shown,
    )
    with here.audit.until_stopped(log):
        node.run(_until_stopped(parent))
    lock.release()
    if here.end is not None and here.end.state != FINISHED:
        raise Stopped(f"The run was not finished: {here.end.words}", 1)


def _piped_key() -> Any:
    """Read the private key that a rehearsal gives to one of its sites, past the disk."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return load_pem_private_key(sys.stdin.buffer.read(), None)


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


def read_address(text: str) -> tuple[str, int]:
    """Read ``host:port``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise FedStrataError(f"'{text}' is no address; write it like fl.example.org:{DEFAULT_PORT}.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether an address stays inside this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _require_tls(host: str, given: bool, insecure: bool, needed: str) -> None:
    if not given and not insecure and not is_loopback(host):
        raise FedStrataError(
            f"A connection with '{host}' needs TLS: give {needed}, which 'fedstrata keys' makes, or --insecure to do "
            "without."
        )


def _certificate(folder: Path, mutual_tls: bool, passphrase_file: Path | None) -> tuple[ServerCertificate, str]:
    """Get what a server proves itself with, and in words until when; warn where that is soon."""
    from fedstrata.deployment.certificates import check_pair
    from fedstrata.deployment.flower import ServerCertificate
    from fedstrata.deployment.keys import AUTHORITY, CERTIFICATE, SERVER_KEY, check_mode

    paths = [folder / name for name in (CERTIFICATE, SERVER_KEY, *((AUTHORITY,) if mutual_tls else ()))]
    for path in paths:
        if not path.is_file():
            raise FedStrataError(f"There is no file '{path}'; 'fedstrata keys' makes it.")
    check_mode(paths[1])
    passphrase = passphrase_of(paths[1], passphrase_file)
    check_pair(paths[0], paths[1], passphrase)
    until = _checked_dates(paths[0], "fedstrata keys renew")
    if (folder / AUTHORITY).is_file():
        _checked_dates(folder / AUTHORITY, "fedstrata keys renew --authority")
    return ServerCertificate(paths[0], paths[1], passphrase, paths[2] if mutual_tls else None), until


def _shown_by_site(folder: Path, name: str, passphrase: str | None) -> ssl.SSLContext | None:
    """Get what a site shows to a server that asks for its certificate, if it has one."""
    from fedstrata.deployment.certificates import site_context
    from fedstrata.deployment.keys import AUTHORITY, SITE_CERTIFICATE, SITE_KEY

    if not (folder / SITE_CERTIFICATE).is_file():
        return None
    _checked_dates(folder / SITE_CERTIFICATE, f"fedstrata keys renew --site {name}")
    return site_context(folder / AUTHORITY, folder / SITE_CERTIFICATE, folder / SITE_KEY, passphrase)


def _checked_dates(certificate: Path, remedy: str) -> str:
    """Tell until when a certificate holds; refuse it if it does not hold now, and warn if it ends soon."""
    from fedstrata.deployment.certificates import check_dates, day

    facts, soon = check_dates(certificate, datetime.datetime.now(datetime.UTC), remedy)
    if soon is not None:
        warnings.warn(soon, FedStrataWarning, stacklevel=2)
    return day(facts.ends)


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


def _until_stopped(parent: int | None) -> threading.Event:
    """Make an event that Ctrl-C and SIGTERM set, and the end of the parent process, where one is given."""
    stop = threading.Event()

    def note(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)

    def watch() -> None:
        while os.getppid() == parent and not stop.wait(0.5):
            pass
        stop.set()

    if parent is not None:
        threading.Thread(target=watch, daemon=True, name="parent").start()
    return stop


def _need_flower() -> None:
    from fedstrata.deployment.flower import need_flower

    need_flower()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
