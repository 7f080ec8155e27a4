r"""Uploads as whole numbers that can be added up without looking at any of them, and the mean that comes out.

A site multiplies its upload :math:`w` by its weight relative to the heaviest site, :math:`u \in (0, 1]`, and rounds to
multiples of a step, :math:`q = \mathrm{round}(u \, \mathrm{clip}(w) / s)`. The range to which a tensor is clipped is
known to everybody, and with :math:`|q| \le L` the step is the range divided by :math:`L`
(:meth:`fedstrata.deployment.rules.SecureRules.largest_number`). So the mean :math:`s \sum_k q_k / \sum_k u_k` differs
from that of the clipped uploads by at most :math:`\frac{K}{2 \sum_k u_k} s`, half a step where all weigh alike.

Names, types, shapes and the hashes of masks are told in clear, so that the numbers of all sites mean the same. The last
number of a vector counts the entries that were clipped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.rules import SecureRules
from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message
from fedstrata.stack import Tensors
from fedstrata.wire import mask_hash

COUNTERS_UP_TO = 2.0**20
"""The range of whole-number tensors, such as the steps that a norm layer has seen, while they are small."""
STATISTICS_ROOM = 128
"""Running statistics may leave the usual range by this factor: they go where the data is, in a few steps."""
_MOST_ENTRIES = 10_000


class Entry(NamedTuple):
    """One tensor of an upload, as it is told in clear: its name, type and shape, and the hash of its mask."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    mask: str | None = None

    def to_facts(self) -> list[Any]:
        """Write it as plain data."""
        return [self.name, self.dtype, list(self.shape), self.mask]


Entries = tuple[Entry, ...]


def entries_of(upload: Message) -> Entries:
    """Describe what a site sends, in the order in which its numbers will stand."""
    return tuple(
        Entry(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape[1:]),
            mask_hash(upload.masks[name]).hex() if name in upload.masks else None,
        )
        for name, tensor in upload.tensors.items()
    )


def read_entries(value: Any, model: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Entries:
    """Read what a site says that it will send: tensors of the model, under masks that are known here."""
    if not isinstance(value, list) or len(value) > _MOST_ENTRIES:
        raise RefusedReply("its list of tensors is none")
    hashes = {name: mask_hash(mask).hex() for name, mask in masks.items()}
    entries = tuple(_read_entry(item, model, hashes) for item in value)
    if len({entry.name for entry in entries}) < len(entries):
        raise RefusedReply("it names a tensor twice")
    return entries


def _read_entry(item: Any, model: Mapping[str, Tensor], hashes: Mapping[str, str]) -> Entry:
    if not isinstance(item, list) or len(item) != 4 or not isinstance(item[0], str):
        raise RefusedReply("its list of tensors is none")
    name = item[0]
    if name not in model:
        raise RefusedReply(f"it holds '{name[:100]}', which is not in the model")
    expected = Entry(name, str(model[name].dtype).removeprefix("torch."), tuple(model[name].shape), hashes.get(name))
    for key, theirs, ours in zip(("type", "shape", "mask"), item[1:], expected.to_facts()[1:], strict=True):
        if theirs != ours:
            raise RefusedReply(f"its '{name}' has the {key} {str(theirs)[:100]} instead of {ours}")
    return expected


@dataclass(frozen=True)
class Scale:
    """How the numbers of a round become whole ones, the same for all of its sites.

    ``largest`` is the largest whole number of a site, ``clip`` the range of a tensor unless ``ranges`` name another.
    """

    bits: int
    largest: int
    clip: float
    ranges: Mapping[str, float]

    @classmethod
    def of(cls, rules: SecureRules, sites: int, ranges: Mapping[str, float]) -> Scale:
        """Choose the scale for so many sites by the rules, which all of them know."""
        return cls(rules.secure_bits, rules.largest_number(sites), rules.secure_clip, ranges)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The type of the numbers that travel."""
        return np.dtype(f"<u{self.bits // 8}")

    def range(self, name: str) -> float:
        """Tell to which range a tensor is clipped."""
        return self.ranges.get(name, self.clip)

    def step(self, name: str) -> float:
        """Tell by which step the numbers of a tensor are rounded."""
        return self.range(name) / self.largest


def ranges_of(model: Mapping[str, Tensor], clip: float, statistics: Collection[str] = ()) -> dict[str, float]:
    """Choose the ranges of tensors that need more than the usual one, by the current model, which is no secret.

    ``statistics`` are the names of what is not trained, such as running variances.
    """
    ranges = {}
    for name, tensor in model.items():
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        if tensor.is_floating_point():
            range = clip * max(largest, STATISTICS_ROOM if name in statistics else 1.0)
        else:
            range = max(COUNTERS_UP_TO, clip * largest)
        if range != clip:
            ranges[name] = range
    return ranges


def read_ranges(value: Any) -> dict[str, float]:
    """Read the ranges that a server asks for."""
    if not isinstance(value, dict) or not all(type(one) is float and 0 < one < math.inf for one in value.values()):
        raise FedStrataError("A request came with ranges that are no numbers.")
    return value


def refuse_infinite(upload: Message) -> None:
    """Refuse to send numbers that are not finite: under masks nobody else could find out."""
    for name, tensor in upload.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FedStrataError(f"'{name}' holds a NaN or an infinity after training, so nothing is sent.")


def to_numbers(upload: Message, weight: float, scale: Scale) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Weigh, clip and round an upload; the last number counts the entries that were clipped."""
    if not 0 < weight <= 1:
        raise FedStrataError(f"The weight of an upload is {weight}, and not a part of the largest one.")
    parts, clipped = [], 0
    for name, tensor in upload.tensors.items():
        values, range = _sent(tensor, upload.masks.get(name)).to("cpu", torch.float64).numpy(), scale.range(name)
        clipped += int(np.count_nonzero(np.abs(values) > range))
        rounded = np.rint(np.clip(values, -range, range) * (weight / scale.step(name)))
        parts.append(np.clip(rounded, -scale.largest, scale.largest).astype(np.int64))
    parts.append(np.array([min(clipped, scale.largest)]))
    return np.concatenate(parts).astype(scale.dtype)


def _sent(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Pick what is sent of a tensor, in a row."""
    return tensor.detach().reshape(-1) if mask is None else tensor.detach().masked_select(mask)


def count_numbers(entries: Sequence[Entry], masks: Mapping[str, Tensor]) -> int:
    """Tell how many numbers a site sends."""
    return sum(_count(entry, masks) for entry in entries) + 1


def _count(entry: Entry, masks: Mapping[str, Tensor]) -> int:
    if entry.mask is None:
        return math.prod(entry.shape)
    return int(masks[entry.name].expand(1, *entry.shape).count_nonzero())


def read_sum(
    total: npt.NDArray[np.unsignedinteger[Any]],
    entries: Sequence[Entry],
    masks: Mapping[str, Tensor],
    scale: Scale,
    sites: int,
    weight: float,
) -> tuple[Tensors, int]:
    """Turn the sum of some sites' numbers, whose weights add up to ``weight``, into their mean, ``[1, ...]``.

    Return it with the number of entries that were clipped. A sum that cannot be one of uploads is refused.
    """
    numbers = total.view(f"<i{scale.bits // 8}").astype(np.int64)
    if max(int(numbers.max()), -int(numbers.min())) > sites * scale.largest:
        raise RefusedReply("it lies outside of what uploads can add up to, so that a site has sent something else")
    mean, start = {}, 0
    for entry in entries:
        count = _count(entry, masks)
        values = torch.from_numpy(numbers[start : start + count] * (scale.step(entry.name) / weight))
        start += count
        if entry.mask is None:
            mean[entry.name] = values.reshape(1, *entry.shape)
        else:
            mask = masks[entry.name].cpu().expand(1, *entry.shape)
            mean[entry.name] = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, values)
    return mean, int(numbers[-1])
