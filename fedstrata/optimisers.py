"""Local optimisers as operations on stacks: each client has its own state and its own gradient norm.

The arithmetic is that of ``torch.optim`` with the same names. ``update_`` changes the tensors that it is given: the
training loop owns them. On a GPU one kernel does all of a step to a stack of weights, if it can.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.kernels.finding import find_kernels
from fedstrata.private_torch import for_each
from fedstrata.spec import Registry, Spec, parameter
from fedstrata.stack import Tensors, align, squared_norm, under, zeros_like

Rate = float | Tensor
"""A learning rate: a number, or a tensor in float64 without axes, which may hold another one at the next step."""

optimisers: Registry[Optimiser] = Registry("optimiser")


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
        scale = self.scale(squared_norm(gradients), self.clip)
        return {name: gradient * align(scale, gradient) for name, gradient in gradients.items()}

    @staticmethod
    def scale(squared: Tensor, clip: float) -> Tensor:
        """Tell from the squared norms ``[K]`` of gradients by how much to shorten each."""
        return (clip / (squared.sqrt() + 1e-6)).clamp(max=1.0)

    def scale_by(self, kernels: ModuleType, gradients: Sequence[Tensor]) -> Tensor | None:
        """Tell the same, with norms that a kernel adds up; None where nothing is clipped."""
        return None if self.clip is None else self.scale(kernels.squared_norms(gradients), self.clip)


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
        return under("momentum", zeros_like(parameters)) if self.momentum else {}

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
        if not moving:
            return
        velocity = [state[f"momentum/{name}"] for name in gradients] if self.momentum else []
        slopes, kernels = _kernels_for(gradients, moving, velocity)
        if kernels is not None:
            scale, rate = self.scale_by(kernels, slopes), _on_device(learning_rate, moving[0])
            options = self.weight_decay, self.momentum, self.nesterov
            kernels.sgd_(moving, slopes, velocity or None, scale, rate, *options)
            return
        direction = list(self.clipped(gradients).values())
        if self.weight_decay:
            direction = list(for_each.add(direction, moving, alpha=self.weight_decay))
        if self.momentum:
            for_each.mul_(velocity, self.momentum)
            for_each.add_(velocity, direction)
            direction = list(for_each.add(direction, velocity, alpha=self.momentum)) if self.nesterov else velocity
        if isinstance(learning_rate, Tensor):  # this rounds as the sum with a constant does
            back = {dtype: (-learning_rate).to(dtype) for dtype in {tensor.dtype for tensor in moving}}
            for_each.addcmul_(moving, direction, [back[tensor.dtype] for tensor in moving])
        else:
            for_each.add_(moving, direction, alpha=-learning_rate)


@dataclass(frozen=True)
class _AdamFamily(Optimiser):
    learning_rate: float = parameter(0.001, "The learning rate, before the schedule.", above=0)
    beta1: float = parameter(0.9, "The decay of the mean of gradients.", low=0, below=1)
    beta2: float = parameter(0.999, "The decay of the mean of squared gradients.", low=0, below=1)
    epsilon: float = parameter(1e-8, "What keeps the division finite.", above=0)
    amsgrad: bool = parameter(
        False, "Divide by the largest mean of squared gradients so far, not the last one (Reddi et al., ICLR 2018)."
    )

    def state(self, parameters: Tensors) -> Tensors:
        """Start with zero moments; every client counts the steps of each of its parameters."""
        none = {
            name: torch.zeros(len(tensor), dtype=torch.float64, device=tensor.device)
            for name, tensor in parameters.items()
        }
        mean, square = zeros_like(parameters), zeros_like(parameters)
        largest = under("largest", zeros_like(parameters) if self.amsgrad else {})
        return under("mean", mean) | under("square", square) | largest | under("steps", none)

    def adam_step_(
        self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate, added: float, shrunk: float
    ) -> None:
        r"""Step by :math:`\eta \hat m / (\sqrt{\hat v} + \epsilon)`, with each client's own bias correction.

        Weight decay is ``added`` to the gradients, or the weights are ``shrunk`` by it.
        """
        if not gradients:
            return
        counters = [state[f"steps/{name}"] for name in gradients]
        for_each.add_(counters, 1)
        steps = torch.stack(counters)
        rates, corrections = learning_rate / (1 - self.beta1**steps), (1 - self.beta2**steps).sqrt()
        moving = [parameters[name] for name in gradients]
        means, squares = ([state[f"{moment}/{name}"] for name in gradients] for moment in ("mean", "square"))
        slopes, kernels = _kernels_for(gradients, moving, means, squares)
        if kernels is not None and not self.amsgrad:
            scale, rate = self.scale_by(kernels, slopes), _on_device(learning_rate, moving[0])
            options = (self.beta1, self.beta2), self.epsilon, added, shrunk
            kernels.adam_(moving, slopes, means, squares, scale, rate, rates, corrections, *options)
            return
        if shrunk:
            for tensor in moving:
                tensor.mul_(1 - learning_rate * shrunk)
        slopes = list(self.clipped(gradients).values())
        if added:
            slopes = [slope + added * tensor for slope, tensor in zip(slopes, moving, strict=True)]
        for_each.lerp_(means, slopes, 1 - self.beta1)
        for_each.mul_(squares, self.beta2)
        for_each.addcmul_(squares, slopes, slopes, value=1 - self.beta2)
        if self.amsgrad:
            largest = [state[f"largest/{name}"] for name in gradients]
            for before, square in zip(largest, squares, strict=True):
                before.copy_(torch.maximum(before, square))
            squares = largest
        denominators = for_each.sqrt(squares)
        for_each.div_(denominators, [_like(*pair) for pair in zip(corrections, squares, strict=True)])
        for_each.add_(denominators, self.epsilon)
        updates = for_each.mul(means, [_like(*pair) for pair in zip(rates, means, strict=True)])
        for_each.div_(updates, denominators)
        for_each.sub_(moving, updates)


def _kernels_for(gradients: Tensors, *stacks: Sequence[Tensor]) -> tuple[list[Tensor], ModuleType | None]:
    """Find kernels that change these stacks on a GPU, and the gradients as they take them: each in one piece."""
    slopes = list(gradients.values())
    if not all(tensor.is_cuda for tensors in (slopes, *stacks) for tensor in tensors):
        return slopes, None

    def trial(kernels: ModuleType) -> None:
        weights = torch.ones(2, 3, device="cuda")
        rate = torch.zeros((), dtype=torch.float64, device="cuda")
        kernels.sgd_([weights], [weights], None, kernels.squared_norms([weights]), rate, 0.0, 0.0, False)

    kernels = find_kernels("updates", "optimiser steps", trial)
    if kernels is None:
        return slopes, None
    pieces = [slope.contiguous() for slope in slopes]
    return (pieces, kernels) if kernels.takes(*filter(len, stacks), pieces) else (slopes, None)


def _on_device(learning_rate: Rate, tensor: Tensor) -> Tensor:
    """Put a learning rate where a kernel reads it."""
    if isinstance(learning_rate, Tensor):
        return learning_rate
    return torch.full((), learning_rate, dtype=torch.float64, device=tensor.device)


def _like(per_client: Tensor, tensor: Tensor) -> Tensor:
    return align(per_client, tensor).to(tensor.dtype)


@optimisers.register("adam")
@dataclass(frozen=True)
class Adam(_AdamFamily):
    """Adam (Kingma and Ba, ICLR 2015); weight decay is added to the gradient."""

    def update_(self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate) -> None:
        """Make one step in place."""
        self.adam_step_(parameters, gradients, state, learning_rate, added=self.weight_decay, shrunk=0.0)


@optimisers.register("adamw")
@dataclass(frozen=True)
class AdamW(_AdamFamily):
    """AdamW (Loshchilov and Hutter, ICLR 2019); weight decay shrinks the weights directly."""

    weight_decay: float = parameter(0.01, "The weight decay.", low=0)

    def update_(self, parameters: Tensors, gradients: Tensors, state: Tensors, learning_rate: Rate) -> None:
        """Make one step in place."""
        self.adam_step_(parameters, gradients, state, learning_rate, added=0.0, shrunk=self.weight_decay)


def with_learning_rate(text: str, rate: Any) -> str:
    """Change the learning rate inside the text of an optimiser, and nothing else of it.

    >>> with_learning_rate("sgd(momentum=0.9)", 0.5)
    'sgd(learning_rate=0.5, momentum=0.9)'
    """
    return str(dataclasses.replace(optimisers.make(text), learning_rate=rate))
