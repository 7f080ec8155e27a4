"""FedProx: a proximal term holds clients near the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Step
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, squared_norm


@methods.register("fedprox")
@dataclass(frozen=True)
class FedProx(Part):
    r"""FedAvg with a proximal term in the local loss: :math:`f_k(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2`.

    The distance runs over the shared parameters; what is personal to a client has no global counterpart to stay near.
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        "https://arxiv.org/abs/1812.06127",
    )
    only_on_shared: ClassVar[bool] = True

    mu: float = parameter(0.01, "The strength of the proximal term.", low=0)

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Add half the squared distance from the weights received, times mu."""
        return proximal_term(clients, step.parameters, step.received, self.mu)


def proximal_term(clients: Clients, parameters: Tensors, centre: Tensors, strength: float) -> Tensor | None:
    r"""Compute each client's :math:`\frac{\mu}{2} \lVert w - c \rVert^2` over the shared parameters, ``[K]``; none
    where nothing is shared.
    """
    distance = {name: tensor - centre[name] for name, tensor in parameters.items() if name in clients.shared}
    return strength / 2 * squared_norm(distance) if distance else None
