"""How much memory a piece of work takes at its peak, beyond what was taken before it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What Linux takes for: the peak of the resident memory is what it is now."""


@dataclass
class Peak:
    """What was taken at the peak, in bytes; zero where this machine does not tell."""

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak meanwhile: on a GPU of PyTorch's memory there, else of this process.

    Memory that the process holds free and uses again does not show, so that small pieces of work may tell zero.
    """
    peak = Peak()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = max(0, torch.cuda.max_memory_allocated(device) - before)
        return
    before = _begin()
    yield peak
    peak.bytes = max(0, _peak() - before)


def _begin() -> int:
    """Forget the peak so far, where that can be done, and tell what is taken now."""
    try:
        _RESET.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return _peak()
    return _resident("VmRSS")


def _peak() -> int:
    try:
        return _resident("VmHWM")
    except OSError:
        return _largest_so_far()


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0


def _largest_so_far() -> int:
    """Tell the largest resident memory of this process so far, on systems without files that tell it."""
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) if sys.platform == "darwin" else int(most) * 1024
