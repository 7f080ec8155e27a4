"""Arithmetic on stacks: all clients' tensors at once.

A **stack** is a dict from a name to a tensor with a leading client axis, ``[K, *shape]``. A plain dict without that
axis holds one model, such as the server's. Everything here is a pure function unless its name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def take(stack: Mapping[str, Tensor], rows: Tensor | None) -> Tensors:
    """Pick clients by their rows; ``None`` means all of them, without a copy."""
    return dict(stack) if rows is None else {name: tensor.index_select(0, rows) for name, tensor in stack.items()}


def put_(stack: Tensors, rows: Tensor | None, values: Mapping[str, Tensor]) -> None:
    """Write clients' values back into their rows, in place; ``None`` replaces the tensors of all clients."""
    for name, value in values.items():
        if rows is None:
            stack[name] = value
        else:
            stack[name].index_copy_(0, rows, value.detach())


def repeat(model: Mapping[str, Tensor], clients: int) -> Tensors:
    """Give every client a copy of one model (a view: clone before writing into it)."""
    return {name: tensor.unsqueeze(0).expand(clients, *tensor.shape) for name, tensor in model.items()}


def take_first(stack: Mapping[str, Tensor]) -> Tensors:
    """Return the first client's tensors, without the client axis."""
    return {name: tensor[0] for name, tensor in stack.items()}


def concatenate(stacks: Iterable[Mapping[str, Tensor]]) -> Tensors:
    """Join the clients of several stacks with equal names."""
    parts = list(stacks)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def clone(stack: Mapping[str, Tensor]) -> Tensors:
    """Copy every tensor, contiguous and cut off from autograd."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in stack.items()}


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensors:
    """Subtract name by name, over the names of ``left``."""
    return {name: tensor - right[name] for name, tensor in left.items()}


def add(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensors:
    """Add name by name, over the names of ``left``."""
    return {name: tensor + right[name] for name, tensor in left.items()}


def squared_norm(stack: Mapping[str, Tensor]) -> Tensor:
    """Compute each client's squared Euclidean norm over all its tensors: ``[K]``.

    >>> squared_norm({"a": torch.tensor([[1.0, 2.0], [0.0, 0.0]]), "b": torch.tensor([[2.0], [3.0]])})
    tensor([9., 9.])
    """
    norms = [per_client(tensor.square()).sum(1) for tensor in stack.values()]
    return torch.stack(norms).sum(0)


def per_client(tensor: Tensor) -> Tensor:
    """Flatten what each client has, ``[K, *shape]``, into a row: ``[K, n]``; a single number becomes a row of one."""
    return tensor.unsqueeze(-1).flatten(1)


def align(weights: Tensor, tensor: Tensor) -> Tensor:
    """Shape ``[K]`` weights so that they multiply a tensor ``[K, ...]`` client by client."""
    return weights.reshape(-1, *[1] * (tensor.dim() - 1))


def weighted_mean(
    tensor: Tensor, shares: Tensor, mask: Tensor | None = None, otherwise: Tensor | None = None
) -> Tensor:
    """Average over the client axis: ``sum_k p_k w_k``, or under masks ``sum_k p_k m_k w_k / sum_k p_k m_k`` entry by
    entry.

    Entries that no client holds take the value of ``otherwise``. Integer tensors (counters) are rounded.
    The sum runs over clients in their order, so the result does not depend on how replies arrived.

    >>> weighted_mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.25, 0.75]))
    tensor([2.5000, 3.5000])
    """
    weights = align(shares, tensor).to(tensor.dtype if tensor.is_floating_point() else torch.float64)
    if mask is None:
        mean = (tensor * weights).sum(0)
    else:
        held = mask * weights
        total = held.expand(tensor.shape).sum(0)
        mean = (tensor * held).sum(0) / total.where(total > 0, 1)
        mean = mean.where(total > 0, mean.new_zeros(()) if otherwise is None else otherwise.to(mean.dtype))
    return mean if tensor.is_floating_point() else mean.round().to(tensor.dtype)
