"""A Flower SuperLink inside the server's process, with nothing open to the network but what sites need.

Flower's own command would start another process for the ServerApp, and anyone who reaches its port could start runs and
register nodes. Here only the fleet API is served, for the sites whose public keys are known, and the ServerApp talks to
the SuperLink's state directly. Before all of that stands a doorkeeper, who reads nothing of strangers but the heads of
their requests. It is put together from parts that Flower does not document (``internals.py``).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from fedstrata.deployment.certificates import check_pair
from fedstrata.deployment.flower.connections import BACKLOG, Connections
from fedstrata.deployment.flower.doorkeeper import Doorkeeper
from fedstrata.deployment.flower.internals import (
    NOOP_ACCOUNT_NAME,
    NOOP_FEDERATION_ID,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    HttpGrid,
    InMemoryLinkState,
    NodeAuthMiddleware,
    NoOpFederationManager,
    ProtobufTranslationMiddleware,
    Task,
    TaskIdentity,
    TaskType,
    fleet_router,
    http_error_translator,
    public_key_to_bytes,
    runtime_handlers,
)
from fedstrata.deployment.flower.objects import Objects
from fedstrata.errors import FedStrataError

_START_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75


@dataclass(frozen=True)
class ServerCertificate:
    """The files with which a server proves who it is; with an authority of sites, these must prove it to it first."""

    certificate: Path
    key: Path
    passphrase: str | None = field(default=None, repr=False)
    authority_of_sites: Path | None = None


class _LinkState(InMemoryLinkState):
    """Lets a site connect again at once after a crash, and tells which answers are there as a whole."""

    def __init__(self) -> None:
        self.objects = Objects()
        super().__init__(NoOpFederationManager(), self.objects)

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        self.deactivate_node(node_id)  # else it would wait until its last heartbeat is forgotten
        return bool(super().activate_node(node_id, heartbeat_interval))

    def store_message_and_object_tree(self, message: FlowerMessage, object_tree: Any, session_id: str) -> Any:
        if message.metadata.message_id != object_tree.object_id:  # its pieces could never be found again
            return False, []
        return super().store_message_and_object_tree(message, object_tree, session_id)

    def _cleanup_expired_task_tokens_locked(self) -> None:
        """Keep the run alive while nothing happens: its only task is this process, and needs no heartbeat.

        Else Flower would take it for dead after a minute without an answer, and drop all that is sent from then on.
        """

    def is_settled(self, message: str) -> bool:
        """Tell whether a message is answered, with all pieces of the answer; or given up, after its time to live."""
        with self.lock:
            asked = self.message_ins_store.get(message)
            if asked is None or asked.metadata.created_at + asked.metadata.ttl <= time.time():
                return True
            reply = self.message_ins_id_to_message_res_id.get(message)
            return reply is not None and self.objects.is_whole(reply)


class _StateFactory:
    def __init__(self, state: _LinkState) -> None:
        self._state = state

    def state(self) -> _LinkState:
        return self._state


class SuperLink:
    """Accepts the sites with known public keys, over TLS or, where that is allowed, in plain text."""

    refused: Callable[[str, str, str], None]
    """Told of refused requests, each stranger's now and then, by who asks for :meth:`nodes`: address, key, reason."""
    connected: Callable[[int, str], None]
    """Told in the same way of sites that have connected: number, address."""

    def __init__(
        self,
        host: str,
        port: int,
        public_keys: Sequence[ec.EllipticCurvePublicKey | None],
        certificate: ServerCertificate | None,
    ) -> None:
        self._state = _LinkState()
        self._certificate = certificate
        self._nodes = [  # for a name that is no key, nobody can sign
            self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, f"site {site}".encode(), 0)
            for site in range(len(public_keys))
        ]
        for site, key in enumerate(public_keys):
            self.set_keys(site, () if key is None else (key,))
        self._task = self._begin_run()
        self._connections = Connections()
        self._door = Doorkeeper(_fleet_app(self._state), self._site_of, self._connections)
        self.refused = lambda address, fingerprint, reason: None
        self.connected = lambda site, address: None
        self._listen_on = host, port
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._door,
                loop="asyncio",  # whose listening sockets may be of our own kind
                http="h11",  # which bounds the head of a request
                ws="none",
                backlog=BACKLOG,
                lifespan="off",
                log_level="error",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                ssl_certfile=None if certificate is None else str(certificate.certificate),
                ssl_keyfile=None if certificate is None else str(certificate.key),
                ssl_keyfile_password=None if certificate is None else certificate.passphrase,
                ssl_ca_certs=None if certificate is None else certificate.authority_of_sites,
                ssl_cert_reqs=ssl.CERT_REQUIRED
                if certificate is not None and certificate.authority_of_sites is not None
                else ssl.CERT_NONE,
            )
        )
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True, name="superlink")
        self.address = f"{host}:{port}"

    def __enter__(self) -> SuperLink:
        try:
            self._sockets = self._connections.listen(*self._listen_on)
        except OSError as error:
            raise FedStrataError(
                f"The server cannot listen on {self.address} ({error.strerror}); is the port taken? Choose another."
            ) from None
        self._thread.start()
        began = time.monotonic()
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() - began > _START_SECONDS:
                raise FedStrataError(f"The server cannot serve on {self.address}; look at its certificate.")
            time.sleep(0.01)
        host, port = self._sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    def _serve(self) -> None:
        self._server.run(sockets=self._sockets)

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)

    def grid(self) -> Grid:
        """Return the ServerApp's way to the sites."""
        return _DirectGrid(self._state, self._task)

    def nodes(self) -> dict[int, tuple[int, str]]:
        """List the sites that are connected: their node ids, and since when; and tell of those who came."""
        for refusal in self._door.refusals.take():
            self.refused(refusal.address, refusal.fingerprint, refusal.reason)
        while self._door.arrivals:
            self.connected(*self._door.arrivals.pop(0))
        online = {node.node_id: node for node in self._state.get_node_info(statuses=["online"])}
        return {
            site: (node, str(online[node].last_activated_at)) for site, node in enumerate(self._nodes) if node in online
        }

    def set_keys(self, site: int, public_keys: Sequence[ec.EllipticCurvePublicKey]) -> None:
        """Know a site by these keys from now on; without any it is cut off, and refused when it comes back."""
        accepted = [public_key_to_bytes(key) for key in public_keys]
        with self._state.lock:
            node, known = self._nodes[site], self._state.node_public_key_to_node_id
            for key in [key for key, owner in known.items() if owner == node]:
                del known[key]
            known.update(dict.fromkeys(accepted, node))
            if not accepted:
                self._state.deactivate_node(node)

    def renew_certificate(self) -> None:
        """Show the certificate that lies in the file now to whoever connects from now on."""
        mine, running = self._certificate, self._server.config.ssl
        if mine is None or running is None:
            return
        check_pair(mine.certificate, mine.key, mine.passphrase)  # what does not fit must not touch the one in use
        running.load_cert_chain(mine.certificate, mine.key, mine.passphrase)

    def forget(self, message: str) -> None:
        """Drop a message that nobody waits for any more, and what has come of its answer."""
        reply = self._state.message_ins_id_to_message_res_id.get(message)
        self._state.delete_messages({message})
        for known in (message, reply):
            if known is not None:
                self._state.object_store.delete(known)

    def traffic(self) -> dict[str, float]:
        """Tell the bytes of all HTTP bodies so far, both ways."""
        return {"network.up": float(self._door.received), "network.down": float(self._door.sent)}

    def allow(self, site: int, most_bytes: int) -> None:
        """Let a site's next answer have so many bytes; more is cut off as it comes."""
        self._door.allow(site, most_bytes)

    def failures(self) -> dict[int, str]:
        """Take the sites whose answers were cut off, and why."""
        return {site: self._door.cut_off.pop(site) for site in list(self._door.cut_off)}

    def _site_of(self, key: bytes) -> int | None:
        node = self._state.get_node_id_by_public_key(key)
        return self._nodes.index(node) if node in self._nodes else None

    def _begin_run(self) -> Task:
        run = self._state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        [task] = self._state.get_tasks(run_ids=[run])
        self._state.claim_task(task.task_id)
        self._state.activate_task(task.task_id)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, run, SUPERLINK_NODE_ID
        return task


def _fleet_app(state: _LinkState) -> FastAPI:
    """Build the part of a SuperLink that talks to sites, without the parts that start runs or register nodes."""
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
        ],
    )
    app.state.linkstate_factory = _StateFactory(state)
    app.state.enable_supernode_auth = True
    app.include_router(fleet_router)
    return app


class _DirectGrid(HttpGrid):
    """A Grid without a connection: it calls what a SuperLink's runtime API would call."""

    def __init__(self, state: _LinkState, task: Task) -> None:
        super().__init__(token="none")
        self._state = state
        self._direct = _DirectRuntime(state, task)
        self.set_run(state.get_run_info(run_ids=[task.run_id])[0])

    @property
    def _runtime_client(self) -> Any:
        return self._direct

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        """Return the answers that are there as a whole, and errors for messages that were given up."""
        settled = [message for message in message_ids if self._state.is_settled(message)]
        return super().pull_messages(settled) if settled else []


class _DirectRuntime:
    """The calls of Flower's runtime API, under the names of its client."""

    def __init__(self, state: _LinkState, task: Task) -> None:
        self._state = state
        self._task = task

    def __getattr__(self, name: str) -> Any:
        handlers = {
            "GetNodes": runtime_handlers.get_nodes,
            "PushMessages": runtime_handlers.push_messages,
            "PullMessages": runtime_handlers.pull_messages,
            "PushObject": runtime_handlers.push_object,
            "PullObject": runtime_handlers.pull_object,
            "ConfirmMessageReceived": runtime_handlers.confirm_message_received,
        }

        def call(request: Any) -> Any:
            self._state.acknowledge_task_heartbeat(self._task.task_id)
            return handlers[name](request, self._state, self._task)

        return call
