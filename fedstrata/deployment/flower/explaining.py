"""Why a site cannot connect, in a sentence that its operator can act on: the clock, the date, the name, the key."""

from __future__ import annotations

import datetime
import email.utils
import json
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import httpx
from cryptography import x509

from fedstrata.deployment.flower.doorkeeper import CLOCK, REASON, TAKEN, TOO_MUCH

_SECONDS = 10.0
_TIME = "%Y-%m-%d %H:%M:%S UTC"
_EXPIRED, _NOT_YET = "certificate has expired", "certificate is not yet valid"


def why_refused(response: httpx.Response) -> str:
    """Read the word by which a server tells why it refused a request; nothing if it tells none that is known."""
    with suppress(ValueError, AttributeError):
        reason = json.loads(response.content).get(REASON)
        if reason in (CLOCK, TAKEN, TOO_MUCH):
            return str(reason)
    return ""


def about_clocks(server: str, response: httpx.Response, now: datetime.datetime) -> str:
    """Say how far the clocks of site and server are apart, by the date of the server's answer."""
    told = "the server does not tell its time"
    with suppress(TypeError, ValueError, KeyError):
        there = email.utils.parsedate_to_datetime(response.headers["date"])
        apart = (now - there).total_seconds()
        direction = "ahead of" if apart > 0 else "behind"
        told = f"here it is {now:{_TIME}}, there {there:{_TIME}}: {abs(apart):.0f} s {direction} the server's"
    return (
        f"{server} knows this site's key, but the clock of this machine is wrong, or the server's is ({told}); "
        "set the clock (by NTP)"
    )


def about_certificate(server: str, error: Exception, authority: Path | None, now: datetime.datetime) -> str:
    """Say why a server's certificate is not trusted: its dates, its names, or who signed it."""
    text = str(error)
    if _EXPIRED in text or _NOT_YET in text:
        return (
            f"The certificate of {server} {_validity(server, authority, now)}, and here it is {now:{_TIME}}; ask its "
            "operator for a new one, or set this machine's clock."
        )
    if "mismatch" in text or "is not valid for" in text:
        return (
            f"The certificate of {server} is for another name{_names(server)}; connect under a name that it has, or "
            "ask its operator for one with this name."
        )
    return (
        f"The certificate of {server} does not come from the authority in '{authority}'; "
        "ask its operator for the right ca.pem."
    )


def _validity(server: str, authority: Path | None, now: datetime.datetime) -> str:
    """Say from when until when the certificate is valid, or else the authority's, if that is what does not fit."""
    with suppress(OSError, ValueError):
        own = _shown(server)
        if own.not_valid_before_utc <= now <= own.not_valid_after_utc and authority is not None:
            own = x509.load_pem_x509_certificate(authority.read_bytes())
            return f"comes from an authority ('{authority}') that {_dates(own)}"
        return _dates(own)
    return "has expired or is not valid yet"


def _dates(certificate: x509.Certificate) -> str:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return f"is valid from {first:{_TIME}} until {last:{_TIME}}"


def _names(server: str) -> str:
    with suppress(OSError, ValueError, x509.ExtensionNotFound):
        names = _shown(server).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return f" ({', '.join(str(name.value) for name in names)})"
    return ""


def _shown(server: str) -> x509.Certificate:
    """Look at the certificate that a server shows, without trusting it."""
    host, _, port = server.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as plain,
        context.wrap_socket(plain) as connection,
    ):
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
