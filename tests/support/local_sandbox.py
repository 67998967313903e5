"""A sandbox that is a directory of this machine: commands of unprivileged users really run, those of root do not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self


class LocalSandbox:
    """``/home/agent``, ``/tmp/.`` and ``/repo`` are below ``root``. What root would do is kept in ``root_commands`` and
    answered from ``answers``: the reply of the first key that the command contains, or success."""

    def __init__(self, root: Path, answers: dict[str, tuple[int, str, str]] | None = None) -> None:
        self.root = root
        self.answers = answers or {}
        self.root_commands: list[str] = []
        self.commands: list[str] = []
        self.written: dict[str, bytes] = {}
        for name in ("bin", "home", "tmp", "repo"):
            (root / name).mkdir(exist_ok=True)

    @property
    def sandbox_id(self) -> str:
        return "local"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    def here(self, text: str) -> str:
        """``text`` with the sandbox's paths replaced by those of this machine."""
        for path, name in (("/home/agent", "home"), ("/tmp/.", "tmp/."), ("/repo", "repo")):
            text = text.replace(path, f"{self.root}/{name}")
        return text

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
        if user == "root":
            self.root_commands.append(cmd)
            return next((reply for key, reply in self.answers.items() if key in cmd), (0, "", ""))
        self.commands.append(cmd)
        variables = {**os.environ, **{k: self.here(v) if k == "HOME" else v for k, v in (env or {}).items()}}
        variables["PATH"] = f"{self.root}/bin:{variables['PATH']}"
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", self.here(cmd), env=variables, cwd=self.root, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), timeout)
        assert process.returncode == 0 or not check, err.decode()
        return process.returncode or 0, out.decode(), err.decode()

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        data = data.encode() if isinstance(data, str) else data
        self.written[sandbox_path] = data
        if user != "root":
            Path(self.here(sandbox_path)).write_text(self.here(data.decode()))

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        return Path(self.here(sandbox_path)).read_text()

    def add_command(self, name: str, script: str) -> None:
        """Put a shell script on the path."""
        file = self.root / "bin" / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)
