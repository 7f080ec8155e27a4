"""Batch norm and group norm for many clients at once, with the addition, rectifier and pooling that follow them.

What follows is announced by models (``fused.py``). On a GPU a kernel computes it all in one launch; without the kernel
the general operations do, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.engines.pooling import max_pool_stack
from fedstrata.fused import Tail, Windows, take_tail
from fedstrata.kernels.finding import find_kernels
from fedstrata.private_torch import for_all_clients

Replacements = Mapping[Callable[..., Any], Callable[..., Any]]

_FEWEST_ROWS = 64
"""Fewer channels than this, of all clients together, would leave most of a GPU idle if each were one program."""

_FUSED_PARTS: frozenset[Callable[..., Any]] = frozenset(
    (
        F.batch_norm, torch.batch_norm, F.group_norm, torch.group_norm, F.relu, torch.relu, torch.relu_, Tensor.relu,
        Tensor.relu_, torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, F.max_pool2d,
        torch.max_pool2d,
    )
)  # fmt: skip


_NOTHING = Tail(None)


def fuses(operations: Replacements, around: Replacements | None) -> bool:
    """Tell whether norms may take along what follows them: where they are replaced here, and nobody watches a part."""
    return operations.get(F.batch_norm) is batch_norm and not (around or {}).keys() & _FUSED_PARTS


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each client's channels, and compute what follows if somebody announced it."""
    tail = take_tail() or _NOTHING
    tensors = input, running_mean, running_var, weight, bias, tail.added
    return for_all_clients(_batch_norm_stack, tensors, training, momentum, eps, tail is not _NOTHING, tail.pooled)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise each client's samples over groups of channels, and compute what follows if somebody announced it.

    It computes in float32 and returns what it was given, also under autocast, as batch norm does. PyTorch's own group
    norm returns float32 there, which the next convolution narrows again: twice the bytes of every image between two.
    """
    tail = take_tail() or _NOTHING
    tensors = input, weight, bias, tail.added
    return for_all_clients(_group_norm_stack, tensors, num_groups, eps, tail is not _NOTHING, tail.pooled)


def _batch_norm_stack(
    inputs: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    rectified: bool,
    pooled: Windows | None = None,
) -> Tensor:
    stacked = inputs.transpose(1, 2)
    clients, channels = stacked.shape[:2]
    # Views, since running statistics are updated in place; weights may be the same for all clients, without a copy.
    mean, variance = (None if tensor is None else tensor.view(-1) for tensor in (mean, variance))
    weight, bias = (None if tensor is None else tensor.reshape(-1) for tensor in (weight, bias))
    flat = stacked.reshape(clients * channels, -1)
    suits = inputs.is_cuda and len(flat) >= _FEWEST_ROWS and (training or mean is not None)
    kernels = find_kernels("batch_norm", "batch norm", _try_batch_norm) if suits else None
    if kernels is None:
        normalised = F.batch_norm(flat[None], mean, variance, weight, bias, training, momentum, eps)
        return _tail(normalised.view(stacked.shape).transpose(1, 2), added, rectified, pooled)
    beside = None if added is None else added.transpose(1, 2).reshape(flat.shape)
    pooling = None if pooled is None else kernels.pooling_of(stacked, pooled.kernel, pooled.stride, pooled.padding)
    outputs: Tensor = kernels.batch_norm(
        flat, mean, variance, weight, bias, training, momentum, eps, beside, rectified, pooling
    )
    if pooling is not None:
        return outputs.view(*stacked.shape[:3], *pooling.windows).transpose(1, 2)
    return _pooled(outputs.view(stacked.shape).transpose(1, 2), pooled)


def _group_norm_stack(
    inputs: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
    groups: int,
    eps: float,
    rectified: bool,
    pooled: Windows | None = None,
) -> Tensor:
    clients, batch, channels = inputs.shape[:3]
    weight, bias = (None if tensor is None else tensor.reshape(-1) for tensor in (weight, bias))
    kernels = find_kernels("group_norm", "group norm", _try_group_norm) if inputs.is_cuda else None
    if kernels is not None and channels % groups == 0 and channels <= groups * kernels.MOST_CHANNELS:
        stacked = inputs.transpose(1, 2)
        flat = stacked.reshape(clients, channels, batch, -1)
        beside = None if added is None else added.transpose(1, 2).reshape(flat.shape)
        outputs: Tensor = kernels.group_norm(flat, groups, weight, bias, eps, beside, rectified)
        return _pooled(outputs.view(stacked.shape).transpose(1, 2), pooled)
    stacked = inputs.transpose(0, 1)
    flat = stacked.reshape(batch, clients * channels, *stacked.shape[3:])
    normalised = F.group_norm(flat, clients * groups, weight, bias, eps).to(inputs.dtype)
    return _tail(normalised.reshape(stacked.shape).transpose(0, 1), added, rectified, pooled)


def _tail(normalised: Tensor, added: Tensor | None, rectified: bool, pooled: Windows | None) -> Tensor:
    outputs = normalised if added is None else normalised + added
    return _pooled(F.relu(outputs) if rectified else outputs, pooled)


def _pooled(outputs: Tensor, pooled: Windows | None) -> Tensor:
    return outputs if pooled is None else max_pool_stack(outputs, pooled.kernel, pooled.stride, pooled.padding)


def _try_batch_norm(kernels: ModuleType) -> None:
    kernels.batch_norm(torch.ones(2, 64, device="cuda"), None, None, None, None, True, 0.1, 1e-5)


def _try_group_norm(kernels: ModuleType) -> None:
    kernels.group_norm(torch.ones(1, 2, 4, 16, device="cuda"), 1, None, None, 1e-5)
