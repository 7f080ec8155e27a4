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
    took part, in evaluation mode. Before the first one there is no teacher. The model is sent as in FedAvg; the client
    uses the one that it has just trained, not the average, until it trains again.

    Fling, which LIPS builds on, has ``strength=0.5, temperature=3``.

    Defaults:
        strength, temperature: CGCL-codes/pFedSD, parameters.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Jin et al., Personalized Edge Intelligence via Federated Self-Knowledge Distillation, TPDS 2023",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.USE,))

    strength: float = parameter(1.0, "The weight of the teacher (lambda).", low=0)
    temperature: float = parameter(1.0, "The temperature of the softened predictions.", above=0)

    @property
    def needs(self) -> Needs:
        """The previous model is the teacher."""
        return Needs(previous=True)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Distil the previous model's predictions into the new one, where there is one."""
        if clients.round == 1:
            return loss
        teacher, _ = step.predict(clients.previous)
        lesson = self.strength * distillation(step.outputs, teacher, self.temperature)
        return loss + torch.where(clients.trained, lesson, 0.0)

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use the client's own last model; before its first round, what the server sent."""
        previous = clients.previous
        return {name: previous[name].where(align(clients.trained, own), own) for name, own in model.items()}
