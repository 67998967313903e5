"""Files of one engine that must not outlive it: temporary ones, secrets, shared memory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

_SHARED_MEMORY = re.compile(r"/dev/shm/sglang_\S+")


class Scratch:
    """A private directory. ``path`` is short: it holds Unix sockets, whose paths may have at most 107 characters."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="slime-engine-"))
        self._secrets: Path | None = None
        self._shared_memory: list[Path] = []
        # Also when the process ends without stopping its engines.
        self._finalizer = weakref.finalize(self, _remove, self.path, self._shared_memory)

    def write_secrets(self, fields: Mapping[str, str]) -> Path:
        """Write SGLang options to a YAML file that only this user can read, and return its path."""
        self._secrets = self.path / "secrets.yaml"
        fd = os.open(self._secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.writelines(f'{name.replace("_", "-")}: "{value}"\n' for name, value in fields.items())
        return self._secrets

    def note_ready(self, pid: int) -> None:
        """The server ``pid`` has read its options: remove the secrets, remember the shared memory it has mapped."""
        if self._secrets is not None:
            self._secrets.unlink(missing_ok=True)
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return  # the server has just ended: the caller sees that from the process itself
        self._shared_memory[:] = sorted({Path(name) for name in _SHARED_MEMORY.findall(maps)})

    def remove(self) -> None:
        """Remove everything; the engine must have ended."""
        self._finalizer()


def _remove(directory: Path, files: list[Path]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for path in files:
        path.unlink(missing_ok=True)


def make_private(log_path: Path) -> None:
    """Create the log if need be and let only this user read it."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    os.chmod(log_path, 0o600)
