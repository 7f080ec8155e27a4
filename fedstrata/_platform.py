"""Settings that must stand before torch is imported; :mod:`fedstrata` imports this first.

Each is a default: what the user has set in the environment wins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from fedstrata._cores import affinity, physical_cores, threads_by_quota

DEFAULTS = {
    # Some virtual machines advertise AMX but cannot run it: a bf16 product then kills the interpreter.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    # Deterministic matrix products on CUDA need a fixed workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Large tensors are freed and allocated anew in every step, and the system hands out their memory page by page: in
    # pages of 2 MiB that is a sixth of the time of a stacked model of images (docs/performance.md).
    "THP_MEM_ALLOC_ENABLE": "1",
}

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What PyTorch, NumPy and Arrow ask for the number of their threads."""

# Without binding, two busy threads may share one core for seconds, and run many times slower at random. With it,
# several processes of few threads each would all sit on the first cores: who sets the number of threads decides about
# binding too, and where a quota sets it there are more cores than threads, for other containers as well.
THREAD_BINDING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}

CORES: frozenset[int] = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
"""The cores that this process may use; binding leaves the first thread, and those that it starts, with one of them."""


def prepare(environment: MutableMapping[str, str], threads: int | None) -> None:
    """Fill in what the environment does not say; ``threads`` are those that a quota of CPU time leaves, if one does."""
    if not threads_are_chosen(environment):
        chosen = THREAD_BINDING if threads is None else dict.fromkeys(THREADS, str(threads))
        for name, value in chosen.items():
            environment.setdefault(name, value)
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def threads_are_chosen(environment: Mapping[str, str]) -> bool:
    """Tell whether the environment says how many threads there are to be."""
    return any(name in environment for name in THREADS)


def limit_threads(torch: Any, threads: int, own: Collection[int]) -> None:
    """Take fewer threads where PyTorch was imported before, unless somebody has chosen a number not among its ``own``.

    Those are the ones that it may take by itself: one for each core, or for each processor.
    """
    if threads < torch.get_num_threads() in own:
        torch.set_num_threads(threads)


PROCESSORS = frozenset(affinity())
"""The processors that the user lets this process run on: binding ties its first thread to one of them."""
CHOSEN_THREADS = os.environ.get("OMP_NUM_THREADS")
"""How many threads the user wants, where they have said so."""

_threads = threads_by_quota()
if _threads is not None and "torch" in sys.modules and not threads_are_chosen(os.environ):
    limit_threads(sys.modules["torch"], _threads, (physical_cores(), len(affinity())))
prepare(os.environ, _threads)
