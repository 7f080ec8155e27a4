"""What can travel to another process: names and text, and files that are imported there; no Python objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fedstrata.data import datasets, partitions
from fedstrata.diagnostics import diagnostics
from fedstrata.experiment import Experiment
from fedstrata.losses import losses
from fedstrata.methods import Method, methods
from fedstrata.models import ModelSpec, models
from fedstrata.plugins import require_imports
from fedstrata.runs.preparing import Ingredients
from fedstrata.scores import metrics
from fedstrata.spec import Registry

COMPONENTS: dict[str, Registry[Any]] = {
    "method": methods,
    "data": datasets,
    "model": models,
    "partition": partitions,
    "loss": losses,
    "test_loss": losses,
    "metrics": metrics,
    "diagnose": diagnostics,
}
"""The keys of an experiment that name components, and where these are registered."""
_INTO_A_FILE = "register it in a file that runs import (--import, or imports=[...])"


def obstacle(experiment: Experiment, given: Ingredients, callbacks: Sequence[object], written: bool) -> str | None:
    """Say in words what keeps a run from being done in another process, if something does, and what to do about it."""
    if not written:
        return "results come back from these through folders; give out=..."
    if callbacks:
        return (
            "callbacks are objects of this one; register them in a file that runs import (--import, or imports=[...])"
        )
    objects = {"data": given.dataset, "split": given.split, "model": _own_model(given), "metrics": given.metrics}
    for what, value in objects.items():
        if value is not None:
            return f"the {what} given as an object cannot travel there; name it in words"
    for key, registry in COMPONENTS.items():
        for name in re.findall(r"[\w.-]+", getattr(experiment, key) or ""):
            if _only_here(experiment, registry, name):
                return f"the {registry.kind} '{name}' was registered in this one; {_INTO_A_FILE}"
    if isinstance(given.method, Method) and not _is_its_text(given.method):
        return f"the method '{given.method}' is an object of this one; {_INTO_A_FILE}"
    return None


def _is_its_text(method: Method) -> bool:
    return all(part.name for part in method.parts) and Method.make(str(method)) == method


def _own_model(given: Ingredients) -> object:
    """Return a model that is more than its text."""
    return None if isinstance(given.model, ModelSpec) and given.model.name else given.model


def _only_here(experiment: Experiment, registry: Registry[Any], name: str) -> bool:
    """Tell whether a component came neither with FedStrata, nor with a package, nor in a file that the run imports."""
    if registry.registered(name) is None:
        return False
    origin = registry.origin(name)
    if origin is None or origin.words.startswith("package "):
        return False
    files = require_imports(experiment.imports).values()
    return not any((registry, name) in file.registered for file in files)
