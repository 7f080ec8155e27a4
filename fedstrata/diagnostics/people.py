"""How single clients fare: how unequally, and who is left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.diagnostics.contract import Diagnostic, Measured, Quantity, Seen, diagnostics
from fedstrata.fairness import fairness, worst_clients
from fedstrata.stack import Stack


@diagnostics.register("people")
@dataclass(frozen=True)
class People(Diagnostic):
    """How unequally clients fare on their own test samples (PLayer-FL, Eq. A.5), and who fares worst.

    The accuracies are those of the models that clients use after the round, the headline of the run, so there are
    numbers in the rounds in which models are tested. Accuracies of single classes are there with
    ``metrics="recall(of=each)"``; which part of the clients is better off than alone and than with FedAvg (Eq. A.6) is
    a matter of three runs, and stands in ``fedstrata compare``.

    Cost: nothing but a few sums over numbers that are there anyway.
    """

    quantities: ClassVar[Mapping[str, Quantity]] = {
        "people.fairness": Quantity(
            "Variance of accuracies over clients",
            "How unequally a method serves its clients: 0 where all have the same accuracy on their own test samples; "
            "lower is fairer.",
            low=0,
        ),
        "people.deviation": Quantity(
            "Standard deviation of accuracies over clients",
            "The square root of the variance, in the unit of the accuracies themselves; lower is fairer.",
            low=0,
        ),
        "people.lowest": Quantity(
            "Lowest accuracy of a client",
            "The accuracy of the client that fares worst, on its own test samples; higher is better.",
            low=0,
            high=1,
        ),
        "people.worst_client": Quantity(
            "Client with the lowest accuracy", "The number of the client that fares worst, of equals the first.", low=0
        ),
        "people.advantage": Quantity(
            "Accuracy above the mean of the clients",
            "How much better than the mean of all clients one fares on its own test samples; below 0 it is left "
            "behind.",
            low=-1,
            high=1,
            centre=0,
        ),
    }

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Sum the accuracies up, where the round was tested."""
        tested = seen.tested
        if not tested:
            return Measured()
        variance, [worst] = fairness(list(tested.values())), worst_clients(tested, 1)
        mean = sum(tested.values()) / len(tested)
        advantages = [tested.get(client, math.nan) - mean for client in seen.participants]
        return Measured(
            of_round={
                "people.fairness": variance,
                "people.deviation": math.sqrt(variance),
                "people.lowest": tested[worst],
                "people.worst_client": float(worst),
            },
            clients={"people.advantage": torch.tensor(advantages, dtype=torch.float64)},
        )
