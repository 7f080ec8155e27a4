"""pFedLA: a hypernetwork for each client decides, layer by layer, whose weights it gets."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
from fedstrata.methods.mechanisms.peers import Mixing, first_models, mix, noted
from fedstrata.methods.mechanisms.shared import rows_of
from fedstrata.optimisers import SGD, Adam, Optimiser
from fedstrata.rng import torch_seed
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, per_client, under

HIDDEN_LAYERS = 3
STILL = 0.1
"""Shares that moved by no more than this part of themselves did not move."""


@methods.register("pfedla")
@dataclass(frozen=True)
class PFedLA(Mixing):
    r"""Mix every client's model layer by layer from all clients' models, with weights that are learned.

    The server has a hypernetwork for each client i: an embedding, a few linear layers with ReLU, and for each layer l a
    softmax over the N clients, :math:`\alpha_i^l`. Client i trains from :math:`\bar\theta_i^l = \sum_j \alpha_{ij}^l
    \theta_j^l`, where :math:`\theta_j` is what client j sent last. What its training changed,
    :math:`\Delta_i = \theta_i - \bar\theta_i`, teaches the hypernetwork: its parameters :math:`\psi_i`, embedding
    included, take a step along :math:`(\partial \bar\theta_i / \partial \psi_i)^T \Delta_i`. A layer is a convolution
    or linear layer together with the norm that follows it; buffers are mixed with their layer.

    ``heur`` is the variant HeurpFedLA: the layers of which a client gets the largest part from itself,
    :math:`\alpha_{ii}^l`, stay with it: they are not sent to it, and teach nothing in that round. All layers are
    uploaded, since the others mix them. All hypernetworks together have about :math:`N^2` times layers times ``hidden``
    numbers.

    There is no code of the authors. The sizes (with three hidden layers) are those of a public reimplementation, but
    not its optimiser, SGD at 0.005: :math:`\Delta_i` and :math:`1/N` are small, so with it shares stay at :math:`1/N`,
    with a softmax as with the ReLU that it has in its place, and the method is FedAvg without sizes. (It also steps
    against :math:`\Delta_i`.) Adam does not mind the scale. At the default rate own shares grow over tens of rounds, at
    ten times that rate every client is alone after ten; where no share moves, a run ends with a remark.

    Defaults:
        heur, embedding, hidden: KarhouTam/pFedLA, src/utils/args.py, which is not by the authors.
        optimiser, learning_rate: ours; no code of the authors, and the rate of KarhouTam/pFedLA moves nothing.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Ma et al., Layer-wised Model Aggregation for Personalized Federated Learning, CVPR 2022",
        "https://arxiv.org/abs/2205.03993",
    )
    touches: ClassVar[Touches] = Mixing.touches.also(takes_away=(Matter.AVERAGE, Matter.JOINING))

    heur: int = parameter(0, "How many layers stay with each client (HeurpFedLA); 0: none.", low=0)
    learning_rate: float = parameter(0.001, "The learning rate of the hypernetworks.", above=0)
    optimiser: str = parameter("adam", "What trains the hypernetworks.", choices=("adam", "sgd"))
    embedding: int = parameter(100, "The size of a client's embedding.", low=1)
    hidden: int = parameter(100, "The size of the hypernetworks' hidden layers.", low=1)

    def keeps(self, layers: LayerMap) -> Kept:
        """Clients keep their models where some layers stay with them."""
        return Kept(resident=(*layers.parameter_names, *layers.buffer_names)) if self.heur else Kept()

    def server_memory(self, server: Server) -> Tensors:
        """Know every client by the initial model, and draw the hypernetworks."""
        network = self._first_network(server)
        return first_models(server) | under("network", network) | under("optimiser", self._optimiser.state(network))

    def _first_network(self, server: Server) -> Tensors:
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
        return network | {
            "heads": drawn(self.hidden, layers * count, self.hidden),
            "logits": drawn(self.hidden, layers * count),
        }

    @property
    def _optimiser(self) -> Optimiser:
        return Adam(self.learning_rate) if self.optimiser == "adam" else SGD(self.learning_rate)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send each participant its mixture."""
        alpha = self._alpha(server, _rows(server, "network"))
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
        network, state = _rows(server, "network"), _rows(server, "optimiser")
        with torch.enable_grad():
            alpha = self._alpha(server, {name: tensor.requires_grad_() for name, tensor in network.items()})
            disagreement = -(alpha * self._agreement(server, replies, alpha.detach())).sum()
            slopes = torch.autograd.grad(disagreement, list(network.values()))
        network = {name: tensor.detach() for name, tensor in network.items()}
        self._optimiser.update_(network, dict(zip(network, slopes, strict=True)), state, self.learning_rate)
        learned = noted(server, "network", network) | noted(server, "optimiser", state)
        return model, server.memory | noted(server, "last", replies.tensors) | learned

    def _agreement(self, server: Server, replies: Message, alpha: Tensor) -> Tensor:
        r"""Compute the gradient of :math:`\langle \bar\theta_i, \Delta_i \rangle` in :math:`\alpha_{ij}^l`.

        It is :math:`\langle \theta_j^l, \Delta_i^l \rangle`: ``[K, L, N]``; zero for layers that stayed.
        """
        models, mixed = server.memory.group("last"), _mixed(server, alpha)
        agreement = torch.zeros_like(alpha)
        for place, names in enumerate(_groups(server)):
            for name in names:
                if name not in server.layers.buffer_names:
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
        chosen = own.topk(min(self.heur, own.shape[1])).indices
        return torch.zeros_like(own, dtype=torch.bool).scatter(1, chosen, True)

    def metrics(self, server: Server) -> Metrics:
        """Tell which part of each layer the participants get from themselves, in the mean."""
        alpha = self._alpha(server, _rows(server, "network"))
        own = alpha.take_along_dim(rows_of(server)[:, None, None], dim=-1)[..., 0].mean(0).tolist()
        names = [server.layers.of(group[0]).name for group in _groups(server)]
        return {"own_share": dict(zip(names, own, strict=True))}

    def remarks(self, server: Server) -> Iterable[str]:
        """Say that the shares are still what they were in the beginning."""
        networks = self._first_network(server), server.memory.group("network")
        began, ended = (self._alpha(server, network) for network in networks)
        if server.clients > 1 and bool(((ended / began - 1).abs() < STILL).all()):
            yield (
                f"The shares of '{self.name}' are still within {STILL:.0%} of the first ones, about 1/{server.clients} "
                "for every client, so it was FedAvg without sizes; give it more rounds or a larger learning_rate."
            )


def _rows(server: Server, group: str) -> Tensors:
    """Pick the participants' rows of a group of the server's memory."""
    rows = rows_of(server)
    return {name: tensor[rows] for name, tensor in server.memory.group(group).items()}


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
