"""pFedHN: a hypernetwork at the server makes every client's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.func import functional_call

from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, ModelAndMemory, Server
from fedstrata.methods.mechanisms.hypernetwork import HyperNetwork
from fedstrata.methods.mechanisms.peers import Mixing
from fedstrata.methods.mechanisms.shared import rows_of, shared_parameters
from fedstrata.rng import torch_seed
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under

_MOMENTUM, _WEIGHT_DECAY, _CLIP = 0.9, 0.001, 50.0


@methods.register("pfedhn")
@dataclass(frozen=True)
class PFedHN(Mixing):
    r"""Let a hypernetwork at the server make each client's model from an embedding of the client.

    Client k gets :math:`\theta_k = h(v_k; \varphi)`, trains it to :math:`\tilde\theta_k`, and sends that back. With
    :math:`\Delta_k = \theta_k - \tilde\theta_k` the hypernetwork and the embedding follow :math:`\nabla_\varphi
    \theta_k^T \Delta_k`, by gradient descent with momentum 0.9 and weight decay 0.001, the gradient's norm clipped
    to 50. Clients never see the hypernetwork, and send as much as in FedAvg. Parameters are made; running statistics
    are averaged.

    The paper draws one client in each round; where several take part, the mean of their gradients is followed. The
    authors' code makes thousands of rounds of 50 local steps. The hypernetwork has about ``hidden`` times as many
    numbers as the model.

    Defaults:
        learning_rate, embedding, hidden: AvivSham/pFedHN, experiments/pfedhn/trainer.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021",
        "https://arxiv.org/abs/2103.04628",
    )
    touches: ClassVar[Touches] = Mixing.touches.also(takes_away=(Matter.AVERAGE, Matter.WHOLE_MODEL, Matter.JOINING))

    learning_rate: float = parameter(0.01, "The learning rate of the hypernetwork.", above=0)
    embedding: int | None = parameter(None, "The size of an embedding; none: 1 + clients / 4, as released.", low=1)
    hidden: int = parameter(100, "The size of the hypernetwork's hidden layers.", low=1)

    def server_memory(self, server: Server) -> Tensors:
        """Draw the hypernetwork, as PyTorch draws its layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(server.seed, self.name))
            network = dict(self._network(server).named_parameters())
        like = next(server.model[name] for name in shared_parameters(server))
        first = {name: tensor.detach().to(like) for name, tensor in network.items()}
        return under("network", first) | under("velocity", {name: torch.zeros_like(one) for name, one in first.items()})

    def _network(self, server: Server) -> HyperNetwork:
        size = self.embedding or int(1 + server.clients / 4)
        shapes = [server.model[name].shape for name in shared_parameters(server)]
        return HyperNetwork(server.clients, size, self.hidden, shapes)

    def _made(self, server: Server, network: Tensors) -> Tensors:
        """Make the participants' parameters."""
        with torch.device("meta"):
            empty = self._network(server)
        made = functional_call(empty, network, (rows_of(server),))
        return dict(zip(shared_parameters(server), made, strict=True))

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send each participant the model that is made for it."""
        return message.plus(self._made(server, server.memory.group("network")))

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Teach the hypernetwork what the clients' training changed."""
        with torch.enable_grad():
            network = {name: one.detach().requires_grad_() for name, one in server.memory.group("network").items()}
            made = self._made(server, network)
            change = [(own.detach() - replies.tensors[name]) / len(own) for name, own in made.items()]
            slopes = torch.autograd.grad(list(made.values()), list(network.values()), change)
        factor = (_CLIP / nn.utils.get_total_norm(slopes)).clamp(max=1)
        velocity = {
            name: _MOMENTUM * old + slope * factor + _WEIGHT_DECAY * network[name].detach()
            for (name, old), slope in zip(server.memory.group("velocity").items(), slopes, strict=True)
        }
        learned = {name: one.detach() - self.learning_rate * velocity[name] for name, one in network.items()}
        return model, under("network", learned) | under("velocity", velocity)
