"""The private keys of a consortium, or of a test, and the folder that holds them.

    <folder>/authority.key          signs the certificates of the server and of the sites; nobody else needs it
    <folder>/server/                for the server: ca.pem, server.pem, server.key, sites.toml with the public keys
    <folder>/sites/NAME/            for each site: ca.pem, site.pem, site.key

Private keys are files that only their owner can read, and where that is wanted nobody without a passphrase. All of this
needs the package ``cryptography``, which the extra ``flower`` brings.
"""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedstrata import files
from fedstrata.deployment.certificates import (
    AUTHORITY_DAYS,
    DAYS,
    Authority,
    CertificateFacts,
    facts_of,
    hosts_of,
    new_authority,
    public_key_of,
    read_certificate,
    server_certificate,
    site_certificate,
    to_pem,
)
from fedstrata.deployment.sites_file import (
    Member,
    PublicKey,
    SitesFile,
    add_to_file,
    change_in_file,
    check_name,
    public_line,
    site_table,
)
from fedstrata.errors import FedStrataError, unknown_name

AUTHORITY, CERTIFICATE, SERVER_KEY, SITE_CERTIFICATE, SITE_KEY, SITES_FILE, AUTHORITY_KEY = (
    "ca.pem", "server.pem", "server.key", "site.pem", "site.key", "sites.toml", "authority.key"
)  # fmt: skip
SHORTEST_PASSPHRASE = 12
"""A key file makes every guess only a little slower, so that the passphrase itself must be hard to guess."""


# Files with private keys ----------------------------------------------------------------------------------------------


def check_mode(path: Path, what: str = "private key") -> None:
    """Refuse a file with a secret that others can read; what is no plain file, such as a pipe, has no reader yet."""
    with files.explained(path, "read"):
        mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & 0o077:
        raise FedStrataError(f"Others can read the {what} '{path}'; protect it with: chmod 600 {path}")


def is_protected(path: Path) -> bool:
    """Tell whether a private key can be read with its passphrase only."""
    return b"ENCRYPTED" in files.read_bytes(path)


def read_private_key(path: Path, passphrase: str | None = None) -> ec.EllipticCurvePrivateKey:
    """Read a private key; a file that others can read is refused. A key without protection needs no passphrase."""
    content = files.read_bytes(path)
    check_mode(path)
    protected = is_protected(path)
    if protected and passphrase is None:
        raise FedStrataError(
            f"The private key '{path}' is protected; give its passphrase with --passphrase-file, or at a terminal, "
            "where it is asked for."
        )
    try:
        key = serialization.load_pem_private_key(content, passphrase.encode() if protected and passphrase else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if key is None and protected:
        raise FedStrataError(f"The passphrase of the private key '{path}' is wrong.")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedStrataError(f"'{path}' holds no private ECDSA key in PEM form; make one with 'fedstrata keys'.")
    return key


def write_private_key(path: Path, key: ec.EllipticCurvePrivateKey, passphrase: str | None = None) -> None:
    """Write a private key, in the place of an older one where there is one, under a passphrase where one is given."""
    if passphrase is not None and len(passphrase) < SHORTEST_PASSPHRASE:
        raise FedStrataError(
            f"A passphrase of {len(passphrase)} characters is too easy to guess; take at least {SHORTEST_PASSPHRASE}."
        )
    protection = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase.encode())
    )
    content = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    write_secret(partial, content)
    with files.explained(path):
        partial.replace(path)


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first moment on."""
    files.make_folder(path.parent)
    with files.explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def change_passphrase(path: Path, old: str | None, new: str | None) -> None:
    """Put a private key under another passphrase, or under none; the key itself stays the same."""
    write_private_key(path, read_private_key(path, old), new)


def make_site_key(folder: Path, passphrase: str | None = None) -> PublicKey:
    """Make a site's private key in a folder of its own, and return the public key, which may be handed to anybody."""
    if (folder / SITE_KEY).exists():
        raise FedStrataError(f"'{folder / SITE_KEY}' exists; keys are never overwritten, so choose another --out.")
    return _new_site_key(folder, passphrase)


def _new_site_key(folder: Path, passphrase: str | None) -> PublicKey:
    key = ec.generate_private_key(ec.SECP384R1())
    write_private_key(folder / SITE_KEY, key, passphrase)
    return key.public_key()


# The folder of a consortium -------------------------------------------------------------------------------------------


def make_keys(
    folder: Path,
    hosts: Sequence[str],
    names: Sequence[str],
    days: int = DAYS,
    passphrase: str | None = None,
    now: datetime.datetime | None = None,
) -> None:
    """Make an authority, a server's certificate for some host names, and a key and a certificate for each site."""
    for name in names:
        check_name(name)
    if len(set(names)) < len(names):
        raise FedStrataError("Two sites cannot have the same name.")
    if folder.exists() and any(folder.iterdir()):
        raise FedStrataError(f"The folder '{folder}' is not empty; keys are never overwritten, so choose another.")
    begins = now or datetime.datetime.now(datetime.UTC)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = new_authority(authority_key, begins, max(AUTHORITY_DAYS, days))
    write_private_key(folder / AUTHORITY_KEY, authority_key, passphrase)
    write_private_key(folder / "server" / SERVER_KEY, server_key, passphrase)
    files.write_atomically(folder / "server" / AUTHORITY, to_pem(authority.certificate))
    certificate = server_certificate(server_key.public_key(), hosts, authority, begins, days)
    files.write_atomically(folder / "server" / CERTIFICATE, certificate)
    made = KeyFolder(folder, begins, days)
    lines = ["# Who may take part, in the order in which the server numbers them.\n"]
    for name in names:
        key = make_site_key(folder / "sites" / name, passphrase)
        made.certify(name, key, authority)
        lines.append(site_table(name, key))
    files.write_atomically(folder / "server" / SITES_FILE, "".join(lines))


@dataclass(frozen=True)
class KeyFolder:
    """A folder that :func:`make_keys` has made, or as much of it as is on this machine, at a time."""

    folder: Path
    now: datetime.datetime
    days: int = DAYS

    @property
    def sites_file(self) -> Path:
        """The file that names the sites."""
        return self.folder / "server" / SITES_FILE

    def authority(self, passphrase: str | None) -> Authority:
        """Read the authority's key and certificate."""
        key = read_private_key(self.folder / AUTHORITY_KEY, passphrase)
        return Authority(read_certificate(self.folder / "server" / AUTHORITY), key)

    def renew_authority(self, passphrase: str | None) -> CertificateFacts:
        """Let the authority sign itself anew, with the same key; every site needs the new ca.pem."""
        key = read_private_key(self.folder / AUTHORITY_KEY, passphrase)
        renewed = new_authority(key, self.now, max(AUTHORITY_DAYS, self.days))
        for folder in (self.folder / "server", *(self.folder / "sites").glob("*")):
            files.write_atomically(folder / AUTHORITY, to_pem(renewed.certificate))
        return facts_of(renewed.certificate)

    def renew_server(self, authority: Authority, hosts: Sequence[str] = ()) -> CertificateFacts:
        """Sign the server's certificate anew: for the same key, and the same hosts if no others are given."""
        path = self.folder / "server" / CERTIFICATE
        old = read_certificate(path)
        signed = server_certificate(public_key_of(old), hosts or hosts_of(old), authority, self.now, self.days)
        files.write_atomically(path, signed)
        return facts_of(read_certificate(path))

    def renew_site(self, name: str, authority: Authority) -> CertificateFacts:
        """Sign the certificate of a site anew, for the key that stands in the sites file."""
        member = _find(SitesFile.read(self.sites_file), name, self.sites_file)
        return self.certify(name, member.public_key, authority)

    def add(
        self, name: str, key: PublicKey | None, sites: Path, authority: Authority | None, passphrase: str | None = None
    ) -> PublicKey:
        """Put a site on the list: with its own public key, or with one that is made for it.

        One that was removed gets its old number back, but never its old key.
        """
        check_name(name)
        known = SitesFile.read(sites).find(name)
        if known is not None and not known.removed:
            raise FedStrataError(f"'{sites}' has a site '{name}'; 'fedstrata keys rotate {name}' gives it another key.")
        new = self._other_key(name, key, known, sites, passphrase)
        if known is None:
            add_to_file(sites, name, new)
        else:
            change_in_file(sites, name, {"key": public_line(new), "removed": None})
        self._settle(name, new, key is None, authority)
        return new

    def rotate(
        self,
        name: str,
        key: PublicKey | None,
        sites: Path,
        authority: Authority | None,
        overlap: datetime.timedelta = datetime.timedelta(),
        passphrase: str | None = None,
    ) -> PublicKey:
        """Give a site another key, its own or one that is made for it; for an ``overlap`` the old one is good too."""
        member = _find(SitesFile.read(sites), name, sites)
        if member.removed:
            raise FedStrataError(f"'{name}' was removed from '{sites}'; 'fedstrata keys add {name}' puts it back.")
        new = self._other_key(name, key, member, sites, passphrase)
        old, until = (public_line(member.public_key), self.now + overlap) if overlap else (None, None)
        change_in_file(sites, name, {"key": public_line(new), "old_key": old, "old_key_until": until})
        self._settle(name, new, key is None, authority)
        return new

    def remove(self, name: str, sites: Path) -> None:
        """Take a site off the list: its key is refused, its number stays its own."""
        if _find(SitesFile.read(sites), name, sites).removed:
            raise FedStrataError(f"'{name}' was removed from '{sites}' before.")
        change_in_file(sites, name, {"removed": True, "old_key": None, "old_key_until": None})

    def _other_key(
        self, name: str, key: PublicKey | None, known: Member | None, sites: Path, passphrase: str | None
    ) -> PublicKey:
        """Take a site's own new key, or make one in the place of that which the folder may hold."""
        if key is not None and known is not None and public_line(key) == public_line(known.public_key):
            raise FedStrataError(f"This is the key that '{name}' has in '{sites}'; another one is needed.")
        return _new_site_key(self.folder / "sites" / name, passphrase) if key is None else key

    def _settle(self, name: str, key: PublicKey, made_here: bool, authority: Authority | None) -> None:
        """Certify a new key, and let nothing lie in the folder of its site that belongs to an old one."""
        folder = self.folder / "sites" / name
        if not made_here:
            (folder / SITE_KEY).unlink(missing_ok=True)
        if authority is None:
            (folder / SITE_CERTIFICATE).unlink(missing_ok=True)
        else:
            self.certify(name, key, authority)

    def certify(self, name: str, key: PublicKey, authority: Authority) -> CertificateFacts:
        """Let the authority sign a site's certificate, and put its own beside it."""
        path = self.folder / "sites" / name / SITE_CERTIFICATE
        files.make_folder(path.parent)
        files.write_atomically(path, site_certificate(key, name, authority, self.now, self.days))
        files.write_atomically(path.with_name(AUTHORITY), to_pem(authority.certificate))
        return facts_of(read_certificate(path))


def _find(file: SitesFile, name: str, path: Path) -> Member:
    member = file.find(name)
    if member is None:
        raise unknown_name(f"site in '{path}' called", name, [one.name for one in file.members])
    return member
