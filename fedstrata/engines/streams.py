"""The stream beside the usual one on which CUDA graphs are recorded."""

from __future__ import annotations

from functools import cache

import torch


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """Return always the same stream of a GPU.

    Memory that was freed on a stream serves that stream only: graphs that were recorded on streams of their own would
    each keep all that a step needs, even in one pool. Matrix products keep memory for every stream they ever ran on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
