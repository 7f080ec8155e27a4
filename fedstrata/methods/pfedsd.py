"""pFedSD: each client's previous model teaches its new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.losses import distillation
from fedstrata.methods.contract.declarations import Decision, Facts, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align


@methods.register("pfedsd")
@dataclass(frozen=True)
class PFedSD(Part):
    r"""FedAvg in which each client's previous model teaches its new one, so that it stays personal.

    The local loss is :math:`\mathrm{CE}(f_w) + \lambda T^2 \, \mathrm{KL}(\mathrm{softmax}(v_k / T) \,\|\,
    \mathrm{softmax}(w / T))`, where the teacher :math:`v_k` is the client's own model after the last round in which it
    took part. Before the first one there is no teacher. The model is sent as in FedAvg; the client uses the one that it
    has just trained, not the average, until it trains again.

    The paper does not say in which mode the teacher runs. In the authors' code and in Fling it is that of training:
    batch norm sees the batch, since running statistics of so few steps still are mostly other clients'. Dropout draws
    for the teacher what it draws for the student. Fling, which LIPS builds on, has ``strength=0.5, temperature=3`` and
    a learning rate of 0.01. As there, running statistics are averaged too, and clients count by their samples; in the
    authors' code all clients count the same, and the statistics that the server sends are always the initial ones.

    Defaults:
        strength, temperature: CGCL-codes/pFedSD, parameters.py.
        teacher: CGCL-codes/pFedSD, pcode/workers/worker_pFedSD.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Jin et al., Personalized Edge Intelligence via Federated Self-Knowledge Distillation, TPDS 2023",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.USE,))

    strength: float = parameter(1.0, "The weight of the teacher (lambda).", low=0)
    temperature: float = parameter(1.0, "The temperature of the softened predictions.", above=0)
    teacher: str = parameter(
        "training", "The mode in which the previous model runs.", choices=("training", "evaluation")
    )

    @property
    def needs(self) -> Needs:
        """The previous model is the teacher."""
        return Needs(previous=True)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Distil the previous model's predictions into the new one, where there is one."""
        if clients.round == 1:
            return loss
        lesson = self.strength * distillation(step.outputs, self._taught(clients, step), self.temperature)
        return loss + torch.where(clients.trained, lesson, 0.0)

    def _taught(self, clients: Clients, step: LocalStep) -> Tensor:
        """Let the previous model predict the batch."""
        if self.teacher == "evaluation":
            return step.predict(clients.previous)[0]
        with torch.no_grad():
            return step.forward({name: clients.previous[name] for name in step.parameters})

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use the client's own last model; before its first round, what the server sent."""
        previous = clients.previous
        return {name: previous[name].where(align(clients.trained, own), own) for name, own in model.items()}
