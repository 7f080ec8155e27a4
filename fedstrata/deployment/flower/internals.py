"""Everything that is used of Flower beside its documented interface: names, what they are for, what to look at.

Read from Flower 1.41.0. No other file imports anything of Flower but ``flwr.app``, ``flwr.clientapp`` and
``flwr.serverapp``. When a release comes: does this file still import, do the tests that ``docs/deployment.md`` names
pass, and is what :data:`USES` says still so?
"""

from __future__ import annotations

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    ErrorCode,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    NOOP_FEDERATION_ID,
    TaskType,
)
from flwr.supercore.error import http_error_translator
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
    validate_object_content,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, verify_signature
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet_router
from flwr.superlink.servicer.runtime import runtime_handlers
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

READ_FROM = "1.41.0"
"""The version of Flower whose source all of this was read from."""

USES = {
    # Both ends
    "ErrorCode": "CLIENT_APP_RAISED_EXCEPTION tells that the ClientApp failed; other codes: Flower gave a message up",
    "public_key_to_bytes": "how a public key is written by which nodes are known",
    "Node": "how a node is named in requests",
    # The server: superlink.py
    "InMemoryLinkState": "nodes, runs, tasks and messages of a SuperLink; subclassed: see the attributes in USED_PARTS",
    "ObjectStore": "how a SuperLink keeps the pieces of messages; written anew in objects.py (is a method new?)",
    "NoObjectInStoreError": "what such a store raises where it has no such message or piece",
    "get_object_id": "the name of a piece: the hash of its content",
    "validate_object_content": "refuses a piece that Flower could not read",
    "FLEET_HTTP_PUBLIC_KEY_HEADER": "where a request names its key",
    "FLEET_HTTP_SIGNATURE_HEADER": "where it signs",
    "TIMESTAMP_HEADER": "what it signs: its time (is it more by now? Then doorkeeper.py must know)",
    "SYSTEM_TIME_TOLERANCE": "so many seconds a site's clock may be ahead",
    "TIMESTAMP_TOLERANCE": "so many seconds more it may be behind",
    "bytes_to_public_key": "reads a public key",
    "verify_signature": "checks what a site has signed",
    "NoOpFederationManager": "no accounts: every node belongs to the one federation",
    "NOOP_FEDERATION_ID": "the name of that federation",
    "NOOP_FLWR_AID": "the account under which nodes and the run are made",
    "NOOP_ACCOUNT_NAME": "its name",
    "SUPERLINK_NODE_ID": "the number of the server among the nodes",
    "TaskType": "SERVER_APP: what kind of task the run begins with",
    "Task": "the task of the run, in whose name the ServerApp sends",
    "TaskIdentity": "where Message looks for its task, run and node (task_id, run_id, node_id), which are set here",
    "fleet_router": "the HTTP paths that nodes call; nothing else is served (is one of them new, or less strict?)",
    "NodeAuthMiddleware": "lets only nodes with a known key pass, by app.state.enable_supernode_auth",
    "ProtobufTranslationMiddleware": "reads and writes bodies as protobuf",
    "http_error_translator": "turns Flower's errors into HTTP answers",
    "HttpGrid": "the Grid of a ServerApp; its _runtime_client is replaced by calls in this process",
    "runtime_handlers": "what a SuperLink does for a ServerApp: the functions under USED_PARTS",
    "iterate_object_tree": "lists the objects of a message, to see whether all have come",
    # A site: supernode.py
    "FleetHttpClient": "the calls of a node to its SuperLink: the methods under USED_PARTS",
    "NodeAuthHttpInterceptor": "signs every call with the key of the node",
    "RuntimeVersionHttpInterceptor": "says which version calls (does a server of another version refuse it?)",
    "ActivateNodeRequest": "a node comes, with its key and how often its heart beats",
    "DeactivateNodeRequest": "a node goes",
    "SendNodeHeartbeatRequest": "a node is alive",
    "PullMessagesRequest": "a node asks for a message",
    "PushMessagesRequest": "a node answers",
    "message_from_proto": "reads the head of a message",
    "message_to_proto": "writes the head of an answer",
    "remove_content_from_message": "an answer without its content, which travels as objects",
    "get_all_nested_objects": "the objects of which an answer is made",
    "get_object_tree": "how they hang together",
    "no_object_id_recompute": "keeps the names of objects, which are hashes, from being computed again",
    "make_pull_object_fn_protobuf": "how one object is fetched",
    "make_push_object_fn_protobuf": "how one object is sent",
    "make_confirm_message_received_fn_protobuf": "tells that all objects of a message have come",
    "pull_and_inflate_object_from_tree": "fetches a whole message",
    "push_objects": "sends the objects that the server lacks",
    "ObjectPullError": "a message could not be fetched",
    "ObjectPushError": "an answer could not be sent",
}
"""Every undocumented name that is imported, and what it is here for."""

USED_PARTS = {
    "InMemoryLinkState": (
        "activate_node", "deactivate_node", "create_node", "create_run", "get_tasks", "claim_task", "activate_task",
        "acknowledge_task_heartbeat", "get_node_info", "get_run_info", "delete_messages",
        "store_message_and_object_tree", "get_node_id_by_public_key", "_cleanup_expired_task_tokens_locked",
    ),
    "HttpGrid": ("pull_messages", "set_run", "_runtime_client"),
    "runtime_handlers": (
        "get_nodes", "push_messages", "pull_messages", "push_object", "pull_object", "confirm_message_received",
    ),
    "FleetHttpClient": (
        "from_server_address", "ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "PullMessages", "PushMessages",
        "PullObject", "PushObject", "ConfirmMessageReceived",
    ),
}  # fmt: skip
"""Methods and attributes of these that are called or replaced."""

LINK_STATE_HOLDS = (
    "lock", "message_ins_store", "message_ins_id_to_message_res_id", "object_store", "node_public_key_to_node_id",
)  # fmt: skip
"""What a link state keeps in itself: which answer belongs to a message, and has all of it come? Which node has a key
(this is changed too: keys that are not in it are refused at every call)?
"""

PUBLIC_KEY_HEADER, SIGNATURE_HEADER = FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
SECONDS_AHEAD = SYSTEM_TIME_TOLERANCE
SECONDS_BEHIND = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
"""How far a site's clock may be from the server's."""

APP_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
"""The code of a message that says that the ClientApp failed; other codes are of messages that Flower gave up."""


def name_message(message: Message, name: str) -> None:
    """Give a message its name, which Flower offers no other way to set."""
    message.metadata.__dict__["_message_id"] = name


__all__ = [
    "APP_RAISED",
    "NOOP_ACCOUNT_NAME",
    "NOOP_FEDERATION_ID",
    "NOOP_FLWR_AID",
    "PUBLIC_KEY_HEADER",
    "SECONDS_AHEAD",
    "SECONDS_BEHIND",
    "SIGNATURE_HEADER",
    "SUPERLINK_NODE_ID",
    "TIMESTAMP_HEADER",
    "ActivateNodeRequest",
    "DeactivateNodeRequest",
    "FleetHttpClient",
    "HttpGrid",
    "InMemoryLinkState",
    "NoObjectInStoreError",
    "NoOpFederationManager",
    "Node",
    "NodeAuthHttpInterceptor",
    "NodeAuthMiddleware",
    "ObjectPullError",
    "ObjectPushError",
    "ObjectStore",
    "ProtobufTranslationMiddleware",
    "PullMessagesRequest",
    "PushMessagesRequest",
    "RuntimeVersionHttpInterceptor",
    "SendNodeHeartbeatRequest",
    "Task",
    "TaskIdentity",
    "TaskType",
    "bytes_to_public_key",
    "fleet_router",
    "get_all_nested_objects",
    "get_object_id",
    "get_object_tree",
    "http_error_translator",
    "iterate_object_tree",
    "make_confirm_message_received_fn_protobuf",
    "make_pull_object_fn_protobuf",
    "make_push_object_fn_protobuf",
    "message_from_proto",
    "message_to_proto",
    "name_message",
    "no_object_id_recompute",
    "public_key_to_bytes",
    "pull_and_inflate_object_from_tree",
    "push_objects",
    "remove_content_from_message",
    "runtime_handlers",
    "validate_object_content",
    "verify_signature",
]
