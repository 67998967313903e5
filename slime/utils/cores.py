"""Number of cores that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return the cores that this process is bound to, or fewer where its container has a smaller quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for read in (_quota_v2, _quota_v1):
        with contextlib.suppress(OSError, ValueError):  # the files of the other version, or "max": no quota
            quota, period = read(cgroup)
            if quota > 0:
                cores = min(cores, quota // period)
    return max(1, cores)


def _quota_v2(cgroup: Path) -> tuple[int, int]:
    quota, period = (cgroup / "cpu.max").read_text().split()
    return int(quota), int(period)


def _quota_v1(cgroup: Path) -> tuple[int, int]:
    quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota), int(period)
