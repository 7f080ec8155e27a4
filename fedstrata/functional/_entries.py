"""What the papers' functions share: counting and ranking entries, sums over clients, refusing what has no answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import overload

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.kernels.finding import find_kernels

FRACTION_TOLERANCE = 1e-12
"""How exactly a fraction is known: far above the rounding of a few operations, far below one entry of a model."""

PIECE_ENTRIES = 2**24
"""How many entries of a stack are turned into float64 at once (128 MiB)."""


def real(tensor: Tensor) -> Tensor:
    """Return the numbers to compute with: without gradient, half precision as float32, whole numbers as float64."""
    if tensor.dtype is torch.bool or tensor.is_complex():
        raise FedStrataError(f"A tensor of {tensor.dtype} was given where real numbers are needed; convert it first.")
    if not tensor.is_floating_point():
        return tensor.detach().to(torch.float64)
    return tensor.detach().to(torch.float32) if tensor.element_size() < 4 else tensor.detach()


def check_fraction(value: float, name: str) -> None:
    """Refuse a fraction of entries that is not in [0, 1)."""
    if not 0 <= value < 1:
        raise FedStrataError(f"{name} is {value}, but it is a fraction of the entries: at least 0 and less than 1.")


def check_same_shape(first: Tensor, first_name: str, second: Tensor, second_name: str) -> None:
    """Refuse two tensors that do not match entry by entry."""
    if first.shape != second.shape:
        raise FedStrataError(
            f"{first_name} has the shape {tuple(first.shape)} but {second_name} has {tuple(second.shape)}; "
            "give two of the same shape."
        )


def check_clients(stack: Tensor, name: str) -> None:
    """Refuse a tensor that has no leading axis of clients."""
    if stack.dim() == 0:
        raise FedStrataError(f"{name} is a single number, but its first axis must be the clients: [K, ...].")


def client_rows(stack: Tensor) -> Tensor:
    """Flatten ``[K, ...]`` to ``[K, n]``, also where an entry is a single number or there are none."""
    return stack.reshape(len(stack), math.prod(stack.shape[1:]))


def all_finite(tensor: Tensor) -> bool:
    """Tell whether no entry is NaN or infinite, without a mask of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def check_finite(tensor: Tensor, name: str, batched: bool = False) -> None:
    """Refuse NaN and infinite entries, naming the tensor and, in a stack, the client."""
    if all_finite(tensor):
        return
    wrong = ~torch.isfinite(tensor)
    count = int(wrong.sum())
    whose = f" of client {int(client_rows(wrong).any(1).nonzero()[0])}" if batched else ""
    raise FedStrataError(
        f"{name}{whose} holds NaN or infinite numbers ({count} of {tensor.numel()}), which can be neither ranked nor "
        "averaged; look for training that diverged, or lower the learning rate."
    )


def count_of(fraction: float, total: int) -> int:
    """Compute ``floor(fraction * total)`` for the decimal number that the fraction stands for.

    >>> int(0.29 * 100), count_of(0.29, 100)
    (28, 29)
    """
    return math.floor((fraction + FRACTION_TOLERANCE) * total)


def dropped_of(fraction: float, total: int) -> int:
    """Count the entries that a fraction below one takes away: ``floor(fraction * total)``, never the last one."""
    return min(count_of(fraction, total), max(total - 1, 0))


def lowest(rows: Tensor, count: int | Tensor) -> Tensor:
    """Mark the ``count`` lowest entries of each row of ``[K, n]``; among equal ones, the first.

    ``count`` may be a tensor ``[K]``, a number for each row. A selection finds the threshold; only the entries equal to
    it are then counted off from the left. Of many rows on a GPU, a kernel does both.

    >>> lowest(torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), 2)
    tensor([[False,  True, False,  True],
            [ True,  True, False, False]])
    """
    if rows.numel() == 0 or (isinstance(count, int) and count == 0):
        return torch.zeros_like(rows, dtype=torch.bool)
    kernels = find_kernels("selecting", "the lowest of many numbers", _try_selecting) if rows.is_cuda else None
    if kernels is not None and kernels.takes(rows):
        each = count if isinstance(count, Tensor) else rows.new_full((len(rows),), count, dtype=torch.int32)
        marks: Tensor = kernels.lowest(rows, each)
        return marks
    counts = count[:, None] if isinstance(count, Tensor) else count
    threshold = _kth_lowest(rows, counts)
    below, tied = rows < threshold, rows == threshold
    wanted = counts - below.sum(1, keepdim=True)
    return below | (tied & (tied.cumsum(1, dtype=torch.int32) <= wanted))


def _try_selecting(kernels: ModuleType) -> None:
    kernels.lowest(torch.ones(2, 4, device="cuda"), torch.ones(2, device="cuda"))


def _kth_lowest(rows: Tensor, counts: int | Tensor) -> Tensor:
    """Find the threshold of each row; where nothing is to be marked, any number that is not above the lowest one."""
    if isinstance(counts, Tensor):
        kth = (counts - 1).clamp(min=0).expand_as(rows)
        pairs = zip(client_pieces(rows), client_pieces(kth), strict=True)
        return torch.cat([piece.sort().values.gather(1, place[:, :1]) for piece, place in pairs])
    if rows.is_cuda:
        # There a sort is faster than kthvalue, and allowed among deterministic algorithms.
        return torch.cat([piece.sort().values[:, counts - 1 : counts] for piece in client_pieces(rows)])
    return rows.kthvalue(counts, keepdim=True).values


@overload
def mask_by(rule: Callable[[Tensor], Tensor], scores: Tensor, batched: bool = ...) -> Tensor: ...
@overload
def mask_by(
    rule: Callable[[Tensor], Tensor], scores: Mapping[str, Tensor], batched: bool = ...
) -> dict[str, Tensor]: ...
def mask_by(
    rule: Callable[[Tensor], Tensor], scores: Tensor | Mapping[str, Tensor], batched: bool = False
) -> Tensor | dict[str, Tensor]:
    """Apply a rule that turns rows of scores ``[K, d]`` into masks to all entries of a tensor or a dict at once."""
    if isinstance(scores, Tensor):
        rows = _rows(scores, "The tensor of scores", batched)
        check_finite(rows, "The tensor of scores", batched)
        return rule(rows).reshape(scores.shape)
    if not scores:
        return {}
    parts = {name: _rows(tensor, f"The tensor of scores '{name}'", batched) for name, tensor in scores.items()}
    _check_alike("number of clients", {str(len(part)) for part in parts.values()})
    _check_alike("device", {str(part.device) for part in parts.values()})
    rows = torch.cat(list(parts.values()), dim=1)
    if not all_finite(rows):
        for name, part in parts.items():
            check_finite(part, f"The tensor of scores '{name}'", batched)
    masks = torch.split(rule(rows), [part.shape[1] for part in parts.values()], dim=1)
    return {name: mask.reshape(tensor.shape) for (name, tensor), mask in zip(scores.items(), masks, strict=True)}


def _rows(scores: Tensor, name: str, batched: bool) -> Tensor:
    if not batched:
        return real(scores).reshape(1, -1)
    check_clients(scores, name)
    return client_rows(real(scores))


def _check_alike(what: str, found: set[str]) -> None:
    if len(found) > 1:
        raise FedStrataError(
            f"The tensors of scores differ in their {what} ({', '.join(sorted(found))}); give all of them the same."
        )


def client_weights(given: Sequence[float] | Tensor, name: str, clients: int, device: torch.device) -> Tensor:
    """Check one weight per client, finite and not negative, and return them as float64 ``[K]``."""
    weights = torch.as_tensor(given, dtype=torch.float64, device=device).detach()
    if weights.shape != (clients,):
        raise FedStrataError(
            f"The {name} have the shape {tuple(weights.shape)} for {clients} clients; give one number for each."
        )
    if not all_finite(weights) or bool((weights < 0).any()):
        raise FedStrataError(f"The {name} are {weights.tolist()}; each must be a finite number that is not negative.")
    return weights


def client_pieces(stack: Tensor) -> tuple[Tensor, ...]:
    """Split ``[K, ...]`` along the clients so that a piece can be copied in float64."""
    return torch.split(stack, max(1, PIECE_ENTRIES // max(1, math.prod(stack.shape[1:]))))


def weighted_sum(stack: Tensor, weights: Tensor) -> Tensor:
    """Sum ``weights[k] * stack[k]`` over the clients, in float64."""
    total = torch.zeros(stack.shape[1:], dtype=torch.float64, device=stack.device)
    columns = weights.reshape(-1, *[1] * (stack.dim() - 1))
    for piece, column in zip(client_pieces(stack), client_pieces(columns.expand_as(stack)), strict=True):
        total += (piece * column).sum(0)
    return total
