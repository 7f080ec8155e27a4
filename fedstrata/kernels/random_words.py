"""Random words: ten rounds of a few operations each, more than a hundred small launches in PyTorch, and one here."""

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import on_device_of

_BLOCK = 1024


@triton.jit
def four_words(key0, key1, counter, stream):  # type: ignore[no-untyped-def]
    """Draw the words of one counter; all arguments are of type uint32."""
    nothing = (counter ^ counter) + (key0 ^ key0)
    key0, key1 = key0 + nothing, key1 + nothing
    word0, word1, word2, word3 = counter + nothing, nothing, stream + nothing, nothing
    first = nothing + 0xD2511F53
    second = nothing + 0xCD9E8D57
    for _ in language.static_range(10):
        high0, low0 = language.umulhi(word0, first), word0 * first
        high1, low1 = language.umulhi(word2, second), word2 * second
        word0, word1 = high1 ^ word1 ^ key0, low1
        word2, word3 = high0 ^ word3 ^ key1, low0
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return word0, word1, word2, word3


@triton.jit  # type: ignore[untyped-decorator]
def _philox(keys, streams, words, blocks, BLOCK: constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = language.program_id(0).to(language.int64)
    place = language.program_id(1) * BLOCK + language.arange(0, BLOCK)
    inside = place < blocks
    key0 = language.load(keys + 2 * row).to(language.uint32)
    key1 = language.load(keys + 2 * row + 1).to(language.uint32)
    stream = language.load(streams + row).to(language.uint32)
    word0, word1, word2, word3 = four_words(key0, key1, place.to(language.uint32), stream)
    target = words + (row * blocks + place) * 4
    language.store(target, word0.to(language.int64), mask=inside)
    language.store(target + 1, word1.to(language.int64), mask=inside)
    language.store(target + 2, word2.to(language.int64), mask=inside)
    language.store(target + 3, word3.to(language.int64), mask=inside)


def philox_words(keys: Tensor, streams: Tensor, blocks: int) -> Tensor:
    """Draw ``[n, 4 * blocks]`` words of 32 bits, as int64, for keys ``[n, 2]`` and streams ``[n]``."""
    words = torch.empty(len(keys), 4 * blocks, dtype=torch.int64, device=keys.device)
    block = min(_BLOCK, triton.next_power_of_2(blocks))
    with on_device_of(keys):
        _philox[(len(keys), triton.cdiv(blocks, block))](keys.contiguous(), streams.contiguous(), words, blocks, block)
    return words
