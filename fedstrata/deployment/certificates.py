"""Certificates of a consortium: of its authority, of its server, and of its sites; and until when they hold.

A server's certificate names its hosts and is good for nothing but servers, a site's names the site and is good for
nothing but clients, so that neither can pass for the other.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstrata import files
from fedstrata.errors import FedStrataError

DAYS = 365
AUTHORITY_DAYS = 3650
"""The authority outlives what it signs, so that renewing a server's certificate needs nothing new at the sites."""
SOON = datetime.timedelta(days=30)
_AUTHORITY_NAME = "FedStrata authority"
_MINUTES_BEFORE = datetime.timedelta(minutes=5)
"""Clocks differ a little; a new certificate holds already where it is still earlier."""


@dataclass(frozen=True)
class Authority:
    """Who signs: a certificate that everybody has, and the private key that belongs to it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class CertificateFacts:
    """What a certificate says: whose it is, from when and until when, and by which fingerprint people compare it."""

    kind: str
    whose: str
    begins: datetime.datetime
    ends: datetime.datetime
    fingerprint: str

    def ended(self, now: datetime.datetime) -> bool:
        """Tell whether it holds no more."""
        return now >= self.ends

    def ends_soon(self, now: datetime.datetime) -> bool:
        """Tell whether it is time to renew it."""
        return now >= self.ends - SOON


def new_authority(key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int = AUTHORITY_DAYS) -> Authority:
    """Make the certificate of an authority, which signs itself."""
    name = _name(_AUTHORITY_NAME)
    builder = _builder(name, name, key.public_key(), key, now, now + datetime.timedelta(days=days))
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return Authority(builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key)


def server_certificate(
    public_key: ec.EllipticCurvePublicKey, hosts: Sequence[str], by: Authority, now: datetime.datetime, days: int
) -> bytes:
    """Make a server's certificate for the names and addresses under which sites reach it."""
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    return _signed(hosts[0], public_key, by, now, days, ExtendedKeyUsageOID.SERVER_AUTH, names)


def site_certificate(
    public_key: ec.EllipticCurvePublicKey, name: str, by: Authority, now: datetime.datetime, days: int
) -> bytes:
    """Make a site's certificate, which a server may want to see before anything else."""
    return _signed(name, public_key, by, now, days, ExtendedKeyUsageOID.CLIENT_AUTH, None)


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate, of whichever authority; of several in the file, the first."""
    try:
        return x509.load_pem_x509_certificate(files.read_bytes(path))
    except ValueError:
        raise FedStrataError(f"'{path}' holds no certificate in PEM form; make one with 'fedstrata keys'.") from None


def public_key_of(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return the public key that a certificate is about."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedStrataError("A certificate that another authority has made cannot be renewed here; ask that one.")
    return key


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """List the names and addresses that a server's certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def facts_of(certificate: x509.Certificate) -> CertificateFacts:
    """Tell what a certificate says."""
    hosts = hosts_of(certificate)
    subject = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return CertificateFacts(
        "authority" if _may_sign(certificate) else "server" if hosts else "site",
        ", ".join(hosts) or (str(subject[0].value) if subject else ""),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def check_pair(certificate: Path, key: Path, passphrase: str | None) -> None:
    """Refuse a certificate and a private key that do not belong together, or that cannot be used at all."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, passphrase)
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise FedStrataError(f"The certificate '{certificate}' belongs to another key than '{key}'.") from None
        if passphrase is not None:
            raise FedStrataError(f"The passphrase of the private key '{key}' is wrong.") from None
        raise FedStrataError(f"'{certificate}' and '{key}' cannot be used: {error}.") from None


def check_dates(path: Path, now: datetime.datetime, remedy: str) -> tuple[CertificateFacts, str | None]:
    """Refuse a certificate that does not hold now; tell in a sentence if it ends soon. ``remedy`` renews it."""
    facts = facts_of(read_certificate(path))
    if facts.ended(now):
        raise FedStrataError(f"The certificate '{path}' has expired on {day(facts.ends)}; renew it with: {remedy}")
    if now < facts.begins:
        raise FedStrataError(
            f"The certificate '{path}' begins on {day(facts.begins)}, and here it is {day(now)}: is the clock right?"
        )
    if not facts.ends_soon(now):
        return facts, None
    left = (facts.ends - now).days
    return facts, f"The certificate '{path}' expires on {day(facts.ends)}, in {left} days; renew it with: {remedy}"


def day(moment: datetime.datetime) -> str:
    """Write a date, for people."""
    return f"{moment:%Y-%m-%d}"


def site_context(authority: Path, certificate: Path, key: Path, passphrase: str | None) -> ssl.SSLContext:
    """Make a site's side of TLS: it trusts one authority, and shows its certificate to a server that asks for it."""
    check_pair(certificate, key, passphrase)
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(certificate, key, passphrase)
    return context


def _signed(
    subject: str,
    public_key: ec.EllipticCurvePublicKey,
    by: Authority,
    now: datetime.datetime,
    days: int,
    purpose: x509.ObjectIdentifier,
    names: x509.SubjectAlternativeName | None,
) -> bytes:
    last = by.certificate.not_valid_after_utc
    if now >= last:
        raise FedStrataError(
            f"The certificate of the authority has expired on {day(last)}; renew it first, with 'fedstrata keys renew "
            "--authority', and send the new ca.pem to every site."
        )
    ends = min(now + datetime.timedelta(days=days), last)
    builder = _builder(_name(subject), by.certificate.subject, public_key, by.key, now, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return to_pem(builder.sign(by.key, hashes.SHA256()))


def to_pem(certificate: x509.Certificate) -> bytes:
    """Write a certificate as text."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _MINUTES_BEFORE)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # no longer one is allowed


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
