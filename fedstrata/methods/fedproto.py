"""FedProto: clients share what their classes look like, not their models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Needs, Touches
from fedstrata.methods.contract.part import Kept, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, ModelAndMemory, Outline, Server, Training
from fedstrata.methods.local import Local
from fedstrata.methods.mechanisms.masking import for_each, send_under
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, repeat, under, weighted_mean

_IMPOSSIBLE = -1e4
"""The output of a class of which a client knows nothing."""


@methods.register("fedproto")
@dataclass(frozen=True)
class FedProto(Part):
    r"""Every client has a model of its own, and pulls the features of each class to what all clients see of it.

    A client's prototype of class j is the mean of its features, the inputs of the head, over its samples of the class.
    The server averages them over the clients that have the class, :math:`\bar C_j = \frac{1}{|N_j|} \sum_{k \in N_j}
    C_{k,j}`, and sends them back; the local loss is :math:`\mathrm{CE} + \lambda \, \mathrm{mean}_i \lVert f(x_i) -
    \bar C_{y_i} \rVert^2 / d`. Nothing of the model travels, only prototypes of the classes that a client holds.

    Clients predict the class whose prototype is nearest, among their own classes, as in the paper (Eq. 9) and in the
    authors' tests; ``predict=head`` takes the outputs of their heads. All clients count alike, as in the authors' code
    (yuetan031/FedProto, ``lib/utils.py``), where the paper weighs by samples (Eq. 6). There prototypes are gathered
    while the last epoch trains; here they are those of the trained model, in evaluation mode.

    Defaults:
        strength: yuetan031/FedProto, lib/options.py.
        predict: yuetan031/FedProto, lib/update.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022",
        "https://arxiv.org/abs/2105.00243",
    )
    touches: ClassVar[Touches] = Local.touches.also((Decision.USE, Decision.HEAD), takes_away=(Matter.SAME_ENTRIES,))

    strength: float = parameter(1.0, "The weight of the pull (lambda).", low=0)
    predict: str = parameter("prototypes", "What decides on the class.", choices=("prototypes", "head"))

    def notes(self, outline: Outline) -> Iterable[str]:
        """Refuse a model without a linear head; say that without a bias it cannot choose prototypes."""
        if outline.layers.linear_head()[1] is None and self.predict == "prototypes":
            yield f"The head of the model has no bias, so '{self.name}' predicts with the head, not with prototypes."

    @property
    def needs(self) -> Needs:
        """Prototypes are means of features."""
        return Needs(features=True, replies=True)

    def keeps(self, layers: LayerMap) -> Kept:
        """Keep the whole model."""
        return Kept(personal=(*layers.parameter_names, *layers.buffer_names))

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Know nothing of any class, like the server."""
        return repeat(self.server_memory(clients), len(clients.ids))

    def server_memory(self, server: Server | Clients) -> Tensors:
        """Make room for a prototype of each class, as large as the head's inputs; zeros are none."""
        return {"prototypes": torch.zeros_like(server.initial[server.layers.linear_head()[0]])}

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the prototypes of all clients."""
        return message.plus(under(self.name, repeat(server.memory, 1)))

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Note the prototypes of all clients."""
        return model, for_each(message.group(self.name), len(clients.ids))

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Pull the features of each sample to the prototype of its class, where there is one."""
        wanted = clients.memory["prototypes"].take_along_dim(step.labels[..., None], 1)
        distance = (step.features.flatten(2) - wanted) * wanted.any(2, keepdim=True)
        return loss + self.strength * distance.square().mean((1, 2))

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the prototypes of the client's classes."""
        name, held = f"{self.name}/prototypes", clients.label_counts > 0
        return send_under(message.plus({name: clients.probe.features(training.trained)}), {name: held[..., None]})

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Average each class over those who have it; one that nobody has stays as it is."""
        name, alike = f"{self.name}/prototypes", torch.ones_like(server.sizes)
        mean = weighted_mean(replies.tensors[name], alike, replies.masks[name], server.memory["prototypes"])
        return model, {"prototypes": mean}

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        r"""Let the head choose the nearest prototype: :math:`c^T f - c^T c / 2` is largest where it is nearest."""
        (weight, bias), prototypes = clients.layers.linear_head(), clients.memory["prototypes"]
        mine = prototypes.any(2) & (clients.label_counts > 0)
        if self.predict == "head" or bias is None or not bool(mine.any()):
            return model
        return {**model, weight: prototypes, bias: (-prototypes.square().sum(2) / 2).where(mine, _IMPOSSIBLE)}
