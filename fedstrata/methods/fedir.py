"""FedIR: samples count by how frequent their classes are overall, against at their client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.losses import cross_entropy
from fedstrata.methods.contract.declarations import Decision, Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, ModelAndMemory, Server
from fedstrata.stack import Tensors


@methods.register("fedir")
@dataclass(frozen=True)
class FedIR(Part):
    r"""FedAvg in which each sample counts by how frequent its class is overall, against at its client.

    The local loss of a batch is :math:`\sum_i a_i \ell_i / \sum_i a_i` with :math:`a_i = p(y_i) / p_k(y_i)`: importance
    weights that make every client's loss an estimate of the global one, normalised over the batch as the authors do.
    The global distribution of labels :math:`p` is what the clients declared, summed by the server, and travels down
    with the model: one number per class.
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Hsu et al., Federated Visual Classification with Real-World Data Distribution, ECCV 2020",
        "https://arxiv.org/abs/2003.08082",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.LOSS,))

    def server_memory(self, server: Server) -> Tensors:
        """Sum up what the clients declared."""
        counts = server.label_counts.sum(0)
        return {"distribution": (counts / counts.sum()).to(torch.float32)}

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the global distribution too."""
        return message.plus({f"{self.name}/distribution": server.memory["distribution"][None]})

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Begin with the client's own distribution, under which all samples count alike."""
        return {"distribution": (clients.label_counts / clients.label_counts.sum(1, keepdim=True)).to(torch.float32)}

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Note the global distribution."""
        return model, {"distribution": message.tensors[f"{self.name}/distribution"].expand(len(clients.ids), -1)}

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Weigh every sample by its class."""
        wanted = clients.memory["distribution"].gather(1, step.labels)
        weights = (wanted / clients.label_counts.gather(1, step.labels)).to(step.outputs.dtype)
        return (weights * cross_entropy(step.outputs, step.labels)).sum(1) / weights.sum(1)
