"""The rounds of a run since its newest checkpoint, on disk as they come, so that others can look on.

A log is one file of Arrow streams, one after another: first an empty one that says after which round the log begins,
then for each round one for each table that has rows of it, and last that of the times, which makes the round complete.
Each checkpoint begins the log anew, so it stays as small as the rounds between two checkpoints, and a run that ends in
good order takes it away: where it lies in the folder of a run that nobody writes any more, the run has died.

Nothing depends on it: a run goes on without where it cannot be written, and resumes from its checkpoint alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedstrata.errors import FedStrataWarning
from fedstrata.files import column_of
from fedstrata.runs.metrics import MetricLog, TimingLog

LIVE_FILE = "live.arrows"
_BEGINNING, _TIMINGS = "beginning", "timings"
_NAME, _AFTER = b"table", b"after"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class LiveLog:
    """Writes the rounds of a run as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._written: dict[str, int] = {}

    def begin(self, after: int, metrics: MetricLog, timings: TimingLog) -> None:
        """Begin anew after a round; all that is in the logs by then, a checkpoint holds."""
        self._written = {**metrics.lengths(), _TIMINGS: timings.length()}
        try:
            self.close()
            self._file = self._path.open("wb")
            nothing = pa.table([column_of(np.empty(0), pa.int32())], names=["round"])
            self._write(nothing, {_NAME: _BEGINNING, _AFTER: str(after)})
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def add(self, metrics: MetricLog, timings: TimingLog) -> None:
        """Add what the logs have had since the last time."""
        if self._file is None:
            return
        tables = {**metrics.since(self._written), _TIMINGS: timings.since(self._written[_TIMINGS])}
        try:
            for name, table in tables.items():
                if len(table) or name == _TIMINGS:
                    self._write(table, {_NAME: name})
            self._file.flush()
        except OSError as error:
            self._give_up(error)
        self._written = {**metrics.lengths(), _TIMINGS: timings.length()}

    def end(self) -> None:
        """Take the log away: what it held is elsewhere, or not wanted any more."""
        try:
            self.close()
            self._path.unlink(missing_ok=True)
        except OSError:
            return

    def close(self) -> None:
        """Write no more; what is there stays, for a run that goes on."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, table: pa.Table, facts: Mapping[bytes, str]) -> None:
        assert self._file is not None
        described = table.replace_schema_metadata(dict(facts))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, described.schema) as stream:
            stream.write_table(described)
        self._file.write(sink.getvalue())

    def _give_up(self, error: OSError) -> None:
        """Write no more; who looks on then sees checkpoints only."""
        self._file = None
        warnings.warn(
            f"'{self._path}' cannot be written ({(error.strerror or str(error)).lower()}), so that those who watch "
            "this run see its checkpoints only.",
            FedStrataWarning,
            stacklevel=3,
        )


@dataclass(frozen=True)
class LiveRounds:
    """What a live log holds: the tables of all complete rounds ``after`` one."""

    after: int
    tables: Mapping[str, pa.Table]

    def following(self, metrics: MetricLog, timings: TimingLog, after: int) -> tuple[MetricLog, TimingLog]:
        """Add the rounds to those of a checkpoint, which may have come since; with a gap between, add nothing."""
        if self.after > after or not self.tables:
            return metrics, timings
        new = {name: table.filter(pc.field("round") > after) for name, table in self.tables.items()}
        times = new.pop(_TIMINGS)
        tables = metrics.to_tables()
        joined = {
            name: pa.concat_tables([tables[name], table]) if name in tables else table for name, table in new.items()
        }
        return (
            MetricLog.from_tables({**tables, **joined}),
            TimingLog.from_table(pa.concat_tables([timings.to_table(), times])),
        )


def read_live_log(path: Path) -> LiveRounds | None:
    """Read the complete rounds of a log, also while it is written; none where there is no log."""
    try:
        written = path.read_bytes()
    except OSError:
        return None
    content = pa.BufferReader(written)
    after: int | None = None
    found: dict[str, list[pa.Table]] = {}
    of_round: dict[str, pa.Table] = {}
    try:
        while content.tell() < content.size():
            table = pa.ipc.open_stream(content).read_all()
            if not written.endswith(_END_OF_STREAM, 0, content.tell()):
                break  # To a reader a stream that was cut between two messages looks whole.
            facts = table.schema.metadata
            name = facts[_NAME].decode()
            if name == _BEGINNING:
                after = int(facts[_AFTER])
                continue
            of_round[name] = table.replace_schema_metadata(None)
            if name == _TIMINGS:
                for one, rows in of_round.items():
                    found.setdefault(one, []).append(rows)
                of_round = {}
    except (pa.ArrowInvalid, OSError):
        pass  # What a write has not yet finished, or never will.
    if after is None:
        return None
    return LiveRounds(after, {name: pa.concat_tables(tables) for name, tables in found.items()})
