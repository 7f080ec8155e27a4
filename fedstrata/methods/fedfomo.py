"""FedFomo: each client weighs other clients' models by how much they help it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Needs
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.peers import Peers, mix
from fedstrata.methods.mechanisms.shared import rows_of
from fedstrata.rng import client_keys, permutation, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, align, per_client, squared_norm, subtract, under

_SMALL = 1e-9
"""What is added to a sum of weights that is smaller, before it divides them."""


@methods.register("fedfomo")
@dataclass(frozen=True)
class FedFomo(Peers):
    r"""Each client mixes the models that lower its loss on held-out samples, by how much they do.

    With :math:`\theta_i` the model with which client i began its last training, it weighs each model :math:`\theta_n`
    that the server sends, and its own after that training, by :math:`w_n = \frac{L_i(\theta_i) - L_i(\theta_n)}
    {\lVert \theta_n - \theta_i \rVert}`, with the loss on samples that it holds out, and goes on from
    :math:`\theta_i + \sum_n \hat w_n (\theta_n - \theta_i)`, where :math:`\hat w` are the positive weights, scaled to
    sum to one. Where none is positive it goes on from :math:`\theta_i`: its own training is given up too.
    Running statistics are mixed with the same weights.

    The server adds up how each client values others, as :math:`w_n / |\sum_m w_m|`, to an affinity between clients, and
    sends those with the highest, with exceptions: each place goes with probability :math:`\varepsilon`, which decays,
    to a random other client. The norm is the sum of absolute differences, and the ten models of the authors' runs are
    nine others and the own one. Their code also offers averages over clusters of clients and over all as candidates,
    which is not done here. SSFL's comparison, by DisPFL's code, is ``fedfomo(neighbours=10, validation=0.1,
    epsilon=0.5, decay=0, norm=l2, affinity=plain)``.

    Each client downloads M models, and uploads its own and M weights. Clients see other clients' models.

    Defaults:
        neighbours, validation: NVlabs/FedFomo, README.md.
        epsilon, decay: NVlabs/FedFomo, federated/configs.py.
        norm: NVlabs/FedFomo, federated/args.py.
        affinity: NVlabs/FedFomo, federation.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021",
        "https://arxiv.org/abs/2012.08565",
    )

    neighbours: int = parameter(9, "How many others each client hears in a round, if there are as many.", low=1)
    validation: float = parameter(0.2, "The part of its samples on which a client judges models.", above=0, below=1)
    epsilon: float = parameter(0.3, "How often a place goes to a random client, in the first round.", low=0, high=1)
    decay: float = parameter(0.05, "By how much epsilon falls from round to round.", low=0)
    norm: str = parameter("l1", "How far models are apart: by absolute or squared differences.", choices=("l1", "l2"))
    affinity: str = parameter(
        "normalised",
        "What is added to the affinity: weights over their sum, or as they are.",
        choices=("normalised", "plain"),
    )

    @property
    def needs(self) -> Needs:
        """Hold samples out to judge models on; the server notes what each client sent."""
        return replace(super().needs, held_out=self.validation)

    # At the client ----------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep the model with which training began, and the last weights."""
        weights = torch.zeros(len(clients.ids), self.neighbours, dtype=torch.float64, device=clients.sizes.device)
        return Stack(weights=weights) | under("start", model)

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Weigh the models heard and the own one, and mix them."""
        start, peers = clients.memory.group("start"), message.group("peers")
        count = len(next(iter(peers.values()))[0]) if peers else 0
        candidates = [
            model,
            *({**model, **{name: stack[:, place] for name, stack in peers.items()}} for place in range(count)),
        ]
        _, before = clients.probe.test(start, held_out=True)
        weights = torch.stack([self._weight(clients, start, before, other) for other in candidates], dim=1)
        positive = weights.clamp(min=0)
        total = positive.sum(1)
        helped = total > 0
        shares = positive / total[:, None]
        mixed = {}
        for name, stack in peers.items():
            mixture = mix(torch.cat((model[name].unsqueeze(1), stack), dim=1), shares)
            mixed[name] = mixture.where(align(helped, mixture), start[name])
        noted = torch.zeros_like(clients.memory["weights"])
        noted[:, :count] = self._valued(weights)[:, 1:]
        return {**model, **mixed}, clients.memory | {"weights": noted}

    def _weight(self, clients: Clients, start: Tensors, before: Tensor, other: Tensors) -> Tensor:
        """Weigh one model of each client: ``[K]``; a model that does not differ has no weight."""
        _, after = clients.probe.test(other, held_out=True)
        change = subtract({name: other[name] for name in clients.layers.parameter_names}, start)
        distance = self._length(change)
        return torch.where(distance > 0, (before - after) / distance, 0.0)

    def _length(self, change: Tensors) -> Tensor:
        """Measure how long each client's change is: ``[K]``."""
        if self.norm == "l2":
            return squared_norm(change).sqrt()
        return torch.stack([per_client(tensor).abs().sum(1) for tensor in change.values()]).sum(0)

    def _valued(self, weights: Tensor) -> Tensor:
        """Scale what is added to the affinity; it stays finite where weights cancel each other."""
        total = weights.sum(1, keepdim=True).abs()
        return weights if self.affinity == "plain" else weights / total.where(total >= _SMALL, total + _SMALL)

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Remember the model with which training begins."""
        return model, clients.memory | under("start", model)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Tell the weights of the models heard, too."""
        return message.plus({f"{self.name}/weights": clients.memory["weights"]})

    # At the server ----------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Begin without any affinity."""
        affinity = torch.zeros(server.clients, server.clients, dtype=torch.float64, device=server.sizes.device)
        return {**super().server_memory(server), "affinity": affinity}

    def choose_peers(self, server: Server) -> Tensor:
        """Choose the peers of each participant, ``[K, M]``: most by affinity, some at random."""
        own, count = rows_of(server)[:, None], min(self.neighbours, server.clients - 1)
        keys = client_keys(server.seed, server.round, server.participants, "peers", server.sizes.device)
        shuffled = permutation(keys, server.clients)
        affinity = server.memory["affinity"][own[:, 0]].scatter(1, own, -torch.inf)
        by_affinity = affinity.gather(1, shuffled).argsort(descending=True, stable=True)
        rank = shuffled.gather(1, by_affinity).argsort()
        epsilon = max(0.0, self.epsilon - self.decay * (server.round - 1))
        at_random = (uniform(keys, (count,), stream=1) < epsilon).sum(1, keepdim=True)
        order = torch.where(rank < count - at_random, rank - server.clients, shuffled.argsort())
        return order.scatter(1, own, server.clients).argsort()[:, :count]

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Note what the participants sent, and add their weights to the affinity."""
        _, memory = super().refine(server, model, replies)
        peers = self.choose_peers(server)
        weights = replies.tensors[f"{self.name}/weights"][:, : peers.shape[1]]
        rows = rows_of(server)
        own = memory["affinity"][rows]
        added = own.scatter(1, peers, own.gather(1, peers) + weights)
        return model, {**memory, "affinity": memory["affinity"].index_copy(0, rows, added)}
