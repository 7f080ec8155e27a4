"""The pieces of messages in the server's memory, which sites push and fetch by their hashes.

Flower's own store puts the tree of a message together from what was said of its pieces in any message, so that a site
could tie trees of others into knots, or describe one that takes for ever to unfold. This one keeps the tree of every
message as it came, refuses what is too large to be honest, and drops a piece when the last message goes that has it.
"""

from __future__ import annotations

import threading
from typing import Any

from fedstrata.deployment.flower.internals import (
    NoObjectInStoreError,
    ObjectStore,
    get_object_id,
    iterate_object_tree,
    validate_object_content,
)

MOST_PIECES = 4096
"""With Flower's pieces of five megabytes, enough for a message of 20 gigabytes."""
_HASH_LENGTH = 64


class Objects(ObjectStore):
    """Messages by the names of their first pieces; the ServerApp and sites use it from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._trees: dict[str, Any] = {}
        self._pieces: dict[str, bytes] = {}
        self._owners: dict[str, set[str]] = {}

    def preregister(self, run_id: int, object_tree: Any) -> list[str]:
        """Expect the pieces of a message; return those that are missing."""
        names = [piece.object_id for piece in iterate_object_tree(object_tree)]
        if len(names) > MOST_PIECES or len(set(names)) < len(names):
            raise ValueError(f"A message of {len(names)} pieces, {len(names) - len(set(names))} of them twice")
        if not all(len(name) == _HASH_LENGTH and set(name) <= set("0123456789abcdef") for name in names):
            raise ValueError("A piece of a message that is not named by its hash")
        with self._lock:
            if self._trees.setdefault(object_tree.object_id, object_tree) != object_tree:
                raise ValueError(f"The message '{object_tree.object_id}' is described in two ways")
            for name in names:
                self._owners.setdefault(name, set()).add(object_tree.object_id)
            return [name for name in names if name not in self._pieces]

    def get_object_tree(self, object_id: str) -> Any:
        """Return the tree of a message, as it came."""
        with self._lock:
            if object_id not in self._trees:
                raise NoObjectInStoreError(f"There is no message '{object_id}'.")
            return self._trees[object_id]

    def is_whole(self, message: str) -> bool:
        """Tell whether all pieces of a message are here."""
        with self._lock:
            tree = self._trees.get(message)
            return tree is not None and all(piece.object_id in self._pieces for piece in iterate_object_tree(tree))

    def put(self, object_id: str, object_content: bytes) -> None:
        """Take a piece that some message is waiting for."""
        if get_object_id(object_content) != object_id:
            raise ValueError(f"A piece whose hash is not '{object_id}'")
        validate_object_content(content=object_content)
        with self._lock:
            if object_id not in self._owners:
                raise NoObjectInStoreError(f"No message has the piece '{object_id}'.")
            self._pieces.setdefault(object_id, object_content)

    def get(self, object_id: str) -> bytes | None:
        """Return a piece: nothing in it while it is awaited, None if no message has it."""
        with self._lock:
            return self._pieces.get(object_id, b"") if object_id in self._owners else None

    def delete(self, object_id: str) -> None:
        """Drop a message, and the pieces that no other has."""
        with self._lock:
            tree = self._trees.pop(object_id, None)
            for piece in () if tree is None else iterate_object_tree(tree):
                owners = self._owners[piece.object_id]
                owners.discard(object_id)
                if not owners:
                    del self._owners[piece.object_id]
                    self._pieces.pop(piece.object_id, None)

    def delete_objects_in_run(self, run_id: int) -> None:
        """Drop everything; there is one run."""
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._trees.clear()
            self._pieces.clear()
            self._owners.clear()

    def __contains__(self, object_id: str) -> bool:
        with self._lock:
            return object_id in self._owners

    def __len__(self) -> int:
        with self._lock:
            return len(self._owners)
