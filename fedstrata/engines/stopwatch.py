"""How long the server takes to make the next model of the replies, apart from all else in a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the stretches of a round that are measured, without holding the round up.

    On a GPU each stretch lies between two events in the stream of work, whose times are read when the round is over
    and the device has been waited for anyway: a round with a stopwatch does what it does without. What is measured is
    then the time of the device, from the end of the work before to the end of the stretch. Elsewhere it is the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what is done inside."""
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """Return the seconds so far; on a GPU only once the device has been waited for."""
        return self._seconds + sum(float(begin.elapsed_time(end)) for begin, end in self._events) / 1000
