"""The number that a recipe reports of a run, in the unit of its paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from fedstrata.errors import FedStrataError
from fedstrata.papers.of_clients import needs_clients, over_clients, values_of_clients
from fedstrata.papers.reading import SECONDS, Recipe
from fedstrata.runs.folder import RunFolder

LAYERS = "layers."
"""With what the name of a number begins that is a mean over layers, and over rounds."""
_BYTES_OF_A_WEIGHT = 4


def number_of(recipe: Recipe, folder: RunFolder) -> float:
    """Find the number of a finished run.

    It is a metric of rounds, or of clients in the rounds of their own models, a total of the run, the seconds of a
    phase in a round (``aggregate.seconds``), a mean over layers and rounds (``layers.gamma``, of some
    ``layers.gamma:*conv*``), or a diagnostic.
    """
    summary = folder.summary()
    return _rounded(in_unit(_find(recipe, summary, folder), recipe.unit, summary))


def numbers_of_clients(recipe: Recipe, folder: RunFolder) -> tuple[float, ...]:
    """Find the number of each client of a finished run, by which its part is computed; NaN where it has none."""
    values = values_of_clients(recipe.number, folder, recipe.at)
    return tuple(_rounded(values.get(client, math.nan)) for client in range(int(folder.summary()["clients"])))


def _rounded(value: float) -> float:
    return float(f"{value:.10g}") if math.isfinite(value) else value


def in_unit(value: float, unit: str, summary: Mapping[str, Any]) -> float:
    """Turn a number of a run into that of a paper.

    >>> in_unit(0.25, "percent", {}), in_unit(2e6, "MB", {})
    (25.0, 2.0)
    """
    match unit:
        case "percent":
            return 100 * value
        case "MB":
            return value / 1e6
        case "TFLOPs a client":
            return value / 1e12 / int(summary["clients"])
        case "percent of dense":
            senders = float(summary["final"]["participation.clients"])
            return 100 * value / (senders * _BYTES_OF_A_WEIGHT * int(summary["parameters"]))
    return value


def _find(recipe: Recipe, summary: Mapping[str, Any], folder: RunFolder) -> float:
    if needs_clients(recipe.number, recipe.at):
        return over_clients(recipe.number, folder, recipe.at)
    rounds = {"last": "final"}.get(recipe.at, recipe.at)
    values = {**summary, **_seconds(folder, summary), **summary.get(rounds, {})}
    value = values.get(recipe.number)
    if recipe.number in values and value is None:
        return math.nan  # as JSON has what is no number: the run diverged
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
