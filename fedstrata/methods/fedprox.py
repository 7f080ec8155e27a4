"""FedProx: a proximal term holds clients near the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep
from fedstrata.methods.mechanisms.proximal import proximal_term
from fedstrata.spec import parameter


@methods.register("fedprox")
@dataclass(frozen=True)
class FedProx(Part):
    r"""FedAvg with a proximal term in the local loss: :math:`f_k(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2`.

    The distance runs over the shared parameters; what is personal to a client has no global counterpart to stay near.
    Beside ``fednova`` the term is that method's own ``mu``.

    Defaults:
        mu: MediaBrain-SJTU/FedDisco, args.py (the authors give no default: litian96/FedProx tunes it over 0.001, 0.01,
            0.1, 0.5 and 1).
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        "https://arxiv.org/abs/1812.06127",
    )
    touches: ClassVar[Touches] = Touches(relies_on=(Matter.SHARING,), takes_away=(Matter.FREE_STEPS,))

    mu: float = parameter(0.01, "The strength of the proximal term.", low=0)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Add half the squared distance from the weights received, times mu."""
        return loss + proximal_term(clients, step.parameters, step.received, self.mu)
