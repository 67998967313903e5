"""Files of one engine that must not outlive it: temporary ones, secrets, shared memory."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

PREFIX = "slime-engine-"
SHARED_MEMORY = Path("/dev/shm")
"""The engine's files there begin with the name of its directory (``engine_plugin/slime_engine_plugin/files.py``)."""
OWNER = "owner.lock"
SWEEP_AGE_S = 60.0
"""An engine may live some seconds longer than its owner."""


class Scratch:
    """A private directory. ``path`` is short: it holds Unix sockets, whose paths may have at most 107 characters.

    It is removed by :meth:`remove`, or when this process ends. What a killed process left is removed by the next one
    that makes a directory.
    """

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Held until this process ends: by it others see that the directory is in use.
        lock = os.open(self.path / OWNER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)
        self._secrets: Path | None = None

    def write_secrets(self, fields: Mapping[str, str]) -> Path:
        """Write SGLang options to a YAML file that only this user can read, and return its path."""
        self._secrets = self.path / "secrets.yaml"
        fd = os.open(self._secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.writelines(f"{name.replace('_', '-')}: {json.dumps(value)}\n" for name, value in fields.items())
        return self._secrets

    def remove_secrets(self) -> None:
        """The server has read its options: remove the file."""
        if self._secrets is not None:
            self._secrets.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything; the engine must have ended. Calling it again does nothing."""
        self._finalizer()


def sweep(directory: Path) -> None:
    """Remove what killed owners have left in ``directory``."""
    for path in directory.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / OWNER, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or being made or removed at this moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_old = time.time() - path.stat().st_mtime > SWEEP_AGE_S
        except OSError:
            os.close(lock)
            continue  # its owner is alive
        if is_old:
            _remove(path, lock)
        else:
            os.close(lock)


def _remove(directory: Path, lock: int) -> None:
    for path in SHARED_MEMORY.glob(f"{directory.name}-*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def make_private(log_path: Path) -> None:
    """Create the log if need be and let only this user read it."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    os.chmod(log_path, 0o600)
