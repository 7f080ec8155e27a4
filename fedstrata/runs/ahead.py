"""Running ahead: the host begins the next round while a GPU still does this one, and reads its numbers later.

A round is a list of work that the host hands to a GPU. If it then waits for the numbers of the round, the GPU has
nothing to do until the next round has been put together. So the numbers of a round are read when the next one has been
handed over: on a stream of their own, which waits for the end of their round and for nothing behind it.

A GPU takes a thousand pieces of work in advance, and then lets the host wait: a host that has handed over a round with
many small pieces at its end is hardly ahead. Reading must be short, therefore. What has to be computed for it, of
layers and of masks, is part of the round; only finished numbers are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from fedstrata.diagnostics import LayerNumbers
from fedstrata.engines.engine import RoundReport
from fedstrata.methods import Server
from fedstrata.stack import Tensors


@dataclass(frozen=True)
class BegunRound:
    """A round that an engine was given to do, and whose numbers are still to be read.

    ``before`` is the server's model before it, and ``view`` what hooks see of the server after it. ``asked`` is how
    many clients were to take part, ``up`` and ``down`` are the bytes of exchanges before it. ``moved`` is what was
    measured of its layers, still on the device. ``began`` is by the clock.
    """

    number: int
    last: bool
    evaluated: bool
    asked: int
    up: int
    down: int
    before: Tensors
    report: RoundReport
    view: Server
    moved: dict[str, LayerNumbers]
    began: float
    end: torch.cuda.Event | None = field(default=None, repr=False)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read its numbers while a later round is under way: what is computed inside waits for this round alone."""
        if self.end is None:
            yield
            return
        stream = _reading_stream(self.view.sizes.device)
        stream.wait_event(self.end)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()  # what was read here may be gone, and its memory used again, after this

    def wait(self) -> float:
        """Wait until it is done; return the time by the clock."""
        if self.end is not None:
            self.end.synchronize()
        return time.perf_counter()


def mark_end(device: torch.device) -> torch.cuda.Event | None:
    """Mark the end of what a GPU was given to do so far."""
    if device.type != "cuda":
        return None
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record(torch.cuda.current_stream(device))
    return end


def on_host(report: RoundReport) -> tuple[dict[str, float], np.ndarray]:
    """Bring what a round reports from the device, all at once: its numbers, and each participant's loss."""
    numbers = {
        "train.loss": report.loss.mean(),
        "train.flops": report.cost.dense.sum(),
        "train.sparse_flops": report.cost.sparse.sum(),
    }
    brought = torch.cat((torch.stack(list(numbers.values())), report.loss)).cpu().numpy()
    return dict(zip(numbers, brought.tolist(), strict=False)), brought[len(numbers) :]


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    """Return always the same stream of a GPU, whose few operations go before those of the round under way."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
