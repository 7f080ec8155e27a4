"""Randomness as a function of where you are.

Every draw is computed from a key (seed, round, client, purpose) and a counter, never from a stream that others advance.
So the order of clients, the chunk size, the engine, the device and a restart change nothing.

Keys are tensors ``[..., 2]`` of two 32-bit words; draws are the counter-based generator Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), written in tensor operations so that all clients draw at once
and a CPU and a GPU draw the same numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.kernels.finding import find_kernels
from fedstrata.private_torch import differs_between_clients
from fedstrata.transfer import to_device

_WORD = 0xFFFFFFFF
_FEW = 2**12
"""Up to so many numbers, what an operation costs is the call."""


def key(seed: int, *place: int | str) -> tuple[int, int]:
    """Hash a place, such as ``(seed, round, client, "batches")``, into the two words of a key."""
    digest = blake2b("/".join(map(str, (seed, *place))).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def client_keys(
    seed: int, round: int, clients: Sequence[int], purpose: str, device: torch.device | str = "cpu"
) -> Tensor:
    """One key per client: a tensor ``[K, 2]``."""
    before, behind = f"{seed}/{round}/".encode(), f"/{purpose}".encode()
    digests = b"".join([blake2b(b"%b%d%b" % (before, one, behind), digest_size=8).digest() for one in clients])
    return to_device(np.frombuffer(digests, dtype="<u4").astype(np.int64).reshape(-1, 2), device)


def fold(keys: Tensor, number: int | Tensor) -> Tensor:
    """Derive other keys from keys ``[..., 2]``, one for each number (at most 32 bits), such as a step."""
    return torch.stack((keys[..., 0], keys[..., 1] ^ (number * 0x9E3779B9 & _WORD)), dim=-1)


def numpy_generator(seed: int, *place: int | str) -> np.random.Generator:
    """Build a NumPy generator for draws that happen once, on the host (partitions, client selection)."""
    return np.random.default_rng(key(seed, *place))


def torch_seed(seed: int, *place: int | str) -> int:
    """Build a seed for PyTorch's own generator (weight initialisation)."""
    low, high = key(seed, *place)
    return (high << 31) ^ low


def philox(keys: Tensor, count: int, stream: int | Tensor = 0) -> Tensor:
    """Draw ``[..., 4 * ceil(count / 4)]`` words of 32 bits, as int64, for keys ``[..., 2]``.

    ``stream`` (at most 32 bits) separates draws under one key, such as the steps of a round.
    """
    blocks = -(-count // 4)
    kernels = _philox_kernels(keys.device) if keys.is_cuda and count and not differs_between_clients(keys) else None
    if kernels is None:
        return _philox_words(keys, stream, blocks)
    streams = stream.reshape(stream.shape or (1,)) if isinstance(stream, Tensor) else keys.new_full((1,), stream)
    rows = (keys[..., 0] + streams[..., 0]).shape
    words: Tensor = kernels.philox_words(
        keys.expand(*rows, 2).reshape(-1, 2), streams.expand(*rows, 1).reshape(-1), blocks
    )
    return words.reshape(*rows, 4 * blocks)


def _philox_words(keys: Tensor, stream: int | Tensor, blocks: int) -> Tensor:
    """Draw the words in operations of PyTorch."""
    position = torch.arange(blocks, dtype=torch.int64, device=keys.device)
    key0, key1 = keys[..., 0:1], keys[..., 1:2]
    zero = torch.zeros_like(position + key0)
    word0, word1, word2, word3 = position + zero, zero, zero + stream, zero
    for _ in range(10):
        product0, product1 = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1, word2, word3 = (
            ((product1 >> 32) & _WORD) ^ word1 ^ key0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ word3 ^ key1,
            product0 & _WORD,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return torch.stack((word0, word1, word2, word3), dim=-1).flatten(-2)


def philox_at_once(keys: Tensor, count: int, stream: int | Tensor = 0) -> Tensor:
    """Draw what :func:`philox` draws, quicker where few words are drawn on a CPU: in operations of NumPy.

    PyTorch does not see these, so it is not for what happens inside a training step, where operations are recorded.
    """
    if keys.device.type != "cpu" or count * keys.shape[:-1].numel() > _FEW or differs_between_clients(keys):
        return philox(keys, count, stream)
    streams = stream.numpy() if isinstance(stream, Tensor) else np.array([stream])
    key0, key1 = (keys.numpy()[..., place : place + 1].astype(np.uint64) for place in range(2))
    position = np.arange(-(-count // 4), dtype=np.uint64)
    shape = tuple(np.broadcast_shapes(position.shape, key0.shape, streams.shape))
    zero = np.zeros(shape, dtype=np.uint64)
    word0, word1, word2, word3 = position + zero, zero, streams.astype(np.uint64) + zero, zero
    half, word = np.uint64(32), np.uint64(_WORD)
    for _ in range(10):
        product0, product1 = word0 * np.uint64(0xD2511F53), word2 * np.uint64(0xCD9E8D57)
        word0, word1 = (product1 >> half) ^ word1 ^ key0, product1 & word
        word2, word3 = (product0 >> half) ^ word3 ^ key1, product0 & word
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & word, (key1 + np.uint64(0xBB67AE85)) & word
    drawn = np.stack((word0, word1, word2, word3), axis=-1).astype(np.int64)
    return torch.from_numpy(drawn.reshape(*shape[:-1], 4 * shape[-1]))


def _philox_kernels(device: torch.device) -> ModuleType | None:
    """Find the GPU's own kernel for the words, if there is one here and it draws the same."""

    def trial(kernels: ModuleType) -> None:
        keys = torch.tensor([[1, 2], [_WORD, 0x80000000]], device=device)
        streams = torch.tensor([[7], [_WORD]], device=device)
        if not torch.equal(kernels.philox_words(keys, streams[:, 0], 5), _philox_words(keys, streams, 5)):
            raise FedStrataError("it draws other numbers")

    return find_kernels("random_words", "random numbers", trial)


def uniform(keys: Tensor, shape: Sequence[int], stream: int | Tensor = 0) -> Tensor:
    """Draw float32 numbers in [0, 1) of shape ``[..., *shape]``, with 24 random bits each.

    >>> keys = client_keys(0, 1, [3, 5], "example")
    >>> both, alone = uniform(keys, (2, 2)), uniform(keys[1:], (2, 2))
    >>> both.shape, torch.equal(both[1:], alone)
    (torch.Size([2, 2, 2]), True)
    """
    count = math.prod(shape)
    words = philox(keys, count, stream)[..., :count]
    return ((words >> 8).to(torch.float32) * 2.0**-24).reshape(*words.shape[:-1], *shape)


def drawn_among(keys: Tensor, values: Tensor) -> Tensor:
    """Draw, for each key, as many numbers as there are among the values of its row, with replacement.

    So a layer's initial weights give other ones of the same distribution, whatever that is: ``[K or 1, *shape]`` gives
    ``[K, *shape]``.

    >>> drawn = drawn_among(client_keys(0, 0, [3, 5], "example"), torch.tensor([[1.0, 2.0, 3.0]]))
    >>> drawn.shape, set(drawn.flatten().tolist()) <= {1.0, 2.0, 3.0}
    (torch.Size([2, 3]), True)
    """
    rows = values.flatten(1)
    places = (uniform(keys, rows.shape[1:]).to(torch.float64) * rows.shape[1]).to(torch.int64)
    return rows.expand(len(places), -1).gather(1, places).reshape(-1, *values.shape[1:])


def normal(keys: Tensor, shape: Sequence[int], stream: int | Tensor = 0) -> Tensor:
    """Draw float64 numbers from the standard normal distribution, of shape ``[..., *shape]`` (Box and Muller, 1958).

    The radius comes from 64 random bits, so that the tails reach beyond nine standard deviations.
    """
    return _normal(philox(keys, _words_for(shape), stream), shape)


def unrepeatable_normal(shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Draw the same from the operating system's own randomness: another one at every call, which nobody can tell."""
    drawn = np.frombuffer(os.urandom(4 * _words_for(shape)), dtype="<u4").astype(np.int64)
    return _normal(torch.from_numpy(drawn).to(device), shape)


def _words_for(shape: Sequence[int]) -> int:
    return 4 * -(-math.prod(shape) // 2)


def _normal(words: Tensor, shape: Sequence[int]) -> Tensor:
    """Turn words of 32 bits, four for two numbers, into normal ones."""
    count = math.prod(shape)
    words = words[..., : _words_for(shape)].to(torch.float64)
    above_zero = (words[..., 0::4] * 2.0**32 + words[..., 1::4] + 0.5) * 2.0**-64
    radius, angle = (-2 * above_zero.log()).sqrt(), words[..., 2::4] * (2 * math.pi * 2.0**-32)
    both = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)[..., :count]
    return both.reshape(*both.shape[:-1], *shape)


def permutation(
    keys: Tensor,
    count: int,
    stream: int | Tensor = 0,
    valid: Tensor | None = None,
    draw: Callable[[Tensor, int, int | Tensor], Tensor] = philox,
) -> Tensor:
    """Shuffle ``0 .. count - 1`` for each key: a tensor ``[..., count]``.

    With ``valid``, a tensor of lengths that broadcasts to ``[..., 1]``, each row begins with the shuffle of its own
    shorter range, the one that it would have got alone, so that clients of unequal size are shuffled in one call.
    ``draw`` may be :func:`philox_at_once` outside of training steps.
    """
    words = draw(keys, 2 * count, stream)[..., : 2 * count]
    order = (words[..., 0::2] << 31) | (words[..., 1::2] >> 1)
    if valid is not None:
        beyond = torch.arange(count, device=keys.device) >= valid
        order = order.masked_fill(beyond, torch.iinfo(torch.int64).max)
    return torch.argsort(order, dim=-1, stable=True)
