"""Rounds as diagnostics see them, made by hand for a model of three layers."""

from __future__ import annotations

import torch
from torch import nn

from fedstrata.diagnostics import Seen
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.views import Message
from fedstrata.stack import Stack

MODEL = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
LAYERS = LayerMap.read(MODEL, (2,))
SHAPES = {"0.weight": (2, 2), "0.bias": (2,), "1.weight": (2,), "1.bias": (2,), "2.weight": (1, 2)}


def drawn(clients, seed=0, scale=1.0):
    """Draw the parameters of K clients."""
    chance = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(clients, *shape, generator=chance) for name, shape in SHAPES.items()}


def seen(uploads, before=None, masks=None, **others):
    """Make what is seen of a round from K clients' uploads; by default the server's model was zero."""
    clients = len(next(iter(uploads.values())))
    zeros = {name: torch.zeros(tensor.shape[1:]) for name, tensor in uploads.items() if tensor.is_floating_point()}
    before = zeros if before is None else before
    given = {
        "round": 1,
        "rounds": 10,
        "layers": LAYERS,
        "before": before,
        "after": {name: uploads[name].float().mean(0) for name in before if name in uploads},
        "travelled": frozenset(uploads),
        "participants": tuple(range(clients)),
        "sizes": torch.ones(clients, dtype=torch.int64),
        "label_counts": torch.ones(clients, 3, dtype=torch.int64),
        "uploads": Message(uploads, masks or {}),
    }
    return Seen(**{**given, **others})


def measured(diagnostic, *rounds):
    """Show rounds to a diagnostic, one after another; return what it measures in the last."""
    memory = Stack()
    for one in rounds:
        memory = diagnostic.update(one, memory)
        found = diagnostic.compute(one, memory)
    return found
