"""Ditto: a personal model beside the shared one, held near it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, ModelAndMemory, Phase
from fedstrata.methods.mechanisms.proximal import proximal_term
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under


@methods.register("ditto")
@dataclass(frozen=True)
class Ditto(Part):
    r"""FedAvg, and beside it a personal model at each client that is held near the global one.

    A participant trains the global model as in FedAvg, and its own :math:`v_k`, which never leaves it, on
    :math:`f_k(v_k) + \frac{\lambda}{2} \lVert v_k - w^t \rVert^2`: every step is :math:`v_k \leftarrow v_k - \eta
    (\nabla f_k(v_k) + \lambda (v_k - w^t))` with the global model :math:`w^t` as received, over the shared parameters.
    Clients use :math:`v_k`; who sits out keeps it as it is. What travels is as in FedAvg.

    The authors' solver makes one step on each model per batch, and averages clients alike; here the two are trained one
    after the other, which comes to the same since neither sees the other. ``pull=released`` is the variant in DisPFL's
    code: after each plain step, :math:`v_k \leftarrow v_k - \eta \lambda (v_k - w^t)`. SSFL's comparison (Table 1) is
    ``ditto(strength=0.5, global_epochs=2, personal_epochs=3, pull=released)``.

    Defaults:
        strength: litian96/ditto, run_fashion_clean_ditto_lam1.sh.
        global_epochs, personal_epochs, pull: litian96/ditto, flearn/trainers_MTL/ditto.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
        "https://arxiv.org/abs/2012.04221",
    )
    touches: ClassVar[Touches] = Touches(
        decides=(Decision.USE,), relies_on=(Matter.SHARING, Matter.AVERAGE, Matter.SHARED_WEIGHTS)
    )

    strength: float = parameter(1.0, "How strongly the personal model is held (lambda).", low=0)
    global_epochs: int | None = parameter(None, "Epochs for the global model; none: as the experiment says.", low=1)
    personal_epochs: int | None = parameter(None, "Epochs for the personal model; none: as the experiment says.", low=1)
    pull: str = parameter(
        "gradient",
        "Pull the personal model inside the gradient, or after the step as DisPFL's code does.",
        choices=("gradient", "released"),
    )

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep a personal model, which starts at the common initial one."""
        return under("personal", model)

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the global model, then the personal one."""
        return (
            Phase(epochs=self.global_epochs, name="global"),
            Phase(model="personal", epochs=self.personal_epochs, name="personal"),
        )

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Hold the personal model near the global one."""
        if step.phase.model is None or self.pull != "gradient":
            return loss
        return loss + proximal_term(clients, step.parameters, step.received, self.strength)

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """In the released variant, pull the personal model after the step."""
        if step.phase.model is None or self.pull != "released":
            return parameters, clients.memory
        reach = step.learning_rate * self.strength
        pulled = {
            name: tensor - reach * (tensor - step.received[name])
            for name, tensor in parameters.items()
            if name in clients.shared
        }
        return {**parameters, **pulled}, clients.memory

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use the personal model."""
        return clients.memory.group("personal")
