"""D-PSGD: clients average with some neighbours, and there is no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory
from fedstrata.methods.mechanisms.peers import NO_SERVER, Peers, mean_with
from fedstrata.stack import Tensors


@methods.register("d-psgd")
@dataclass(frozen=True)
class DPSGD(Peers):
    r"""Decentralised: each client averages its model with those of random neighbours, then trains.

    :math:`w_k \leftarrow \frac{1}{1 + |N_k|} \bigl( w_k + \sum_{j \in N_k} w_j \bigr)` over the models after the last
    training, with neighbours :math:`N_k` drawn anew in every round, then the local epochs. The paper takes one
    gradient step between averages on a fixed graph; local epochs and random neighbours are those of DisPFL's and SSFL's
    comparisons, where all clients take part in every round. Where only some do, they hear the last models of all.

    Each client downloads as many models as it has neighbours and uploads its own once. With as many neighbours as
    there are other clients, everybody has the plain mean.
    """

    facts: ClassVar[Facts] = Facts(
        "decentralised",
        "Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized "
        "Parallel Stochastic Gradient Descent, NeurIPS 2017",
        "https://arxiv.org/abs/1705.09056",
        not_on_network=NO_SERVER,
    )

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Average the own model with those heard."""
        mixed = {name: mean_with(model[name], peers) for name, peers in message.group("peers").items()}
        return {**model, **mixed}, clients.memory
