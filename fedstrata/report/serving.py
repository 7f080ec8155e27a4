"""A server for one page and its news, and for nothing else.

It answers GET only, two addresses, and only those who may: requests must be meant for this machine (a foreign site that
has its name point here is refused), and where others can reach it, they must bring the token.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import secrets
import socket
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fedstrata.errors import FedStrataError
from fedstrata.report.watching import Snapshot, Watcher

_AT_A_TIME = 32
"""How many requests are answered at a time; more have to wait."""
_SECONDS_TO_ASK = 10
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def is_local(host: str) -> bool:
    """Tell whether an address can be reached from this machine alone.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("0.0.0.0"), is_local("::1")
    (True, True, False, True)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_meant_for(asked: str, host: str) -> bool:
    """Tell whether the ``Host`` of a request means this server, and not a name that somebody has made to point here.

    Nobody can make an address in numbers point elsewhere; of names, only those of this machine are known.

    >>> is_meant_for("localhost:8080", "127.0.0.1"), is_meant_for("evil.example", "127.0.0.1")
    (True, False)
    >>> is_meant_for("192.168.1.5:80", "0.0.0.0"), is_meant_for("192.168.1.5:80", "127.0.0.1")
    (True, False)
    """
    try:
        name = (urlsplit(f"//{asked}").hostname or "").rstrip(".").lower()
    except ValueError:
        return False
    if is_local(host):
        return is_local(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return name in {"localhost", host.lower(), own, f"{own}.local", f"{own.split('.')[0]}.local"}
    return True


class PageServer(ThreadingHTTPServer):
    """Serves the page of a watcher until :meth:`shutdown`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, watcher: Watcher, host: str = "127.0.0.1", port: int = 0, with_token: bool = False) -> None:
        self.watcher = watcher
        self.host = host
        self.token = secrets.token_urlsafe(24) if with_token or not is_local(host) else None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(_AT_A_TIME)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise FedStrataError(
                f"No page can be served at {host}, port {port}: {reason.lower()}; choose another --port (0 for any "
                "that is free) or --host."
            ) from error

    @property
    def cookie(self) -> str:
        """The name under which a browser keeps the token; browsers do not tell ports apart."""
        return f"fedstrata-{self.server_address[1]}"

    @property
    def url(self) -> str:
        """Where the page is, with the token if there is one; as others reach it, where they can."""
        host = self.host
        if host in ("0.0.0.0", "::"):
            host = _own_address(self.address_family)
        written = f"[{host}]" if ":" in host else host
        query = "" if self.token is None else f"?token={quote(self.token)}"
        return f"http://{written}:{self.server_address[1]}/{query}"

    def admits(self, given: str | None) -> bool:
        """Compare a token with ours, in a time that does not tell how much of it is right."""
        return self.token is None or (given is not None and hmac.compare_digest(given.encode(), self.token.encode()))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, of which there are so many."""
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let the next one come."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _SECONDS_TO_ASK
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "FedStrata", ""

    def parse_request(self) -> bool:
        """Let only GET pass."""
        if not super().parse_request():
            return False
        if self.command == "GET":
            return True
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"", {"Allow": "GET"})
        return False

    def do_GET(self) -> None:
        """Answer a request."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not is_meant_for(self.headers.get("Host", ""), self.server.host):
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "This server does not have that name.")
        in_address = query.get("token", [None])[0]
        if not any(self.server.admits(given) for given in {in_address, self._bearer(), self._cookie()}):
            return self._refuse(
                HTTPStatus.FORBIDDEN, "Open the address that 'fedstrata watch' has printed, with its token."
            )
        if url.path not in ("/", "/data.json"):
            return self._refuse(HTTPStatus.NOT_FOUND, "There is nothing here but the page.")
        try:
            snapshot = self.server.watcher.current()
        except Exception as error:  # a page that fails once is asked for again
            return self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"The page cannot be built: {error}")
        self._answer(url.path, snapshot, in_address)

    def _answer(self, path: str, snapshot: Snapshot, in_address: str | None) -> None:
        tag = {"ETag": snapshot.tag}
        if path == "/data.json":
            if self.headers.get("If-None-Match") == snapshot.tag:
                return self._send(HTTPStatus.NOT_MODIFIED, b"", tag)
            return self._send(HTTPStatus.OK, snapshot.news, {**tag, "Content-Type": "application/json; charset=utf-8"})
        kept = {}
        if self.server.token is not None and in_address is not None:
            kept = {"Set-Cookie": f"{self.server.cookie}={in_address}; Path=/; HttpOnly; SameSite=Strict"}
        self._send(HTTPStatus.OK, snapshot.page, {**kept, "Content-Type": "text/html; charset=utf-8"})

    def _bearer(self) -> str | None:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        return given.strip() if scheme.lower() == "bearer" else None

    def _cookie(self) -> str | None:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return None
        return None if found is None else found.value

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self.close_connection = True
        self._send(status, sentence.encode(), {"Content-Type": "text/plain; charset=utf-8"})

    def _send(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str]) -> None:
        if len(content) > 1000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            content, headers = gzip.compress(content, 5, mtime=0), {**headers, "Content-Encoding": "gzip"}
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: addresses may hold the token."""


def _own_address(family: socket.AddressFamily | int) -> str:
    """Find the address by which others in the network reach this machine; nothing is sent for it."""
    outside = ("2001:db8::1", 9) if family == socket.AF_INET6 else ("192.0.2.1", 9)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(outside)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
