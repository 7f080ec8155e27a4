"""What a request must show before the server reads it: a known key, the right time, and no more bytes than are due.

Flower looks at the signature only when it has read the whole body. Here the head of a request is enough to refuse it:
a stranger's body is never read. A site may send small requests at any time, and of its answers as many bytes as the
question allows that it was asked (:meth:`Doorkeeper.allow`).
"""

from __future__ import annotations

import asyncio
import binascii
import datetime
import json
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedstrata.deployment.flower.connections import Caller, Connections
from fedstrata.deployment.flower.internals import (
    PUBLIC_KEY_HEADER,
    SECONDS_AHEAD,
    SECONDS_BEHIND,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    bytes_to_public_key,
    verify_signature,
)
from fedstrata.deployment.flower.refusals import Refusals, Refused

PROCESS_HEADER = "fedstrata-process"
"""By which a process of a site is told from another one with the same key."""
REASON = "reason"
"""Where an answer says why a request was refused, in one of the words below."""
UNSIGNED, STRANGE, CLOCK, TAKEN, TOO_MUCH, BROKEN = "unsigned", "key", "clock", "taken", "too much", "broken"

_PUSHING = ("/v1/fleet/push-messages", "/v1/fleet/push-object")
_OK, _FAILED = 200, 500
_ACTIVATING = "/v1/fleet/activate-node"
_SMALL_BODY, _LARGE_BODY = 64 * 2**10, 16 * 2**20
"""Flower cuts arrays into pieces of five megabytes, and sends them side by side."""
_ON_THEIR_WAY = 48 * 2**20
"""So much may still come of an answer to an older question, and of what Flower puts around the pieces."""
_SECONDS_FOR_MORE = 60.0
_SECONDS_ALIVE = 12.0
"""A process of a site that was not heard for longer has gone: its heart beats every five seconds."""


class Unwelcome(Exception):  # noqa: N818 - a verdict
    """A request that is refused: the status of the answer, the word that tells why, and a sentence."""

    def __init__(self, status: int, reason: str, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.reason = reason
        self.words = words


def identify(headers: Mapping[str, str], site_of: Callable[[bytes], int | None], now: datetime.datetime) -> int:
    """Find out from the head of a request which site sends it; one that cannot show that is unwelcome."""
    try:
        key, signature = (b64decode(headers[name], validate=True) for name in (PUBLIC_KEY_HEADER, SIGNATURE_HEADER))
        stamp = headers[TIMESTAMP_HEADER]
        signed = datetime.datetime.fromisoformat(stamp)
        age = (now - signed).total_seconds()
    except (KeyError, ValueError, TypeError, binascii.Error):
        raise Unwelcome(401, UNSIGNED, "it is not signed as a site signs") from None
    site = site_of(key)
    if site is None:
        raise Unwelcome(401, STRANGE, "its key is not in the sites file")
    if not verify_signature(bytes_to_public_key(key), stamp.encode(), signature):
        raise Unwelcome(401, UNSIGNED, "its signature is wrong")
    if not -SECONDS_AHEAD < age < SECONDS_BEHIND:
        direction = "ahead of" if age < 0 else "behind"
        words = f"the site's clock is {abs(age):.0f} s {direction} the server's: {signed:%Y-%m-%d %H:%M:%S} there"
        raise Unwelcome(401, CLOCK, words)
    return site


@dataclass
class _Holder:
    """The process that speaks for a site, from where, and when it was heard last."""

    caller: Caller
    address: str
    heard: float


class Doorkeeper:
    """Lets requests of known sites pass to ``app``, and counts the bytes of all bodies both ways."""

    def __init__(
        self,
        app: ASGIApp,
        site_of: Callable[[bytes], int | None],
        connections: Connections,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self.app = app
        self.connections = connections
        self.refusals = Refusals()
        self.received = self.sent = 0
        self.arrivals: list[tuple[int, str]] = []
        """Sites that have connected, and from where, until somebody takes them."""
        self.cut_off: dict[int, str] = {}
        """Sites whose answer was too large, and how, until somebody takes them."""
        self._site_of = site_of
        self._allowed: Counter[int] = Counter()
        self._pushed: Counter[int] = Counter()
        self._holders: dict[int, _Holder] = {}
        self._now = now

    def allow(self, site: int, most_bytes: int) -> None:
        """Let a site send an answer of so many bytes, from now on."""
        self._pushed[site], self._allowed[site] = 0, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the SuperLink answer it."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        address, status = scope["client"][0], 0

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            self.sent += len(message.get("body", b""))
            await send(message)

        try:
            site = identify(headers, self._site_of, self._now())
            caller = Caller(site, headers.get(PROCESS_HEADER, "")[:64])
            self._hold(caller, address)
            self.connections.recognise(tuple(scope["client"]), caller)
            body = await self._read(scope["path"], headers, site, receive)
            if body is not None:
                await self.app(scope, _replayed(body, receive), counted)
            if status >= _FAILED:
                raise Unwelcome(status, BROKEN, f"nothing can be made of it (of '{scope['path']:.100}')")
            if scope["path"] == _ACTIVATING and status == _OK:
                self.arrivals.append((site, address))
        except Exception as error:
            why = error if isinstance(error, Unwelcome) else Unwelcome(400, BROKEN, f"it is broken ({error!r:.200})")
            self._note(address, headers.get(PUBLIC_KEY_HEADER, ""), why)
            if not status:
                await _refuse(why, counted)

    def _hold(self, caller: Caller, address: str) -> None:
        """Let one process at a time speak for a site, as long as it is alive."""
        now, holder = time.monotonic(), self._holders.get(caller.site)
        if holder is not None and holder.caller != caller:
            alive = now - holder.heard < _SECONDS_ALIVE and self.connections.has(holder.caller)
            if alive:
                raise Unwelcome(409, TAKEN, f"another process, at {holder.address}, is connected with the same key")
        self._holders[caller.site] = _Holder(caller, address, now)

    async def _read(self, path: str, headers: Mapping[str, str], site: int, receive: Receive) -> bytes | None:
        """Read the body of a request, as far as it is due; None if its sender has gone."""
        pushing = path in _PUSHING
        most = _LARGE_BODY if pushing else _SMALL_BODY
        declared = headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdecimal() or int(declared) > most:
            raise Unwelcome(413, TOO_MUCH, f"its body of {declared:.20} bytes is larger than {most}")
        body, more = bytearray(), True
        while more:
            try:
                message = await asyncio.wait_for(receive(), _SECONDS_FOR_MORE)
            except TimeoutError:
                raise Unwelcome(408, BROKEN, f"nothing more came of it for {_SECONDS_FOR_MORE:.0f} s") from None
            if message["type"] != "http.request":
                return None
            piece = message.get("body", b"")
            self.received += len(piece)
            if pushing:
                self._pushed[site] += len(piece)
                self._check_pushed(site)
            if len(body) + len(piece) > most:
                raise Unwelcome(413, TOO_MUCH, f"its body is larger than {most} bytes")
            body += piece
            more = message.get("more_body", False)
        return bytes(body)

    def _check_pushed(self, site: int) -> None:
        allowed = self._allowed[site]
        if self._pushed[site] > allowed + _ON_THEIR_WAY:
            self.cut_off.setdefault(site, f"its answer was cut off: the question allows {allowed} bytes, and more came")
            raise Unwelcome(413, TOO_MUCH, f"its answer is larger than the {allowed} bytes that the question allows")

    def _note(self, address: str, key: str, unwelcome: Unwelcome) -> None:
        self.refusals.note(
            address,
            sha256(key.encode()).digest(),
            unwelcome.reason,
            lambda: Refused(address, fingerprint(key), unwelcome.words),
        )


def fingerprint(key: str) -> str:
    """Write the fingerprint of a public key from the head of a request, as ``ssh-keygen -l`` writes it."""
    try:
        public = serialization.load_pem_public_key(b64decode(key, validate=True))
        line = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return f"SHA256:{b64encode(sha256(b64decode(line.split()[1])).digest()).decode().rstrip('=')}"
    except (ValueError, TypeError, UnsupportedAlgorithm, binascii.Error):
        return "none"


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Give a body that was read already, and then whatever comes after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(unwelcome: Unwelcome, send: Send) -> None:
    """Answer with the reason, and close the connection: the rest of the request is not read."""
    content = json.dumps({"detail": unwelcome.words, REASON: unwelcome.reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(content)).encode()))
    await send({"type": "http.response.start", "status": unwelcome.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
