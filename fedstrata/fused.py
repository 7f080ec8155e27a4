"""A norm, an addition, a rectifier and a pooling, said as one, so that an engine may compute them as one.

Models call :func:`norm_rectified`. By itself it calls the modules one after another. Inside of :func:`fusing` what
follows is announced before the norm is called; who answers for ``F.batch_norm`` or ``F.group_norm`` there may take
it (:func:`take_tail`) and return the final outputs. Whatever is not taken is computed as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedstrata.private_torch import is_watched

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Windows of which the largest number is taken: their size, how far they move, and how far beyond the edges."""

    kernel: Pair
    stride: Pair
    padding: Pair

    def count(self, images: Sequence[int]) -> Pair:
        """Tell how many there are in images ``[..., height, width]``, down and across."""
        down, across = (
            (length + 2 * padding - size) // stride + 1
            for length, padding, size, stride in zip(images[-2:], self.padding, self.kernel, self.stride, strict=True)
        )
        return down, across

    @property
    def overlap(self) -> bool:
        """Whether a place may lie in several."""
        return any(stride < size for stride, size in zip(self.stride, self.kernel, strict=True))


@dataclass
class Tail:
    """What follows a norm: perhaps an addition, then a rectifier, then perhaps max-pooling."""

    added: Tensor | None
    pooled: Windows | None = None
    taken: bool = False


_fusing: ContextVar[bool] = ContextVar("fusing", default=False)
_tail: ContextVar[Tail | None] = ContextVar("tail", default=None)
_NORMS = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm))


def norm_rectified(
    norm: nn.Module,
    rectifier: nn.Module,
    inputs: Tensor,
    shortcut: Callable[[], Tensor] | None = None,
    pool: nn.Module | None = None,
) -> Tensor:
    """Compute ``pool(rectifier(norm(inputs) + shortcut()))``.

    The shortcut is called after the norm, as the sum is written; only where they are fused it is called before.
    """
    outputs: Tensor
    windows = None if pool is None or shortcut is not None else _windows(pool)
    if _fusing.get() and type(norm) in _NORMS and type(rectifier) is nn.ReLU and not is_watched(norm):
        added = None if shortcut is None else shortcut()
        if added is None or added.shape == inputs.shape:
            tail = Tail(added, windows)
            before = _tail.set(tail)
            try:
                outputs = norm(inputs)
            finally:
                _tail.reset(before)
            if tail.taken:
                return outputs if pool is None or windows is not None else pool(outputs)
        else:
            outputs = norm(inputs)
    else:
        outputs = norm(inputs)
        added = None if shortcut is None else shortcut()
    outputs = rectifier(outputs if added is None else outputs + added)
    return outputs if pool is None else pool(outputs)


def _windows(pool: nn.Module) -> Windows | None:
    """Tell the windows of a pooling, if they are plain ones and nobody looks at what it returns."""
    if type(pool) is not nn.MaxPool2d or is_watched(pool) or pool.ceil_mode or pool.return_indices:
        return None
    if pair(pool.dilation) != (1, 1):
        return None
    return Windows(pair(pool.kernel_size), pair(pool.stride), pair(pool.padding))


def pair(size: Any) -> Pair:
    """Read a size that is given once for both axes, or for each."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


@contextmanager
def fusing(allowed: bool) -> Iterator[None]:
    """Let norms take along what follows them, or not."""
    before = _fusing.set(allowed)
    try:
        yield
    finally:
        _fusing.reset(before)


def take_tail() -> Tail | None:
    """Take what follows the norm that is being computed, if anything does: whoever takes it computes it."""
    tail = _tail.get()
    if tail is not None:
        tail.taken = True
        _tail.set(None)
    return tail
