"""What clients changed in a round, read off their uploads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Seen
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.declarations import Matter
from fedstrata.methods.contract.views import Message
from fedstrata.stack import per_client

ENTRIES_AT_ONCE = 2**20
"""How many numbers are turned into float64 at once: 8 MiB, which processors hold near."""
MOST_ROWS = 1_000_000
"""How many numbers of single clients a diagnostic stores over a run, where nobody says how often."""


def sent_parameters(layers: LayerMap, uploads: Message, before: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Name the parameters of each layer that clients sent as numbers and that the server holds too.

    Bits in the place of weights, as FedPM sends them, are no such numbers. Layers without any are left out.
    """
    sent = {
        name
        for name, tensor in uploads.tensors.items()
        if name in before and tensor.is_floating_point() and before[name].is_floating_point()
    }
    names = {layer.name: [name for name in layer.parameters if name in sent] for layer in layers.layers}
    return {layer: own for layer, own in names.items() if own}


def update_pieces(uploads: Message, before: Mapping[str, Tensor], name: str) -> Iterator[Tensor]:
    """Yield each client's upload of a tensor minus the server's, in float64, some columns of ``[K, n]`` at a time.

    An entry that a client did not send counts as unchanged.
    """
    sent, old, mask = per_client(uploads.tensors[name].detach()), before[name].flatten(), uploads.masks.get(name)
    held = None if mask is None else per_client(mask.expand_as(uploads.tensors[name]))
    at_once = max(1, ENTRIES_AT_ONCE // max(1, len(sent)))
    for begin in range(0, sent.shape[1], at_once):
        some = slice(begin, begin + at_once)
        update = sent[:, some].to(torch.float64) - old[some].to(torch.float64)
        yield update if held is None else update.masked_fill_(~held[:, some], 0)


def shares_of(seen: Seen) -> Tensor:
    """Weigh the participants by their samples, as FedAvg does: ``[K]`` in float64, with the sum 1."""
    sizes = seen.sizes.to(torch.float64)
    return sizes / sizes.sum()


def no_updates(method: Method) -> str | None:
    """Say why clients send no updates of the server's model, if so: each other's models, or bits for weights."""
    if method.needs.relays:
        return f"with '{method}' clients send their models to each other, and no server"
    if method.taking(Matter.SHARED_WEIGHTS) is not None:
        return f"with '{method}' clients do not send weights"
    return None


def due_every(every: int, round: int, rounds: int) -> bool:
    """Tell whether a round is the first, the last, or one of every so many."""
    return round in (1, rounds) or round % every == 0


def details_due(every: int | None, rows: int, round: int, rounds: int) -> bool:
    """Tell whether a round stores its numbers of single clients, so many rows; without ``every``, so that a whole run
    stores about a million of them at most.

    >>> [round for round in range(1, 9) if details_due(None, 400_000, round, 8)]
    [1, 4, 8]
    """
    return due_every(every or math.ceil(rows * rounds / MOST_ROWS) or 1, round, rounds)
