"""The result of a run in short: what ``summary.json`` holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fedstrata.runs.metrics import describe_clients

if TYPE_CHECKING:
    from fedstrata.runs.driver import Driver


def summarise(driver: Driver) -> dict[str, Any]:
    """Sum a run up: the last round, the mean of the last ten, and the best, each under its own name.

    Where samples are held out to choose a model on, ``validated`` is what that model reached. Where the run ended
    before its last round, ``stopped`` says why.
    """
    metrics, setting = driver.metrics, driver.setting
    rounds, accuracy = metrics.series("client_after.accuracy.mean")
    return {
        "method": str(driver.method),
        "data": driver.experiment.data,
        "model": driver.experiment.model,
        "rounds": driver.round,
        "clients": driver.split.clients,
        "seed": driver.experiment.seed,
        "headline": driver.headline,
        "final": metrics.latest(),
        "last_ten": metrics.last_ten(),
        "best": metrics.best(),
        "best_round": int(rounds[accuracy.argmax()]) if len(rounds) else None,
        **_validated(driver),
        **({} if driver.stopped is None else {"stopped": driver.stopped}),
        **metrics.traffic(),
        **metrics.participation(),
        **metrics.work(),
        **driver.timings.summary(),
        **({"cost_of_diagnostics": costs} if (costs := driver.diagnosis.costs(driver.timings)) else {}),
        "parameters": sum(setting.initial[name].numel() for name in setting.layers.parameter_names),
        "engine": driver.plan.engine,
    }


def _validated(driver: Driver) -> dict[str, Any]:
    """Tell in which round the model was best on the validation samples, the first of equals, and all it did.

    Where clients have models of their own, each has its own round, and what is told is over all of these.
    """
    best = driver.best
    if best.clients:
        return {"validated_rounds": best.rounds, "validated": _validated_clients(driver)}
    if not best.model:
        return {}
    return {"validated_round": driver.chosen_round, "validated": driver.metrics.of_round(driver.chosen_round)}


def _validated_clients(driver: Driver) -> dict[str, float]:
    """Sum up what clients reached, each in the round of its own best model; what is not defined for one is left out."""
    further = [one for one in driver.setting.metrics if not one.axes]
    rising = {"accuracy": True, "loss": False} | {str(one): one.higher_is_better is not False for one in further}
    told = {"client_validation.accuracy": True} | {f"client_after.{name}": better for name, better in rising.items()}
    undefined = {f"client_after.{one}" for one in further}
    values: dict[str, float] = {}
    for metric, better in told.items():
        numbers = [driver.metrics.of_client(client, metric, round) for client, round in enumerate(driver.best.rounds)]
        known = [one for one in numbers if one is not None and not (metric in undefined and math.isnan(one))]
        values |= {
            f"{metric}.{name}": value for name, value in describe_clients(known, higher_is_better=better).items()
        }
    return values
