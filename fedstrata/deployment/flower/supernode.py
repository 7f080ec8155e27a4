"""A Flower SuperNode inside the site's process: it fetches messages and lets the ClientApp answer them there.

Flower's own command starts a new process for every message, which imports PyTorch and loads the data each time, and
asks for messages every three seconds. This one keeps the ClientApp alive, and comes back by itself when the server was
away. It is put together from parts that Flower does not document (``internals.py``).
"""

from __future__ import annotations

import datetime
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstrata.deployment.flower.app import PARTITION_KEY
from fedstrata.deployment.flower.doorkeeper import CLOCK, PROCESS_HEADER, TAKEN, TOO_MUCH
from fedstrata.deployment.flower.explaining import about_certificate, about_clocks, why_refused
from fedstrata.deployment.flower.internals import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetHttpClient,
    Node,
    NodeAuthHttpInterceptor,
    ObjectPullError,
    ObjectPushError,
    PullMessagesRequest,
    PushMessagesRequest,
    RuntimeVersionHttpInterceptor,
    SendNodeHeartbeatRequest,
    get_all_nested_objects,
    get_object_tree,
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    message_from_proto,
    message_to_proto,
    name_message,
    no_object_id_recompute,
    public_key_to_bytes,
    pull_and_inflate_object_from_tree,
    push_objects,
    remove_content_from_message,
)
from fedstrata.errors import FedStrataError

_HEARTBEAT_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 10.0
_SECONDS_FOR_ANOTHER = 5.0
_AT_ONCE = 8
"""So many pieces of a message travel at once, or a far server would answer each only after the one before."""


_SAME_KEY = "another process is connected with this site's key, and only one can be; stop one of them"


class _Lost(Exception):  # noqa: N818 - not an error
    """The server is away, or does not know this connection any more; the site connects again.

    ``about`` is what stays the same while words change, such as times.
    """

    def __init__(self, words: str, about: str = "") -> None:
        super().__init__(words)
        self.about = about or words


@dataclass(frozen=True)
class SuperNode:
    """Connects a ClientApp with a server, as long as it is not told to stop.

    ``root_certificate`` is the authority that the server's certificate must come from; without one the connection is in
    plain text.
    """

    server: str
    app: ClientApp
    key: ec.EllipticCurvePrivateKey
    root_certificate: Path | None
    poll_seconds: float = 1.0
    log: Callable[[str], None] = lambda line: None
    connected: Callable[[], None] = lambda: None
    """Told whenever the server has let the site in."""
    is_over: Callable[[], bool] = lambda: False
    """Whether the ClientApp has nothing more to do: then the connection ends too."""
    idle: Callable[[float], None] = lambda seconds: None
    """Told how long no message has come."""
    tls: ssl.SSLContext | None = None
    """How this site speaks TLS where it has a certificate of its own to show."""
    process: str = field(default_factory=lambda: token_hex(8))
    """By which the server tells this process from another one with the same key."""

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set; the server may come and go meanwhile."""
        pause, told = _FIRST_PAUSE, ""
        while not stop.is_set() and not self.is_over():
            try:
                with self._client() as client:
                    node = self._activate(client)
                    self.log(f"connected with {self.server}")
                    self.connected()
                    pause, told = _FIRST_PAUSE, ""
                    self._serve(client, node, stop)
            except _Lost as lost:
                if lost.about != told:
                    self.log(f"{lost}; trying again")
                told = lost.about
                stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _client(self) -> FleetHttpClient:
        interceptors = (
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(self.key, self.key.public_key()),
            _ProcessInterceptor(self.process),
        )
        if self.tls is not None:
            return FleetHttpClient(f"https://{self.server}", interceptors=interceptors, verify=self.tls)
        return FleetHttpClient.from_server_address(
            self.server,
            self.root_certificate is None,
            None if self.root_certificate is None else str(self.root_certificate),
            interceptors=interceptors,
        )

    def _activate(self, client: FleetHttpClient) -> Node:
        """Say who this is; a server that does not know the key, or that cannot be trusted, ends the site.

        A wrong clock may be set right, and another process with the same key may end: the site waits for that.
        """
        request = ActivateNodeRequest(
            public_key=public_key_to_bytes(self.key.public_key()), heartbeat_interval=_HEARTBEAT_SECONDS
        )
        try:
            return Node(node_id=client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (502, 503, 504):
                raise _Lost(f"{self.server} is not ready") from None
            reason = why_refused(error.response)
            if reason == CLOCK:
                now = datetime.datetime.now(datetime.UTC)
                raise _Lost(about_clocks(self.server, error.response, now), CLOCK) from None
            if reason == TAKEN:
                raise _Lost(_SAME_KEY) from None
            raise FedStrataError(
                f"{self.server} does not accept this site's key; ask its operator to put the public key into the "
                "sites file."
            ) from None
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                now = datetime.datetime.now(datetime.UTC)
                raise FedStrataError(about_certificate(self.server, error, self.root_certificate, now)) from None
            if isinstance(error, httpx.RemoteProtocolError) and self.root_certificate is not None:
                raise _Lost(
                    f"{self.server} has ended the connection at once; if it asks for certificates of sites "
                    "(--mutual-tls), put a site.pem that holds today into the folder of --keys"
                ) from None
            if "WRONG_VERSION_NUMBER" in str(error) or isinstance(error, httpx.RemoteProtocolError):
                raise FedStrataError(
                    f"{self.server} speaks {'no TLS' if self.root_certificate else 'TLS only'}; "
                    "site and server must agree."
                ) from None
            raise _Lost(f"{self.server} cannot be reached") from None

    def _serve(self, client: FleetHttpClient, node: Node, stop: threading.Event) -> None:
        ended = threading.Event()
        heart = threading.Thread(target=self._beat, args=(client, node, ended), daemon=True, name="heartbeat")
        heart.start()
        try:
            since, withdrawn = time.monotonic(), None
            while not stop.is_set() and not self.is_over():
                if withdrawn is not None and time.monotonic() - withdrawn > _SECONDS_FOR_ANOTHER:
                    raise _Lost(f"{self.server} has withdrawn a message, and sent no other")
                try:
                    answered = self._answer_one(client, node)
                except ObjectPullError:  # the server asks anew: it has just seen this site come back
                    withdrawn, answered = withdrawn or time.monotonic(), False
                if answered:
                    since, withdrawn = time.monotonic(), None
                else:
                    self.idle(time.monotonic() - since)
                    stop.wait(self.poll_seconds)
            if not self.is_over():  # of a node that has gone, the server would not get its last answer any more
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        except httpx.HTTPStatusError as error:
            reason = why_refused(error.response)
            words = {
                TAKEN: _SAME_KEY,
                TOO_MUCH: f"{self.server} refuses this site's answer: it is larger than the question allows",
            }
            raise _Lost(words.get(reason, f"{self.server} has refused a request of this site")) from None
        except (httpx.HTTPError, ObjectPushError) as error:
            raise _Lost(f"the connection with {self.server} is lost ({type(error).__name__})") from None
        finally:
            ended.set()
            heart.join(timeout=_HEARTBEAT_SECONDS)

    def _beat(self, client: FleetHttpClient, node: Node, ended: threading.Event) -> None:
        """Tell the server now and then that this site is alive, also while it trains."""
        while not ended.wait(_HEARTBEAT_SECONDS / 2):
            try:
                client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=_HEARTBEAT_SECONDS))
            except (httpx.HTTPError, RuntimeError):
                continue  # the loop that asks for messages finds out itself

    def _answer_one(self, client: FleetHttpClient, node: Node) -> bool:
        """Fetch a message, if there is one, let the ClientApp answer it, and send the answer."""
        pulled = client.PullMessages(PullMessagesRequest(node=node))
        if not pulled.messages_list:
            return False
        head, tree = message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0]
        run = head.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(client.PullObject, node, run),
            make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run),
            return_type=Message,
            initial_backoff=_FIRST_PAUSE,
            max_concurrent_pulls=_AT_ONCE,
        )
        name_message(message, head.metadata.message_id)
        context = Context(run, node.node_id, {PARTITION_KEY: 0}, RecordDict(), {})
        self._send(client, node, self.app(message, context))
        return True

    def _send(self, client: FleetHttpClient, node: Node, reply: Message) -> None:
        with no_object_id_recompute():
            name_message(reply, reply.object_id)
            response = client.PushMessages(
                PushMessagesRequest(
                    node=node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                )
            )
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(client.PushObject, node, reply.metadata.run_id, response.session_id),
                object_ids_to_push=set(response.objects_to_push),
                max_concurrent_pushes=_AT_ONCE,
            )


class _ProcessInterceptor:
    """Says with every request which process sends it."""

    def __init__(self, process: str) -> None:
        self.process = process

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers[PROCESS_HEADER] = self.process
        return call_next(context)
