"""What a site keeps on its disk: its state after each step of a run, and the answer that it gave.

A step changes the site's state or must not be done twice: a survey, an announcement, a round of training. Each is one
folder that appears whole or not at all, named by its place in the run::

    <root>/<run>/step-000003-training-0000/
        state.safetensors    the site's state after the step
        reply.bin            the payload of its answer
        step.json            what was asked (its digest), what was answered, checksums

Beside them lie ``hello.json``, what the server said of the run; ``data.json``, the fingerprint of the site's samples;
under secure aggregation ``secrets.json``, the secrets of a round, until the round is over; and at the end ``model``,
the site's own final model, unless its operator wants it elsewhere. All of it only its owner can read. With the newest
steps kept, a request that comes again gets the same answer, and one that comes again with another content (the server
fell back to an earlier round) is answered from the state before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from fedstrata import files
from fedstrata.deployment.last_steps import Step
from fedstrata.deployment.protocol import Place, Stage
from fedstrata.errors import FedStrataError

ROUNDS_KEPT = 2
_SECRETS = "secrets.json"
_STEP_NAME = re.compile(rf"step-(\d{{6,}})-({'|'.join(stage.name.lower() for stage in Stage)})-(\d{{4,}})")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class Record:
    """A step that was done: what was asked, what was answered, and the state after it.

    ``adopted`` is the last announcement that the state knows of, ``session`` the server's session that asked, ``after``
    the last step before it that the server knew of.
    """

    place: Place
    asked: str
    facts: Mapping[str, Any]
    reply: bytes
    adopted: Place
    session: str
    state: dict[str, Tensor]
    after: Step | None = None


class SiteStore:
    """The steps of one run at one site."""

    def __init__(self, root: Path, run: str) -> None:
        if not _RUN_NAME.fullmatch(run):
            raise FedStrataError(f"{run[:100]!r} cannot be the name of a run; a server gives it letters and digits.")
        self.path = root / run
        files.make_folder(root, private=True)
        files.make_folder(self.path, private=True)
        with files.explained(self.path):
            self.path.chmod(0o700)  # one that an older version made, too
        files.remove_partials(self.path)

    def places(self) -> list[Place]:
        """List the places of the steps that are kept, in their order."""
        found = (_STEP_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(Place(int(match[1]), Stage[match[2].upper()], int(match[3])) for match in found if match)

    def newest(self, before: Place) -> Place | None:
        """Find the newest step before a place."""
        return max((place for place in self.places() if place < before), default=None)

    def read(self, place: Place) -> Record:
        """Read what is kept of a step; damage is an error that names the file."""
        folder = self._folder(place)
        content = {name: files.read_bytes(folder / name) for name in ("state.safetensors", "reply.bin")}
        described = self._described(place)
        if described.get("checksums") != _checksums(content):
            raise FedStrataError(
                f"'{folder}' is damaged: its checksums are wrong. Delete '{self.path}' to let this site begin anew."
            )
        return Record(
            place=place,
            asked=described["asked"],
            facts=described["facts"],
            reply=content["reply.bin"],
            adopted=Place.read(described["adopted"]),
            session=described["session"],
            state=files.from_safetensors(content["state.safetensors"], folder / "state.safetensors"),
            after=Step.read(described.get("after")),
        )

    def holds(self, step: Step) -> bool:
        """Tell whether just this step is kept: in its place, and asked for with the same content."""
        return step.place in self.places() and self._described(step.place).get("asked") == step.asked

    def newest_round(self, session: str) -> int:
        """Find the last round of which something was done in a session of the server."""
        rounds = (place.round for place in self.places() if self._described(place).get("session") == session)
        return max(rounds, default=0)

    def write(self, record: Record) -> None:
        """Keep a step; it replaces itself and all later ones, and those that nobody can ask for any more go."""
        for place in self.places():
            if place >= record.place:
                files.remove_folder(self._folder(place))
        content = {"state.safetensors": files.to_safetensors(record.state), "reply.bin": record.reply}
        described = {
            "asked": record.asked,
            "facts": dict(record.facts),
            "adopted": record.adopted.to_facts(),
            "session": record.session,
            "after": None if record.after is None else record.after.to_facts(),
            "checksums": _checksums(content),
        }
        files.write_folder_atomically(
            self._folder(record.place),
            {**content, "step.json": json.dumps(described, allow_nan=False) + "\n"},
            private=True,
        )
        self._drop_old(record.place)

    def _drop_old(self, newest: Place) -> None:
        """Keep the steps of the last rounds, the state before them, and the steps that the server knew of then."""
        old = [place for place in self.places() if place.round <= newest.round - ROUNDS_KEPT]
        if len(old) < 2:
            return
        steps = (Step.read(self._described(place).get("after")) for place in self.places() if place not in old)
        known = {step.place for step in steps if step is not None}
        for place in old[:-1]:
            if place not in known:
                files.remove_folder(self._folder(place))

    def greeting(self) -> dict[str, Any] | None:
        """Read the facts of the last hello, by which a site that was restarted goes on."""
        path = self.path / "hello.json"
        return files.from_json(files.read_bytes(path), path) if path.exists() else None

    def write_greeting(self, facts: Mapping[str, Any]) -> None:
        """Keep the facts of a hello."""
        files.write_atomically(self.path / "hello.json", files.to_json(facts), private=True)

    def require_samples(self, contents: str | None) -> None:
        """Keep the fingerprint of the samples with which the site began the run, and refuse others from then on."""
        path = self.path / "data.json"
        if not path.exists():
            files.write_atomically(path, files.to_json({"contents": contents}), private=True)
        elif files.from_json(files.read_bytes(path), path).get("contents") != contents:
            raise FedStrataError(
                "This site's samples are not those with which it began the run: some inputs or labels have changed. "
                "Start it with its data as it was; a changed dataset is for another run."
            )

    def secrets(self) -> dict[str, Any] | None:
        """Read the secrets of the newest round that was aggregated securely."""
        path = self.path / _SECRETS
        return files.from_json(files.read_bytes(path), path) if path.exists() else None

    def write_secrets(self, facts: Mapping[str, Any]) -> None:
        """Keep the secrets of a round, instead of those before."""
        files.write_atomically(self.path / _SECRETS, json.dumps(facts), private=True)

    def _described(self, place: Place) -> dict[str, Any]:
        path = self._folder(place) / "step.json"
        return files.from_json(files.read_bytes(path), path)

    def _folder(self, place: Place) -> Path:
        return self.path / f"step-{place.round:06d}-{place.stage.name.lower()}-{place.number:04d}"


def _checksums(content: Mapping[str, bytes]) -> dict[str, str]:
    return {name: sha256(data).hexdigest() for name, data in content.items()}
