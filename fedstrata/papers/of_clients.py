"""How single clients fare in a run, with the models that a paper looks at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import describe_clients, higher_is_better

BEFORE = "validated_before"
"""Each client's model as it was just trained, in the round in which it had the lowest loss on its validation samples;
or as it was adapted after the last round, where that has a lower one.

So the released code of PLayer-FL scores all methods: even FedAvg's models are those of clients that have trained them
for an epoch more.
"""
WEIGHTED = "weighted"
"""The mean over clients in which each counts by its test samples."""
_JUDGED_BEFORE, _JUDGED_ADAPTED = "client_before_validation.loss", "client_adapted_validation.loss"


def needs_clients(number: str, at: str) -> bool:
    """Tell whether a number is not in the round table, but is computed from those of single clients."""
    return at == BEFORE or number.endswith(f".{WEIGHTED}")


def over_clients(number: str, folder: RunFolder, at: str) -> float:
    """Sum up a metric of clients, ``client_before.f1.mean``; clients whose labels do not define it are left out."""
    metric, _, statistic = number.rpartition(".")
    values = values_of_clients(metric, folder, at)
    defined = {client: value for client, value in values.items() if not math.isnan(value)}
    numbers = np.array(list(defined.values()))
    if statistic == WEIGHTED:
        sizes = folder.split().test_sizes[np.array(list(defined), dtype=np.int64)]
        return float(np.average(numbers, weights=sizes)) if len(numbers) else math.nan
    described = describe_clients(numbers, higher_is_better=higher_is_better(f"{metric}.mean") is not False)
    if statistic not in described:
        raise FedStrataError(f"Over clients there is {', '.join((*described, WEIGHTED))}, not '{statistic}'.")
    return described[statistic]


def values_of_clients(metric: str, folder: RunFolder, at: str) -> dict[int, float]:
    """Return a metric of all clients, each with its chosen model, or with that of the last round."""
    metrics, rounds = folder.metrics(), chosen_rounds(folder, at)
    found = metrics.of_chosen(metric, rounds, adapted(folder, at)) if rounds else metrics.of_clients(metric)
    if not found:
        raise FedStrataError(f"'{folder.path}' has no '{metric}' of single clients.")
    return found


def chosen_rounds(folder: RunFolder, at: str) -> list[int]:
    """Tell the round of each client's model, where samples that it holds out chose it; nothing if the last counts."""
    if at == BEFORE:
        rounds = judged_before(folder)
        if not rounds:
            raise FedStrataError(
                f"'{folder.path}' does not tell how clients' models did on samples that they held out before "
                "aggregation; it needs a validation_fraction, and a run with this version."
            )
        return rounds
    return rounds_of_validated(folder.summary()) if at == "validated" else []


def adapted(folder: RunFolder, at: str) -> list[bool]:
    """Tell of each client whether its chosen model is the one that it adapted in the end; nothing where none was."""
    if at != BEFORE:
        return list(folder.summary().get("validated_adapted", ()))
    metrics = folder.metrics()
    before = metrics.of_clients_at(_JUDGED_BEFORE, judged_before(folder))
    after = metrics.of_clients(_JUDGED_ADAPTED)
    return [after[client] < before[client] for client in sorted(after)]


def judged_before(folder: RunFolder) -> list[int]:
    """The round of each client's just-trained model with the lowest loss on the samples that the client held out."""
    return folder.metrics().rounds_of_lowest(_JUDGED_BEFORE)


def rounds_of_validated(summary: Mapping[str, Any]) -> list[int]:
    """The round of each client's model, where validation chose it: its own, or that of the model of all."""
    if "validated_round" in summary:
        return [int(summary["validated_round"])] * int(summary["clients"])
    return [int(round) for round in summary.get("validated_rounds", ())]
