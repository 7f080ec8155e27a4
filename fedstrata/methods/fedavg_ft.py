"""FedAvg followed by local fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Decision, Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Phase
from fedstrata.methods.fedavg import FedAvg
from fedstrata.spec import parameter


@methods.register("fedavg-ft")
@dataclass(frozen=True)
class FedAvgFineTuning(Part):
    """FedAvg; after the last round every client fine-tunes the global model on its own data.

    The fine-tuned models are evaluated under the label ``client_adapted`` and are not sent anywhere. They train at the
    initial learning rate, as the comparisons in SSFL (Table 1) do, not at the decayed one.

    Defaults:
        epochs: rong-dai/DisPFL, fedml_api/standalone/fedavg/fedavg_api.py.
    """

    facts: ClassVar[Facts] = Facts(
        "averaging", FedAvg.facts.paper + "; fine-tuned as in SSFL, Table 1", FedAvg.facts.link
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.USE,))

    epochs: int | None = parameter(None, "Epochs of fine-tuning; none: as many as in a round.", low=1)

    def adaptation(self) -> Phase:
        """Train the whole model once more."""
        return Phase(epochs=self.epochs)
