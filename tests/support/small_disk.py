"""Disks of a few kilobytes: a tmpfs in a mount namespace that no other process sees."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def missing() -> str | None:
    """Return why a disk cannot be mounted here, or None."""
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, timeout=30
    )
    return None if tried.returncode == 0 else f"needs the right to mount: {tried.stderr.strip()}"


def command(folder: Path, size: str, *words: str, fill: bool = False) -> list[str]:
    """Return the command that runs ``words`` where ``folder`` is a disk of ``size`` (``64k``), full with ``fill``."""
    full = 'dd if=/dev/zero of="$0/filler" bs=4k 2>/dev/null;' if fill else ""
    script = f'mount -t tmpfs -o size={size},mode=777 none "$0" || exit 99; {full} exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(folder), *words]


def run(folder: Path, size: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python ``code`` where ``folder`` is an empty disk of ``size``."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        command(folder, size, sys.executable, "-c", code, str(folder), *arguments),
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
