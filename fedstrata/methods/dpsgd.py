"""D-PSGD: clients average with some neighbours, and there is no server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedstrata.methods.contract.part import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Probe, Server
from fedstrata.methods.mechanisms.peers import NO_SERVER, Peers, heard, last_models, mean_with
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, weighted_mean

_PAPER = (
    "Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized "
    "Parallel Stochastic Gradient Descent, NeurIPS 2017"
)
_LINK = "https://arxiv.org/abs/1705.09056"


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

    facts: ClassVar[Facts] = Facts("decentralised", _PAPER, _LINK, not_on_network=NO_SERVER)

    def receive(self, clients: Clients, message: Message, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Average the own model with those heard."""
        mixed = {name: mean_with(model[name], peers) for name, peers in heard(message.tensors).items()}
        return {**model, **mixed}, clients.memory


@methods.register("d-psgd-ft")
@dataclass(frozen=True)
class DPSGDFineTuning(DPSGD):
    """D-PSGD; after the last round every client fine-tunes the mean of all models on its own data.

    After the last round everybody gets the plain mean of all clients' models, which is what ``client_after`` then
    tests, and trains it at the initial learning rate (``client_adapted``), as the comparisons in SSFL (Table 1) do.
    """

    facts: ClassVar[Facts] = Facts(
        "decentralised", _PAPER + "; fine-tuned as in SSFL, Table 1", _LINK, not_on_network=NO_SERVER
    )

    epochs: int | None = parameter(None, "Epochs of fine-tuning; none: as many as in a round.", low=1)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Relay the neighbours' models; after the last round, send the mean of all."""
        if server.round <= server.rounds:
            return super().broadcast(server, message)
        shares = torch.full((server.clients,), 1 / server.clients, dtype=torch.float64, device=server.sizes.device)
        mean = {name: weighted_mean(stack, shares)[None] for name, stack in last_models(server.memory).items()}
        return replace(message, tensors={**message.tensors, **mean})

    def adaptation(self) -> Phase:
        """Train the mean of all models."""
        return Phase(epochs=self.epochs)
