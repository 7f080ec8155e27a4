"""Arithmetic on stacks: all clients' tensors at once.

A **stack** is a dict from a name to a tensor with a leading client axis, ``[K, *shape]``. A plain dict without that
axis holds one model, such as the server's. Everything here is a pure function unless its name says otherwise.

Names may stand in **groups**: ``mask/conv.weight`` is ``conv.weight`` of the group ``mask``. All that a client keeps is
one :class:`Stack` with groups in groups, such as ``memory/ssfl/mask/conv.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from fedstrata.private_torch import for_each

Tensors = dict[str, Tensor]

Rows = Tensor | slice | None
"""Some of K clients: their rows in any order, a stretch of them that needs no copy, or ``None`` for all."""


class Stack(dict[str, Tensor]):
    """Named tensors in groups; :func:`under` puts tensors into a group, and ``|`` joins stacks.

    >>> stack = Stack(round=torch.tensor(1)) | under("mask", {"a": torch.tensor(True)})
    >>> stack, stack.group("mask")
    ({'round': tensor(1), 'mask/a': tensor(True)}, {'a': tensor(True)})
    """

    def __or__(self, other: Mapping[str, Tensor]) -> Stack:  # type: ignore[override]
        """Join with others; what both name is as the others have it."""
        return Stack({**self, **other})

    def __ior__(self, other: Mapping[str, Tensor]) -> Stack:  # type: ignore[override]
        """Join with others into a new stack: a stack that somebody else holds too stays as it is."""
        return self | other

    def group(self, name: str) -> Stack:
        """Take what stands in a group, by its name there."""
        start = f"{name}/"
        return Stack({key[len(start) :]: tensor for key, tensor in self.items() if key.startswith(start)})

    def without(self, *groups: str) -> Stack:
        """Leave some groups out."""
        starts = tuple(f"{name}/" for name in groups)
        return Stack({key: tensor for key, tensor in self.items() if not key.startswith(starts)})


def under(group: str, tensors: Mapping[str, Tensor]) -> Stack:
    """Put tensors into a group."""
    return Stack({f"{group}/{name}": tensor for name, tensor in tensors.items()})


def take(stack: Mapping[str, Tensor], rows: Rows) -> Stack:
    """Pick clients by their rows; all of them and stretches come without a copy, and so does what all share."""
    return Stack(stack if rows is None else {name: _rows_of(tensor, rows) for name, tensor in stack.items()})


def _rows_of(tensor: Tensor, rows: Tensor | slice) -> Tensor:
    if isinstance(rows, slice):
        return tensor[rows]
    shared = expanded_axes(tensor)[0]
    return tensor[:1].expand(len(rows), *tensor.shape[1:]) if shared else tensor.index_select(0, rows)


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


def concatenate(stacks: Iterable[Mapping[str, Tensor]]) -> Stack:
    """Join the clients of several stacks with equal names."""
    parts = list(stacks)
    return Stack({name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {})


def copy_(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into the places of their names; those that lie alike are written in one call."""
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for name, value in values.items():
        place = places[name]
        if place is value:
            continue
        if _lies_like(place) == _lies_like(value):
            written, read = alike.setdefault(place.dtype, ([], []))
            written.append(place)
            read.append(value)
        else:
            place.copy_(value)
    for written, read in alike.values():
        for_each.copy_(written, read)


def _lies_like(tensor: Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def clone(stack: Mapping[str, Tensor]) -> Stack:
    """Copy every tensor, contiguous and cut off from autograd."""
    given = {name: tensor.detach() for name, tensor in stack.items()}
    copies = {name: torch.empty_like(own, memory_format=torch.contiguous_format) for name, own in given.items()}
    copy_(copies, given)
    return Stack(copies)


def apart(stack: Mapping[str, Tensor]) -> Stack:
    """Copy the tensors that share memory with others of the stack, or inside themselves, so that all can be written."""
    seen: set[int] = set()
    result = Stack()
    for name, tensor in stack.items():
        place = tensor.untyped_storage().data_ptr()
        own = tensor.is_contiguous() and place not in seen
        seen.add(place)
        result[name] = tensor if own else tensor.clone(memory_format=torch.contiguous_format)
    return result


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensors:
    """Subtract name by name, over the names of ``left``."""
    return {name: tensor - right[name] for name, tensor in left.items()}


def add(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensors:
    """Add name by name, over the names of ``left``."""
    return {name: tensor + right[name] for name, tensor in left.items()}


def expanded_axes(tensor: Tensor) -> tuple[bool, ...]:
    """Tell along which axes a tensor is only expanded, so that all of it is the same there."""
    return tuple(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def narrow(tensor: Tensor) -> Tensor:
    """Take one slice of each axis that is only expanded."""
    for axis, expanded in enumerate(expanded_axes(tensor)):
        if expanded:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


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


_SIDE_BY_SIDE = {"cuda": 2**22}
"""Up to how many entries a tensor is averaged side by side with others, by the kind of device: copying more of them
takes longer than beginning with each anew. A CPU begins at once, and would only copy.
"""

_AT_ONCE = 2**25
"""How many entries are put side by side at most, to bound the memory."""


def weighted_means(
    stack: Mapping[str, Tensor],
    shares: Tensor,
    masks: Mapping[str, Tensor] | None = None,
    otherwise: Mapping[str, Tensor] | None = None,
) -> Tensors:
    """Average all tensors of a stack over the client axis, each as :func:`weighted_mean` does.

    A model has many small tensors, for each of which a GPU would wait longer than it computes: small ones of a kind
    are put side by side. No gradient goes through it.

    >>> weighted_means({"a": torch.tensor([[1.0], [3.0]]), "b": torch.tensor([2.0, 4.0])}, torch.tensor([0.25, 0.75]))
    {'a': tensor([2.5000]), 'b': tensor(3.5000)}
    """
    masks, otherwise = masks or {}, otherwise or {}
    means = Tensors()
    for names in _of_a_kind(stack, masks):
        if len(names) == 1:
            [name] = names
            means[name] = weighted_mean(stack[name], shares, masks.get(name), otherwise.get(name))
            continue
        rows = torch.cat([per_client(stack[name]) for name in names], 1)
        held = [per_client(masks[name].expand_as(stack[name])) for name in names if name in masks]
        rest = [otherwise[name].flatten() for name in names if name in otherwise and held]
        mean = weighted_mean(rows, shares, torch.cat(held, 1) if held else None, torch.cat(rest) if rest else None)
        parts = torch.split(mean, [stack[name][0].numel() for name in names])
        means |= clone({name: part.view(stack[name].shape[1:]) for name, part in zip(names, parts, strict=True)})
    return {name: means[name] for name in stack}


def _of_a_kind(stack: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> list[list[str]]:
    """Group the names of tensors that may stand side by side: small ones of as many clients, of one type, all of them
    under masks or none, and together no more than fits.
    """
    groups: list[list[str]] = []
    open_groups: dict[object, tuple[list[str], int]] = {}
    for name, tensor in stack.items():
        entries = tensor.numel()
        if entries > _SIDE_BY_SIDE.get(tensor.device.type, 0):
            groups.append([name])
            continue
        kind = tensor.dtype, tensor.device, len(tensor), name in masks
        names, so_far = open_groups.get(kind, ([], _AT_ONCE))
        if so_far + entries > _AT_ONCE:
            names, so_far = [], 0
            groups.append(names)
        names.append(name)
        open_groups[kind] = names, so_far + entries
    return groups


def zeros_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """Make tensors of zeros, for each name one like the given."""
    zeros = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    if zeros:
        for_each.zero_(list(zeros.values()))
    return zeros


@lru_cache(maxsize=1024)
def constant(values: tuple[float, ...] | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keep a constant on its device, so that no step waits for a copy."""
    return torch.tensor(values, dtype=dtype, device=device)
