"""Settings that must stand before torch is imported; :mod:`fedstrata` imports this first.

Each is a default: what the user has set in the environment wins.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

DEFAULTS = {
    # Some virtual machines advertise AMX but cannot run it: a bf16 product then kills the interpreter.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    # Deterministic matrix products on CUDA need a fixed workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

# Without binding, two busy threads may share one core for seconds, and run many times slower at random. With it,
# several processes of one thread each would all sit on the first core: who sets the number of threads decides about
# binding too.
THREAD_BINDING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}

CORES: frozenset[int] = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())
"""The cores that this process may use; binding leaves the first thread, and those that it starts, with one of them."""


def prepare(environment: MutableMapping[str, str]) -> None:
    """Fill in what the environment does not say."""
    if "OMP_NUM_THREADS" not in environment:
        for name, value in THREAD_BINDING.items():
            environment.setdefault(name, value)
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


prepare(os.environ)
