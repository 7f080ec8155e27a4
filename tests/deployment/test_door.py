"""Who is read, how long and how much: strangers that flood the server, and sites that send more than was asked for."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedstrata.deployment.federation import Event
from fedstrata.deployment.flower import GridNetwork, ServerCertificate, SuperLink, SuperNode, app_of
from fedstrata.deployment.flower.doorkeeper import fingerprint
from fedstrata.deployment.flower.internals import (
    ActivateNodeRequest,
    Node,
    PullMessagesRequest,
    PushMessagesRequest,
    make_push_object_fn_protobuf,
    message_from_proto,
    message_to_proto,
    name_message,
    public_key_to_bytes,
    remove_content_from_message,
)
from fedstrata.deployment.flower.messages import to_record
from fedstrata.deployment.flower.refusals import Refusals, Refused
from fedstrata.deployment.keys import SitesFile, make_keys, read_private_key
from fedstrata.deployment.protocol import Place, Request
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.errors import FedStrataError

MEGABYTE = 2**20
PIECE = 5 * MEGABYTE
NAMES = ["berlin", "paris"]
STRANGERS, THEIR_BYTES, IDLE = 20, 62 * 10**6, 1500


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets") / "keys"
    make_keys(folder, ["127.0.0.1"], NAMES)
    return folder


def super_link(keys: Path) -> SuperLink:
    members = SitesFile.read(keys / "server" / "sites.toml").members
    certificate = ServerCertificate(keys / "server" / "server.pem", keys / "server" / "server.key")
    return SuperLink("127.0.0.1", 0, [member.public_key for member in members], certificate)


@pytest.fixture
def link(keys: Path) -> Iterator[SuperLink]:
    with super_link(keys) as running:
        yield running


def super_node(address: str, keys: Path, name: str, log: Callable[[str], None] = lambda line: None) -> SuperNode:
    key = read_private_key(keys / "sites" / name / "site.key")
    site = Site(keys / "state" / name, SiteData())
    return SuperNode(address, app_of(lambda context: site), key, keys / "server" / "ca.pem", 0.05, log)


# Strangers ------------------------------------------------------------------------------------------------------------


def connect(address: str, keys: Path | None = None) -> socket.socket:
    host, port = address.split(":")
    plain = socket.create_connection((host, int(port)), timeout=20)
    if keys is None:
        return plain
    return ssl.create_default_context(cafile=str(keys / "server" / "ca.pem")).wrap_socket(plain, server_hostname=host)


def flood(address: str, keys: Path, size: int) -> int:
    """Send a large request without a signature; tell how many bytes of it the server took."""
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: {address}\r\ncontent-type: {PROTOBUF_MEDIA_TYPE}\r\n"
    sent, piece = 0, bytes(2**16)
    with suppress(OSError), connect(address, keys) as connection:
        connection.sendall(f"{head}content-length: {size}\r\n\r\n".encode())
        while sent < size:
            connection.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.attack(
    "Strangers send bodies of 62 MB.",
    "Each is refused after the head of its request; nothing of the bodies is read.",
)
def test_bodies_of_strangers_are_not_read(link, keys):
    taken = [flood(link.address, keys, THEIR_BYTES) for _ in range(3)]
    assert max(taken) < 8 * MEGABYTE, "what fits between two machines, but no more"
    assert link.traffic()["network.up"] == 0


def still_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


@pytest.mark.attack(
    "A stranger opens connections and says nothing, over TCP or after the TLS handshake.",
    "A few are kept, the oldest goes for each new one, and all are cut after some seconds; sites get in meanwhile.",
)
@pytest.mark.parametrize("over_tls", [False, True])
def test_idle_connections_are_cut_and_sites_get_in(over_tls, link, keys):
    link._connections.most_strangers, link._connections.seconds_to_speak = 8, 1.5
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(link.address, keys if over_tls else None)) for _ in range(40)]
        stop = threading.Event()
        site = threading.Thread(target=super_node(link.address, keys, "berlin").run, args=(stop,), daemon=True)
        site.start()
        until = time.monotonic() + 10
        while not link.nodes() and time.monotonic() < until:
            time.sleep(0.02)
        assert list(link.nodes()) == [0]
        assert sum(map(still_open, idle)) <= 8
        while any(map(still_open, idle)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not any(map(still_open, idle))
        stop.set()
        site.join(timeout=10)


def test_a_head_that_never_ends_is_refused(link, keys):
    with connect(link.address, keys) as connection, suppress(OSError):
        connection.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\n")
        for number in range(1000):
            connection.sendall(f"x-{number}: {'a' * 1000}\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.attack(
    "A stranger knocks a hundred times with a key that is not in the sites file.",
    "The server's log tells it once, with the address and the fingerprint of the key.",
)
def test_a_strange_key_is_told_once(link, keys, tmp_path):
    make_keys(tmp_path / "others", ["127.0.0.1"], ["bern"])
    told: list[tuple[str, str, str]] = []
    link.refused = lambda *refusal: told.append(refusal)
    stranger = read_private_key(tmp_path / "others" / "sites" / "bern" / "site.key")
    node = SuperNode(link.address, app_of(lambda context: None), stranger, keys / "server" / "ca.pem")
    with node._client() as client:
        for _ in range(100):
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                client.PullMessages(PullMessagesRequest(node=Node(node_id=1)))
    link.nodes()
    [(address, shown, reason)] = told
    line = (tmp_path / "others" / "server" / "sites.toml").read_text().split('key = "')[1].split('"')[0]
    (tmp_path / "key.pub").write_text(line)
    assert (address, reason) == ("127.0.0.1", "its key is not in the sites file")
    assert shown in subprocess.run(["ssh-keygen", "-lf", tmp_path / "key.pub"], capture_output=True, text=True).stdout


def test_refusals_are_bounded():
    clock = [0.0]
    refusals = Refusals(lambda: clock[0])
    for number in range(5000):
        refusals.note(f"10.0.{number // 256}.{number % 256}", b"", "key", lambda: Refused("", "", ""))
    assert len(list(refusals.take())) == 30
    clock[0] = 61
    refusals.note("10.1.0.0", b"", "key", lambda: Refused("", "", ""))
    assert len(list(refusals.take())) == 1
    assert fingerprint("no key") == "none"


# Sites ----------------------------------------------------------------------------------------------------------------


@contextmanager
def pulled(address: str, keys: Path, ask: Callable[[], None]) -> Iterator[tuple[FleetHttpClient, Node, Message]]:
    """Connect as a site, let the server ask, and fetch the head of its message."""
    node = super_node(address, keys, "berlin")
    with node._client() as client:
        request = ActivateNodeRequest(public_key=public_key_to_bytes(node.key.public_key()), heartbeat_interval=30.0)
        here = Node(node_id=client.ActivateNode(request).node_id)
        ask()
        until = time.monotonic() + 20
        while not (answer := client.PullMessages(PullMessagesRequest(node=here))).messages_list:
            assert time.monotonic() < until
            time.sleep(0.05)
        yield client, here, message_from_proto(answer.messages_list[0])


def push_message(client: FleetHttpClient, here: Node, asked: Message, tree: ObjectTree) -> Any:
    """Answer a message with the pieces of a tree, all of which are still to come."""
    reply = Message(to_record("{}", b""), reply_to=asked)
    name_message(reply, tree.object_id)
    head = message_to_proto(remove_content_from_message(reply))
    return client.PushMessages(PushMessagesRequest(node=here, messages_list=[head], message_object_trees=[tree]))


def name(text: object) -> str:
    return sha256(str(text).encode()).hexdigest()


def fat_pieces(count: int) -> Iterator[tuple[str, bytes]]:
    for number in range(count):
        content = ArrayChunk(memoryview(number.to_bytes(4, "big") * (PIECE // 4))).deflate()
        yield sha256(content).hexdigest(), content


def answer_fatly(client: FleetHttpClient, here: Node, asked: Message, count: int) -> int:
    """Answer with many pieces; tell how many the server took."""
    tree = ObjectTree(object_id=name("fat"), children=[ObjectTree(object_id=piece) for piece, _ in fat_pieces(count)])
    session = push_message(client, here, asked, tree).session_id
    push = make_push_object_fn_protobuf(client.PushObject, here, asked.metadata.run_id, session)
    taken = 0
    with suppress(httpx.HTTPError):
        for piece, content in fat_pieces(count):
            push(piece, content)
            taken += 1
    return taken


def network_of(link: SuperLink) -> GridNetwork:
    return GridNetwork(link.grid(), link.nodes, 0.02, link.forget, allow=link.allow, failures=link.failures)


def small(round: int) -> Request:
    """Ask for an answer of few bytes."""
    return Request("train", "run", Place.training(round), most_bytes=61_000)


def asking(network: GridNetwork) -> Callable[[], None]:
    """Ask the first site, once it is there."""

    def ask() -> None:
        while not any(event.joined for event in network.receive(1.0)):
            pass
        network.send(0, small(1))

    return ask


@pytest.mark.attack(
    "A site answers with many megabytes, where the question allows 61 kB.",
    "The answer is cut off as it comes, the round goes on without it, and the log says why.",
)
def test_a_fat_answer_is_cut_off_as_it_comes(link, keys):
    network = network_of(link)
    with pulled(link.address, keys, asking(network)) as (client, here, asked):
        assert answer_fatly(client, here, asked, 20) == 9, "48 MiB may be on their way"
        [event] = network.receive(1.0)
        assert event.failure is not None
        assert "61000 bytes" in event.failure
        assert len(link._state.objects) == 0, "what came of it is gone"
        network.send(0, small(2))
        assert client.PullMessages(PullMessagesRequest(node=here)).messages_list, "the site is asked again"


@pytest.mark.attack(
    "A site opens forty connections at once with its own key.",
    "Sixteen stay, for every new one the one that was silent for longest is cut, and the site is served all along.",
)
def test_a_site_has_so_many_connections(link, keys):
    node = super_node(link.address, keys, "berlin")
    request = ActivateNodeRequest(public_key=public_key_to_bytes(node.key.public_key()), heartbeat_interval=30.0)
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(node._client()).ActivateNode(request)
        assert len(link._connections) <= 16
        assert list(link.nodes()) == [0]


def test_a_port_that_is_taken_is_told(link, keys):
    port = int(link.address.split(":")[1])
    with pytest.raises(FedStrataError, match="is the port taken"), SuperLink("127.0.0.1", port, [], None):
        pass
    with SuperLink("localhost", 0, [], None) as other:
        assert other.address.split(":")[-1] != "0"


def knot() -> ObjectTree:
    """Describe an answer of 120 pieces which, put together piece by piece, has more than 2 ** 60."""
    tree = ObjectTree(object_id=name(0))
    for number in range(1, 60):
        bare = ObjectTree(object_id=tree.object_id)
        tree = ObjectTree(object_id=name(number), children=[tree, bare])
    return tree


@pytest.mark.attack(
    "A site describes an answer whose pieces contain each other, so that it unfolds into 2 to the 60; or of too many.",
    "The description is refused, and the other sites do not notice.",
)
@pytest.mark.parametrize(
    "tree",
    [
        knot(),
        ObjectTree(object_id=name("many"), children=[ObjectTree(object_id=name(number)) for number in range(5000)]),
        ObjectTree(object_id="../../etc/passwd"),
    ],
)
def test_a_knotted_answer_is_refused(tree, link, keys):
    told: list[tuple[str, str, str]] = []
    link.refused = lambda *refusal: told.append(refusal)
    network = network_of(link)
    with pulled(link.address, keys, asking(network)) as (client, here, asked):
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            push_message(client, here, asked, tree)
        began = time.monotonic()
        assert network.receive(0.1) == []
        assert time.monotonic() - began < 5
        assert "push-messages" in told[0][2]


@pytest.mark.attack(
    "A site answers with pieces that are no message, or with the tree of another one.",
    "The server reads the one answer as a failure, and goes on.",
)
def test_a_broken_answer_is_one_failure(link, keys):
    network = network_of(link)
    with pulled(link.address, keys, asking(network)) as (client, here, asked):
        [(piece, content)] = fat_pieces(1)
        session = push_message(client, here, asked, ObjectTree(object_id=piece)).session_id
        make_push_object_fn_protobuf(client.PushObject, here, asked.metadata.run_id, session)(piece, content)
        [event] = network.receive(5.0)
        assert isinstance(event, Event)
        assert event.failure is not None
        assert "cannot be read" in event.failure


# A server in a process of its own -------------------------------------------------------------------------------------

SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_door import network_of, small, super_link

with super_link(Path({keys!r})) as link:
    network = network_of(link)
    print(link.address, flush=True)
    while True:
        for event in network.receive(1.0):
            if event.joined:
                network.send(event.site, small(1))
            print(event.failure or event, flush=True)
"""


@contextmanager
def server_process(keys: Path) -> Iterator[tuple[str, int]]:
    """Start a server; give its address and its process."""
    code = SERVER.format(tests=str(Path(__file__).parent), keys=str(keys))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        assert process.poll() is None, "the server is still there"
    finally:
        process.kill()
        process.communicate()


def megabytes(process: int, field: str) -> float:
    """Read the memory of a process: VmRSS is now, VmHWM the most so far."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024 / 10**6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.attack(
    "20 strangers at once send 62 MB each; then one opens 1,500 connections and says nothing; then a site answers a "
    "question for 61 kB with 1.5 GB.",
    "The server's memory grows by less than 250 MB in all.",
)
def test_the_memory_of_a_server_under_a_flood(keys, record_property):
    with server_process(keys) as (address, process), ExitStack() as stack:
        before = megabytes(process, "VmRSS")
        strangers = [threading.Thread(target=flood, args=(address, keys, THEIR_BYTES)) for _ in range(STRANGERS)]
        for stranger in strangers:
            stranger.start()
        for stranger in strangers:
            stranger.join()
        flooded = megabytes(process, "VmHWM")
        for _ in range(IDLE):
            with suppress(OSError):
                stack.enter_context(connect(address))
        time.sleep(2)
        idle = megabytes(process, "VmHWM")
        with pulled(address, keys, lambda: None) as (client, here, asked):
            taken = answer_fatly(client, here, asked, 300)
        fat = megabytes(process, "VmHWM")
    record_property(
        "measured",
        f"{before:.0f} MB before, at most {flooded:.0f} MB under the strangers, {idle:.0f} MB with the connections, "
        f"{fat:.0f} MB with the answer, of which {taken * PIECE / 10**6:.0f} MB were taken",
    )
    assert fat - before < 250
