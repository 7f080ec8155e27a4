"""The result of a run in short: what ``summary.json`` holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.runs.metrics import describe_clients
from fedstrata.runs.noting import over_clients

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

    Where clients have models of their own, each has its own round, and what is told is over all of these; where they
    adapt models in the end, ``validated_adapted`` says whose adapted model it is.
    """
    best = driver.chosen
    if best.clients:
        adapted = {"validated_adapted": list(best.adapted)} if best.adapted else {}
        return {"validated_rounds": best.rounds, **adapted, "validated": _validated_clients(driver)}
    if not best.model:
        return {}
    return {"validated_round": driver.chosen_round, "validated": driver.metrics.of_round(driver.chosen_round)}


def _validated_clients(driver: Driver) -> dict[str, float]:
    """Sum up what clients reached, each in the round of its own best model, under the names of the round table."""

    best, label = driver.chosen, driver.headline

    def of_clients(metric: str) -> np.ndarray:
        return np.array(list(driver.metrics.of_chosen(metric, best.rounds, best.adapted).values()))

    told = {
        name: describe_clients(of_clients(name), higher_is_better=not name.endswith("loss"))
        for name in ("client_validation.accuracy", f"{label}.accuracy", f"{label}.loss")
    }
    finite = np.isfinite(of_clients(f"{label}.loss"))
    for metric in driver.setting.metrics:
        if not metric.axes:
            numbers = of_clients(f"{label}.{metric}")
            told[f"{label}.{metric}"] = over_clients(metric, numbers, np.isnan(numbers) & finite)
    return {f"{name}.{statistic}": value for name, values in told.items() for statistic, value in values.items()}
