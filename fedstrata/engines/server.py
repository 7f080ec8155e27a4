"""The server's side of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedstrata.engines.client import Setting
from fedstrata.methods.base import Message, Server
from fedstrata.methods.composition import Exchange
from fedstrata.rng import numpy_generator
from fedstrata.stack import Tensors, clone


@dataclass(frozen=True)
class Declared:
    """What clients tell the server about their data once, before the first round."""

    sizes: Tensor
    label_counts: Tensor


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between rounds: the shared part of the model, and the method's memory."""

    model: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)


def server_view(
    setting: Setting, state: ServerState, declared: Declared, participants: Sequence[int], round: int
) -> Server:
    """Gather what hooks may see at the server."""
    rows = torch.tensor(list(participants))
    return Server(
        round=round,
        rounds=setting.rounds,
        layers=setting.layers,
        seed=setting.seed,
        clients=setting.clients,
        participants=tuple(participants),
        sizes=declared.sizes[rows].to(setting.device),
        label_counts=declared.label_counts[rows].to(setting.device),
        model=state.model,
        memory=state.memory,
    )


def first_server_state(setting: Setting, declared: Declared) -> ServerState:
    """Prepare the server before the first round."""
    model = clone({name: tensor for name, tensor in setting.initial.items() if name not in setting.personal})
    view = server_view(setting, ServerState(model), declared, range(setting.clients), 0)
    return ServerState(model, clone(setting.method.server_memory(view)))


def select(setting: Setting, participation: float, round: int) -> tuple[int, ...]:
    """Choose the participants of a round uniformly, at least one, in ascending order; the same for every method under
    one seed."""
    count = max(1, round_half_up(participation * setting.clients))
    if count == setting.clients:
        return tuple(range(setting.clients))
    chosen = numpy_generator(setting.seed, round, "select").choice(setting.clients, size=count, replace=False)
    return tuple(sorted(int(client) for client in chosen))


def round_half_up(number: float) -> int:
    """Round to the nearest whole number, halves up."""
    return int(number + 0.5)


def broadcast(
    setting: Setting, state: ServerState, declared: Declared, participants: Sequence[int], round: int
) -> Message:
    """Build what the server sends: by default the shared tensors, the same for everybody."""
    message = Message({name: tensor.unsqueeze(0) for name, tensor in state.model.items()})
    return setting.method.broadcast(server_view(setting, state, declared, participants, round), message)


def conclude(
    setting: Setting, state: ServerState, declared: Declared, exchange: Exchange, replies: Message, round: int
) -> tuple[ServerState, Message]:
    """Conclude a survey of all clients: the next state, and the announcement to everybody."""
    everybody = range(setting.clients)
    model, memory = exchange.conclude(server_view(setting, state, declared, everybody, round), replies)
    state = ServerState({**state.model, **model}, memory)
    return state, exchange.announce(server_view(setting, state, declared, everybody, round))


def server_round(
    setting: Setting, state: ServerState, declared: Declared, participants: Sequence[int], replies: Message, round: int
) -> ServerState:
    """Weigh, merge, step and refine: from the replies, in the order of the participants, to the next state."""
    new, memory = setting.method.aggregate(server_view(setting, state, declared, participants, round), replies)
    return ServerState({**state.model, **new}, memory)
