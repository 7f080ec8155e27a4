"""What a run leaves behind: a folder from which it can be resumed, compared and reported.

    experiment.toml     what was asked for
    imports/            copies of the Python files that registered components for the run, if there were any
    environment.json    with which software, on what
    data.json           the data in numbers: classes, sizes, label counts, a fingerprint of all samples, and the names
                        of the clients where these are the sites of the data
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

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from torch import Tensor

from fedstrata import files
from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.plugins import IMPORTS_FOLDER
from fedstrata.runs.checkpoints import (
    CHECKPOINTS_FOLDER,
    Checkpoint,
    Checkpoints,
    metrics_of_checkpoint,
    read_checkpoint,
    timings_of_checkpoint,
)
from fedstrata.runs.describing import DESCRIPTION, SPLIT_SCHEMA, describe, split_from_table
from fedstrata.runs.live_log import LIVE_FILE, LiveLog, read_live_log
from fedstrata.runs.log_files import logs_to_parquet, metrics_from_parquet, timings_from_parquet
from fedstrata.runs.metrics import METRIC_SCHEMAS, OPTIONAL_SCHEMAS, MetricLog, TimingLog
from fedstrata.runs.naming import CLIENT_NAMES
from fedstrata.trained.card import Card
from fedstrata.trained.model import CARD_FILE, WEIGHTS_FILE

BEFORE_A_RUN = {"status.json", "deployment.log", "audit.jsonl"}
"""What a server of real sites writes while it waits for them, before it can begin a run."""
LAYERS_FILE = "layers.json"
"""What is known of the layers of the model."""
ORDER_FILE = "order.json"
"""Beside the runs of a comparison: the names of their folders, in the order in which they are compared."""
_CLIENTS_FILE = "clients.safetensors"
_LAST = "last-{}"
_DIAGNOSIS = "diagnosis"


def folder_named(given: object) -> Path:
    """Take the name of a folder as a call from Python gives it; what cannot be one is told in a sentence."""
    if not isinstance(given, str | PathLike):
        raise FedStrataError(f"{given!r} is no name of a folder; give a text or a Path, such as 'runs/first'.")
    return Path(given)


def runs_inside(path: Path) -> list[Path]:
    """List the runs in a folder, in the order of their comparison; where none is noted, in which they were made."""
    places = {name: place for place, name in enumerate(_noted_order(path))}

    def place_of(run: Path) -> tuple[int, int]:
        split = run / "split.parquet"  # which is never written again
        return places.get(run.name, len(places)), split.stat().st_mtime_ns if split.exists() else 0

    return sorted(sorted(file.parent for file in path.glob("*/experiment.toml")), key=place_of)


def note_order(path: Path, names: Sequence[str]) -> None:
    """Note in which order runs are compared, beside them; those of comparisons before that are in no other follow."""
    before = _noted_order(path)
    order = list(dict.fromkeys((*names, *before)))
    if order != before:
        files.write_atomically(path / ORDER_FILE, files.to_json({"runs": order}))


def _noted_order(path: Path) -> list[str]:
    file = path / ORDER_FILE
    return list(files.from_json(files.read_bytes(file), file).get("runs", ())) if file.is_file() else []


class RunFolder:
    """The folder of one run.

    :meth:`create` and :meth:`resume` take the right to write it, which one process at a time can have, until
    :meth:`close` or the end of a ``with`` block; :meth:`open` only reads, also while another process writes.
    """

    def __init__(self, path: Path, lock: files.WriteLock | None = None) -> None:
        self.path = path
        self._lock = lock
        self._live: LiveLog | None = None
        self._checkpoints = Checkpoints(path / CHECKPOINTS_FOLDER)

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
        description = describe(experiment, dataset, split, environment)
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
            for name in (*DESCRIPTION, files.LOCK_FILE):
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
            missing = [name for name in DESCRIPTION if not (path / name).exists()]
        if path.is_file():
            raise FedStrataError(f"'{path}' is a file, not the folder of a run; give the --out folder of a run.")
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
        for folder in (path, path / CHECKPOINTS_FOLDER, path / "metrics"):
            files.remove_partials(folder)
        return run

    def close(self) -> None:
        """Let other processes write this run."""
        if self._live is not None:
            with suppress(OSError):  # of a full disk it was told when there was something to write
                self._live.close()
            self._live = None
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

    def client_names(self) -> list[str]:
        """What the clients are called, where they are sites that have names; else nothing."""
        return list(self.data().get(CLIENT_NAMES, ()))

    def split(self) -> Split:
        """Who holds which samples; checked against the hash that was saved with it."""
        path = self.path / "split.parquet"
        table = files.from_parquet(files.read_bytes(path), SPLIT_SCHEMA, path)
        split = split_from_table(table)
        if split.hash != (table.schema.metadata or {}).get(b"hash", b"").decode():
            raise FedStrataError(f"'{path}' is damaged: its hash differs from the one that was saved with it.")
        return split

    def metrics(self) -> MetricLog:
        """All that was measured: of the whole run if it is finished, else up to its newest checkpoint."""
        if self.finished:
            place = self.path / "metrics"
            there = {path.name for path in place.glob("*.parquet")}
            return metrics_from_parquet(lambda name: self._read(f"metrics/{name}"), place, there)
        return self._checkpoints.newest(metrics_of_checkpoint) or MetricLog()

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
            return timings_from_parquet(self._read, self.path)
        return self._checkpoints.newest(timings_of_checkpoint) or TimingLog()

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
        written = self._checkpoints.save(round, state, facts, metrics, timings)
        if written and self._live is not None:
            self._live.begin(round, metrics, timings)

    def load_checkpoint(self) -> Checkpoint | None:
        """Load the newest whole checkpoint, or none where the run has not come to its first one."""
        return self._checkpoints.newest(read_checkpoint)

    def save_last(self, model: Mapping[str, Tensor], clients: Mapping[str, Tensor]) -> None:
        """Write the models of the last round, where others are the results of the run."""
        self._require_lock()
        for name, tensors in ((WEIGHTS_FILE, model), (_CLIENTS_FILE, clients)):
            files.write_atomically(self.path / _LAST.format(name), files.safetensors_pieces(tensors))

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
        for name, content in logs_to_parquet(metrics, timings).items():
            folder = self.path if name == "timings.parquet" else self.path / "metrics"
            files.write_atomically(folder / name, content)
        weights = files.to_safetensors(model)
        files.write_atomically(self.path / WEIGHTS_FILE, weights)
        if clients is not None:
            files.write_atomically(self.path / _CLIENTS_FILE, files.safetensors_pieces(clients))
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


def _refuse_foreign_content(path: Path) -> None:
    """Let only an empty folder pass, or one in which the creation of a run was cut short."""
    if not path.is_dir():
        raise FedStrataError(f"'{path}' is a file, not a folder; choose another --out.")
    names = {entry.name for entry in path.iterdir() if files.partial_of(entry.name) is None} - BEFORE_A_RUN
    if not names or (
        files.LOCK_FILE in names
        and names < {files.LOCK_FILE, IMPORTS_FOLDER, *DESCRIPTION}
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
