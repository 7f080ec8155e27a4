"""The model of a round on the server's disk, before any site hears of it.

Where noise was put on a model nobody can draw it again: a server that was killed after the sites had got the model, and
merged their uploads once more, would publish them a second time under another noise, and account for one. So what came
of a round is written down first, and a server that was started again goes on with that::

    <run>/releases/round-000003/
        state.safetensors    the server's state after the round, and what the sites told with their uploads
        report.json          who took part, what travelled, and a checksum

The newest one stays until the next takes its place.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from fedstrata import files
from fedstrata.engines.engine import RoundReport, pack, unpack
from fedstrata.engines.evaluation import Scores
from fedstrata.engines.server import ServerState
from fedstrata.errors import FedStrataError
from fedstrata.flops import Cost
from fedstrata.stack import Stack, under

RELEASES_FOLDER = "releases"
_NAME = re.compile(r"round-(\d{6,})")
_STATE, _REPORT = "state.safetensors", "report.json"


@dataclass(frozen=True)
class Releases:
    """What came of the newest round, in a folder of the run."""

    path: Path

    def find(self, round: int) -> tuple[ServerState, RoundReport] | None:
        """Find what came of a round; where a later one was published, it cannot be done again."""
        newest = max(self._rounds(), default=0)
        if newest > round:
            raise FedStrataError(
                f"The model of round {newest} was published, under noise, but the newest whole checkpoint is of round "
                f"{round - 1}: to merge round {round} again would publish its uploads once more than the account says. "
                "Bring the checkpoints back, or begin another run."
            )
        return self._read(round) if newest == round else None

    def keep(self, round: int, state: ServerState, report: RoundReport) -> None:
        """Write down what came of a round, and drop what came of those before."""
        files.make_folder(self.path)
        files.remove_partials(self.path)
        content = files.to_safetensors(pack(state, Stack()) | under("report", _tensors(report)))
        described = {**_facts(report), "sha256": sha256(content).hexdigest()}
        files.write_folder_atomically(self._folder(round), {_STATE: content, _REPORT: json.dumps(described) + "\n"})
        for earlier in self._rounds():
            if earlier != round:
                files.remove_folder(self._folder(earlier))

    def drop(self) -> None:
        """Forget everything, once the run has its end."""
        if self.path.is_dir():
            files.remove_folder(self.path)

    def _read(self, round: int) -> tuple[ServerState, RoundReport]:
        folder = self._folder(round)
        content = files.read_bytes(folder / _STATE)
        described = files.from_json(files.read_bytes(folder / _REPORT), folder / _REPORT)
        if described.get("sha256") != sha256(content).hexdigest():
            raise FedStrataError(
                f"'{folder}' is damaged: its checksum is wrong, so that round {round} cannot be gone on with, and it "
                "may not be published under another noise. Begin another run."
            )
        tensors = Stack(files.from_safetensors(content, folder / _STATE))
        return unpack(tensors)[0], _report(described, tensors.group("report"))

    def _rounds(self) -> list[int]:
        found = (_NAME.fullmatch(entry.name) for entry in (self.path.iterdir() if self.path.is_dir() else ()))
        return [int(match[1]) for match in found if match]

    def _folder(self, round: int) -> Path:
        return self.path / f"round-{round:06d}"


def _tensors(report: RoundReport) -> Stack:
    tensors = Stack({"loss": report.loss, "cost/dense": report.cost.dense, "cost/sparse": report.cost.sparse})
    if report.before is not None:
        numbers = {"accuracy": report.before.accuracy, "loss": report.before.loss}
        tensors |= under("before", {name: torch.from_numpy(values) for name, values in numbers.items()})
        further = {name: torch.from_numpy(values) for name, values in report.before.further.items()}
        tensors |= under("further", further)
    return tensors


def _facts(report: RoundReport) -> dict[str, Any]:
    return {
        "participants": list(report.participants),
        "sent": sorted(report.sent),
        "bytes": [report.bytes_up, report.bytes_down],
        "tested": None if report.before is None else list(report.before.clients),
        "further": [] if report.before is None else list(report.before.further),
        "errors": dict(report.errors),
    }


def _report(facts: dict[str, Any], tensors: Stack) -> RoundReport:
    tested, before, further = facts["tested"], tensors.group("before"), tensors.group("further")
    return RoundReport(
        participants=tuple(facts["participants"]),
        sent=frozenset(facts["sent"]),
        loss=tensors["loss"],
        cost=Cost(tensors["cost/dense"], tensors["cost/sparse"]),
        up=facts["bytes"][0],
        down=facts["bytes"][1],
        before=None
        if tested is None
        else Scores(
            tuple(tested),
            before["accuracy"].numpy(),
            before["loss"].numpy(),
            {name: further[name].numpy() for name in facts["further"]},
        ),
        errors=facts["errors"],
    )
