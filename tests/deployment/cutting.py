"""A connection that can be cut in the middle of an upload, and stays down until it is mended."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

AT_ONCE = struct.pack("ii", 1, 0)
"""Close with a reset, and without sending what is still to be sent."""


class CutLine:
    """Passes everything on to a server, until so many bytes have gone up."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self.server = host, int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.is_cut = threading.Event()
        self._left: int | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def __enter__(self) -> CutLine:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.listener.close()
        self._reset()

    def cut_after(self, count: int) -> None:
        """Cut the line when so many more bytes have gone up."""
        self.is_cut.clear()
        self._left = count

    def mend(self) -> None:
        """Let the site connect again."""
        self.is_cut.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                if self.is_cut.is_set():
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self.server)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._open |= {near, far}
                threading.Thread(target=self._carry, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while content := source.recv(16 * 1024):
                target.sendall(content[: self._allowed(len(content))] if up else content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _allowed(self, count: int) -> int:
        """Tell how many of these bytes may still go up."""
        if self._left is None:
            return count
        allowed = min(count, self._left)
        self._left -= allowed
        if not self._left:
            self._left = None
            self.is_cut.set()
            self._reset()
        return allowed

    def _reset(self) -> None:
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            end.close()
