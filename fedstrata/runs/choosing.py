"""The models that are best on samples which nobody trains on: the one of all clients, or each client's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedstrata.stack import Stack, Tensors, clone, repeat, take, under

_ACCURACY, _ROUND = "accuracy", "round"


@dataclass
class Best:
    """What validation has chosen so far: of equals, the first.

    ``model`` is the one for all; ``clients`` are stacks over all clients, on the CPU, where each has its own, with the
    accuracy and the round of each. ``adapted`` tells of each whether it is the one after the final adaptation, where
    there was one.
    """

    model: Tensors = field(default_factory=dict)
    clients: Tensors = field(default_factory=dict)
    reached: Tensors = field(default_factory=dict)
    adapted: tuple[bool, ...] = ()

    def keep_model(self, model: Tensors) -> None:
        """Keep the one model of all."""
        self.model = clone(model)

    def keep_clients(self, clients: Sequence[int], models: Tensors, accuracy: np.ndarray, round: int, all: int) -> None:
        """Keep the models of those of some clients that are better than before."""
        if not self.clients:
            self.clients = {
                name: torch.zeros((all, *stack.shape[1:]), dtype=stack.dtype) for name, stack in models.items()
            }
            self.reached = {
                _ACCURACY: torch.full((all,), -1.0, dtype=torch.float64),
                _ROUND: torch.zeros(all, dtype=torch.int64),
            }
        ids, found = torch.tensor(list(clients)), torch.from_numpy(accuracy).double()
        better = found > self.reached[_ACCURACY][ids]
        rows = ids[better]
        self.reached[_ACCURACY][rows] = found[better]
        self.reached[_ROUND][rows] = round
        for name, stack in models.items():
            self.clients[name][rows] = stack.detach().cpu()[better]

    def or_adapted(self, models: Tensors, accuracy: np.ndarray, round: int) -> Best:
        """Choose between these and the models that all clients have adapted after a round; this one stays as it is."""
        best = Best(clients=dict(clone(self.clients)), reached=dict(clone(self.reached)))
        best.keep_clients(range(len(accuracy)), models, accuracy, round, len(accuracy))
        best.adapted = tuple((best.reached[_ACCURACY] > self.reached[_ACCURACY]).tolist())
        return best

    @property
    def rounds(self) -> list[int]:
        """The round of each client's model, where each has its own."""
        return self.reached.get(_ROUND, torch.empty(0)).tolist()

    def of_clients(self, clients: Sequence[int]) -> Tensors:
        """Return the models of some clients, a stack in their order; nothing where nothing was chosen."""
        if self.clients:
            return take(self.clients, torch.tensor(list(clients)))
        return repeat(self.model, len(clients)) if self.model else {}

    def state(self) -> Stack:
        """Return all of it, as a checkpoint stores it."""
        return (
            under("best/model", self.model) | under("best/clients", self.clients) | under("best/reached", self.reached)
        )

    @classmethod
    def from_state(cls, state: Stack) -> Best:
        """Read it from a checkpoint."""

        def there(group: str) -> dict[str, Tensor]:
            return {name: tensor.cpu() for name, tensor in state.group(group).items()}

        return cls(state.group("best/model"), there("best/clients"), there("best/reached"))
