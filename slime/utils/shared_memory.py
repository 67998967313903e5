"""The space of ``/dev/shm``, which engines, trainers and Ray share: who writes to it when it is full ends by SIGBUS."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

DIRECTORY = Path("/dev/shm")
NEEDED_BYTES = 16 << 20
"""With less no engine starts."""
SCARCE_BYTES = 64 << 20
_BUS_ERROR = re.compile(r"\bSIGBUS\b|\bbus error\b|exit ?code:? -7\b|\bsignal 7\b", re.IGNORECASE)
WAY_OUT = (
    "free some of it (files that ended processes left there), or give it more: docker run --shm-size=8g, "
    "mount -o remount,size=8g /dev/shm"
)


def free_bytes() -> int | None:
    """Return what is free; None where there is no such file system."""
    try:
        return shutil.disk_usage(DIRECTORY).free
    except OSError:
        return None


def words() -> str:
    """Return size and free space in words."""
    try:
        usage = shutil.disk_usage(DIRECTORY)
    except OSError as e:
        return f"{DIRECTORY} cannot be looked at: {e.strerror or e}"
    return f"{DIRECTORY} has {usage.free >> 20} of {usage.total >> 20} MiB free"


def hint(said: str) -> str:
    """Return a line to append to the failure ``said`` of a process here, where shared memory may be its cause."""
    ended_so = _BUS_ERROR.search(said) is not None
    free = free_bytes()
    scarce = free is not None and free < NEEDED_BYTES
    if not ended_so and not scarce:
        return ""
    what = "A bus error (signal 7) is what writing to shared memory ends in when it is full" if ended_so else "Look at"
    return f"\n{what}{': ' if ended_so else ' shared memory: '}{words()}; {WAY_OUT}"
