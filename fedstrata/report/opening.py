"""What a report is asked for, as runs: folders of runs, and folders of which only tables were published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstrata.report.published import is_published, read_published, refuse_what_is_no_run
from fedstrata.report.reading import Run, read_run


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Open the runs in some folders; what holds none is refused, with a word about what it is."""
    runs: list[Run] = []
    for path in map(Path, paths):
        if is_published(path):
            runs += read_published(path)
        elif is_published(path.parent) and (path.parent / f"{path.name}.toml").is_file():
            runs += [run for run in read_published(path.parent) if run.path == path]
        else:
            refuse_what_is_no_run(path)
            runs.append(read_run(path))
    return runs
