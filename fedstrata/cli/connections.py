"""What the commands of servers and sites share about connections: addresses, TLS and certificates."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import ssl
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstrata.cli.keys import PORT
from fedstrata.cli.passphrases import passphrase_of
from fedstrata.errors import FedStrataError, FedStrataWarning

if TYPE_CHECKING:
    from fedstrata.deployment.flower import ServerCertificate

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS: everything travels in plain text, weights included.")
]


def read_address(text: str) -> tuple[str, int]:
    """Read ``host:port``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise FedStrataError(f"'{text}' is no address; write it like fl.example.org:{PORT}.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether an address stays inside this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_tls(host: str, given: bool, insecure: bool, needed: str) -> None:
    """Refuse a connection that leaves this machine without TLS, unless that is asked for."""
    if not given and not insecure and not is_loopback(host):
        raise FedStrataError(
            f"A connection with '{host}' needs TLS: give {needed}, which 'fedstrata keys' makes, or --insecure to do "
            "without."
        )


def proof_of_server(folder: Path, mutual_tls: bool, passphrase_file: Path | None) -> tuple[ServerCertificate, str]:
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
    until = checked_dates(paths[0], "fedstrata keys renew")
    if (folder / AUTHORITY).is_file():
        checked_dates(folder / AUTHORITY, "fedstrata keys renew --authority")
    return ServerCertificate(paths[0], paths[1], passphrase, paths[2] if mutual_tls else None), until


def proof_of_site(folder: Path, name: str, passphrase: str | None) -> ssl.SSLContext | None:
    """Get what a site shows to a server that asks for its certificate, if it has one."""
    from fedstrata.deployment.certificates import site_context
    from fedstrata.deployment.keys import AUTHORITY, SITE_CERTIFICATE, SITE_KEY

    if not (folder / SITE_CERTIFICATE).is_file():
        return None
    checked_dates(folder / SITE_CERTIFICATE, f"fedstrata keys renew --site {name}")
    return site_context(folder / AUTHORITY, folder / SITE_CERTIFICATE, folder / SITE_KEY, passphrase)


def checked_dates(certificate: Path, remedy: str) -> str:
    """Tell until when a certificate holds; refuse it if it does not hold now, and warn if it ends soon."""
    from fedstrata.deployment.certificates import check_dates, day

    facts, soon = check_dates(certificate, datetime.datetime.now(datetime.UTC), remedy)
    if soon is not None:
        warnings.warn(soon, FedStrataWarning, stacklevel=2)
    return day(facts.ends)


def need_flower() -> None:
    """Refuse to go on where Flower is not installed, and keep it quiet where it is."""
    from fedstrata.deployment import flower

    flower.need_flower()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
