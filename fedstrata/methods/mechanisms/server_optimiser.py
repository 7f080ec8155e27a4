"""Optimisers at the server, for which the clients' merged update is a gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import ModelAndMemory, Server
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, under


@dataclass(frozen=True)
class ServerOptimiser(Part):
    r"""Move the shared parameters by what an optimiser makes of :math:`\Delta = \sum_k p_k (w_k - w)`.

    Running statistics are averaged: a running variance that overshoots may turn negative. What did not travel in a
    round neither moves nor changes its state.
    """

    touches: ClassVar[Touches] = Touches()

    @abstractmethod
    def state(self, tensor: Tensor) -> Tensors:
        """Prepare the optimiser's state for one parameter."""

    @abstractmethod
    def move(self, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Compute how one parameter moves, and the new state."""

    def server_memory(self, server: Server) -> Tensors:
        """Start from the first state."""
        memory = Stack()
        for name in shared_parameters(server):
            memory |= under(name, self.state(server.model[name]))
        return memory

    def server_step(self, server: Server, merged: Tensors) -> ModelAndMemory:
        """Let every parameter that travelled follow the optimiser."""
        new, memory = dict(merged), server.memory
        for name in shared_parameters(server):
            if name in merged:
                old = server.model[name]
                moved, state = self.move(merged[name] - old, server.memory.group(name))
                new[name] = old + moved
                memory |= under(name, state)
        return new, memory


@dataclass(frozen=True)
class AdaptiveOptimiser(ServerOptimiser):
    r"""Divide a running mean of the updates by the root of a running mean of their squares, entry by entry.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta`, :math:`w \leftarrow w + \eta \, m / (\sqrt v + \tau)`; what
    becomes of v is all in which the three methods differ. It starts at :math:`\tau^2` (Algorithm 2); there is no
    correction of the first steps. The authors tune the learning rate and tau for each task, over several orders of
    magnitude; the defaults are those of one of their tasks.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
        "https://arxiv.org/abs/2003.00295",
    )

    learning_rate: float = parameter(0.01, "The server's learning rate, which the paper tunes for each task.", above=0)
    beta1: float = parameter(0.9, "The decay of the mean of updates.", low=0, below=1)
    tau: float = parameter(1e-3, "The adaptivity: the smaller, the more alike all entries move.", above=0)

    @abstractmethod
    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Take the square of an update in."""

    def state(self, tensor: Tensor) -> Tensors:
        """Start with no mean, and squares of tau."""
        return {"mean": torch.zeros_like(tensor), "square": torch.full_like(tensor, self.tau**2)}

    def move(self, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Follow the mean, scaled by the squares."""
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * update
        square = self.squares(state["square"], update.square())
        return self.learning_rate * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}
