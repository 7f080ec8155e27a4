"""The command of a site: client."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.cli.connections import Insecure, checked_dates, need_flower, proof_of_site, read_address, require_tls
from fedstrata.cli.options import Imports, Quiet, read_setting
from fedstrata.cli.passphrases import PassphraseFile, passphrase_of
from fedstrata.cli.terminal import Stopped, print_line


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
    need_flower()
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
    require_tls(host, authority is not None, insecure, f"'{keys / AUTHORITY}'")
    passphrase = None if key_on_stdin else passphrase_of(keys / SITE_KEY, passphrase_file)
    key = _piped_key() if key_on_stdin else read_private_key(keys / SITE_KEY, passphrase)
    if authority is not None:
        checked_dates(authority, "fedstrata keys renew --authority, where the authority is")
    shown = None if authority is None else proof_of_site(keys, site, passphrase)
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
