"""Numbers as bytes: the values of a tensor, all of them or those under a mask, exact or in a narrower type.

Where values only move, they move as plain items of their width, whatever their type; entries of a mask are worked on in
chunks, so that their positions stay in the processor's cache.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.wire.frame import Bytes, Reader, WireError
from fedstrata.wire.masks import unpack_bits
from fedstrata.wire.support import Support

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
"""The types that can be sent, by their names on the wire."""

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
AS_IS = "as-is"
VALUES = (AS_IS, *_NARROW)
"""The ways to send floating-point values."""

_Items = npt.NDArray[Any]
_Counts = npt.NDArray[np.int64]
_ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_INT8 = 127
_SCALE = struct.Struct("<d")


def sent_type(dtype: torch.dtype, values: str) -> torch.dtype:
    """Tell in which type values travel: floating-point ones in a narrower type if asked, others as they are."""
    if values not in VALUES:
        raise unknown_name("way to send values", values, VALUES)
    narrow = _NARROW.get(values, dtype)
    return narrow if dtype.is_floating_point and narrow.itemsize < dtype.itemsize else dtype


def byte_count(count: int | _Counts, dtype: torch.dtype, sent_as: torch.dtype) -> int | _Counts:
    """Count the bytes that numbers take: truth values take a bit each, filled up to whole bytes."""
    if dtype == torch.bool:
        return -(-count // 8)
    return count * sent_as.itemsize + (_SCALE.size if _is_scaled(dtype, sent_as) else 0)


def write_numbers(numbers: Tensor, sent_as: torch.dtype) -> list[Bytes]:
    """Write numbers ``[n]``."""
    if numbers.dtype == torch.bool:
        return [np.packbits(numbers.numpy()).data]
    if _is_scaled(numbers.dtype, sent_as):
        [whole], [scale] = _scaled(numbers[None])
        return [_SCALE.pack(float(scale)), _items(whole).view(np.uint8).data]
    return [_items(_narrowed(numbers, sent_as)).view(np.uint8).data]


def read_numbers(reader: Reader, count: int, dtype: torch.dtype, sent_as: torch.dtype) -> _Items:
    """Read a count of numbers, as items that are a view of the message where they travelled as they are."""
    if dtype == torch.bool:
        return unpack_bits(reader, count)
    scale = reader.unpack(_SCALE)[0] if _is_scaled(dtype, sent_as) else None
    if scale is not None and not 0 <= scale < math.inf:
        raise WireError(f"A message holds int8 values with the impossible scale {scale}.")
    items = reader.take(count * sent_as.itemsize).view(f"i{sent_as.itemsize}")
    if dtype == sent_as:
        return items
    numbers = torch.from_numpy(items.copy()).view(sent_as)
    if scale is None:
        return _items(numbers.to(dtype))
    return _items(_unscaled(numbers[None], torch.tensor([scale], dtype=torch.float64), dtype)[0])


# Under a mask --------------------------------------------------------------------------------------------------------


def write_values(tensor: Tensor, support: Support | None, sent_as: torch.dtype) -> Iterator[Bytes]:
    """Write the values on the support of a mask, all of them without one; piece by piece where nothing changes them."""
    if support is None or tensor.device.type != "cpu" or tensor.dtype == torch.bool or tensor.dtype != sent_as:
        yield from write_numbers(values_under(tensor, support), sent_as)
    else:
        for picked in _picked(tensor, support):
            yield picked.view(np.uint8).data


def values_under(tensor: Tensor, support: Support | None) -> Tensor:
    """Pick the values on the support of a mask, all of them without one: ``[n]``."""
    tensor = tensor.detach()
    if support is None:
        return tensor.cpu().contiguous().reshape(-1)
    if tensor.device.type != "cpu":
        mask = torch.from_numpy(support.expanded(tensor.shape).mask()).to(tensor.device)
        return tensor.masked_select(mask).cpu()
    nothing = _items(tensor.new_empty(0))
    return torch.from_numpy(np.concatenate([nothing, *_picked(tensor, support)])).view(tensor.dtype)


def _picked(tensor: Tensor, support: Support) -> Iterator[_Items]:
    items = _items(values_under(tensor, None))
    for stretch, _, positions in support.expanded(tensor.shape).stretches():
        yield np.take(items[stretch], positions, mode="clip")


def tensor_of(items: _Items, dtype: torch.dtype, shape: Sequence[int], support: Support | None) -> Tensor:
    """Build a tensor from the values on the support of a mask, with zeros elsewhere, or from all values without one."""
    if support is None:
        whole = items.copy()
    else:
        whole = np.zeros(math.prod(shape), dtype=items.dtype)
        for stretch, place, positions in support.expanded(shape).stretches():
            # A copy, because items that lie at odd addresses in a message are slow to take apart.
            whole[stretch][positions] = items[place].copy()
    return torch.from_numpy(whole).view(dtype).reshape(tuple(shape))


def _items(numbers: Tensor) -> _Items:
    """View numbers ``[n]`` as whole numbers of the same width."""
    return numbers.view(_ITEMS[numbers.dtype.itemsize]).numpy()


# In a narrower type --------------------------------------------------------------------------------------------------


def as_received(rows: Tensor, sent_as: torch.dtype) -> Tensor:
    """Return the numbers ``[K, n]`` of K messages as their receivers get them."""
    if _is_scaled(rows.dtype, sent_as):
        return _unscaled(*_scaled(rows), rows.dtype)
    return _narrowed(rows, sent_as).to(rows.dtype)


def _is_scaled(dtype: torch.dtype, sent_as: torch.dtype) -> bool:
    return dtype.is_floating_point and sent_as == torch.int8


def _narrowed(numbers: Tensor, sent_as: torch.dtype) -> Tensor:
    narrow = numbers.to(sent_as)
    if narrow.dtype != numbers.dtype and int(narrow.isinf().sum()) != int(numbers.isinf().sum()):
        raise FedStrataError(
            f"Values up to {float(numbers.abs().max()):.4g} do not fit into {sent_as}, which ends at "
            f"{torch.finfo(sent_as).max:.4g}; send them as bf16 or as they are."
        )
    return narrow


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    r"""Round each row ``[K, n]`` to whole multiples of its scale ``[K]``, :math:`\max |v| / 127`."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    if not bool(torch.isfinite(largest).all()):
        raise FedStrataError("Values that are not finite cannot be sent as int8; send them as they are.")
    scales = largest.to(torch.float64) / _LARGEST_INT8
    scales = scales.where(scales >= torch.finfo(wide.dtype).tiny, 0.0)
    multiples = wide / scales.where(scales > 0, 1.0).to(wide.dtype)[:, None]
    return multiples.round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8).to(torch.int8), scales


def _unscaled(whole: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    largest = torch.finfo(dtype).max
    return (whole.to(wide) * scales.to(wide)[:, None]).clamp_(-largest, largest).to(dtype)
