"""Checkpoints of a run, from which it goes on after an interruption: the newest two are kept.

Each is one folder that appears whole or not at all, with checksums of all its files and of the list of them::

    round-000012/
        state.safetensors   all tensors that the next round depends on
        *.parquet           all that was measured so far
        manifest.json       the round, further facts, and the checksums
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.runs.log_files import logs_to_parquet, metrics_from_parquet, timings_from_parquet
from fedstrata.runs.metrics import MetricLog, TimingLog

CHECKPOINTS_FOLDER = "checkpoints"
_CHECKPOINT_VERSION = 3
_CHECKPOINTS_KEPT = 2
_CHECKPOINT_NAME = re.compile(r"round-(\d{6,})")

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A run as it stood after a round: all that the next round depends on, and all that was measured so far."""

    round: int
    state: dict[str, Tensor]
    facts: dict[str, Any]
    metrics: MetricLog
    timings: TimingLog


class _OtherFormatError(FedStrataError):
    """A checkpoint that is not damaged, but of another version."""


class Checkpoints:
    """The checkpoints of one run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, round: int, state: Mapping[str, Tensor], facts: Mapping[str, Any], metrics: MetricLog, timings: TimingLog
    ) -> bool:
        """Save a run as it stands after ``round``, and drop all but the newest two; false where it is there already."""
        place = self.folder / f"round-{round:06d}"
        files.make_folder(self.folder)
        if place.exists():
            if _is_whole(place):
                return False
            files.remove_folder(place)
        content: dict[str, files.Pieces] = {
            "state.safetensors": files.safetensors_pieces(state),
            **{name: files.Pieces([data]) for name, data in logs_to_parquet(metrics, timings).items()},
        }
        files.write_folder_atomically(place, {**content, "manifest.json": lambda: _manifest(round, facts, content)})
        there = self._there()
        kept = [number for number in there if number <= round][:_CHECKPOINTS_KEPT]
        for number, path in there.items():
            if number not in kept:
                files.remove_folder(path)
        return True

    def newest(self, read: Callable[[Path], T]) -> T | None:
        """Read the newest whole checkpoint; none where there is none yet.

        A damaged one is passed over with a warning. Where all are damaged, that is an error: beginning again is the
        user's decision.
        """
        there = self._there()
        for path in there.values():
            try:
                return read(path)
            except _OtherFormatError:
                raise
            except FedStrataError as error:
                warnings.warn(f"A checkpoint is passed over: {error}", FedStrataWarning, stacklevel=3)
        if there:
            raise FedStrataError(
                f"No checkpoint in '{self.folder}' is whole; delete that folder to begin at the first round again."
            )
        return None

    def _there(self) -> dict[int, Path]:
        """Find the checkpoints, newest first."""
        found = {
            int(matched.group(1)): entry
            for entry in (self.folder.iterdir() if self.folder.is_dir() else ())
            if (matched := _CHECKPOINT_NAME.fullmatch(entry.name))
        }
        return dict(sorted(found.items(), reverse=True))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint; a damaged one, or one of another version, is refused."""
    manifest = _read_manifest(folder)
    return Checkpoint(
        round=manifest["round"],
        state=files.from_safetensors(
            _read_verified(folder, manifest, "state.safetensors"), folder / "state.safetensors"
        ),
        facts=manifest["facts"],
        metrics=metrics_of_checkpoint(folder),
        timings=timings_of_checkpoint(folder),
    )


def metrics_of_checkpoint(folder: Path) -> MetricLog:
    """Read only what was measured up to a checkpoint."""
    manifest = _read_manifest(folder)
    return metrics_from_parquet(lambda name: _read_verified(folder, manifest, name), folder, manifest["files"])


def timings_of_checkpoint(folder: Path) -> TimingLog:
    """Read only how long everything took up to a checkpoint."""
    manifest = _read_manifest(folder)
    return timings_from_parquet(lambda name: _read_verified(folder, manifest, name), folder)


def _manifest(round: int, facts: Mapping[str, Any], content: Mapping[str, files.Pieces]) -> str:
    """Describe a checkpoint and its files, with checksums for them and for the description itself."""
    sums = {name: {"sha256": written.sha256, "size": written.size} for name, written in content.items()}
    manifest = {"version": _CHECKPOINT_VERSION, "round": round, "facts": dict(facts), "files": sums}
    return json.dumps({**manifest, "sha256": _checksum(json.loads(json.dumps(manifest)))}, indent=2) + "\n"


def _checksum(manifest: Mapping[str, Any]) -> str:
    return sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    manifest = files.from_json(files.read_bytes(path), path)
    if manifest.pop("sha256", None) != _checksum(manifest):
        raise FedStrataError(f"'{path}' is damaged: its checksum is wrong.")
    if manifest["version"] != _CHECKPOINT_VERSION:
        raise _OtherFormatError(
            f"'{folder}' has the checkpoint format {manifest['version']}, but FedStrata {__version__} reads the format "
            f"{_CHECKPOINT_VERSION}; go on with the version that began the run."
        )
    return manifest


def _read_verified(folder: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    content = files.read_bytes(folder / name)
    expected = manifest["files"][name]
    if (len(content), sha256(content).hexdigest()) != (expected["size"], expected["sha256"]):
        raise FedStrataError(f"'{folder / name}' is damaged: its checksum is wrong.")
    return content


def _is_whole(folder: Path) -> bool:
    try:
        manifest = _read_manifest(folder)
        for name in manifest["files"]:
            _read_verified(folder, manifest, name)
    except _OtherFormatError:
        raise
    except FedStrataError:
        return False
    return True
