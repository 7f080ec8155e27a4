"""What a run was made with, read back from its folder, to go on with it or to look at it again."""

from __future__ import annotations

from fedstrata.engines.planning import ENGINES, Plan
from fedstrata.experiment import Experiment
from fedstrata.plugins import IMPORTS_FOLDER, load_imports
from fedstrata.runs.folder import RunFolder


def import_experiment(folder: RunFolder) -> Experiment:
    """Import the files that a run was made with, from its own copies of them, and return its experiment."""
    return load_imports(folder.experiment, folder.path / IMPORTS_FOLDER)


def experiment_as_run(folder: RunFolder) -> Experiment:
    """Do the same, on the device that the run was made on."""
    return import_experiment(folder).with_changes({"device": folder.environment()["device"]})


def same_work(experiment: Experiment) -> Experiment:
    """Take from an experiment what two runs of a comparison differ in: their method, their seed, and what is learned.

    What is left says how much work a round is.
    """
    defaults = Experiment()
    return experiment.with_changes({key: getattr(defaults, key) for key in _NO_WORK})


_NO_WORK = ("method", "seed", "rounds", "optimiser", "schedule", "loss", "diagnose", "evaluate_every")


def plan_of(folder: RunFolder) -> Plan | None:
    """Read how the run was planned, so that its numbers stay the same; none where real sites have done the work."""
    environment = folder.environment()
    resolved = environment["resolved"]
    if resolved["engine"] not in ENGINES:
        return None
    return Plan(resolved["engine"], resolved["chunk"], environment["threads"])
