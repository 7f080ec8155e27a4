"""Stacks of unequal models, and one training pass over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstrata.engines.forward import Forward
from fedstrata.stack import Tensors

CLIENTS = 3


@dataclass
class Pass:
    """What one forward and backward pass leaves."""

    outputs: Tensor
    buffers: Tensors
    gradients: Tensors


def parameters_of(model: nn.Module, clients: int = CLIENTS) -> Tensors:
    """Give each client other parameters, in float64."""
    generator = torch.Generator().manual_seed(1)

    def near(tensor: Tensor) -> Tensor:
        noise = torch.randn(clients, *tensor.shape, generator=generator, dtype=torch.float64)
        return tensor.detach().double() + 0.2 * noise

    return {name: near(tensor) for name, tensor in model.named_parameters()}


def buffers_of(model: nn.Module, clients: int = CLIENTS) -> Tensors:
    """Give each client other buffers: running statistics stay positive, counters stay whole."""
    generator = torch.Generator().manual_seed(2)

    def near(tensor: Tensor) -> Tensor:
        drawn = torch.rand(clients, *tensor.shape, generator=generator, dtype=torch.float64)
        return (tensor + 5 * drawn).long() if not tensor.is_floating_point() else tensor.double() + drawn

    return {name: near(tensor) for name, tensor in model.named_buffers()}


def keys_of(clients: int = CLIENTS, seed: int = 0) -> Tensor:
    return torch.arange(2 * clients).reshape(clients, 2) + 1000 * seed


def run_pass(
    forward: Forward, model: nn.Module, inputs: Tensor, training: bool = True, keys: Tensor | None = None
) -> Pass:
    """Run K clients' models, and differentiate a function of the outputs that weighs each of them differently."""
    clients = len(inputs)
    parameters = {name: tensor.requires_grad_() for name, tensor in parameters_of(model, clients).items()}
    keys = keys_of(clients) if keys is None else keys
    outputs, buffers = forward(parameters, buffers_of(model, clients), inputs, keys, training=training)
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).reshape(outputs.shape)
    found = torch.autograd.grad((outputs * weights).sum(), list(parameters.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}
    return Pass(outputs.detach(), buffers, gradients)


def assert_same(left: Pass, right: Pass, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(left.outputs, right.outputs, rtol=tolerance, atol=tolerance)
    for ours, theirs in ((left.buffers, right.buffers), (left.gradients, right.gradients)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance)
