"""The files on a machine that a run is made of, such as a table and pretrained weights, known by their SHA-256."""

from __future__ import annotations

from functools import lru_cache
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.data import datasets
from fedstrata.experiment import Experiment
from fedstrata.models.base import models

if TYPE_CHECKING:
    from fedstrata.runs.folder import RunFolder

FILES = "files"
"""Where they stand in the description of the data, if there are some."""
_PYTHON = "python:"


def local_files(experiment: Experiment) -> dict[str, str]:
    """List the files that an experiment names in its data and its model, as far as they are here, with their hashes."""
    named = [(registry, text) for registry, text in ((datasets, experiment.data), (models, experiment.model))]
    specs = [registry.make(text) for registry, text in named if not text.startswith(_PYTHON)]
    values = [str(value) for spec in specs for value in spec.local_values().values()]
    return {value: _hash_of(path) for value in values if (path := Path(value).expanduser()).is_file()}


def changed_file(folder: RunFolder, experiment: Experiment) -> str | None:
    """Say in a sentence that a file is not what it was when a run began; nothing where all are, or are not here."""
    noted = folder.data().get(FILES, {})
    now = local_files(experiment) if noted else {}
    for name, before in noted.items():
        if now.get(name, before) != before:
            return (
                f"'{name}' is not the file with which the run in '{folder.path}' was made (SHA-256 {now[name][:12]}, "
                f"then {before[:12]}); put that file back, or give another folder for the runs."
            )
    return None


def _hash_of(path: Path) -> str:
    told = path.stat()
    return _hash_of_content(path.resolve(), told.st_size, told.st_mtime_ns)


@lru_cache(maxsize=256)
def _hash_of_content(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
