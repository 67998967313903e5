"""Commands and files of a sandbox through its shell: files are read and written with the rights that commands have."""

from __future__ import annotations

import abc
import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path

FILE_TIMEOUT_S = 120.0
READ_BYTES = 32 << 20


class ShellSandbox(abc.ABC):
    """``exec``, ``write_file`` and ``read_file`` of a sandbox whose shell can be given standard input."""

    @property
    @abc.abstractmethod
    def sandbox_id(self) -> str:
        """The name of this sandbox in messages; empty outside the ``async with`` block."""

    @abc.abstractmethod
    async def _shell(
        self,
        cmd: str,
        *,
        user: str,
        env: Mapping[str, str],
        timeout: float,
        stdin: bytes = b"",
        output_bytes: int | None = None,
    ) -> tuple[int, str, str]:
        """Run ``cmd``; return (exit code, output, errors), cut at ``output_bytes`` in place of the usual bound."""

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> tuple[int, str, str]:
        """Run ``cmd`` with bash in ``/workspace``; see ``slime.agent.sandbox.Sandbox``. Raises TimeoutError after
        ``timeout`` s, when the processes that it has started are killed."""
        code, out, err = await self._shell(cmd, user=user, env=env or {}, timeout=timeout)
        if check and code != 0:
            raise RuntimeError(f"exit code {code} in sandbox {self.sandbox_id} of {cmd}: {(err or out)[-2000:]}")
        return code, out, err

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write text, bytes, or the file of this machine that a Path names; directories are made. Raises OSError."""
        data = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        data = self._written(data.encode() if isinstance(data, str) else data)
        folder, path = shlex.quote(str(Path(sandbox_path).parent)), shlex.quote(sandbox_path)
        cmd = f"{{ [ -d {folder} ] || mkdir -p {folder}; }} && cat > {path}"
        code, _, err = await self._shell(cmd, user=user, env={}, timeout=FILE_TIMEOUT_S, stdin=data)
        if code != 0:
            raise OSError(f"{sandbox_path} could not be written in the sandbox: {err.strip()[-500:]}")

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file. Raises OSError."""
        path, most = shlex.quote(sandbox_path), 2 * READ_BYTES
        cmd = f"head -c {READ_BYTES + 1} < {path}"
        code, out, err = await self._shell(cmd, user=user, env={}, timeout=FILE_TIMEOUT_S, output_bytes=most)
        if code != 0:
            raise OSError(f"{sandbox_path} could not be read in the sandbox: {err.strip()[-500:]}")
        if len(out.encode()) > READ_BYTES:
            raise OSError(f"{sandbox_path} has more than {READ_BYTES} bytes; read a part of it with `head` or `tail`")
        return out

    def _written(self, content: bytes) -> bytes:
        """Return what is written for ``content``."""
        return content
