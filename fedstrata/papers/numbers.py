"""The number that a recipe reports of a run, in the unit of its paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from fedstrata.errors import FedStrataError
from fedstrata.fairness import incentive_of
from fedstrata.papers.cells import INCENTIVE
from fedstrata.papers.of_clients import BEFORE, chosen_rounds, needs_clients, over_clients, values_of_clients
from fedstrata.papers.reading import SECONDS, Recipe
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import higher_is_better

LAYERS = "layers."
"""With what the name of a number begins that is a mean over layers, and over rounds."""
_BYTES_OF_A_WEIGHT = 4


def number_of(recipe: Recipe, folder: RunFolder, baselines: tuple[RunFolder, RunFolder] | None = None) -> float:
    """Find the number of a finished run; ``baselines`` are ``local`` and ``fedavg`` with the same setting and seed.

    It is a metric of rounds, or of clients in the rounds of their own models, a total of the run, the seconds of a
    phase in a round (``aggregate.seconds``), a mean over layers and rounds (``layers.gamma``, of some
    ``layers.gamma:*conv*``), a diagnostic, or an incentive.
    """
    summary = folder.summary()
    value = in_unit(_find(recipe, summary, folder, baselines), recipe.unit, summary)
    return float(f"{value:.10g}") if math.isfinite(value) else value


def in_unit(value: float, unit: str, summary: Mapping[str, Any]) -> float:
    """Turn a number of a run into that of a paper.

    >>> in_unit(0.25, "percent", {}), in_unit(0.5, "squared", {}), in_unit(2e6, "MB", {})
    (25.0, 0.25, 2.0)
    """
    match unit:
        case "percent":
            return 100 * value
        case "squared":
            return value * value
        case "MB":
            return value / 1e6
        case "TFLOPs a client":
            return value / 1e12 / int(summary["clients"])
        case "percent of dense":
            senders = float(summary["final"]["participation.clients"])
            return 100 * value / (senders * _BYTES_OF_A_WEIGHT * int(summary["parameters"]))
    return value


def _find(
    recipe: Recipe, summary: Mapping[str, Any], folder: RunFolder, baselines: tuple[RunFolder, RunFolder] | None
) -> float:
    if recipe.number.startswith(INCENTIVE):
        return _incentive(recipe, folder, baselines)
    if needs_clients(recipe.number, recipe.at):
        return over_clients(recipe.number, folder, recipe.at)
    rounds = {"last": "final"}.get(recipe.at, recipe.at)
    values = {**summary, **_seconds(folder, summary), **summary.get(rounds, {})}
    value = values.get(recipe.number)
    if not isinstance(value, int | float):
        value = _of_layers(recipe.number, folder)
    if value is None:
        numbers = sorted(name for name, one in values.items() if isinstance(one, int | float))
        raise FedStrataError(
            f"The runs of '{recipe.name}' have no number '{recipe.number}' at '{recipe.at}'; they have "
            f"{', '.join(numbers)}."
        )
    return float(value)


def _seconds(folder: RunFolder, summary: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of each phase of a round, on average, as ``train.seconds``."""
    rounds = max(1, int(summary["rounds"]))
    return {f"{phase}{SECONDS}": seconds / rounds for phase, seconds in folder.timings().totals().items()}


def _of_layers(number: str, folder: RunFolder) -> float | None:
    """The mean of a number of layers, or of clients in layers, over all rounds; none where there is no such one."""
    name, _, pattern = number.removeprefix(LAYERS).partition(":")
    values = []
    for table in folder.metrics().to_tables().values():
        if "layer" in table.column_names:
            columns = (table.column(key).to_pylist() for key in ("metric", "layer", "value"))
            values += [
                value
                for metric, layer, value in zip(*columns, strict=True)
                if metric in (name, f"{name}.mean") and fnmatch(layer, pattern or "*")
            ]
    return sum(values) / len(values) if values else None


def _incentive(recipe: Recipe, folder: RunFolder, baselines: tuple[RunFolder, RunFolder] | None) -> float:
    if baselines is None:
        raise FedStrataError("An incentive needs the runs of 'local' and of 'fedavg' with the same setting and seed.")
    metric = recipe.number.removeprefix(INCENTIVE)
    if recipe.at not in ("last", "validated", BEFORE):
        raise FedStrataError(f"An incentive is that of the last or the validated models, not at '{recipe.at}'.")
    if recipe.at != "last" and not chosen_rounds(folder, recipe.at):
        raise FedStrataError(f"The runs of '{recipe.name}' hold no samples out to choose models by; use at = \"last\".")
    own = _models_in_use(metric, folder, recipe.at)
    local, fedavg = (_models_in_use(metric, one, recipe.at) for one in baselines)
    return incentive_of(own, local, fedavg, higher_is_better(f"client_after.{metric}.mean") is not False)


def _models_in_use(metric: str, folder: RunFolder, at: str) -> dict[int, float]:
    """How clients fare with the models that they use: those that were chosen on validation samples, or the last."""
    label = "client_before" if at == BEFORE else folder.summary()["headline"]
    return values_of_clients(f"{label}.{metric}", folder, at)
