"""Slow connections on a fast machine: a proxy that passes bytes on as a link of some speed and distance would."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from fedstrata.errors import FedStrataError

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit),(\d+(?:\.\d+)?)ms")
_PIECE = 16 * 1024
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Link:
    """A connection: bytes per second in each direction, and the seconds of a round trip.

    >>> Link.read("50mbit,80ms")
    Link(bytes_per_second=6250000.0, round_trip=0.08)
    """

    bytes_per_second: float
    round_trip: float

    @classmethod
    def read(cls, text: str) -> Link:
        """Read a text such as ``50mbit,80ms``."""
        matched = _TEXT.fullmatch(text.replace(" ", "").lower())
        if matched is None or float(matched.group(1)) == 0:
            raise FedStrataError(f"'{text}' is no link; write its speed and round trip time like 50mbit,80ms.")
        return cls(float(matched.group(1)) * _UNITS[matched.group(2)] / 8, float(matched.group(3)) / 1000)


class _Direction:
    """One direction of a site's link, for all its connections: pieces leave one after another, and arrive later."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free_at = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, until it ends; the sender is read from no faster than the link."""
        clock = asyncio.get_running_loop()
        arrivals: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(arrivals, writer))
        with suppress(ConnectionError):
            while piece := await reader.read(_PIECE):
                self.free_at = max(self.free_at, clock.time()) + len(piece) / self.link.bytes_per_second
                arrivals.put_nowait((self.free_at + self.link.round_trip / 2, piece))
                await asyncio.sleep(self.free_at - clock.time())
        arrivals.put_nowait((clock.time() + self.link.round_trip / 2, b""))
        await delivery

    async def _deliver(self, arrivals: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while True:
                due, piece = await arrivals.get()
                await asyncio.sleep(max(0.0, due - clock.time()))
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
        writer.close()


class ShapedLinks:
    """One proxy for each of some sites, in front of one server; ``addresses`` are where the sites connect."""

    def __init__(self, server: str, link: Link, sites: int) -> None:
        host, _, port = server.rpartition(":")
        self.server = host, int(port)
        self.link = link
        self.sites = sites
        self.addresses: list[str] = []
        self._listeners: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="links")

    def __enter__(self) -> ShapedLinks:
        self._thread.start()
        self.addresses = [
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result() for _ in range(self.sites)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for listener in self._listeners:
            listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _listen(self) -> str:
        up, down = _Direction(self.link), _Direction(self.link)

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection(*self.server)
                await asyncio.gather(up.carry(reader, far_writer), down.carry(far_reader, writer))
            writer.close()

        listener = await asyncio.start_server(connect, _LOOPBACK, 0)
        self._listeners.append(listener)
        return f"{_LOOPBACK}:{listener.sockets[0].getsockname()[1]}"
