"""What a server writes down of a run over real sites when it begins, by which it goes on after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.data.channels import Statistics
from fedstrata.deployment.declarations import Schema
from fedstrata.deployment.facts import (
    normalisation_from_facts,
    normalisation_to_facts,
    statistics_from_facts,
    statistics_to_facts,
)
from fedstrata.deployment.federation import Federation
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.runs.folder import RunFolder

DEPLOYMENT_FILE = "deployment.json"


@dataclass(frozen=True)
class Begun:
    """A run that was begun in a folder and is not finished."""

    run: str
    committed: int
    schema: Schema
    normalises_by: str | Statistics | None
    statistics: Statistics | None

    @classmethod
    def find(cls, out: Path, names: Sequence[str], experiment: Experiment) -> Begun | None:
        """Find a run to go on with; one of other sites, or another experiment, is refused."""
        described = _description(out)
        if described is None:
            return None
        if described["sites"] != list(names):
            raise FedStrataError(
                f"The run in '{out}' was begun with the sites {', '.join(described['sites'])}; "
                "go on with the same ones, or choose another --out."
            )
        folder = RunFolder.open(out)
        differing = [key for key, value in vars(folder.experiment).items() if value != getattr(experiment, key)]
        if differing:
            what = "other imported files" if differing[0] == "imports" else f"another {differing[0]}"
            raise FedStrataError(
                f"The run in '{out}' was begun with {what}; go on with the same experiment, or choose another --out."
            )
        data = folder.data()
        checkpoint = folder.load_checkpoint()
        return cls(
            described["run"],
            0 if checkpoint is None else checkpoint.round,
            Schema(
                tuple(data["input_shape"]),
                tuple(data["class_names"]),
                described.get("input_type", "float32"),
                described.get("columns", ""),
            ),
            normalisation_from_facts(described.get("normalises_by")),
            statistics_from_facts(described.get("statistics")),
        )


def write_begun(out: Path, federation: Federation, rehearsal: bool) -> None:
    """Write down what was agreed on with the sites, beside the description of the run."""
    assert federation.schema is not None
    described = {
        "run": federation.run,
        "sites": list(federation.names),
        "rehearsal": rehearsal,
        "statistics": statistics_to_facts(federation.statistics),
        "input_type": federation.schema.input_type,
        "columns": federation.schema.columns,
        "normalises_by": normalisation_to_facts(federation.agreement.normalises_by),
    }
    files.write_atomically(out / DEPLOYMENT_FILE, files.to_json(described))


def begun_sites(out: Path) -> list[str] | None:
    """Name the sites of an unfinished run in a folder, in the order of their numbers; None where there is no run."""
    described = _description(out)
    return None if described is None else list(described["sites"])


def _description(out: Path) -> dict[str, Any] | None:
    path = out / DEPLOYMENT_FILE
    return None if not path.exists() or RunFolder(out).finished else files.from_json(files.read_bytes(path), path)
