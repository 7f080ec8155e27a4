"""FedIR and FedVC: clients whose classes and sizes differ made alike, by weights of samples and by virtual clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.losses import cross_entropy
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Server, Step
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.rng import numpy_generator
from fedstrata.spec import parameter
from fedstrata.stack import Tensors

_FACTS = Facts(
    "local objective",
    "Hsu et al., Federated Visual Classification with Real-World Data Distribution, ECCV 2020",
    "https://arxiv.org/abs/2003.08082",
)


@methods.register("fedir")
@dataclass(frozen=True)
class FedIR(Part):
    r"""FedAvg in which each sample counts by how frequent its class is overall, against at its client.

    The local loss of a batch is :math:`\sum_i a_i \ell_i / \sum_i a_i` with :math:`a_i = p(y_i) / p_k(y_i)`: importance
    weights that make every client's loss an estimate of the global one, normalised over the batch as the authors do.
    The global distribution of labels :math:`p` is what the clients declared, summed by the server, and travels down
    with the model: one number per class.
    """

    facts: ClassVar[Facts] = _FACTS

    def server_memory(self, server: Server) -> Tensors:
        """Sum up what the clients declared."""
        counts = server.label_counts.sum(0)
        return {"distribution": (counts / counts.sum()).to(torch.float32)}

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the global distribution too."""
        distribution = server.memory["distribution"][None]
        return replace(message, tensors={**message.tensors, f"{self.name}/distribution": distribution})

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Begin with the client's own distribution, under which all samples count alike."""
        return {"distribution": (clients.label_counts / clients.label_counts.sum(1, keepdim=True)).to(torch.float32)}

    def begin(self, clients: Clients, received: Tensors, message: Message) -> Tensors:
        """Note the global distribution."""
        return {"distribution": message.tensors[f"{self.name}/distribution"].expand(len(clients.ids), -1)}

    def base_loss(self, clients: Clients, step: Step) -> Tensor:
        """Weigh every sample by its class."""
        wanted = clients.memory["distribution"].gather(1, step.labels)
        weights = (wanted / clients.label_counts.gather(1, step.labels)).to(step.outputs.dtype)
        return (weights * cross_entropy(step.outputs, step.labels)).sum(1) / weights.sum(1)


@methods.register("fedvc")
@dataclass(frozen=True)
class FedVC(Part):
    r"""Clients of any size train as virtual clients of one size, and all count alike.

    A local epoch has ``samples`` samples (:math:`N_{VC}`): a larger client takes a part of its data, another one each
    time, and a smaller one repeats some of its own. So all make the same number of steps. Participants are drawn with
    chances proportional to their data, and merged with equal shares. What travels is as in FedAvg.

    A client is drawn at most once in a round, although two virtual clients may be parts of one; where everybody takes
    part, nothing is drawn.
    """

    facts: ClassVar[Facts] = _FACTS

    samples: int = parameter(256, "The samples of a virtual client.", low=1)

    def samples_per_epoch(self) -> int:
        """Give every client an epoch of the same size."""
        return self.samples

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Draw participants by their sizes."""
        if count == server.clients:
            return tuple(range(count))
        sizes = server.sizes.to(torch.float64).cpu().numpy()
        generator = numpy_generator(server.seed, server.round, "select")
        chosen = generator.choice(server.clients, size=count, replace=False, p=sizes / sizes.sum())
        return tuple(sorted(int(client) for client in chosen))

    def weigh(self, server: Server) -> Tensor:
        """Count all participants alike."""
        return equal_weights(server)
