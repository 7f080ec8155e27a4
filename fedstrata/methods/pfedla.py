"""pFedLA: a hypernetwork for each client decides, layer by layer, whose weights it gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.part import Kept, Metrics
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, ModelAndMemory, Server
from fedstrata.methods.mechanisms.masking import send_under
from fedstrata.methods.mechanisms.peers import Mixing, first_models, mix, noted, rows_of
from fedstrata.rng import torch_seed
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, per_client, under

HIDDEN_LAYERS = 3


@methods.register("pfedla")
@dataclass(frozen=True)
class PFedLA(Mixing):
    r"""Mix every client's model layer by layer from all clients' models, with weights that are learned.

    The server has a hypernetwork for each client i: an embedding, a few linear layers with ReLU, and for each layer l a
    softmax over the N clients, :math:`\alpha_i^l`. Client i trains from :math:`\bar\theta_i^l = \sum_j \alpha_{ij}^l
    \theta_j^l`, where :math:`\theta_j` is what client j sent last. What its training changed,
    :math:`\Delta_i = \theta_i - \bar\theta_i`, teaches the hypernetwork: its parameters :math:`\psi_i`, embedding
    included, take a step :math:`\psi_i \leftarrow \psi_i + \eta \, (\partial \bar\theta_i / \partial \psi_i)^T
    \Delta_i`. A layer is a convolution or linear layer together with the norm that follows it; buffers are
    mixed with their layer.

    ``heur`` is the variant HeurpFedLA: the layers of which a client gets the largest part from itself,
    :math:`\alpha_{ii}^l`, stay with it: they are not sent to it, and teach nothing in that round. All layers are
    uploaded, since the others mix them. The hypernetwork's sizes and learning rate are those of the public
    reimplementation (hidden layers: three). All of them have about :math:`N^2` times layers times ``hidden`` numbers.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, CVPR 2022",
        "https://arxiv.org/abs/2205.03993",
    )
    touches: ClassVar[Touches] = Mixing.touches.also(takes_away=(Matter.AVERAGE, Matter.JOINING))

    heur: int = parameter(0, "How many layers stay with each client (HeurpFedLA); 0: none.", low=0)
    learning_rate: float = parameter(0.005, "The learning rate of the hypernetworks.", above=0)
    embedding: int = parameter(100, "The size of a client's embedding.", low=1)
    hidden: int = parameter(100, "The size of the hypernetworks' hidden layers.", low=1)

    def keeps(self, layers: LayerMap) -> Kept:
        """Clients keep their models where some layers stay with them."""
        return Kept(resident=(*layers.parameter_names, *layers.buffer_names)) if self.heur else Kept()

    def server_memory(self, server: Server) -> Tensors:
        """Know every client by the initial model, and draw the hypernetworks."""
        generator = torch.Generator().manual_seed(torch_seed(server.seed, self.name))
        like = next(server.model[name] for name in server.layers.parameter_names if name in server.model)
        count, layers = server.clients, len(_groups(server))

        def drawn(inputs: int, *shape: int) -> Tensor:
            values = torch.rand(count, *shape, generator=generator, dtype=torch.float64) * 2 - 1
            return (values / math.sqrt(inputs)).to(like)

        network = {"embedding": torch.randn(count, self.embedding, generator=generator, dtype=torch.float64).to(like)}
        sizes = [self.embedding, *[self.hidden] * HIDDEN_LAYERS]
        for place, inputs in enumerate(sizes[:-1]):
            network |= {
                f"weight{place}": drawn(inputs, self.hidden, inputs),
                f"bias{place}": drawn(inputs, self.hidden),
            }
        network |= {
            "heads": drawn(self.hidden, layers * count, self.hidden),
            "logits": drawn(self.hidden, layers * count),
        }
        return first_models(server) | under("network", network)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send each participant its mixture."""
        alpha = self._alpha(server, _network(server))
        stays = self._stays(server, alpha)
        mixed = _mixed(server, alpha)
        message = message.plus(mixed)
        if not self.heur:
            return message
        sent = {
            name: align(~stays[:, place], mixed[name]) for place, names in enumerate(_groups(server)) for name in names
        }
        return send_under(message, sent)

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Teach the participants' hypernetworks, and note what was sent."""
        old = _network(server)
        with torch.enable_grad():
            network = {name: tensor.detach().requires_grad_() for name, tensor in old.items()}
            alpha = self._alpha(server, network)
            agreement = self._agreement(server, replies, alpha.detach())
            slopes = torch.autograd.grad((alpha * agreement).sum(), list(network.values()))
        learned = {
            name: tensor + self.learning_rate * slope for (name, tensor), slope in zip(old.items(), slopes, strict=True)
        }
        return model, server.memory | noted(server, "last", replies.tensors) | noted(server, "network", learned)

    def _agreement(self, server: Server, replies: Message, alpha: Tensor) -> Tensor:
        r"""Compute the gradient of :math:`\langle \bar\theta_i, \Delta_i \rangle` in :math:`\alpha_{ij}^l`.

        It is :math:`\langle \theta_j^l, \Delta_i^l \rangle`: ``[K, L, N]``; zero for layers that stayed.
        """
        models, mixed = server.memory.group("last"), _mixed(server, alpha)
        agreement = torch.zeros_like(alpha)
        for place, names in enumerate(_groups(server)):
            for name in names:
                if (
                    name in replies.tensors
                    and models[name].is_floating_point()
                    and name not in server.layers.buffer_names
                ):
                    change = replies.tensors[name] - mixed[name]
                    agreement[:, place] += per_client(change) @ per_client(models[name]).T
        return agreement * ~self._stays(server, alpha)[..., None]

    def _alpha(self, server: Server, network: Tensors) -> Tensor:
        """Run the participants' hypernetworks: the share of each client in each of their layers, ``[K, L, N]``."""
        values = network["embedding"][..., None]
        for place in range(HIDDEN_LAYERS):
            values = torch.relu(network[f"weight{place}"] @ values + network[f"bias{place}"][..., None])
        logits = (network["heads"] @ values)[..., 0] + network["logits"]
        return logits.reshape(len(logits), -1, server.clients).softmax(-1)

    def _stays(self, server: Server, alpha: Tensor) -> Tensor:
        """Tell which layers stay with each participant: ``[K, L]``."""
        own = alpha.detach().take_along_dim(rows_of(server)[:, None, None], dim=-1)[..., 0]
        chosen = own.topk(min(self.heur, own.shape[1]), dim=1).indices
        return torch.zeros_like(own, dtype=torch.bool).scatter(1, chosen, True)

    def metrics(self, server: Server) -> Metrics:
        """Tell which part of each layer the participants get from themselves, in the mean."""
        alpha = self._alpha(server, _network(server))
        own = alpha.take_along_dim(rows_of(server)[:, None, None], dim=-1)[..., 0].mean(0).tolist()
        names = [server.layers.of(group[0]).name for group in _groups(server)]
        return {"own_share": dict(zip(names, own, strict=True))}


def _network(server: Server) -> Tensors:
    """Pick the participants' hypernetworks from the server's memory."""
    rows = rows_of(server)
    return {name: tensor[rows] for name, tensor in server.memory.group("network").items()}


def _mixed(server: Server, alpha: Tensor) -> Tensors:
    """Mix each participant's model layer by layer."""
    models = server.memory.group("last")
    return {
        name: mix(models[name][None], alpha[:, place]) for place, names in enumerate(_groups(server)) for name in names
    }


def _groups(server: Server) -> list[list[str]]:
    """Divide what is shared into layers, each with its norm."""
    blocks = (
        [name for layer in block for name in layer.names if name in server.model] for block in server.layers.blocks()
    )
    return [names for names in blocks if names]
