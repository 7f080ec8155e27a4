"""A network that makes the weights of others."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HyperNetwork(nn.Module):
    """Makes the tensors of a model from a client's embedding: some linear layers with ReLU, and one for each tensor."""

    def __init__(self, clients: int, embedding: int, hidden: int, shapes: list[torch.Size], layers: int = 3) -> None:
        super().__init__()
        self.shapes = shapes
        self.embeddings = nn.Embedding(clients, embedding)
        more = [module for _ in range(layers) for module in (nn.ReLU(), nn.Linear(hidden, hidden))]
        self.body = nn.Sequential(nn.Linear(embedding, hidden), *more)
        self.heads = nn.ModuleList(nn.Linear(hidden, shape.numel()) for shape in shapes)

    def forward(self, clients: Tensor) -> list[Tensor]:
        """Make the tensors of some clients' models, ``[K, ...]`` each."""
        hidden = self.body(self.embeddings(clients))
        made = zip(self.heads, self.shapes, strict=True)
        return [head(hidden).reshape(len(clients), *shape) for head, shape in made]
