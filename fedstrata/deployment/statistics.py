"""What sites tell of their samples for the mean and deviation of all, once, before the first round.

A site sends how many numbers each channel has, their sum and the sum of their squares. The server adds these up and
tells all sites, with its next hello, the mean and deviation that come out. Under secure aggregation it sees only the
total: whole numbers travel under masks, cut into pieces that are small enough to be added up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedstrata.data.channels import POINT, ChannelSums
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.facts import number_in, whole_numbers_in
from fedstrata.deployment.rules import SecureRules
from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.views import Message

if TYPE_CHECKING:
    from fedstrata.deployment.secure.primitives import Vector

PIECES = "statistics"
"""The name of the pieces in what is added up under masks."""
_BITS = 2 * POINT
"""A sum has so many bits: as many before the point as behind it."""


# What travels ---------------------------------------------------------------------------------------------------------


def sums_to_facts(sums: ChannelSums) -> dict[str, Any]:
    """Write the sums of a site."""
    first, second = sums.numbers()
    return {"count": sums.count, "sums": first, "squares": second}


def sums_from_facts(facts: Mapping[str, Any], channels: int) -> ChannelSums:
    """Read the sums of a site; what cannot be sums of numbers is refused."""
    [count] = whole_numbers_in({"count": [facts.get("count")]}, "count", 1)
    sums, squares = (_numbers_in(facts, name, channels) for name in ("sums", "squares"))
    for one, square in zip(sums, squares, strict=True):
        if square < 0 or one**2 > count * square * (1 + 1e-9):
            raise RefusedReply(f"no {count} numbers have the sum {one:g} and the sum {square:g} of their squares")
    return ChannelSums.from_numbers(count, sums, squares)


def _numbers_in(facts: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = facts.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise RefusedReply(f"its {name} are not one number for each of {count} channels")
    return [number_in({name: value}, name, -1e150, 1e150) for value in values]


# Under masks ----------------------------------------------------------------------------------------------------------


def to_pieces(sums: ChannelSums, rules: SecureRules, sites: int) -> Message:
    """Cut the sums into pieces of a few bits, of which those of all sites can be added up."""
    width = _width(rules, sites)
    numbers = [sums.count << POINT, *sums.sums, *sums.squares]
    if max(map(abs, numbers)) >= 2 ** (_BITS - 1) // sites:
        raise FedStrataError("The samples hold values that are too large to be added up; scale them down first.")
    mask = 2**width - 1
    pieces = [[(number >> shift) & mask for shift in range(0, _BITS, width)] for number in numbers]
    return Message({PIECES: torch.tensor(pieces, dtype=torch.float64)[None]})


def from_pieces(total: Vector, rules: SecureRules, sites: int, channels: int) -> ChannelSums:
    """Put the total of all sites' sums together from the sums of their pieces."""
    width = _width(rules, sites)
    whole = total.view(f"<i{total.itemsize}").astype(np.int64)
    if int(whole.min()) < 0 or int(whole[:-1].max()) > sites * (2**width - 1) or whole[-1]:
        raise FedStrataError(
            "The sites' sums add up to something that no samples have, and under secure aggregation nobody can tell "
            "whose fault that is; start the server again."
        )
    numbers = []
    for pieces in whole[:-1].reshape(2 * channels + 1, -1).tolist():
        number = sum(piece << (width * place) for place, piece in enumerate(pieces)) % 2 ** _modulus(width)
        numbers.append(number - 2 ** _modulus(width) if number >> (_modulus(width) - 1) else number)
    return ChannelSums(numbers[0] >> POINT, tuple(numbers[1 : channels + 1]), tuple(numbers[channels + 1 :]))


def count_pieces(rules: SecureRules, sites: int) -> int:
    """Tell into how many pieces a sum is cut."""
    return math.ceil(_BITS / _width(rules, sites))


def _width(rules: SecureRules, sites: int) -> int:
    """Tell the bits of a piece."""
    return min(32, rules.largest_number(sites).bit_length() - 1)


def _modulus(width: int) -> int:
    """Tell the bits of all pieces of a number."""
    return width * math.ceil(_BITS / width)
