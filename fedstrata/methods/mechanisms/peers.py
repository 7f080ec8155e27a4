"""What methods share that mix the clients' models: the last model of every client, and an exchange between peers.

The server holds the last model that each of all N clients sent, in the group ``last`` of the part's memory, ``[N,
...]``; of a client that has sent nothing yet, the initial one. A method either mixes them there, one model for each
client, or sends every client the models of some others, its **peers**, in the group ``peers`` with ``[K, M, ...]``, to
be mixed at the client. In a decentralised method the peers would send them to each other; in a simulation the server
relays them, so that the bytes are those that would travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Matter, Needs, Touches
from fedstrata.methods.contract.part import Kept, Part
from fedstrata.methods.contract.views import Message, ModelAndMemory, Server
from fedstrata.methods.mechanisms.shared import equal_shares, rows_of
from fedstrata.rng import client_keys, permutation
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, repeat, under, weighted_mean

_ENTRIES_AT_ONCE = 2**24
"""How many numbers of peers are looked at together: a bound on memory."""
NO_SERVER = "peers send their models to each other, and there is no server that a network could run"


@dataclass(frozen=True)
class Mixing(Part):
    """A part that mixes the clients' last models, for each client in its own way."""

    touches: ClassVar[Touches] = Touches(
        decides=(Decision.MIXTURE,), relies_on=(Matter.SHARING, Matter.PLAIN_MESSAGES), takes_away=(Matter.ONE_MODEL,)
    )

    @property
    def needs(self) -> Needs:
        """The server notes what each client sent."""
        return Needs(replies=True)


@dataclass(frozen=True)
class Peers(Mixing):
    """Every client keeps its own model and hears those of some others; nobody averages over all.

    A subclass mixes in :meth:`receive`, where the peers' models are the message's group ``peers``; it may choose the
    peers itself.

    Defaults:
        neighbours: rong-dai/DisPFL, fedml_experiments/standalone/dpsgd/cifar10.sh (10 of 100 clients).
    """

    touches: ClassVar[Touches] = Mixing.touches.also(takes_away=(Matter.AVERAGE, Matter.JOINING))

    neighbours: int = parameter(10, "How many others each client hears in a round, if there are as many.", low=1)

    @property
    def needs(self) -> Needs:
        """The server notes what each client sent, and relays it."""
        return replace(super().needs, relays=self.neighbours)

    def keeps(self, layers: LayerMap) -> Kept:
        """Clients keep their whole models."""
        return Kept(resident=(*layers.parameter_names, *layers.buffer_names))

    def server_memory(self, server: Server) -> Tensors:
        """Know every client by the initial model."""
        return first_models(server)

    def choose_peers(self, server: Server) -> Tensor:
        """Choose the peers of each participant, ``[K, M]``: uniformly among the others."""
        others = server.clients - 1
        keys = client_keys(server.seed, server.round, server.participants, "peers", server.sizes.device)
        at_once = max(1, _ENTRIES_AT_ONCE // max(1, others))
        drawn = [permutation(some, others)[:, : min(self.neighbours, others)] for some in torch.split(keys, at_once)]
        chosen = torch.cat(drawn)
        return chosen + (chosen >= rows_of(server)[:, None])

    def broadcast(self, server: Server, message: Message) -> Message:
        """Relay the peers' last models, instead of a model for all."""
        peers = self.choose_peers(server)
        models = {name: stack[peers] for name, stack in server.memory.group("last").items()}
        return message.without(server.model).plus(under("peers", models))

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Note what the participants sent."""
        return model, server.memory | noted(server, "last", replies.tensors)


# The server's side ----------------------------------------------------------------------------------------------------


def first_models(server: Server) -> Stack:
    """Prepare the server's memory of every client's last model."""
    return under("last", repeat(server.model, server.clients))


def noted(server: Server, group: str, sent: Mapping[str, Tensor]) -> Stack:
    """Return what changes in a group of the server's memory when the participants' rows in it are as sent."""
    rows, known = rows_of(server), server.memory.group(group)
    return under(group, {name: known[name].index_copy(0, rows, sent[name]) for name in sent if name in known})


# The mixing -----------------------------------------------------------------------------------------------------------


def mean_with(own: Tensor, peers: Tensor, held: Tensor | None = None) -> Tensor:
    """Average each client's own tensor ``[K, ...]`` with those of its peers ``[K, M, ...]``, all alike.

    Under masks ``[K, 1 + M, ...]``, own first, each entry is averaged over those that hold it; zero where nobody does.
    """
    count = 1 + peers.shape[1]
    shares = equal_shares(count, own.device)
    mean = torch.empty_like(own, memory_format=torch.contiguous_format)
    at_once = max(1, _ENTRIES_AT_ONCE * len(peers) // max(1, peers.numel()))
    for begin in range(0, len(own), at_once):
        some = slice(begin, begin + at_once)
        models = torch.cat((own[some].unsqueeze(1), peers[some]), dim=1).transpose(0, 1)
        mean[some] = weighted_mean(models, shares, None if held is None else held[some].transpose(0, 1))
    return mean


def mix(models: Tensor, weights: Tensor) -> Tensor:
    r"""Compute :math:`\sum_m a_{km} w_{km}` for weights ``[K, M]`` and models ``[K, M, ...]``, or ``[1, M, ...]`` where
    all clients mix the same ones; counters are rounded.

    >>> mix(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    rows, shares = models.unsqueeze(-1).flatten(2), weights.to(torch.float64)
    at_once = max(1, _ENTRIES_AT_ONCE // max(1, len(rows) * rows.shape[1]))
    mixed = torch.cat([_product(shares, piece.to(torch.float64)) for piece in torch.split(rows, at_once, 2)], 1)
    mixed = mixed.view(len(weights), *models.shape[2:])
    return (mixed if models.is_floating_point() else mixed.round()).to(models.dtype)


def _product(shares: Tensor, rows: Tensor) -> Tensor:
    """Multiply ``[K, M]`` with ``[K, M, n]``, or with the same ``[1, M, n]`` for all clients: ``[K, n]``.

    In float64, which no GPU cuts short in a product.
    """
    return shares @ rows[0] if len(rows) == 1 else torch.bmm(shares[:, None], rows)[:, 0]
