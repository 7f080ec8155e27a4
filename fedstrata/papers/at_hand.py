"""The runs that figures are redrawn from: whole ones in a folder, and those of which tables were published."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedstrata.experiment import Experiment
from fedstrata.papers.cells import Cell, settings_hash
from fedstrata.report.published import is_published, read_published
from fedstrata.report.reading import Run, read_run


@dataclass(frozen=True)
class RunsAtHand:
    """Finished runs, by the hash of their settings."""

    folder: Path | None = None
    """Where whole runs lie, each in a folder that is named by its hash."""
    published: Mapping[str, Run] = field(default_factory=dict)
    """Runs of which tables are left, as ``results/`` has them."""

    @classmethod
    def among(cls, known: Iterable[Path], folder: Path | None = None) -> RunsAtHand:
        """Look for published runs in some folders, in folders in these, and beside files in them."""
        found: dict[str, Run] = {}
        for place in dict.fromkeys(one for path in known for one in _places(path) if is_published(one)):
            for run in read_published(place):
                found.setdefault(settings_hash(Experiment.from_mapping(dict(run.experiment))), run)
        return cls(folder, found)

    def find(self, cell: Cell) -> Run | None:
        """The run of a cell: the whole one where it lies in the folder, else what was published of it.

        A run in which nothing was diagnosed stands in for one that is the same otherwise: to diagnose changes no round.
        """
        if self.folder is not None and (self.folder / cell.settings / "summary.json").exists():
            return read_run(self.folder / cell.settings)
        plain = settings_hash(dataclasses.replace(cell.experiment, diagnose=None))
        return self.published.get(cell.settings) or self.published.get(plain)


def _places(path: Path) -> list[Path]:
    return [path, *sorted(path.glob("*/"))] if path.is_dir() else [path.parent]
