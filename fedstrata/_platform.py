"""Settings that must stand before torch is imported; :mod:`fedstrata` imports this first.

Each is a default: what the user has set in the environment wins.
"""

from __future__ import annotations

import os

DEFAULTS = {
    # Without binding, two busy threads may share one core for seconds, and run many times slower at random.
    "OMP_PROC_BIND": "true",
    "OMP_PLACES": "cores",
    # Some virtual machines advertise AMX but cannot run it: a bf16 product then kills the interpreter.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    # Deterministic matrix products on CUDA need a fixed workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
