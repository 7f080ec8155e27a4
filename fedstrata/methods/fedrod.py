"""FedRoD: a shared model with a balanced loss, and a personal head beside its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.losses import cross_entropy
from fedstrata.methods.contract.declarations import Decision, Facts, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Outline
from fedstrata.stack import Tensors, under


@methods.register("fedrod")
@dataclass(frozen=True)
class FedRoD(Part):
    r"""Share a model trained with a class-balanced loss; add a personal head to it at each client.

    The shared model, body :math:`z` and generic head :math:`g`, minimises the balanced softmax loss :math:`-\log
    \frac{n_{k,y} e^{g_y}}{\sum_c n_{k,c} e^{g_c}}` with the client's own class counts :math:`n_{k,c}` (a class that it
    lacks has no part in the sum), so that clients with different classes learn towards one goal. The personal head
    :math:`h_k`, linear on the same features, minimises the plain cross entropy of :math:`g(z) + h_k(z)` without
    touching :math:`z` and :math:`g`. Clients use the sum of both. The personal head never leaves a client; what travels
    is as in FedAvg.

    Where the paper says nothing, the personal head starts at zero: a client begins with the generic prediction. The
    variant whose personal heads come from a hypernetwork is not offered.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022",
        "https://arxiv.org/abs/2107.00778",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.HEAD, Decision.USE, Decision.LOSS))

    @property
    def needs(self) -> Needs:
        """Train the personal head, which works on the input of the generic one."""
        return Needs(features=True, learns=("head",))

    def notes(self, outline: Outline) -> Iterable[str]:
        """Refuse a model without a linear head."""
        outline.layers.linear_head()
        return ()

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start every personal head at zero."""
        return under("head", {name: torch.zeros_like(model[name]) for name in clients.layers.linear_head() if name})

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Compute the balanced softmax loss of the generic prediction, and the cross entropy of the personal one.

        Only the personal head learns from the latter.
        """
        counts = clients.label_counts.to(step.outputs.dtype)
        generic = cross_entropy(step.outputs + counts.log()[:, None], step.labels).mean(1)
        personal = step.outputs.detach() + self._personal_outputs(clients, step.features.detach())
        return generic + cross_entropy(personal, step.labels).mean(1)

    def _personal_outputs(self, clients: Clients, features: Tensor) -> Tensor:
        (weight, bias), own = clients.layers.linear_head(), clients.memory.group("head")
        outputs = features @ own[weight].transpose(1, 2)
        return outputs if bias is None else outputs + own[bias][:, None]

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Add the personal head to the generic one: the sum of two linear maps."""
        return {**model, **{name: model[name] + own for name, own in clients.memory.group("head").items()}}
