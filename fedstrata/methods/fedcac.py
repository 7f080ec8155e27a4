"""FedCAC: clients share their critical weights only with those whose critical weights are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import overlaps, sensitivity, top_mask
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.part import Kept
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.peers import Mixing, first_models, mix, noted
from fedstrata.methods.mechanisms.shared import rows_of
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under

NEGLIGIBLE = 1e-12
"""Up to this score a weight did not move but for rounding: a bias in front of a norm layer, which has no gradient."""


@methods.register("fedcac")
@dataclass(frozen=True)
class FedCAC(Mixing):
    r"""Take critical weights from similar clients only, and all other weights from the global model.

    A client's critical weights are the :math:`\tau` of each tensor with the largest :math:`|\Delta w \cdot w|` in its
    last training; a weight that did not move is never critical. The overlap of two clients is :math:`O_{ij} = 1 -
    \lVert c_i - c_j \rVert_1 / (2 \lVert c_i \rVert_1)`. After round t client i collaborates with the clients j with
    :math:`O_{ij} \ge \bar O + \frac{t}{\beta} (O_{max} - \bar O)`, mean and maximum over all pairs: with many at
    first, later with fewer, after round :math:`\beta` with none. It goes on with the plain mean over itself and its
    collaborators where a weight is critical to it, and with the global model elsewhere. Running statistics and other
    buffers stay with each client.

    The upload is the model and one bit per weight; the server puts each client's model together and sends that. The
    defaults are those for CIFAR-10; for CIFAR-100 the authors take ``tau=0.4, beta=170``. Where not everybody takes
    part, clients are compared by their last uploads, and those without one get the global model. In a tensor
    whose least critical score is at most 1e-10, the authors' code takes all that moved for critical; here it stays tau.

    Defaults:
        tau, beta: kxzxvbk/Fling, flzoo/cifar10/cifar10_fedcac_resnet_config.py, by the first author.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Wu et al., Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously "
        "Aggressive Collaboration, ICCV 2023",
        "https://arxiv.org/abs/2309.11103",
    )

    tau: float = parameter(0.5, "The fraction of each tensor that is critical.", above=0, high=1)
    beta: int = parameter(100, "The round after which clients collaborate with nobody on critical weights.", low=1)

    def keeps(self, layers: LayerMap) -> Kept:
        """Keep buffers."""
        return Kept(personal=layers.buffer_names)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Tell which weights were critical, too."""
        names = [name for name in clients.layers.parameter_names if name in message.tensors]
        critical = {name: self._critical(training.start[name], training.trained[name]) for name in names}
        return message.plus(under(self.name, critical))

    def _critical(self, before: Tensor, after: Tensor) -> Tensor:
        scores = sensitivity(before, after)
        return top_mask(scores, 1 - self.tau, batched=True) & (scores > NEGLIGIBLE)

    def server_memory(self, server: Server) -> Tensors:
        """Know every client by the initial model, and nothing of what is critical."""
        models = first_models(server)
        none = {name: torch.zeros_like(stack, dtype=torch.bool) for name, stack in models.group("last").items()}
        seen = torch.zeros(server.clients, dtype=torch.bool, device=server.sizes.device)
        return models | under("critical", none) | {"seen": seen}

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Note what the participants sent."""
        sent, critical = noted(server, "last", replies.tensors), noted(server, "critical", replies.group(self.name))
        return model, server.memory | sent | critical | {
            "seen": server.memory["seen"].index_fill(0, rows_of(server), True)
        }

    def broadcast(self, server: Server, message: Message) -> Message:
        """Put each participant's model together."""
        rows, critical, models = rows_of(server), server.memory.group("critical"), server.memory.group("last")
        shares = self._collaboration(server)[rows]
        whole = {
            name: mix(models[name][None], shares).where(critical[name][rows], tensor)
            for name, tensor in message.tensors.items()
            if name in critical
        }
        return message.plus(whole)

    def _collaboration(self, server: Server) -> Tensor:
        """Give the share of each client in each client's critical weights: ``[N, N]``."""
        seen = server.memory["seen"]
        alone = torch.eye(server.clients, dtype=torch.bool, device=seen.device)
        pairs = seen & seen[:, None] & ~alone
        together = alone
        if bool(pairs.any()):
            overlap = overlaps(server.memory.group("critical"))
            mean, most = overlap[pairs].mean(), overlap[pairs].max()
            together = alone | (pairs & (overlap >= mean + (server.round - 1) / self.beta * (most - mean)))
        return together / together.sum(1, keepdim=True).to(torch.float64)
