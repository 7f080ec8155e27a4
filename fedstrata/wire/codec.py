"""Messages as bytes, and bytes as messages.

A message is a frame (:mod:`fedstrata.wire.frame`) around a description and a body. The description is JSON with the
name, type and shape of each tensor. The body holds the tensors one after the other: the mask, if there is one, in the
smallest way (:mod:`fedstrata.wire.masks`), and then the values inside it (:mod:`fedstrata.wire.values`). A message that
is cut, altered or inconsistent, or that would unpack to far more than it holds, is refused as a whole.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message
from fedstrata.stack import Tensors, per_client, subtract
from fedstrata.wire.frame import FRAME_BYTES, Bytes, Reader, WireError, seal, unseal
from fedstrata.wire.masks import read_mask, read_truth, tallies, truth_sizes, write_mask, write_truth
from fedstrata.wire.support import Support, support_of
from fedstrata.wire.values import (
    AS_IS,
    DTYPES,
    VALUES,
    as_received,
    byte_count,
    read_numbers,
    sent_type,
    tensor_of,
    write_values,
)

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_AXES = 32
# What a message may unpack to, unless a limit is given: something, since masks may hide whole tensors; so much per byte
# (at 99 % sparsity it is a hundred times); and the tensors under masks that are held.
_UNPACKED_BYTES = 2**28
_UNPACKED_BYTES_PER_BYTE = 128
_UNPACKED_BYTES_PER_HELD_ENTRY = 8
MOST_TENSORS = 10_000
"""So many tensors and numbers a message may describe, unless another limit is given."""
LONGEST_NAME = 500
_DESCRIBED_BYTES_PER_TENSOR = 400
"""Room for the name, type and shape of a tensor, in the mean."""
_REMEMBERED, _REMEMBERED_BYTES = 32, 2**16
"""So many descriptions are remembered, of so many bytes at the most: what strangers send takes no more memory."""


def encode(
    message: Message, held: Mapping[str, Tensor] | None = None, values: str = AS_IS, round: int | None = None
) -> bytes:
    """Write the message of one client (every leading axis is 1) as bytes.

    ``held`` maps names of tensors to the masks that the receiver is known to hold: where it is the mask of the message,
    only its hash is sent. ``values`` says how floating-point tensors travel: ``as-is``, ``fp16``, ``bf16``, or ``int8``
    with a scale per tensor (:func:`quantisation_error` tells what that costs).
    """
    _check_one_client(message)
    entries, numbers = _entries(message, values)
    held, tensors, masks = held or {}, message.tensors, message.masks
    body = [
        *(_write(one, tensors[one.name], masks.get(one.name), held.get(one.name)) for one in entries),
        *(_write(one, message.numbers[one.name]) for one in numbers),
    ]
    return seal(_description(entries, numbers), chain.from_iterable(body), round)


def decode(
    data: bytes,
    device: torch.device | str = "cpu",
    held: Mapping[str, Tensor] | None = None,
    round: int | None = None,
    limit: int | None = None,
    most_tensors: int = MOST_TENSORS,
) -> Message:
    """Read a message of one client; whatever does not fit is a :class:`WireError`, and nothing of it is used.

    ``held`` maps names of tensors to the masks that are held here, which a message may name by their hash (the mask in
    the message is then the held one itself). ``round`` refuses a message of any other round. ``limit`` bounds the bytes
    that the message may unpack to; by default they are bounded by its length and the masks that are held.
    ``most_tensors`` bounds how many tensors and numbers it describes, before the description is read.
    """
    held = held or {}
    entries, numbers, reader = _described(data, round, most_tensors)
    if limit is None:
        held_entries = sum(mask.numel() for mask in held.values())
        limit = _UNPACKED_BYTES + _UNPACKED_BYTES_PER_BYTE * len(data) + _UNPACKED_BYTES_PER_HELD_ENTRY * held_entries
    unpacked = sum(entry.unpacked_bytes for entry in (*entries, *numbers))
    if unpacked > limit:
        raise WireError(f"A message of {len(data)} bytes would unpack to {unpacked}, and the limit is {limit}.")
    message = Message()
    for entry in entries:
        support = None
        if entry.mask_shape is not None:
            mask, support = read_mask(reader, entry.mask_shape, held.get(entry.name))
            message.masks[entry.name] = mask.to(device)
        message.tensors[entry.name] = _read(reader, entry, support).to(device)
    for entry in numbers:
        message.numbers[entry.name] = _read(reader, entry).to(device)
    reader.finish()
    return message


def outline(data: bytes) -> list[list[Any]]:
    """List the tensors and numbers in an encoded message without reading any of their values.

    Of each there is the name, the type (``f32``, or ``f32:f16`` where it travels in a narrower one), the shape and, for
    what stands under a mask, the shape of the mask, or 1 where that is the same.
    """
    entries, numbers, _ = _described(data, None, MOST_TENSORS)
    return [entry.to_json() for entry in (*entries, *numbers)]


def _described(data: bytes, round: int | None, most_tensors: int) -> tuple[_Entries, _Entries, Reader]:
    """Read what a message says of itself, which is bounded before it is looked at, and where its values begin."""
    description, reader = unseal(data, round, _DESCRIBED_BYTES_PER_TENSOR * (most_tensors + 1))
    return *_parse(description, most_tensors), reader


def encoded_sizes(
    message: Message, clients: int, held: Mapping[str, Tensor] | None = None, values: str = AS_IS
) -> list[int]:
    """Tell how many bytes :func:`encode` would write for each client, without writing them.

    The leading axes of the message, and of the held masks, are the number of clients or 1.
    """
    return _sizes_to_count(message, clients, held, values)()


def bytes_to_count(
    message: Message, clients: int, held: Mapping[str, Tensor] | None = None, values: str = AS_IS
) -> Callable[[], int]:
    """Prepare to tell the bytes of all clients' messages: a GPU begins to count masks, and is waited for by the call.

    Until then, only the masks of the message are held.
    """
    sizes = _sizes_to_count(message, clients, held, values)
    return lambda: bytes_sent(sizes())


def _sizes_to_count(
    message: Message, clients: int, held: Mapping[str, Tensor] | None = None, values: str = AS_IS
) -> Callable[[], list[int]]:
    entries, numbers = _entries(message, values)
    sizes = np.full(clients, FRAME_BYTES + len(_description(entries, numbers)), dtype=np.int64)
    tensors = [message.tensors[entry.name] for entry in entries] + [message.numbers[entry.name] for entry in numbers]
    truths: list[tuple[_Entry, Tensor, Tensor | None]] = []
    for entry, tensor in zip((*entries, *numbers), tensors, strict=True):
        if entry.mask_shape is not None:
            truths.append((entry, message.masks[entry.name], (held or {}).get(entry.name)))
        elif entry.is_truth:
            truths.append((entry, tensor, None))
        else:
            sizes += byte_count(entry.count, entry.dtype, entry.sent_as)

    tallied = tallies([(truth, known) for _, truth, known in truths])

    def count() -> list[int]:
        counted = sizes.copy()
        for (entry, truth, _), tally in zip(truths, tallied(), strict=True):
            counted += truth_sizes(truth, tally)
            if not entry.is_truth:
                counted += byte_count(tally.ones * entry.values_per_mask_entry, entry.dtype, entry.sent_as)
        return [int(size) for size in counted]

    return count


def bytes_sent(sizes: Iterable[int]) -> int:
    """Add up the bytes of some messages. One that holds nothing counts nothing: nothing of it needs to be sent.

    >>> bytes_sent([len(encode(Message()))])
    0
    """
    return sum(size for size in sizes if size != _BYTES_OF_NOTHING)


def received(message: Message, values: str) -> Message:
    """Return the message of some clients as its receivers get it, where values travel in a narrower type."""
    return replace(message, tensors={name: _received(message, name, values) for name in message.tensors})


def _received(message: Message, name: str, values: str) -> Tensor:
    tensor, mask = message.tensors[name], message.masks.get(name)
    sent_as = sent_type(tensor.dtype, values)
    if sent_as == tensor.dtype:
        return tensor
    sent = tensor if mask is None else tensor.where(mask, 0.0)
    return as_received(per_client(sent), sent_as).reshape(tensor.shape)


def quantisation_error(message: Message, values: str) -> Tensor:
    r"""Tell what a narrower type costs each client's message: :math:`\lVert v - \hat v \rVert / \lVert v \rVert`,
    ``[K]``, over all its floating-point tensors.
    """
    numbers = {
        name: tensor.where(message.masks[name], 0.0) if name in message.masks else tensor
        for name, tensor in message.tensors.items()
        if tensor.is_floating_point()
    }
    if not numbers:
        return torch.zeros(1, dtype=torch.float64)
    got = received(Message(numbers), values).tensors
    error, norm = _norm(subtract(got, numbers)), _norm(numbers)
    return error / norm.where(norm > 0, 1.0)


def _norm(tensors: Tensors) -> Tensor:
    """Compute the norm of each client's tensors ``[K]``, some of which may be the same for everybody."""
    squares = (per_client(tensor.to(torch.float64).square()).sum(1) for tensor in tensors.values())
    return torch.sqrt(reduce(torch.add, squares))


# One tensor ----------------------------------------------------------------------------------------------------------


def _write(entry: _Entry, tensor: Tensor, mask: Tensor | None = None, held: Tensor | None = None) -> Iterator[Bytes]:
    if entry.is_truth:
        yield from write_truth(tensor)
        return
    support = None if mask is None else support_of(mask)
    if support is not None:
        yield from write_mask(support, held)
    yield from write_values(tensor, support, entry.sent_as)


def _read(reader: Reader, entry: _Entry, support: Support | None = None) -> Tensor:
    if entry.is_truth:
        return read_truth(reader, entry.shape)
    kept = entry.count if support is None else support.count * entry.values_per_mask_entry
    items = read_numbers(reader, kept, entry.dtype, entry.sent_as)
    return tensor_of(items, entry.dtype, entry.shape, support)


# The description -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """What the description says about one tensor; shapes begin with the client axis, which is 1 and not written."""

    name: str
    dtype: torch.dtype
    sent_as: torch.dtype
    shape: tuple[int, ...]
    mask_shape: tuple[int, ...] | None = None

    @property
    def is_truth(self) -> bool:
        """Whether it is a tensor of truth values, which travels as masks do."""
        return self.dtype == torch.bool and self.mask_shape is None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def values_per_mask_entry(self) -> int:
        """How many values one entry of the mask stands for."""
        return self.count // max(1, math.prod(self.mask_shape or ()))

    @property
    def unpacked_bytes(self) -> int:
        """The memory that the tensor takes, and its mask, at most."""
        return self.count * self.dtype.itemsize + (0 if self.mask_shape is None else self.count)

    def to_json(self) -> list[Any]:
        """Write it compactly: a mask of the shape of the tensor is just 1."""
        types = [_DTYPE_NAMES[dtype] for dtype in (self.dtype, self.sent_as)]
        mask = [] if self.mask_shape is None else [1 if self.mask_shape == self.shape else self.mask_shape[1:]]
        return [self.name, types[0] if types[0] == types[1] else ":".join(types), self.shape[1:], *mask]

    @classmethod
    def from_json(cls, raw: Any) -> _Entry:
        if not isinstance(raw, list) or len(raw) not in (3, 4) or not isinstance(raw[0], str):
            raise _not_a_tensor(raw)
        if len(raw[0]) > LONGEST_NAME:
            raise WireError(f"A message describes a tensor with a name of {len(raw[0])} characters.")
        name, types, shape, *mask = raw
        dtype, sent_as = _types(types)
        shape = _shape(shape)
        if not mask:
            return cls(name, dtype, sent_as, shape)
        mask_shape = shape if mask == [1] and type(mask[0]) is int else _shape(mask[0])
        if not _broadcasts(mask_shape, shape):
            raise _not_a_tensor(raw)
        return cls(name, dtype, sent_as, shape, mask_shape)


_Entries = tuple[_Entry, ...]


def _entries(message: Message, values: str) -> tuple[list[_Entry], list[_Entry]]:
    def entry(name: str, tensor: Tensor, values: str, mask: Tensor | None) -> _Entry:
        if tensor.dtype not in _DTYPE_NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPE_NAMES)
            given = str(tensor.dtype).removeprefix("torch.")
            raise FedStrataError(f"Tensors of type {given} cannot be sent; use one of {known}.")
        mask_shape = None if mask is None else (1, *mask.shape[1:])
        return _Entry(name, tensor.dtype, sent_type(tensor.dtype, values), (1, *tensor.shape[1:]), mask_shape)

    tensors = [entry(name, tensor, values, message.masks.get(name)) for name, tensor in message.tensors.items()]
    return tensors, [entry(name, tensor, AS_IS, None) for name, tensor in message.numbers.items()]


def _description(entries: list[_Entry], numbers: list[_Entry]) -> bytes:
    content = [[entry.to_json() for entry in group] for group in (entries, numbers)]
    return json.dumps(content, separators=(",", ":")).encode()


def _parse(description: bytes, most_tensors: int) -> tuple[_Entries, _Entries]:
    """Read a description; the messages of a run have few different ones, and the last short ones are remembered."""
    return (_parse_again if len(description) <= _REMEMBERED_BYTES else _parse_anew)(description, most_tensors)


def _parse_anew(description: bytes, most_tensors: int) -> tuple[_Entries, _Entries]:
    try:
        content = json.loads(description)
    except (ValueError, RecursionError):
        raise WireError("The description of a message is not readable.") from None
    if not isinstance(content, list) or len(content) != 2 or not all(isinstance(group, list) for group in content):
        raise WireError("The description of a message is not a list of tensors and a list of numbers.")
    described = sum(map(len, content))
    if described > most_tensors:
        raise WireError(f"A message describes {described} tensors and numbers; {most_tensors} are the most.")
    entries, numbers = (tuple(_Entry.from_json(raw) for raw in group) for group in content)
    for group in (entries, numbers):
        if len({entry.name for entry in group}) < len(group):
            raise WireError("A message describes two tensors of the same name.")
    if any(entry.mask_shape is not None or entry.sent_as != entry.dtype for entry in numbers):
        raise WireError("A message describes numbers that are masked or not sent as they are.")
    return entries, numbers


_parse_again = lru_cache(_REMEMBERED)(_parse_anew)


def _types(raw: Any) -> tuple[torch.dtype, torch.dtype]:
    names = raw.split(":") if isinstance(raw, str) else []
    dtypes = [DTYPES.get(name) for name in names]
    match dtypes:
        case [torch.dtype() as dtype]:
            return dtype, dtype
        case [torch.dtype() as dtype, torch.dtype() as sent_as] if sent_as in _narrower(dtype):
            return dtype, sent_as
    raise WireError(f"A message describes values of the unknown type {reprlib.repr(raw)}.")


def _narrower(dtype: torch.dtype) -> set[torch.dtype]:
    return {sent_type(dtype, values) for values in VALUES} - {dtype}


def _shape(raw: Any) -> tuple[int, ...]:
    if (
        not isinstance(raw, list)
        or len(raw) >= _MOST_AXES
        or not all(type(size) is int and 0 <= size < 2**62 for size in raw)
        or math.prod(max(size, 1) for size in raw) >= 2**62
    ):
        raise WireError(f"A message describes the impossible shape {reprlib.repr(raw)}.")
    return (1, *raw)


def _broadcasts(mask_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(mask_shape) <= len(shape) and all(
        ours in (1, theirs) for ours, theirs in zip(reversed(mask_shape), reversed(shape), strict=False)
    )


def _not_a_tensor(raw: Any) -> WireError:
    return WireError(f"A message describes something that is not a tensor: {reprlib.repr(raw)}.")


def _check_one_client(message: Message) -> None:
    if not message.common:
        raise FedStrataError("One message at a time can be encoded; pick a client's with 'rows'.")


_BYTES_OF_NOTHING = FRAME_BYTES + len(_description([], []))
