"""The commands for real sites: keys, server, client, status; and deploy, which rehearses all of it on one machine."""

from __future__ import annotations

import ipaddress
import logging
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

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
)
from fedstrata.cli.running import PAGE, stoppable, unused_folder
from fedstrata.cli.terminal import Stopped, messages, new_table, print_json, results
from fedstrata.errors import FedStrataError

DEFAULT_PORT = 9092
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
        app, keys, examples=("fedstrata keys --host fl.example.org --site berlin --site paris --site rome --out keys",)
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
    from fedstrata.deployment.server import LOG_FILE, Deployment, LogFile, StatusFile
    from fedstrata.progress import show_progress

    shaped = None if link is None else Link.read(link)
    folder = out or unused_folder(experiment)
    rules = _rules({}, min_sites, round_timeout, secure)
    deployment = Deployment(experiment, site_names(local), folder, rules, rehearsal=True)
    deployment.check()
    status = StatusFile.begin(deployment)
    with (
        stoppable(f"the same command, with --out {shlex.quote(str(folder))}", folder),
        show_progress(messages, 1, experiment.rounds, quiet) as progress,
    ):
        progress.begin(f"{experiment.method}, {local} sites")
        log = LogFile(folder / LOG_FILE, lambda line: None if quiet else messages.print(line, soft_wrap=True))
        rehearse(deployment, progress, status, log, shaped)
    models = {f"the model of {name}": model_folder(folder, name) for name in deployment.names}
    show_run(folder, None if no_report else folder / PAGE, json, quiet, models)


def keys(
    host: Annotated[list[str], typer.Option(help="A name or address under which sites reach the server; repeatable.")],
    site: Annotated[list[str], typer.Option(help="The name of a site; may be repeated.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not hold anything yet.")] = Path("keys"),
    json: Json = False,
) -> None:
    """Make certificates and keys for a small consortium, and say who gets what.

    One authority signs the certificate of the server; each site gets a key of its own.
    """
    _need_flower()
    from fedstrata.deployment.keys import make_keys

    make_keys(out, host, site)
    parts = {"server": out / "server", **{name: out / "sites" / name for name in site}}
    if json:
        print_json(
            {"authority": str(out / "authority.key"), "folders": {name: str(path) for name, path in parts.items()}}
        )
        return
    table = new_table("who", "gets this folder", "and starts")
    table.add_row(
        "the server", str(parts["server"]), "fedstrata server EXPERIMENT.TOML --tls server --sites server/sites.toml"
    )
    for name in site:
        command = f"fedstrata client --server {host[0]}:{DEFAULT_PORT} --site {name} --keys {name} --data-root FOLDER"
        table.add_row(name, str(parts[name]), command)
    results.print(table)
    results.print(
        f"\nSend each folder over a channel that you trust: it holds a private key. Keep {out / 'authority.key'} to "
        "yourself; it is needed only for a new server certificate.",
        soft_wrap=True,
    )


def server(
    changes: dict[str, Any],
    experiment_file: ExperimentFile = None,
    sites: Annotated[Path, typer.Option(help="The file with the names and public keys of the sites.")] = Path(
        "sites.toml"
    ),
    tls: Annotated[Path | None, typer.Option(help="The folder with server.pem and server.key.")] = None,
    address: Annotated[str, typer.Option(help="The address and port to listen on.")] = f"0.0.0.0:{DEFAULT_PORT}",
    out: Out = None,
    min_sites: MinSites = None,
    round_timeout: RoundTimeout = None,
    secure: Secure = False,
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
    from fedstrata.deployment.flower import ServerCertificate, SuperLink, serve
    from fedstrata.deployment.keys import CERTIFICATE, SERVER_KEY, SitesFile, check_mode
    from fedstrata.deployment.server import LOG_FILE, Deployment, LogFile, StatusFile
    from fedstrata.progress import show_progress
    from fedstrata.trained.model import WEIGHTS_FILE

    host, port = read_address(address)
    _require_tls(host, tls is not None, insecure, "--tls FOLDER")
    certificate = None if tls is None or insecure else ServerCertificate(tls / CERTIFICATE, tls / SERVER_KEY)
    file = SitesFile.read(sites)
    folder = out or unused_folder(experiment)
    deployment = Deployment(experiment, file.names, folder, _rules(vars(file.rules), min_sites, round_timeout, secure))
    deployment.check()
    for path in () if certificate is None else (certificate.certificate, certificate.key):
        if not path.is_file():
            raise FedStrataError(f"There is no file '{path}'; 'fedstrata keys' makes it.")
    if certificate is not None:
        check_mode(certificate.key)
    if dry_run:
        _show_dry_run(deployment, f"{host}:{port}", certificate is not None, json)
        return
    status = StatusFile.begin(deployment)
    with (
        stoppable(f"the same command, with --out {shlex.quote(str(folder))}", folder),
        show_progress(messages, 1, experiment.rounds, quiet) as progress,
        SuperLink(host, port, [member.public_key for member in file.members], certificate) as link,
    ):
        progress.begin(f"{experiment.method}, {len(file.members)} sites")
        log = LogFile(folder / LOG_FILE, lambda line: None if quiet else messages.print(line, soft_wrap=True))
        log(f"listening on {link.address}{'' if certificate else ', without TLS'}")
        serve(deployment, link, progress, status, log)
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
        Path | None, typer.Option(help="Where this site keeps its state; by default site-NAME in the current folder.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where this site's own model goes in the end; by default into its state folder.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, or cuda if there is one.")] = "auto",
    poll: Annotated[float, typer.Option(metavar="SECONDS", help="How often to ask the server for work.")] = 1.0,
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
        int, typer.Option(metavar="N", help="Give no sums of fewer training samples than this away.")
    ] = 5,
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
    from fedstrata.deployment.rules import SiteRules
    from fedstrata.deployment.site import Site
    from fedstrata.deployment.site_data import SiteData
    from fedstrata.files import WriteLock, make_folder
    from fedstrata.plugins import import_files

    import_files(imports or ())
    host, _ = read_address(server)
    authority = keys / AUTHORITY if (keys / AUTHORITY).is_file() and not insecure else None
    _require_tls(host, authority is not None, insecure, f"'{keys / AUTHORITY}'")
    folder = state or Path(f"site-{site}")
    make_folder(folder, private=True)
    lock = WriteLock(folder)

    def log(line: str) -> None:
        if not quiet:
            messages.print(f"{site}: {line}", soft_wrap=True)

    own = SiteData(data, None if data_root is None else str(data_root), device, part)
    here = Site(folder, own, log, rules=SiteRules(secure_only, not no_statistics, min_samples), out=out)
    node = SuperNode(
        server,
        app_of(lambda context: here),
        _piped_key() if key_on_stdin else read_private_key(keys / SITE_KEY),
        authority,
        poll,
        log,
        is_over=lambda: here.end is not None,
        idle=here.teller.idle,
    )
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
    from fedstrata.deployment.server import status_of
    from fedstrata.report.formats import data_size

    told = status_of(folder)
    if json:
        print_json(told)
        return
    results.print(
        f"{told['method']}: {told['state']}, {told['rounds_done']} of {told['rounds']} rounds", soft_wrap=True
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
            results.print(f"{word}: {', '.join(told[names]) or 'nobody'}", soft_wrap=True)


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


def _rules(given: dict[str, Any], min_sites: int | None, round_timeout: float | None, secure: bool) -> Any:
    from fedstrata.deployment.rules import Rules

    options = {"min_sites": min_sites, "round_timeout": round_timeout, "secure": secure or None}
    return Rules(**{**given, **{key: value for key, value in options.items() if value is not None}})


def _show_dry_run(deployment: Any, address: str, secure: bool, json: bool) -> None:
    told = {"address": address, "tls": secure, "sites": list(deployment.names), **deployment.describe()}
    if json:
        print_json(told)
        return
    for key, value in told.items():
        results.print(f"{key.replace('_', ' ')}:{_listed(value)}", soft_wrap=True)


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
