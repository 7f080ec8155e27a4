"""FedAvg, and FedAvg followed by local fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Phase
from fedstrata.methods.mechanisms.layer_choice import DECIDES_WHAT_IS_USED
from fedstrata.spec import parameter

_PAPER = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
_LINK = "https://arxiv.org/abs/1602.05629"


@methods.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Part):
    r"""Average what the clients learned, by their number of samples.

    :math:`w^{t+1} = \sum_k \frac{n_k}{n} w_k^t` over everything in the model, running statistics of norm layers
    included. This is what a round does when no part says otherwise, so the class is empty and can be combined with
    anything.
    """

    facts: ClassVar[Facts] = Facts("averaging", _PAPER, _LINK)


@methods.register("fedavg-ft")
@dataclass(frozen=True)
class FedAvgFineTuning(Part):
    """FedAvg; after the last round every client fine-tunes the global model on its own data.

    The fine-tuned models are evaluated under the label ``client_adapted`` and are not sent anywhere. They train at the
    initial learning rate, as the comparisons in SSFL (Table 1) do, not at the decayed one.
    """

    facts: ClassVar[Facts] = Facts("averaging", _PAPER + "; fine-tuned as in SSFL, Table 1", _LINK)
    claims: ClassVar[tuple[str, ...]] = (DECIDES_WHAT_IS_USED,)

    epochs: int | None = parameter(None, "Epochs of fine-tuning; none: as many as in a round.", low=1)

    def adaptation(self) -> Phase:
        """Train the whole model once more."""
        return Phase(epochs=self.epochs)


@methods.register("local-adaptation")
@dataclass(frozen=True)
class LocalAdaptation(FedAvgFineTuning):
    """FedAvg; after the last round every client trains the global model for one more epoch, for itself.

    This is ``fedavg-ft`` with a single epoch, as PLayer-FL compares with it.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Yu et al., Salvaging Federated Learning by Local Adaptation, 2020",
        "https://arxiv.org/abs/2002.04758",
    )

    epochs: int | None = parameter(1, "Epochs of adaptation; none: as many as in a round.", low=1)
