r"""Truth values as bytes: masks, and tensors of truth values.

There are three kinds of record, of which the smallest is written; its first byte says which it is.

- *bits*: one bit per entry, the first entry in the highest bit.
- *gaps*: the positions of the rarer truth value, as the gaps between them in a Golomb-Rice code (Rice and Plaunt,
  1971): of each gap the quotient by :math:`2^r` in unary, and then of each gap the remainder in :math:`r` bits. With
  the best :math:`r` that is within a few per cent of the entropy of a random mask.
- *held*: the hash of a mask that the receiver holds already.

With :math:`r = 0` gaps are bits without those behind the last position, so they are considered only where
:math:`r > 0`: where fewer than about 38 % of the entries have the rarer value.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedstrata.stack import constant, per_client
from fedstrata.wire.frame import Bytes, Reader, WireError
from fedstrata.wire.support import HASH_BYTES, SUPPORTS, Positions, Support, Truth, support_of, true_positions

_Counts = npt.NDArray[np.int64]

_BITS, _GAPS_OF_FALSE, _GAPS_OF_TRUE, _HELD = range(4)
_KIND = struct.Struct("<B")
_GAPS = struct.Struct("<II")
# How many entries are looked at together when sizes are computed: a bound on memory.
_ENTRIES_AT_ONCE = 2**24
# How many entries of a mask are added up together on a GPU: a scan over single entries takes a hundred times longer.
_BLOCK = 1024


def write_truth(truth: Tensor) -> list[Bytes]:
    """Write truth values ``[1, ...]`` in the smallest way."""
    entries = truth.detach().cpu().contiguous().reshape(-1).numpy()

    def positions(of_true: bool) -> Positions:
        return true_positions(entries if of_true else ~entries)

    gaps = _gap_records(len(entries), int(np.count_nonzero(entries)), positions)
    return _smallest(_bits_record(np.packbits(entries)), *gaps)


def write_mask(support: Support, held: Tensor | None) -> list[Bytes]:
    """Write a mask in the smallest way; ``held`` is the mask that the receiver is known to hold."""
    if held is not None and support.is_of(held):
        return _smallest(_bits_record(support.bits), [_KIND.pack(_HELD), support.hash])

    def positions(of_true: bool) -> Positions:
        return support.positions() if of_true else true_positions(~support.mask().reshape(-1))

    return _smallest(_bits_record(support.bits), *_gap_records(math.prod(support.shape), support.count, positions))


def read_truth(reader: Reader, shape: Sequence[int]) -> Tensor:
    """Read truth values of a shape."""
    (kind,) = reader.unpack(_KIND)
    entries, _ = _read_entries(reader, kind, math.prod(shape))
    return torch.from_numpy(entries).reshape(tuple(shape))


def read_mask(reader: Reader, shape: Sequence[int], held: Tensor | None) -> tuple[Tensor, Support]:
    """Read a mask of a shape; one that is named by its hash is the held one itself, not a copy."""
    (kind,) = reader.unpack(_KIND)
    if kind == _HELD:
        return _read_held(reader, shape, held)
    entries, positions = _read_entries(reader, kind, math.prod(shape))
    mask = entries.reshape(tuple(shape))
    return torch.from_numpy(mask), SUPPORTS.find(mask, positions)


def _read_entries(reader: Reader, kind: int, count: int) -> tuple[Truth, Positions | None]:
    """Read a number of truth values, and the positions of the true ones where these are what was sent."""
    if kind == _BITS:
        return unpack_bits(reader, count), None
    if kind not in (_GAPS_OF_FALSE, _GAPS_OF_TRUE):
        raise WireError(f"A message holds truth values of an unknown kind ({kind}).")
    positions, of_true = _read_gaps(reader, count), kind == _GAPS_OF_TRUE
    entries = np.full(count, not of_true)
    entries[positions] = of_true
    return entries, positions if of_true else None


@dataclass(frozen=True)
class Tally:
    """How many of truth values ``[K, ...]`` are true in each row, and which rows the receiver holds already."""

    ones: _Counts
    same: Truth


def tallies(truths: Sequence[tuple[Tensor, Tensor | None]]) -> Callable[[], list[Tally]]:
    """Count what is true, and compare it with what is held, if anything; call the result for the numbers.

    A GPU begins to count at once, and is waited for by the call, which reads all numbers together. On a CPU nothing is
    counted before the call.
    """
    rows = [
        (per_client(truth), None if held is None or held.shape[1:] != truth.shape[1:] else per_client(held))
        for truth, held in truths
    ]
    if all(own.device.type == "cpu" for own, _ in rows):
        return lambda: [_tally(own, others) for own, others in rows]
    return tallies_read_at_once(rows)


def tallies_read_at_once(rows: Sequence[tuple[Tensor, Tensor | None]]) -> Callable[[], list[Tally]]:
    """Begin to count and compare rows ``[K, n]`` where they are; the call reads all numbers back together.

    Rows of many masks are laid side by side and added up together, so that a GPU is asked a few times and not once for
    every mask.
    """
    pieces = _side_by_side(rows)
    counted = [_counted([rows[place] for place in piece]) for piece in pieces]
    sizes = [(len(own), others is not None) for own, others in rows]  # the rows themselves may be gone when it is read

    def read() -> list[Tally]:
        found: dict[int, Tally] = {}
        numbers = torch.cat([piece.flatten() for piece in counted]).cpu().numpy() if counted else np.empty(0)
        begin = 0
        for piece, sums in zip(pieces, counted, strict=True):
            ones, differing = numbers[begin : begin + sums.numel()].reshape(sums.shape)
            begin += sums.numel()
            for column, place in enumerate(piece):
                clients, compared = sizes[place]
                same = differing[:, column] == 0 if compared else np.zeros(clients, dtype=np.bool_)
                found[place] = Tally(ones[:clients, column], same)
        return [found[place] for place in range(len(sizes))]

    return read


def _side_by_side(rows: Sequence[tuple[Tensor, Tensor | None]]) -> list[list[int]]:
    """Divide masks, by their places, into those that are counted together: of as many clients, and not too many."""
    pieces: list[list[int]] = []
    last: dict[int, tuple[list[int], int]] = {}
    for place, (own, others) in enumerate(rows):
        clients = max(len(own), 0 if others is None else len(others))
        piece, entries = last.get(clients, ([], 0))
        if not piece or entries + clients * own.shape[1] > _ENTRIES_AT_ONCE:
            piece, entries = [], 0
            pieces.append(piece)
        piece.append(place)
        last[clients] = piece, entries + clients * own.shape[1]
    return pieces


def _counted(rows: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Count for each mask what is true in its rows, and where they differ from what is held: ``[2, K, masks]``.

    Each mask is filled up to whole blocks; these are added up side by side, and only their few sums one after another.
    Inside of a block eight truth values, of a byte each, are one number: in a sum of 128 such numbers no byte
    overflows, and no wider copy is made of them.
    """
    clients = max(len(part) for pair in rows for part in pair if part is not None)
    pairs = [(own, own if others is None else others.to(own.device)) for own, others in rows]
    blocks = [-(-own.shape[1] // _BLOCK) for own, _ in pairs]
    empty = torch.zeros(1, _BLOCK, dtype=torch.bool, device=pairs[0][0].device)

    def filled_up(parts: Sequence[Tensor]) -> Tensor:
        pieces = [piece for part in parts for piece in (part, empty[:, : -part.shape[1] % _BLOCK])]
        return torch.cat([piece.expand(clients, -1) for piece in pieces], dim=1)

    own, known = map(filled_up, zip(*pairs, strict=True))
    words = torch.stack([own, own != known]).view(2, clients, sum(blocks), _BLOCK).view(torch.int64)
    sums = words.sum(3, keepdim=True).view(torch.uint8).sum(3)
    ends = constant((0, *itertools.accumulate(blocks)), torch.int64, own.device)
    return torch.nn.functional.pad(sums.cumsum(2), (1, 0)).index_select(2, ends).diff(dim=2)


def _tally(rows: Tensor, others: Tensor | None) -> Tally:
    if others is None:
        return Tally(true_counts(rows), np.zeros(len(rows), dtype=np.bool_))
    return Tally(true_counts(rows), np.all(rows.numpy() == others.cpu().numpy(), axis=1))


def truth_sizes(truth: Tensor, tally: Tally) -> _Counts:
    """Count the bytes that :func:`write_truth`, or :func:`write_mask`, takes for each client's row of ``[K, ...]``."""
    rows, same = per_client(truth), tally.same
    bits = -(-rows.shape[1] // 8)
    if same.all():
        return np.full(len(same), _KIND.size + min(bits, HASH_BYTES), dtype=np.int64)
    wanted = ~same if len(same) == len(rows) else np.ones(len(rows), dtype=np.bool_)
    return _KIND.size + np.where(same, min(bits, HASH_BYTES), np.minimum(bits, _gap_sizes(rows, tally.ones, wanted)))


def mask_hash(mask: Tensor) -> bytes:
    """Name a mask ``[1, ...]`` by eight bytes of BLAKE2b over its shape, without the client axis, and its bits."""
    return support_of(mask).hash


def true_counts(truth: Tensor) -> _Counts:
    """Count the true entries in each client's row of ``[K, ...]``."""
    rows = per_client(truth)
    if rows.device.type != "cpu":
        return rows.sum(1).cpu().numpy()
    return np.array([np.count_nonzero(row) for row in rows.numpy()], dtype=np.int64)


def _read_held(reader: Reader, shape: Sequence[int], held: Tensor | None) -> tuple[Tensor, Support]:
    named = reader.take(HASH_BYTES).tobytes()
    support = None if held is None or list(held.shape) != list(shape) else support_of(held)
    if held is None or support is None or support.hash != named:
        raise WireError(
            f"A message names a mask of shape {list(shape)} by the hash {named.hex()}, and that mask is not held here; "
            "the sender has to send it."
        )
    return held, support


def _bits_record(bits: npt.NDArray[np.uint8]) -> list[Bytes]:
    return [_KIND.pack(_BITS), bits.data]


def _smallest(*records: list[Bytes]) -> list[Bytes]:
    return min(records, key=lambda record: sum(len(part) for part in record))


# Gaps ----------------------------------------------------------------------------------------------------------------


def _gap_records(size: int, ones: int, positions: Callable[[bool], Positions]) -> list[list[Bytes]]:
    """Write the gaps between the positions of the rarer value, if that can be smaller than bits."""
    rarer = min(ones, size - ones)
    width = int(_remainder_width(rarer, size))
    if not width:
        return []
    of_true = ones == rarer
    gaps = (np.diff(positions(of_true), prepend=-1) - 1).astype(np.uint32)
    ends = np.cumsum((gaps >> width) + 1, dtype=np.int64) - 1
    quotients = np.zeros(ends[-1] + 1 if rarer else 0, dtype=np.bool_)
    quotients[ends] = True
    unary = np.packbits(quotients)
    kind = _KIND.pack(_GAPS_OF_TRUE if of_true else _GAPS_OF_FALSE)
    return [[kind, _GAPS.pack(rarer, len(unary)), unary.data, _pack_planes(gaps, width).data]]


def _read_gaps(reader: Reader, count: int) -> Positions:
    rarer, unary_bytes = reader.unpack(_GAPS)
    width = int(_remainder_width(rarer, count))
    ends = true_positions(np.unpackbits(reader.take(unary_bytes)).view(np.bool_))
    last = int(ends[-1]) + 1 if len(ends) else 0
    if len(ends) != rarer or unary_bytes != -(-last // 8):
        raise WireError(f"A message does not hold the {rarer} gaps that it announces.")
    remainders = _unpack_planes(reader, rarer, width)
    # In Python's numbers, which cannot overflow; after that, the sums below cannot either.
    if ((last - rarer) << width) + int(remainders.sum()) + rarer > count:
        raise WireError(f"The gaps in a message lead past the last of {count} truth values.")
    quotients = np.diff(ends, prepend=-1) - 1
    return np.cumsum((quotients << width) + remainders + 1) - 1


def _remainder_width(rarer: int | _Counts, entries: int) -> _Counts:
    r"""Choose the bits of a remainder; none where gaps cannot be smaller than bits.

    For a random mask of density :math:`p`, the best Rice parameter is
    :math:`1 + \lfloor \log_2 (\ln(\varphi - 1) / \ln(1 - p)) \rfloor` with the golden ratio :math:`\varphi` (Kiely,
    2004), here with :math:`-1 / \ln(1 - p) \approx 1 / p - 1 / 2` in whole numbers, so that both sides agree on it.
    """
    if not 8 * _GAPS.size < entries < 2**32:
        return np.zeros_like(rarer, dtype=np.int64)
    scale = 481 * (2 * entries - rarer) // (2000 * np.maximum(rarer, 1))
    bit_length: _Counts = np.frexp(np.asarray(scale, dtype=np.float64))[1].astype(np.int64)
    return bit_length


def _gap_sizes(rows: Tensor, ones: _Counts, wanted: Truth) -> _Counts:
    """Count the bytes of gaps in rows ``[K, n]`` with so many ones; very many where not wanted or not considered."""
    rarer = np.minimum(ones, rows.shape[1] - ones)
    widths = _remainder_width(rarer, rows.shape[1])
    result = np.full(len(rows), np.iinfo(np.int64).max, dtype=np.int64)
    candidates = np.flatnonzero(wanted & (widths > 0))
    at_once = max(1, _ENTRIES_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, len(candidates), at_once):
        some = candidates[start : start + at_once]
        picked = torch.from_numpy(some).to(rows.device)
        of_true = torch.from_numpy(ones[some] == rarer[some]).to(rows.device)
        quotients = _quotient_sums(rows[picked] == of_true[:, None], torch.from_numpy(widths[some]).to(rows.device))
        unary_bits = rarer[some] + quotients
        result[some] = _GAPS.size + -(-unary_bits // 8) + -(-rarer[some] * widths[some] // 8)
    return result


def _quotient_sums(rows: Tensor, widths: Tensor) -> _Counts:
    """Sum the quotients of the gaps between the true entries of each row."""
    flat = rows.reshape(-1)
    on_cpu = flat.device.type == "cpu"
    positions = torch.from_numpy(true_positions(flat.numpy())) if on_cpu else flat.nonzero()[:, 0]
    row = positions.div(rows.shape[1], rounding_mode="floor")
    # A gap begins behind the entry before, or with the row.
    previous = torch.cat([positions.new_full((1,), -1), positions[:-1]]).maximum(row * rows.shape[1] - 1)
    quotients = (positions - previous - 1) >> widths[row]
    return torch.zeros_like(widths).index_add_(0, row, quotients).cpu().numpy()


# Bits ----------------------------------------------------------------------------------------------------------------


def _pack_planes(numbers: npt.NDArray[np.uint32], width: int) -> npt.NDArray[np.uint8]:
    """Pack the lowest bits of numbers: the highest of these of all numbers, then the next of all, and so on."""
    return np.packbits([(numbers & np.uint32(1 << plane)) != 0 for plane in reversed(range(width))])


def _unpack_planes(reader: Reader, count: int, width: int) -> npt.NDArray[np.uint32]:
    numbers = np.zeros(count, dtype=np.uint32)
    for bits in unpack_bits(reader, count * width).reshape(width, count):
        numbers <<= 1
        numbers |= bits
    return numbers


def unpack_bits(reader: Reader, count: int) -> Truth:
    """Read packed truth values; the last byte must be filled up with zeros, so that they have one encoding."""
    bits = np.unpackbits(reader.take(-(-count // 8))).view(np.bool_)
    if bits[count:].any():
        raise WireError("A message holds bits behind the last truth value.")
    return bits[:count]
