"""Making a finished run longer, and saying where that is not what one long run would have been."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.methods import Decision, Method
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients
from fedstrata.runs.recalling import import_experiment
from fedstrata.schedules import schedules


def refuse_to_extend(folder: RunFolder, rounds: int, given: Ingredients) -> None:
    """Refuse what cannot go on until it has so many rounds; warn where it will not end like one long run."""
    if not folder.finished:
        raise FedStrataError(
            f"The run in '{folder.path}' is not finished; go on with 'fedstrata resume {folder.path}' first."
        )
    folder.experiment.with_changes({"rounds": rounds})  # refuses what is no number of rounds
    done = int(folder.summary()["rounds"])
    if rounds <= done:
        raise FedStrataError(
            f"The run in '{folder.path}' has {done} rounds already; to go on, give more than that, not {rounds}."
        )
    experiment = import_experiment(folder)
    method = given.make_method(experiment)
    private = [part for part in method.parts if part.touches and Decision.PRIVACY in part.touches.decides]
    planned = [part for part in private if part.plans_ahead]
    if planned:
        raise FedStrataError(
            f"The run in '{folder.path}' cannot go on: {planned[0].plans_ahead}, and more rounds would spend more than "
            f"'{planned[0]}' promises. Begin a new run of {rounds} rounds."
        )
    for why in differences(experiment, method, done, rounds, folder.metrics().series("train.loss")[1].tolist()):
        warnings.warn(f"This will not end like one run of {rounds} rounds: {why}.", FedStrataWarning, stacklevel=3)


def differences(experiment: Experiment, method: Method, done: int, rounds: int, losses: list[float]) -> Iterator[str]:
    """Say why the first rounds of a longer run would not have been those that are done."""
    schedule = schedules.make(experiment.schedule)
    for round in range(1, done + 1):
        before, longer = (schedule.factor(round, total, losses[: round - 1]) for total in (experiment.rounds, rounds))
        if before != longer:
            yield (
                f"the schedule '{schedule}' plans for all rounds, and in round {round} of {rounds} the learning rate "
                f"would have been {longer / before if before else 0:.3g} times as high"
            )
            break
    yield from method.plans_ahead
    off = done % experiment.evaluate_every != 0
    if off and (experiment.validation or experiment.validation_fraction):
        yield f"round {done} was evaluated as the last one, and its model may have been chosen"
