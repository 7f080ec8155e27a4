"""What a run leaves behind: a folder from which it can be resumed, compared and reported.

    experiment.toml     what was asked for
    imports/            copies of the Python files that registered components for the run, if there were any
    environment.json    with which software, on what
    data.json           the data in numbers: classes, sizes, label counts, and a fingerprint of all samples
    split.parquet       who holds which samples
    layers.json         the layers of the model: kinds, roles, sizes, and in which the method masks weights
    checkpoints/        the newest two, for going on after an interruption
    metrics/            rounds.parquet, clients.parquet, layers.parquet: equal runs have equal bytes here; and
                        classes.parquet where numbers of single classes were asked for, diagnostics.parquet where
                        diagnostics gave numbers of clients in layers
    diagnosis/          the same tables, of what was computed after the run was finished, if anything was
    timings.parquet     all that a clock has touched
    live.arrows         while the run goes on: the rounds since the newest checkpoint, for those who look on
    model.safetensors   the final global model, as far as it is shared
    model.json          what one must know to use it: architecture, preprocessing, classes, where it comes from
    clients.safetensors where clients use models of their own: what differs in them, stacked over all clients
    last-*.safetensors  the same of the last round, where the best models on validation samples are the results
    summary.json        written last: where it is, the run is finished

Every file appears whole or not at all, and a checkpoint is one folder that appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.data.contents import fingerprint
from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Parts, Split
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.plugins import IMPORTS_FOLDER, loaded_packages, require_imports
from fedstrata.runs.live_log import LIVE_FILE, LiveLog, read_live_log
from fedstrata.runs.metrics import METRIC_SCHEMAS, OPTIONAL_SCHEMAS, TIMING_SCHEMA, MetricLog, TimingLog
from fedstrata.runs.provenance import commit
from fedstrata.trained.card import Card
from fedstrata.trained.model import CARD_FILE, WEIGHTS_FILE

# Written in this order when there is no folder to rename: the experiment comes last and makes the folder a run.
_DESCRIPTION = ("environment.json", "data.json", "split.parquet", "experiment.toml")
_SPLIT_SCHEMA = pa.schema([("client", pa.int32()), ("part", pa.string()), ("position", pa.int64())])
BEFORE_A_RUN = {"status.json", "deployment.log", "audit.jsonl"}
"""What a server of real sites writes while it waits for them, before it can begin a run."""
CONTENTS = "contents"
"""Where the fingerprint of all samples stands in the description of the data."""
LAYERS_FILE = "layers.json"
"""What is known of the layers of the model."""
_CLIENTS_FILE = "clients.safetensors"
_LAST = "last-{}"
_DIAGNOSIS = "diagnosis"
_CHECKPOINT_VERSION = 2
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


class RunFolder:
    """The folder of one run.

    :meth:`create` and :meth:`resume` take the right to write it, which one process at a time can have, until
    :meth:`close` or the end of a ``with`` block; :meth:`open` only reads, also while another process writes.
    """

    def __init__(self, path: Path, lock: files.WriteLock | None = None) -> None:
        self.path = path
        self._lock = lock
        self._live: LiveLog | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        experiment: Experiment,
        dataset: Dataset,
        split: Split,
        environment: Mapping[str, Any],
        lock: files.WriteLock | None = None,
    ) -> RunFolder:
        """Make the folder of a new run, which appears only when complete; a folder with other content is refused.

        ``lock`` is the right to write it, where the caller has taken it already.
        """
        description = _describe(experiment, dataset, split, environment)
        with files.explained(path):
            place = path.resolve()
            files.make_folder(place.parent)
            files.remove_partials(place.parent, place.name)
            if not place.exists():
                files.write_folder_atomically(place, description)
                return cls(path, files.WriteLock(path))
            _refuse_foreign_content(path)
        lock = lock or files.WriteLock(path)
        files.remove_partials(path)
        shutil.rmtree(path / IMPORTS_FOLDER, ignore_errors=True)
        try:
            for name, content in description.items():
                files.make_folder((path / name).parent)
                files.write_atomically(path / name, content)
        except BaseException:
            shutil.rmtree(path / IMPORTS_FOLDER, ignore_errors=True)
            for name in (*_DESCRIPTION, files.LOCK_FILE):
                (path / name).unlink(missing_ok=True)
            lock.release()
            raise
        return cls(path, lock)

    @staticmethod
    def refuse_taken(path: Path) -> None:
        """Refuse a place where :meth:`create` could not make a run, before any work is done for it."""
        with files.explained(path):
            if path.exists():
                _refuse_foreign_content(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a run for reading."""
        with files.explained(path, "read"):
            missing = [name for name in _DESCRIPTION if not (path / name).exists()]
        if not path.is_dir():
            raise FedStrataError(f"There is no run folder '{path}'; 'fedstrata run --out {path}' would make one.")
        if "experiment.toml" in missing:
            raise FedStrataError(
                f"'{path}' is not a run folder: it holds no experiment.toml; give the --out folder of a run."
            )
        if missing:
            raise FedStrataError(
                f"The run folder '{path}' lacks {missing[0]}: it is damaged or half copied; repeat the copy or the run."
            )
        return cls(path)

    @classmethod
    def resume(cls, path: Path, lock: files.WriteLock | None = None) -> RunFolder:
        """Open a run for writing on, and clear away what an interruption has left half-written.

        ``lock`` is the right to write it, where the caller has taken it already.
        """
        run = cls.open(path)
        run._lock = lock or files.WriteLock(path)
        for folder in (path, path / "checkpoints", path / "metrics"):
            files.remove_partials(folder)
        return run

    def close(self) -> None:
        """Let other processes write this run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def experiment(self) -> Experiment:
        """What was asked for."""
        return Experiment.read(self.path / "experiment.toml")

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.path / "summary.json").exists()

    def environment(self) -> dict[str, Any]:
        """With which software the run was made, and on what."""
        return self._read_json("environment.json")

    def data(self) -> dict[str, Any]:
        """The data in numbers: dataset, class names, label counts, sizes, hashes of the split and of all samples."""
        return self._read_json("data.json")

    def split(self) -> Split:
        """Who holds which samples; checked against the hash that was saved with it."""
        path = self.path / "split.parquet"
        table = files.from_parquet(files.read_bytes(path), _SPLIT_SCHEMA, path)
        split = _split_from_table(table)
        if split.hash != (table.schema.metadata or {}).get(b"hash", b"").decode():
            raise FedStrataError(f"'{path}' is damaged: its hash differs from the one that was saved with it.")
        return split

    def metrics(self) -> MetricLog:
        """All that was measured: of the whole run if it is finished, else up to its newest checkpoint."""
        if self.finished:
            place = self.path / "metrics"
            there = {path.name for path in place.glob("*.parquet")}
            return _metrics_from_parquet(lambda name: self._read(f"metrics/{name}"), place, there)
        return self._from_newest_checkpoint(_metrics_of_checkpoint) or MetricLog()

    def diagnosis(self) -> dict[str, pa.Table]:
        """The tables of what was computed after the run was finished, by their names."""
        schemas, folder = {**METRIC_SCHEMAS, **OPTIONAL_SCHEMAS}, self.path / _DIAGNOSIS
        there = [name for name in schemas if (folder / f"{name}.parquet").exists()]
        return {
            name: files.from_parquet(self._read(f"{_DIAGNOSIS}/{name}.parquet"), schemas[name], folder)
            for name in there
        }

    def save_diagnosis(self, tables: Mapping[str, pa.Table]) -> None:
        """Write what was computed after the run was finished, in the place of what was there."""
        self._require_lock()
        self._require_finished()
        folder = self.path / _DIAGNOSIS
        files.make_folder(folder)
        files.remove_partials(folder)
        for name, table in tables.items():
            files.write_atomically(folder / f"{name}.parquet", files.to_parquet(table))

    def timings(self) -> TimingLog:
        """How long everything took: in the whole run if it is finished, else up to its newest checkpoint."""
        if self.finished:
            return _timings_from_parquet(self._read, self.path)
        return self._from_newest_checkpoint(_timings_of_checkpoint) or TimingLog()

    def logs_so_far(self) -> tuple[MetricLog, TimingLog]:
        """All that was measured and how long it took, of a run that goes on up to its last complete round."""
        # The log is read first: the checkpoint that it follows is there by then, or a newer one.
        live = None if self.finished else read_live_log(self.path / LIVE_FILE)
        metrics, timings = self.metrics(), self.timings()
        if live is None or self.finished:
            return metrics, timings
        rounds = timings.to_table().column("round")
        return live.following(metrics, timings, rounds[-1].as_py() if len(rounds) else 0)

    def summary(self) -> dict[str, Any]:
        """The result in short."""
        self._require_finished()
        return self._read_json("summary.json")

    def model(self, last: bool = False) -> dict[str, Tensor]:
        """The weights and buffers of the global model that the run gives, on the CPU, or of that of the last round."""
        self._require_finished()
        name = self._name(WEIGHTS_FILE, last)
        return files.from_safetensors(self._read(name), self.path / name)

    def _name(self, name: str, last: bool) -> str:
        """Name the file of the last round, where there is one beside the results."""
        return _LAST.format(name) if last and (self.path / _LAST.format(name)).exists() else name

    def card(self) -> Card:
        """What one must know to use the models of the run."""
        self._require_finished()
        path = self.path / CARD_FILE
        if not path.exists():
            raise FedStrataError(
                f"The run in '{self.path}' was made by a version of FedStrata that did not save how inputs are "
                "preprocessed; repeat it to get its models."
            )
        return Card.from_mapping(self._read_json(CARD_FILE), path)

    def models_of_clients(self, last: bool = False) -> dict[str, Tensor] | None:
        """What differs between the clients' models and the global one, as stacks; none where they are elsewhere."""
        self._require_finished()
        path = self.path / self._name(_CLIENTS_FILE, last)
        return files.from_safetensors(self._read(path.name), path) if path.exists() else None

    def begin_live(self, round: int, metrics: MetricLog, timings: TimingLog) -> None:
        """Let others look on from here: all up to ``round`` is in a checkpoint, or there is nothing yet."""
        self._require_lock()
        self._live = LiveLog(self.path / LIVE_FILE)
        self._live.begin(round, metrics, timings)

    def show_round(self, metrics: MetricLog, timings: TimingLog) -> None:
        """Show a round that is done to those who look on."""
        if self._live is not None:
            self._live.add(metrics, timings)

    def end_live(self) -> None:
        """Say that the run has ended in good order, here or for the time being."""
        if self._live is not None:
            self._live.end()
            self._live = None

    def layers(self) -> dict[str, Any]:
        """What is known of the layers of the model; nothing in runs of earlier versions."""
        return self._read_json(LAYERS_FILE) if (self.path / LAYERS_FILE).exists() else {}

    def describe_layers(self, facts: Mapping[str, Any]) -> None:
        """Write what is known of the layers of the model, where it is not there yet."""
        self._require_lock()
        if not (self.path / LAYERS_FILE).exists():
            files.write_atomically(self.path / LAYERS_FILE, files.to_json(facts))

    def save_checkpoint(
        self, round: int, state: Mapping[str, Tensor], facts: Mapping[str, Any], metrics: MetricLog, timings: TimingLog
    ) -> None:
        """Save all that is needed to go on after ``round``, and drop all but the newest two checkpoints.

        ``facts`` is any JSON with texts as keys. A run is a function of its experiment, so where a whole checkpoint of
        this round exists already (a signal came right after a regular save), it stays.
        """
        self._require_lock()
        folder = self.path / "checkpoints"
        place = folder / f"round-{round:06d}"
        files.make_folder(folder)
        if place.exists():
            if _is_whole(place):
                return
            files.remove_folder(place)
        content: dict[str, bytes] = {
            "state.safetensors": files.to_safetensors(state),
            **_logs_to_parquet(metrics, timings),
        }
        files.write_folder_atomically(place, {**content, "manifest.json": _manifest(round, facts, content)})
        checkpoints = self._checkpoints()
        kept = [number for number in checkpoints if number <= round][:_CHECKPOINTS_KEPT]
        for number, path in checkpoints.items():
            if number not in kept:
                files.remove_folder(path)
        if self._live is not None:
            self._live.begin(round, metrics, timings)

    def load_checkpoint(self) -> Checkpoint | None:
        """Load the newest whole checkpoint, or none where the run has not come to its first one.

        A damaged one is passed over with a warning. Where all are damaged, that is an error: beginning again is the
        user's decision.
        """
        return self._from_newest_checkpoint(_read_checkpoint)

    def save_last(self, model: Mapping[str, Tensor], clients: Mapping[str, Tensor]) -> None:
        """Write the models of the last round, where others are the results of the run."""
        self._require_lock()
        for name, tensors in ((WEIGHTS_FILE, model), (_CLIENTS_FILE, clients)):
            files.write_atomically(self.path / _LAST.format(name), files.to_safetensors(tensors))

    def finish(
        self,
        model: Mapping[str, Tensor],
        clients: Mapping[str, Tensor] | None,
        card: Card,
        metrics: MetricLog,
        timings: TimingLog,
        summary: Mapping[str, Any],
    ) -> None:
        """Write the results; the summary comes last and marks the run as finished."""
        self._require_lock()
        files.make_folder(self.path / "metrics")
        for name, content in _logs_to_parquet(metrics, timings).items():
            folder = self.path if name == "timings.parquet" else self.path / "metrics"
            files.write_atomically(folder / name, content)
        weights = files.to_safetensors(model)
        files.write_atomically(self.path / WEIGHTS_FILE, weights)
        if clients is not None:
            files.write_atomically(self.path / _CLIENTS_FILE, files.to_safetensors(clients))
        described = card.with_changes(hash=sha256(weights).hexdigest()).to_mapping()
        files.write_atomically(self.path / CARD_FILE, files.to_json(described))
        files.write_atomically(self.path / "summary.json", files.to_json(summary))
        self.end_live()

    def reopen(self, experiment: Experiment) -> None:
        """Make a finished run an unfinished one of a longer experiment, which goes on from its last checkpoint."""
        self._require_lock()
        files.write_atomically(self.path / "experiment.toml", experiment.to_toml())
        (self.path / "summary.json").unlink()
        self.__dict__.pop("experiment", None)

    def _from_newest_checkpoint(self, read: Callable[[Path], T]) -> T | None:
        checkpoints = self._checkpoints()
        for path in checkpoints.values():
            try:
                return read(path)
            except _OtherFormatError:
                raise
            except FedStrataError as error:
                warnings.warn(f"A checkpoint is passed over: {error}", FedStrataWarning, stacklevel=3)
        if checkpoints:
            folder = self.path / "checkpoints"
            raise FedStrataError(
                f"No checkpoint in '{folder}' is whole; delete that folder to begin at the first round again."
            )
        return None

    def _checkpoints(self) -> dict[int, Path]:
        """Find the checkpoints, newest first."""
        folder = self.path / "checkpoints"
        found = {
            int(matched.group(1)): entry
            for entry in (folder.iterdir() if folder.is_dir() else ())
            if (matched := _CHECKPOINT_NAME.fullmatch(entry.name))
        }
        return dict(sorted(found.items(), reverse=True))

    def _require_lock(self) -> None:
        if self._lock is None:
            raise FedStrataError(f"The run in '{self.path}' was opened for reading; use RunFolder.resume to write it.")

    def _require_finished(self) -> None:
        if not self.finished:
            raise FedStrataError(
                f"The run in '{self.path}' is not finished; go on with 'fedstrata resume {self.path}'."
            )

    def _read(self, name: str) -> bytes:
        return files.read_bytes(self.path / name)

    def _read_json(self, name: str) -> dict[str, Any]:
        return files.from_json(self._read(name), self.path / name)


def describe_environment(device: torch.device | str, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Tell with which software a run is made and on what, without names of users or machines.

    ``resolved`` is what became of the settings that were left to the program, such as ``engine = "auto"``.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "fedstrata": __version__,
        **({"commit": known} if (known := commit()) else {}),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "resolved": dict(resolved),
        **({"packages": dict(packages)} if (packages := loaded_packages()) else {}),
    }


def _describe(
    experiment: Experiment, dataset: Dataset, split: Split, environment: Mapping[str, Any]
) -> dict[str, bytes | str]:
    data = {
        "dataset": dataset.name,
        "class_names": dataset.class_names,
        "label_counts": split.label_counts(dataset),
        "sizes": split.sizes,
        "test_sizes": split.test_sizes,
        "split_hash": split.hash,
        "input_shape": dataset.input_shape,
        "samples": split.samples(dataset),
        **({"whole_numbers": True} if dataset.whole_numbers else {}),
        **({} if (contents := fingerprint(dataset)) is None else {CONTENTS: contents}),
    }
    imported = require_imports(experiment.imports)
    return {
        **{f"{IMPORTS_FOLDER}/{name}": file.content for name, file in imported.items()},
        "environment.json": files.to_json(environment),
        "data.json": files.to_json(data),
        "split.parquet": files.to_parquet(_split_to_table(split)),
        "experiment.toml": experiment.to_toml(),
    }


def _refuse_foreign_content(path: Path) -> None:
    """Let only an empty folder pass, or one in which the creation of a run was cut short."""
    if not path.is_dir():
        raise FedStrataError(f"'{path}' is a file, not a folder; choose another --out.")
    names = {entry.name for entry in path.iterdir() if files.partial_of(entry.name) is None} - BEFORE_A_RUN
    if not names or (
        files.LOCK_FILE in names
        and names < {files.LOCK_FILE, IMPORTS_FOLDER, *_DESCRIPTION}
        and "experiment.toml" not in names
    ):
        return
    if "experiment.toml" not in names:
        raise FedStrataError(f"The folder '{path}' holds other things (such as '{min(names)}'); choose another --out.")
    if RunFolder(path).finished:
        raise FedStrataError(
            f"'{path}' already holds a finished run; choose another --out, or delete that folder first."
        )
    raise FedStrataError(
        f"'{path}' already holds a run that is not finished; "
        f"go on with it by 'fedstrata resume {path}', or choose another --out."
    )


def _split_to_table(split: Split) -> pa.Table:
    parts = {"train": split.train_parts, "test": split.test_parts}
    lengths = [int(part.sizes.sum()) for part in parts.values()]
    kinds = pa.array(np.repeat(np.arange(len(parts)), lengths), pa.int8())
    columns = [
        pa.array(np.concatenate([part.owners() for part in parts.values()]), pa.int32()),
        pa.DictionaryArray.from_arrays(kinds, pa.array(list(parts), pa.string())).cast(pa.string()),
        pa.array(np.concatenate([part.joined() for part in parts.values()]), pa.int64()),
    ]
    return pa.table(columns, schema=_SPLIT_SCHEMA.with_metadata({"hash": split.hash}))


def _split_from_table(table: pa.Table) -> Split:
    clients, parts, positions = (table.column(name).to_numpy() for name in _SPLIT_SCHEMA.names)
    count = int(clients.max(initial=-1)) + 1
    in_part = [(parts == part) & (clients >= 0) for part in ("train", "test")]
    return Split(*(_parts_of(clients[chosen], positions[chosen], count) for chosen in in_part))


def _parts_of(clients: np.ndarray, positions: np.ndarray, count: int) -> Parts:
    """Collect the positions of each client, in the order in which they stand."""
    order = np.argsort(clients, kind="stable")
    return Parts(positions[order], np.bincount(clients, minlength=count))


def _logs_to_parquet(metrics: MetricLog, timings: TimingLog) -> dict[str, bytes]:
    tables = {**metrics.to_tables(), "timings": timings.to_table()}
    return {f"{name}.parquet": files.to_parquet(table) for name, table in tables.items()}


def _metrics_from_parquet(read: Callable[[str], bytes], folder: Path, there: Collection[str]) -> MetricLog:
    """Read the tables of metrics: those that every run has, and of the others those that are there."""
    optional = {name: schema for name, schema in OPTIONAL_SCHEMAS.items() if f"{name}.parquet" in there}
    schemas = {**METRIC_SCHEMAS, **optional}
    names = {name: f"{name}.parquet" for name in schemas}
    return MetricLog.from_tables(
        {name: files.from_parquet(read(file), schemas[name], folder / file) for name, file in names.items()}
    )


def _timings_from_parquet(read: Callable[[str], bytes], folder: Path) -> TimingLog:
    return TimingLog.from_table(files.from_parquet(read("timings.parquet"), TIMING_SCHEMA, folder / "timings.parquet"))


def _manifest(round: int, facts: Mapping[str, Any], content: Mapping[str, bytes]) -> str:
    """Describe a checkpoint and its files, with checksums for them and for the description itself."""
    sums = {name: {"sha256": sha256(data).hexdigest(), "size": len(data)} for name, data in content.items()}
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


def _metrics_of_checkpoint(folder: Path) -> MetricLog:
    manifest = _read_manifest(folder)
    return _metrics_from_parquet(lambda name: _read_verified(folder, manifest, name), folder, manifest["files"])


def _timings_of_checkpoint(folder: Path) -> TimingLog:
    manifest = _read_manifest(folder)
    return _timings_from_parquet(lambda name: _read_verified(folder, manifest, name), folder)


def _read_checkpoint(folder: Path) -> Checkpoint:
    manifest = _read_manifest(folder)
    return Checkpoint(
        round=manifest["round"],
        state=files.from_safetensors(
            _read_verified(folder, manifest, "state.safetensors"), folder / "state.safetensors"
        ),
        facts=manifest["facts"],
        metrics=_metrics_of_checkpoint(folder),
        timings=_timings_of_checkpoint(folder),
    )
