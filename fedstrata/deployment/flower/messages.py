"""Requests and replies as Flower messages.

A request or a reply of :mod:`fedstrata.deployment.protocol` travels as a Flower message with two records: the facts as
a text, and the encoded bytes as an array with a serialisation type of its own, which Flower carries untouched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedstrata.deployment.protocol import ProtocolError, Request

STYPE = "fedstrata.wire"
_FACTS, _PAYLOAD = "fedstrata.facts", "fedstrata.payload"
_TYPES = {"survey": "train", "train": "train", "test": "evaluate", "adapt": "evaluate"}
SECONDS_TO_LIVE = 12 * 3600.0
"""After so long Flower gives a message up; a step that takes longer is asked for again."""


def to_record(header: str, payload: bytes) -> RecordDict:
    """Put facts and payload into the content of a Flower message."""
    records: dict[str, Any] = {_FACTS: ConfigRecord({"json": header})}
    if payload:
        records[_PAYLOAD] = ArrayRecord({"bytes": Array("uint8", (len(payload),), STYPE, payload)})
    return RecordDict(records)


def from_record(content: RecordDict) -> tuple[str, bytes]:
    """Take facts and payload out of the content of a Flower message; whatever does not fit is refused."""
    facts = content.config_records.get(_FACTS)
    header = None if facts is None else facts.get("json")
    if not isinstance(header, str):
        raise ProtocolError("A message came that FedStrata did not send: it holds no facts.")
    record = content.array_records.get(_PAYLOAD)
    if record is None:
        return header, b""
    array = record.get("bytes")
    if array is None or len(record) != 1 or array.stype != STYPE:
        raise ProtocolError("A message came that FedStrata did not send: its payload is of another kind.")
    return header, bytes(array.data)


def push(grid: Grid, requests: Iterable[tuple[int, Request]], seconds_to_live: float = SECONDS_TO_LIVE) -> list[str]:
    """Send requests to nodes; return the ids under which their answers will come."""
    messages = [
        Message(
            to_record(request.header(), request.payload),
            node,
            _TYPES.get(request.kind, "query"),
            ttl=seconds_to_live,
            group_id=str(request.round),
        )
        for node, request in requests
    ]
    return list(grid.push_messages(messages))
