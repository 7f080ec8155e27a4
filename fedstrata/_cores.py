"""How many cores this process may use: those of its affinity mask, and no more than its control groups pay for.

A container with a quota of CPU time sees every core of its machine, and libraries start a thread on each. These then
wait for each other until the next period: what takes a microsecond takes a tenth of a second.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

_UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_CPU_CONTROLLER = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu")


def threads_by_quota(root: Path = Path("/"), allowed: Collection[int] | None = None) -> int | None:
    """Tell how many threads a quota of CPU time leaves; none where there is no quota, or one for every core.

    ``root`` is the root of the file system, and ``allowed`` the numbers of the processors of the affinity mask.
    """
    quota = cpu_quota(root)
    if quota is None:
        return None
    threads = max(1, math.ceil(quota - 1e-6))
    return threads if threads < physical_cores(root, allowed) else None


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Read how many cores' time the control groups of this process (versions 1 and 2) have; none: as much as there is.

    The smallest of the group and of all groups around it counts. A container may see its own group as the root.
    """
    quotas = [quota for folder in _folders(root) for quota in (_unified(folder), _legacy(folder)) if quota is not None]
    return min(quotas, default=None)


def physical_cores(root: Path = Path("/"), allowed: Collection[int] | None = None) -> int:
    """Count the cores of the processors of the affinity mask: those that share one, as hyper-threads do, count once."""
    return len({_siblings(root, processor) for processor in (affinity() if allowed is None else allowed)})


def affinity() -> Collection[int]:
    """List the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _folders(root: Path) -> Iterator[Path]:
    """List the folders in which limits of this process may stand."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not group.startswith("/") or ".." in group:
            continue
        mounts = _CPU_CONTROLLER if "cpu" in controllers.split(",") else _UNIFIED if number == "0" else ()
        inner = PurePosixPath(group)
        for mount in mounts:
            for level in (inner, *inner.parents):
                yield root / mount / level.relative_to("/")


def _unified(folder: Path) -> float | None:
    """Read version 2: the microseconds of a period, or ``max``, and the length of the period."""
    limit, _, period = (_read(folder / "cpu.max") or "").strip().partition(" ")
    return _ratio(limit, period or "100000")


def _legacy(folder: Path) -> float | None:
    """Read version 1: microseconds, or -1, and the length of the period, in a file each."""
    limit, period = (_read(folder / f"cpu.cfs_{what}_us") or "" for what in ("quota", "period"))
    return _ratio(limit, period)


def _ratio(limit: str, period: str) -> float | None:
    try:
        time, length = int(limit), int(period)
    except ValueError:
        return None
    return time / length if time > 0 and length > 0 else None


def _siblings(root: Path, processor: int) -> str:
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    return (_read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list") or str(processor)).strip()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
