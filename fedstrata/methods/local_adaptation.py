"""FedAvg followed by a single epoch of local training, as PLayer-FL compares with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.fedavg_ft import FedAvgFineTuning
from fedstrata.spec import parameter


@methods.register("local-adaptation")
@dataclass(frozen=True)
class LocalAdaptation(FedAvgFineTuning):
    """FedAvg; after the last round every client trains the global model for one more epoch, for itself.

    This is ``fedavg-ft`` with a single epoch, as PLayer-FL compares with it.

    Defaults:
        epochs: gaiters-aerials/player_fl, code/clients.py, which compares with it.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Yu et al., Salvaging Federated Learning by Local Adaptation, 2020",
        "https://arxiv.org/abs/2002.04758",
    )

    epochs: int | None = parameter(1, "Epochs of adaptation; none: as many as in a round.", low=1)
