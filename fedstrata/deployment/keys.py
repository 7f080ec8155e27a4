"""Certificates and keys for a small consortium, or for a test.

    <folder>/authority.key          signs the server's certificate; nobody else needs it
    <folder>/server/                for the server: ca.pem, server.pem, server.key, sites.toml with the public keys
    <folder>/sites/NAME/            for each site: ca.pem, site.key

Private keys are files that only their owner can read. All of this needs the package ``cryptography``, which the extra
``flower`` brings.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedstrata import files
from fedstrata.deployment.rules import Rules
from fedstrata.errors import FedStrataError, unknown_name

AUTHORITY, CERTIFICATE, SERVER_KEY, SITE_KEY, SITES_FILE = (
    "ca.pem", "server.pem", "server.key", "site.key", "sites.toml"
)  # fmt: skip
_DAYS = 365
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Member:
    """A site that may take part: its name, and the public key by which it is known."""

    name: str
    public_key: ec.EllipticCurvePublicKey


@dataclass(frozen=True)
class SitesFile:
    """Who takes part, in an order that stays, and by which rules."""

    members: tuple[Member, ...]
    rules: Rules

    @property
    def names(self) -> list[str]:
        """The names of the sites."""
        return [member.name for member in self.members]

    @classmethod
    def read(cls, path: Path) -> SitesFile:
        """Read a sites file; what does not fit is refused with a sentence."""
        try:
            content = tomllib.loads(files.read_bytes(path).decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FedStrataError(f"'{path}' is not a TOML file: {error}.") from None
        for key in content:
            if key not in ("rules", "sites"):
                raise unknown_name(f"key in '{path}' called", key, ["rules", "sites"])
        sites = content.get("sites", [])
        if not isinstance(sites, list) or not sites:
            raise FedStrataError(f"'{path}' names no sites; write a [[sites]] table with name and key for each.")
        members = tuple(_member(site, path) for site in sites)
        names, keys = zip(*((member.name, _public_line(member.public_key)) for member in members), strict=True)
        for kind, values in (("name", names), ("public key", keys)):
            if len(set(values)) < len(members):
                raise FedStrataError(f"'{path}' gives two sites the same {kind}.")
        return cls(members, _rules(content.get("rules", {}), path))


def _member(site: Any, path: Path) -> Member:
    if not isinstance(site, dict) or site.keys() != {"name", "key"} or not _NAME.fullmatch(str(site["name"])):
        raise FedStrataError(f"A site in '{path}' must have just a name, of letters and digits, and a key.")
    try:
        key = serialization.load_ssh_public_key(str(site["key"]).encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedStrataError(
            f"The key of the site '{site['name']}' in '{path}' is no public ECDSA key; "
            "take the line that 'fedstrata keys' wrote."
        )
    return Member(str(site["name"]), key)


def _rules(given: Any, path: Path) -> Rules:
    known = list(Rules.__dataclass_fields__)
    if not isinstance(given, dict):
        raise FedStrataError(f"In '{path}', [rules] must be a table.")
    for key in given:
        if key not in known:
            raise unknown_name(f"rule in '{path}' called", key, known)
    return Rules(**given)


def make_keys(folder: Path, hosts: Sequence[str], names: Sequence[str]) -> None:
    """Make an authority, a server's certificate for some host names, and a key for each site."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise FedStrataError(f"'{name}' cannot be the name of a site; use letters, digits, '-', '_' and '.'.")
    if len(set(names)) < len(names):
        raise FedStrataError("Two sites cannot have the same name.")
    if folder.exists() and any(folder.iterdir()):
        raise FedStrataError(f"The folder '{folder}' is not empty; keys are never overwritten, so choose another.")
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _certificate("FedStrata authority", authority.public_key(), "FedStrata authority", authority, None)
    own = _certificate(hosts[0], server.public_key(), "FedStrata authority", authority, hosts)
    write_secret(folder / "authority.key", _private(authority))
    write_secret(folder / "server" / SERVER_KEY, _private(server))
    files.write_atomically(folder / "server" / AUTHORITY, root)
    files.write_atomically(folder / "server" / CERTIFICATE, own)
    lines = ["# Who may take part, in the order in which the server numbers them.\n"]
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        write_secret(folder / "sites" / name / SITE_KEY, _private(key))
        files.write_atomically(folder / "sites" / name / AUTHORITY, root)
        lines.append(f'\n[[sites]]\nname = "{name}"\nkey = "{_public_line(key.public_key())}"\n')
    files.write_atomically(folder / "server" / SITES_FILE, "".join(lines))


def check_mode(path: Path) -> None:
    """Refuse the file of a private key that others can read."""
    with files.explained(path, "read"):
        mode = path.stat().st_mode
    if mode & 0o077:
        raise FedStrataError(f"Others can read the private key '{path}'; protect it with: chmod 600 {path}")


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key; a file that others can read is refused."""
    content = files.read_bytes(path)
    check_mode(path)
    try:
        key = serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedStrataError(f"'{path}' holds no private ECDSA key in PEM form; make one with 'fedstrata keys'.")
    return key


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first moment on."""
    files.make_folder(path.parent)
    with files.explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def _public_line(key: ec.EllipticCurvePublicKey) -> str:
    """Write a public key in one line, as OpenSSH does."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate(
    subject: str,
    public_key: ec.EllipticCurvePublicKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str] | None,
) -> bytes:
    """Make a certificate: of an authority, or of a server with its host names."""
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer)]
    builder = (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
