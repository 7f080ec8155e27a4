"""What methods share that mix the clients' models: the last model of every client, and an exchange between peers.

The server holds the last model that each of all N clients sent, in the memory of the part under ``last/<tensor>``,
``[N, ...]``; of a client that has sent nothing yet, the initial one. A method either mixes them there, one model for
each client, or sends every client the models of some others, its **peers**, ``peers/<tensor>`` with ``[K, M, ...]``, to
be mixed at the client. In a decentralised method the peers would send them to each other; in a simulation the server
relays them, so that the bytes are those that would travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.compatibility import defines
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Message, Server
from fedstrata.rng import client_keys, permutation
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, weighted_mean

MIXES_MODELS = "mixes the clients' models for each of them"
"""The claim of such parts (see :class:`fedstrata.methods.Part`): two mixtures would undo each other."""

NO_SERVER = "peers send their models to each other, and there is no server that a network could run"


@dataclass(frozen=True)
class Mixing(Part):
    """A part that mixes the clients' last models, for each client in its own way."""

    claims: ClassVar[tuple[str, ...]] = (MIXES_MODELS,)

    def objects_to(self, other: Part) -> str | None:
        """Refuse what leaves parts of the models out, or changes them on their way."""
        if not any(defines(other, hook) for hook in ("upload", "broadcast")):
            return None
        return f"'{self.name}' mixes clients' models as they are, and '{other.name}' changes what travels"


@dataclass(frozen=True)
class Peers(Mixing):
    """Every client keeps its own model and hears those of some others; nobody averages over all.

    A subclass mixes in :meth:`receive`, where :func:`heard` finds the peers' models, and may choose the peers itself.
    """

    averages: ClassVar[bool] = False
    lets_join: ClassVar[bool] = False

    neighbours: int = parameter(10, "How many others each client hears in a round, if there are as many.", low=1)

    def resident(self, layers: LayerMap) -> Iterable[str]:
        """Clients keep their whole models."""
        return (*layers.parameter_names, *layers.buffer_names)

    def server_memory(self, server: Server) -> Tensors:
        """Know every client by the initial model."""
        return first_models(server)

    def choose_peers(self, server: Server) -> Tensor:
        """Choose the peers of each participant, ``[K, M]``: uniformly among the others."""
        others = server.clients - 1
        keys = client_keys(server.seed, server.round, server.participants, "peers", server.sizes.device)
        chosen = permutation(keys, others)[:, : min(self.neighbours, others)]
        return chosen + (chosen >= rows_of(server)[:, None])

    def broadcast(self, server: Server, message: Message) -> Message:
        """Relay the peers' last models, instead of a model for all."""
        peers = self.choose_peers(server)
        return relayed(server, message, {name: stack[peers] for name, stack in last_models(server.memory).items()})

    def examine(self, server: Server, replies: Message, shares: Tensor, new: Tensors) -> tuple[Tensors, Tensors]:
        """Note what the participants sent."""
        return new, {**server.memory, **noted(server, "last", replies.tensors)}


# The server's side ----------------------------------------------------------------------------------------------------


def rows_of(server: Server) -> Tensor:
    """Return the participants' rows in stacks of all clients: ``[K]``."""
    return torch.tensor(server.participants, device=server.sizes.device)


def first_models(server: Server) -> Tensors:
    """Prepare the server's memory of every client's last model."""
    return {f"last/{name}": tensor.expand(server.clients, *tensor.shape) for name, tensor in server.model.items()}


def last_models(memory: Mapping[str, Tensor]) -> Tensors:
    """Find every client's last model in a part's memory."""
    return {name.removeprefix("last/"): stack for name, stack in memory.items() if name.startswith("last/")}


def noted(server: Server, kind: str, sent: Mapping[str, Tensor]) -> Tensors:
    """Return what changes in the server's memory when the participants' rows of ``kind/<tensor>`` are as sent."""
    rows = rows_of(server)
    return {
        f"{kind}/{name}": server.memory[f"{kind}/{name}"].index_copy(0, rows, tensor)
        for name, tensor in sent.items()
        if f"{kind}/{name}" in server.memory
    }


def relayed(server: Server, message: Message, models: Mapping[str, Tensor]) -> Message:
    """Put peers' models ``[K, M, ...]`` into a message instead of the server's model."""
    others = {name: tensor for name, tensor in message.tensors.items() if name not in server.model}
    masks = {name: mask for name, mask in message.masks.items() if name not in server.model}
    peers = {f"peers/{name}": stack for name, stack in models.items()}
    return replace(message, tensors={**others, **peers}, masks=masks)


# The mixing -----------------------------------------------------------------------------------------------------------


def heard(tensors: Mapping[str, Tensor]) -> Tensors:
    """Find the peers' models, or their masks, in a message: ``[K, M, ...]`` by the names of the model's tensors."""
    return {name.removeprefix("peers/"): tensor for name, tensor in tensors.items() if name.startswith("peers/")}


def mean_with(own: Tensor, peers: Tensor, held: Tensor | None = None) -> Tensor:
    """Average each client's own tensor ``[K, ...]`` with those of its peers ``[K, M, ...]``, all alike.

    Under masks ``[K, 1 + M, ...]``, own first, each entry is averaged over those that hold it; zero where nobody does.
    """
    everybody = torch.cat((own.unsqueeze(1), peers), dim=1).transpose(0, 1)
    shares = torch.full((len(everybody),), 1 / len(everybody), dtype=torch.float64, device=own.device)
    return weighted_mean(everybody, shares, None if held is None else held.transpose(0, 1))


def mix(models: Tensor, weights: Tensor) -> Tensor:
    r"""Compute :math:`\sum_m a_{km} w_{km}` for weights ``[K, M]`` and models ``[K, M, ...]``, or ``[1, M, ...]`` where
    all clients mix the same ones; counters are rounded.

    >>> mix(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    kind = models.dtype if models.is_floating_point() else torch.float64
    # One after the other, not as a matrix product, which a GPU may do in lower precision.
    terms = zip(models.unbind(1), weights.to(kind).unbind(1), strict=True)
    mixed = sum((model * align(weight, model) for model, weight in terms), start=models.new_zeros((), dtype=kind))
    return mixed if models.is_floating_point() else mixed.round().to(models.dtype)
