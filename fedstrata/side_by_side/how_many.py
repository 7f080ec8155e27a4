"""How many runs at a time."""

from __future__ import annotations

import math

from fedstrata import _platform
from fedstrata._cores import cpu_quota, physical_cores
from fedstrata.errors import FedStrataError

AUTO = "auto"
MOST_ON_A_GPU = 4
"""A run of few clients keeps a GPU busy for a third of the time, or less."""
MOST_ON_A_CPU = 8
"""Each takes some hundred megabytes before its first client."""
_MEMORY_ON_A_GPU = 2**30
"""What a run takes there before its first client, and some for these."""


def read_jobs(given: int | str) -> int | None:
    """Read the number of runs at a time; none for ``auto``.

    >>> read_jobs("4"), read_jobs(2), read_jobs("auto")
    (4, 2, None)
    """
    if given == AUTO:
        return None
    try:
        number = int(given)
    except ValueError:
        number = 0
    if number < 1 or isinstance(given, bool | float):
        raise FedStrataError(f"'{given}' is no number of runs at a time; give a whole number from 1 on, or '{AUTO}'.")
    return number


def as_many_as_fit(device: str, free: float, threads: str | None, cores: int) -> int:
    """Choose how many runs at a time: a core for each at least, or as many as the threads that the user gives to each.

    ``free`` is the memory for clients on the device, in bytes.

    >>> as_many_as_fit("cuda", 90e9, None, 16), as_many_as_fit("cuda", 3e9, None, 16)
    (4, 2)
    >>> as_many_as_fit("cpu", 4e9, None, 2), as_many_as_fit("cpu", 4e9, "4", 16), as_many_as_fit("cpu", 4e9, "2", 2)
    (2, 4, 1)
    """
    if device == "cuda":
        return max(1, min(MOST_ON_A_GPU, cores, int(free // _MEMORY_ON_A_GPU)))
    each = int(threads) if threads is not None and threads.isdecimal() else 1
    return max(1, min(MOST_ON_A_CPU, cores // max(1, each)))


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity mask and its quota of CPU time."""
    quota = cpu_quota()
    cores = physical_cores(allowed=_platform.PROCESSORS)
    return cores if quota is None else min(cores, max(1, math.ceil(quota - 1e-6)))
