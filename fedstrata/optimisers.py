"""Local optimisers as operations on stacks: each client has its own state and its own gradient norm.

The arithmetic is that of ``torch.optim`` with the same names. ``update_`` changes the tensors that it is given: the
training loop owns them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.private_torch import for_each
from fedstrata.spec import Registry, Spec, parameter
from fedstrata.stack import Tensors, align, squared_norm

optimisers: Registry[Optimiser] = Registry("optimiser")

Rate = float | Tensor
"""A learning rate: a number, or a tensor without axes, which may hold another one at the next step."""


@dataclass(frozen=True)
class Optimiser(Spec, ABC):
    """What all local optimisers share."""

    learning_rate: float = parameter(0.1, "The learning rate, before the schedule.", above=0)
    weight_decay: float = parameter(0.0, "The weight decay.", low=0)
    clip: float | None = parameter(None, "Scale a client's gradient down to this norm when it is longer.", above=0)
    keep: bool = parameter(
        False, "Keep the optimiser's state at the client from round to round instead of starting afresh."
    )

    @abstractmethod
    def state(self, parameters: Tensors) -> Tensors:
        """Return the state before the first step, as stacks."""

    @abstractmethod
    def update_(self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate) -> None:
        """Make one step, in place, for the parameters that have a gradient."""

    def effective_steps(self, steps: Tensor, before: Tensor | None = None, pull: float = 0.0) -> Tensor:
        r"""Tell how many steps' worth of gradients some steps ``[K]`` add up to, in float64.

        It is :math:`\sum_i a_i` of FedNova, where the steps move the weights by :math:`-\eta \sum_i a_i g_i`: how far
        gradients of 1 would go, in learning rates. Momentum uses every gradient again in later steps; where the state
        has seen steps ``before`` ``[K]``, they left their momentum. ``pull`` is :math:`\eta\mu` of a proximal term in
        the loss, which takes a part of the way back in every step. An optimiser that normalises gradients counts plain
        steps.
        """
        return steps.to(torch.float64)

    def clipped(self, gradients: Tensors) -> Tensors:
        """Shorten each client's gradient to the norm ``clip``."""
        if self.clip is None or not gradients:
            return gradients
        norm = squared_norm(gradients).sqrt()
        scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        return {name: gradient * align(scale, gradient) for name, gradient in gradients.items()}


@optimisers.register("sgd")
@dataclass(frozen=True)
class SGD(Optimiser):
    """Stochastic gradient descent, with momentum if asked: :math:`v = m v + g`, :math:`w = w - \\eta v`."""

    momentum: float = parameter(0.0, "The momentum.", low=0, below=1)
    nesterov: bool = parameter(False, "Look ahead along the momentum (Nesterov).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise FedStrataError("The optimiser 'sgd' with nesterov=true needs a momentum, such as momentum=0.9.")

    def state(self, parameters: Tensors) -> Tensors:
        """Start with zero momentum."""
        return (
            {f"momentum/{name}": torch.zeros_like(tensor) for name, tensor in parameters.items()}
            if self.momentum
            else {}
        )

    def effective_steps(self, steps: Tensor, before: Tensor | None = None, pull: float = 0.0) -> Tensor:
        r"""Follow gradients of 1: :math:`v \leftarrow m v + 1 - \eta\mu x`, :math:`x \leftarrow x + v`.

        From a fresh state and without a pull that is the sum of :math:`(1 - m^q) / (1 - m)` over the steps q.
        """
        count, momentum = steps.to(torch.float64), self.momentum
        way, velocity = torch.zeros_like(count), torch.zeros_like(count)
        if before is not None:
            velocity = (1 - momentum ** before.to(torch.float64)) / (1 - momentum)
        for step in range(int(count.max()) if len(count) else 0):
            slope = 1 - pull * way
            velocity = momentum * velocity + slope
            move = slope + momentum * velocity if self.nesterov else velocity
            way = torch.where(step < count, way + move, way)
        return way

    def update_(self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate) -> None:
        """Make one step in place."""
        moving = [parameters[name] for name in gradients]
        direction = list(self.clipped(gradients).values())
        if not moving:
            return
        if self.weight_decay:
            direction = list(for_each.add(direction, moving, alpha=self.weight_decay))
        if self.momentum:
            velocity = [state[f"momentum/{name}"] for name in gradients]
            for_each.mul_(velocity, self.momentum)
            for_each.add_(velocity, direction)
            direction = list(for_each.add(direction, velocity, alpha=self.momentum)) if self.nesterov else velocity
        if isinstance(learning_rate, Tensor):
            for_each.sub_(moving, for_each.mul(direction, learning_rate))
        else:
            for_each.add_(moving, direction, alpha=-learning_rate)


@dataclass(frozen=True)
class _AdamFamily(Optimiser):
    learning_rate: float = parameter(0.001, "The learning rate, before the schedule.", above=0)
    beta1: float = parameter(0.9, "The decay of the mean of gradients.", low=0, below=1)
    beta2: float = parameter(0.999, "The decay of the mean of squared gradients.", low=0, below=1)
    epsilon: float = parameter(1e-8, "What keeps the division finite.", above=0)

    def state(self, parameters: Tensors) -> Tensors:
        """Start with zero moments; every client counts the steps of each of its parameters."""
        moments = {
            f"{moment}/{name}": torch.zeros_like(tensor)
            for moment in ("mean", "square")
            for name, tensor in parameters.items()
        }
        steps = {
            f"steps/{name}": torch.zeros(len(tensor), dtype=torch.float64, device=tensor.device)
            for name, tensor in parameters.items()
        }
        return {**moments, **steps}

    def adam_step_(self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate) -> None:
        r"""Step by :math:`\eta \hat m / (\sqrt{\hat v} + \epsilon)`, with each client's own bias correction."""
        if not gradients:
            return
        counters = [state[f"steps/{name}"] for name in gradients]
        for_each.add_(counters, 1)
        steps = torch.stack(counters)
        rates, corrections = learning_rate / (1 - self.beta1**steps), (1 - self.beta2**steps).sqrt()
        means, squares = ([state[f"{moment}/{name}"] for name in gradients] for moment in ("mean", "square"))
        slopes = list(gradients.values())
        for_each.lerp_(means, slopes, 1 - self.beta1)
        for_each.mul_(squares, self.beta2)
        for_each.addcmul_(squares, slopes, slopes, value=1 - self.beta2)
        denominators = for_each.sqrt(squares)
        for_each.div_(denominators, [_like(*pair) for pair in zip(corrections, squares, strict=True)])
        for_each.add_(denominators, self.epsilon)
        updates = for_each.mul(means, [_like(*pair) for pair in zip(rates, means, strict=True)])
        for_each.div_(updates, denominators)
        for_each.sub_([parameters[name] for name in gradients], updates)


def _like(per_client: Tensor, tensor: Tensor) -> Tensor:
    return align(per_client, tensor).to(tensor.dtype)


@optimisers.register("adam")
@dataclass(frozen=True)
class Adam(_AdamFamily):
    """Adam (Kingma and Ba, ICLR 2015); weight decay is added to the gradient."""

    def update_(self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate) -> None:
        """Make one step in place."""
        gradients = self.clipped(gradients)
        if self.weight_decay:
            gradients = {name: gradient + self.weight_decay * parameters[name] for name, gradient in gradients.items()}
        self.adam_step_(parameters, gradients, state, learning_rate)


@optimisers.register("adamw")
@dataclass(frozen=True)
class AdamW(_AdamFamily):
    """AdamW (Loshchilov and Hutter, ICLR 2019); weight decay shrinks the weights directly."""

    weight_decay: float = parameter(0.01, "The weight decay.", low=0)

    def update_(self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate) -> None:
        """Make one step in place."""
        for name in gradients:
            parameters[name].mul_(1 - learning_rate * self.weight_decay)
        self.adam_step_(parameters, self.clipped(gradients), state, learning_rate)


def with_learning_rate(text: str, rate: Any) -> str:
    """Change the learning rate inside the text of an optimiser, and nothing else of it.

    >>> with_learning_rate("sgd(momentum=0.9)", 0.5)
    'sgd(learning_rate=0.5, momentum=0.9)'
    """
    return str(dataclasses.replace(optimisers.make(text), learning_rate=rate))
