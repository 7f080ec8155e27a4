"""Optimisers at the server, for which the clients' merged update is a gradient: FedAvgM and the FedOpt family."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Server
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Tensors

_ADAPTIVE = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
_ADAPTIVE_LINK = "https://arxiv.org/abs/2003.00295"


@dataclass(frozen=True)
class ServerOptimiser(Part):
    r"""Move the shared parameters by what an optimiser makes of :math:`\Delta = \sum_k p_k (w_k - w)`.

    Running statistics are averaged: a running variance that overshoots may turn negative. What did not travel in a
    round neither moves nor changes its state.
    """

    @abstractmethod
    def state(self, tensor: Tensor) -> Tensors:
        """Prepare the optimiser's state for one parameter."""

    @abstractmethod
    def move(self, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Compute how one parameter moves, and the new state."""

    def server_memory(self, server: Server) -> Tensors:
        """Start from the first state."""
        states = {name: self.state(server.model[name]) for name in shared_parameters(server)}
        return {f"{slot}/{name}": tensor for name, state in states.items() for slot, tensor in state.items()}

    def step(self, server: Server, merged: Tensors) -> tuple[Tensors, Tensors]:
        """Let every parameter that travelled follow the optimiser."""
        new, memory = dict(merged), dict(server.memory)
        for name in shared_parameters(server):
            if name in merged:
                old = server.model[name]
                slots = {slot: server.memory[f"{slot}/{name}"] for slot in self.state(old)}
                moved, slots = self.move(merged[name] - old, slots)
                new[name] = old + moved
                memory |= {f"{slot}/{name}": tensor for slot, tensor in slots.items()}
        return new, memory


@methods.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(ServerOptimiser):
    r"""FedAvg with momentum on the server's update.

    With :math:`\Delta = \sum_k p_k (w_k - w)`: :math:`v \leftarrow \beta v + \Delta`, :math:`w \leftarrow w + \eta v`.
    Only parameters have momentum; running statistics are averaged. Nothing more travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, "
        "2019",
        "https://arxiv.org/abs/1909.06335",
    )

    beta: float = parameter(0.9, "The momentum.", low=0, below=1)
    learning_rate: float = parameter(1.0, "The server's learning rate.", above=0)

    def state(self, tensor: Tensor) -> Tensors:
        """Start with no velocity."""
        return {"velocity": torch.zeros_like(tensor)}

    def move(self, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Accumulate the update into the velocity and follow it."""
        velocity = self.beta * state["velocity"] + update
        return self.learning_rate * velocity, {"velocity": velocity}


@dataclass(frozen=True)
class AdaptiveOptimiser(ServerOptimiser):
    r"""Divide a running mean of the updates by the root of a running mean of their squares, entry by entry.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta`, :math:`w \leftarrow w + \eta \, m / (\sqrt v + \tau)`; what
    becomes of v is all in which the three methods differ. It starts at :math:`\tau^2` (Algorithm 2); there is no
    correction of the first steps.
    """

    learning_rate: float = parameter(0.03, "The server's learning rate, which the paper tunes for each task.", above=0)
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


@methods.register("fedadam")
@dataclass(frozen=True)
class FedAdam(AdaptiveOptimiser):
    r"""FedAvg with Adam at the server.

    With :math:`\Delta = \sum_k p_k (w_k - w)`: :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta`, :math:`v
    \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`, :math:`w \leftarrow w + \eta \, m / (\sqrt v + \tau)`. The betas and
    tau are the paper's; its learning rate is tuned for each task, and the default is ours. Running statistics are
    averaged. Nothing more travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts("aggregation", _ADAPTIVE, _ADAPTIVE_LINK)

    beta2: float = parameter(0.99, "The decay of the mean of squared updates.", low=0, below=1)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Take a running mean."""
        return self.beta2 * previous + (1 - self.beta2) * square


@methods.register("fedyogi")
@dataclass(frozen=True)
class FedYogi(AdaptiveOptimiser):
    r"""FedAvg with Yogi at the server: as Adam, but squares that are too large fall slowly.

    As ``fedadam``, but :math:`v \leftarrow v - (1 - \beta_2) \Delta^2 \, \mathrm{sign}(v - \Delta^2)`. The betas and
    tau are the paper's; its learning rate is tuned for each task, and the default is ours. Running statistics are
    averaged. Nothing more travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts("aggregation", _ADAPTIVE, _ADAPTIVE_LINK)

    beta2: float = parameter(0.99, "The decay of the mean of squared updates.", low=0, below=1)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Go towards the new square."""
        return previous - (1 - self.beta2) * square * torch.sign(previous - square)


@methods.register("fedadagrad")
@dataclass(frozen=True)
class FedAdagrad(AdaptiveOptimiser):
    r"""FedAvg with Adagrad at the server: squares only add up, so steps grow shorter.

    As ``fedadam``, but :math:`v \leftarrow v + \Delta^2`, and without momentum unless ``beta1`` is given. Tau is the
    paper's; its learning rate is tuned for each task, and the default is ours. Running statistics are averaged. Nothing
    more travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts("aggregation", _ADAPTIVE, _ADAPTIVE_LINK)

    beta1: float = parameter(0.0, "The decay of the mean of updates.", low=0, below=1)

    def squares(self, previous: Tensor, square: Tensor) -> Tensor:
        """Add up."""
        return previous + square
