"""A proxy that makes connections slow: as slow as it says, and without losing a byte."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from fedstrata.deployment.link import Link, ShapedLinks
from fedstrata.errors import FedStrataError


@pytest.fixture
def echo():
    """A server that sends everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            while content := connection.recv(65536):
                connection.sendall(content)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def exchange(address: str, content: bytes) -> tuple[bytes, float]:
    host, _, port = address.rpartition(":")
    received = bytearray()
    with socket.create_connection((host, int(port))) as connection:
        began = time.monotonic()
        sender = threading.Thread(target=connection.sendall, args=(content,))
        sender.start()
        while len(received) < len(content):
            received += connection.recv(65536)
        sender.join()
        return bytes(received), time.monotonic() - began


def test_a_small_message_takes_a_round_trip(echo):
    with ShapedLinks(echo, Link.read("100mbit,200ms"), 1) as links:
        content, seconds = exchange(links.addresses[0], b"hello")
    assert content == b"hello"
    assert 0.2 <= seconds < 0.5


def test_a_large_message_takes_as_long_as_the_speed_says_and_arrives_whole(echo):
    sent = bytes(range(256)) * 2000
    with ShapedLinks(echo, Link.read("8mbit,10ms"), 2) as links:
        tried = [exchange(links.addresses[1], sent) for _ in range(3)]  # a busy machine may be late once
    assert [content for content, _ in tried] == [sent] * 3
    fastest, expected = min(seconds for _, seconds in tried), len(sent) / 1e6
    assert expected <= fastest < 2 * expected + 0.5, "both directions carry at the same time"


@pytest.mark.parametrize("text", ["", "50mbit", "50mbit,", "fast,80ms", "0mbit,1ms", "-5mbit,1ms"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(FedStrataError, match="no link"):
        Link.read(text)
