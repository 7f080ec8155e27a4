"""The connections with a server: how many there may be, and how long a stranger may say nothing.

Every connection begins as a stranger's, and costs memory as soon as TLS begins. It must bring a request with a known
key within some seconds, or it is cut. Of strangers there are few at a time: a new one takes the
place of the oldest from the address that has most, so that whoever floods the server crowds out himself, not the sites.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import time
from asyncio import sslproto
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

Peer = tuple[str, int]
"""The address and port of the other end."""
BACKLOG = 64
"""So many connections are taken on at once; the system lets others wait."""
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Where 'localhost' has an address of a kind that this machine does not speak."""
_TLS_BUFFER = 2**15
"""What a connection has to read into: more than a record of TLS, and an eighth of what Python would give it."""
_CUT_BEFORE_CLEARING, _SECONDS_BEFORE_CLEARING = 128, 2.0


class Caller(NamedTuple):
    """Who speaks over a connection: a site, and which of its processes."""

    site: int
    process: str


class Connections:
    """All connections that are open, of strangers and of sites; used by the thread that serves them alone."""

    def __init__(self, most_strangers: int = 64, most_per_site: int = 16, seconds_to_speak: float = 15.0) -> None:
        self.most_strangers = most_strangers
        self.most_per_site = most_per_site
        self.seconds_to_speak = seconds_to_speak
        self._cut, self._cleared = 0, 0.0
        self._strangers: dict[Peer, _Connection] = {}
        self._known: dict[Peer, tuple[Caller, _Connection]] = {}

    def listen(self, host: str, port: int) -> list[socket.socket]:
        """Listen on all addresses of a host that this machine has; with port 0 on a free port."""
        sslproto.SSLProtocol.max_size = _TLS_BUFFER
        listeners: list[socket.socket] = []
        missing: OSError | None = None
        for family, kind, protocol, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
            taken = listeners[0].getsockname()[1] if listeners else port
            try:
                listeners.append(self._listener(family, kind, protocol, (address[0], taken, *address[2:])))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error
        if not listeners:
            raise missing or OSError(errno.EADDRNOTAVAIL, "there is no such address")
        return listeners

    def _listener(self, family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
        listener = _Listener(family, kind, protocol)
        try:
            listener.connections = self
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def add(self, connection: _Connection) -> None:
        """Take a new connection on, as a stranger's."""
        while len(self._strangers) >= self.most_strangers:
            self._strangers.pop(self._most_crowded()).cut()
            self._clear_away()
        self._strangers[connection.peer] = connection
        connection.timer = asyncio.get_running_loop().call_later(self.seconds_to_speak, connection.cut)

    def recognise(self, peer: Peer, caller: Caller) -> None:
        """Note who speaks over a connection; where a site has too many, the one that was silent for longest is cut."""
        stranger = self._strangers.pop(peer, None)
        _, connection = self._known.pop(peer, (None, stranger))
        if connection is None:
            return
        connection.stop_timer()
        own = [other for other, (known, _) in self._known.items() if known.site == caller.site]
        if len(own) >= self.most_per_site:
            self._known.pop(own[0])[1].cut()
        self._known[peer] = caller, connection

    def has(self, caller: Caller) -> bool:
        """Tell whether a process of a site is connected."""
        return any(known == caller for known, _ in self._known.values())

    def remove(self, connection: _Connection) -> None:
        """Forget a connection that was closed."""
        connection.stop_timer()
        if self._strangers.get(connection.peer) is connection:
            del self._strangers[connection.peer]
        if connection.peer in self._known and self._known[connection.peer][1] is connection:
            del self._known[connection.peer]

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def _clear_away(self) -> None:
        """Free what connections that were cut have left: in a handshake, some Pythons tie it into a circle."""
        self._cut += 1
        if self._cut >= _CUT_BEFORE_CLEARING and time.monotonic() - self._cleared >= _SECONDS_BEFORE_CLEARING:
            gc.collect()
            self._cut, self._cleared = 0, time.monotonic()

    def _most_crowded(self) -> Peer:
        """Find the oldest stranger from the address that has most of them."""
        [(host, _)] = Counter(host for host, _ in self._strangers).most_common(1)
        return next(peer for peer in self._strangers if peer[0] == host)


class _Listener(socket.socket):
    """A socket that tells of every connection before anything is done for it."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        connection = _Connection(self.family, self.type, self.proto, accepted.detach())
        connection.peer, connection.connections = (address[0], address[1]), self.connections
        self.connections.add(connection)
        return connection, address


class _Connection(socket.socket):
    """A connection that tells when it is closed."""

    peer: Peer
    connections: Connections
    timer: asyncio.TimerHandle | None = None

    def cut(self) -> None:
        """End the connection, whatever it is used for: whoever holds it reads its end, and closes it."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def close(self) -> None:
        self.connections.remove(self)
        super().close()
