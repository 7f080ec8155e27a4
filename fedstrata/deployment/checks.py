"""Replies as hostile input: what does not look like an honest reply is refused by name, before anything is merged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message
from fedstrata.stack import Tensors
from fedstrata.wire import decode

_ROOM = 2**20
_LARGEST = 8
"""A reply may be so many times as large as the model: some methods send more than weights."""
_FURTHER_TENSORS = 64
"""A reply may hold so many tensors beside those that go with the tensors of the model."""


class RefusedReply(FedStrataError):  # noqa: N818 - a verdict
    """A reply that is not used, and why."""


def most_bytes(model: Tensors) -> int:
    """Tell how many bytes a reply about a model may have, encoded or unpacked."""
    return _LARGEST * sum(tensor.nbytes for tensor in model.values()) + _ROOM


def read_reply(
    payload: bytes, model: Tensors, device: torch.device, known: Tensors | None = None, round: int | None = None
) -> Message:
    """Decode a reply of a round, which may name masks that are known here, and insist on finite numbers.

    How many bytes, tensors and characters in names there are is checked first, by what the model can need.
    """
    most = most_bytes(model)
    if len(payload) > most:
        raise RefusedReply(f"it has {len(payload)} bytes, and {most} are the most for this model")
    message = decode(payload, device, known, round, most, _LARGEST * len(model) + _FURTHER_TENSORS)
    for name, tensor in (*message.tensors.items(), *message.numbers.items()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise RefusedReply(f"'{name}' holds a NaN or an infinity")
    return message


def check_weights(message: Message, model: Tensors, norm_limit: float) -> None:
    """Insist that weights have the shapes of the model's, and a norm of the same kind."""
    for name, tensor in message.tensors.items():
        if name not in model:
            continue
        expected = model[name]
        if tensor.shape != (1, *expected.shape):
            raise RefusedReply(f"'{name}' has the shape {list(tensor.shape[1:])} instead of {list(expected.shape)}")
        alike = tensor.is_floating_point() == expected.is_floating_point()
        if not alike and tensor.dtype != torch.bool:  # some methods train and send masks
            raise RefusedReply(f"'{name}' has the type {tensor.dtype} instead of {expected.dtype}")
    known = [name for name in message.tensors if name in model and model[name].is_floating_point()]
    sent, own = (_norm([part[name] for name in known]) for part in (message.tensors, model))
    if sent > norm_limit * max(own, 1.0):
        raise RefusedReply(f"its norm is {sent:.3g}, more than {norm_limit:g} times that of the model, {own:.3g}")


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


Layout = tuple[tuple[Any, ...], ...]
"""What a message holds, without its values: entries that begin with the name of a tensor."""


def layout(message: Message) -> Layout:
    """Describe what a message holds, without its values."""
    tensors = (
        (name, str(tensor.dtype), tuple(tensor.shape), name in message.masks)
        for name, tensor in message.tensors.items()
    )
    numbers = ((f"number {name}", "", tuple(tensor.shape), False) for name, tensor in message.numbers.items())
    return tuple(sorted((*tensors, *numbers)))


def odd_ones_out(layouts: Mapping[int, Layout]) -> dict[int, str]:
    """Find the sites whose replies hold other layers than those of most sites (of the first one, where most differ)."""
    layouts = dict(sorted(layouts.items()))
    if len(set(layouts.values())) <= 1:
        return {}
    usual = Counter(layouts.values()).most_common(1)[0][0]
    return {site: _difference(own, usual) for site, own in layouts.items() if own != usual}


def _difference(own: Layout, usual: Layout) -> str:
    names, expected = {entry[0] for entry in own}, {entry[0] for entry in usual}
    if names - expected:
        return f"it holds '{min(names - expected)}', which the other sites do not send"
    if expected - names:
        return f"it lacks '{min(expected - names)}', which the other sites send"
    differing = next(entry[0] for entry, other in zip(own, usual, strict=True) if entry != other)
    return f"its '{differing}' has another type, shape or mask than those of the other sites"
