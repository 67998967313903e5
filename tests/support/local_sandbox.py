"""A local sandbox in which commands of the agent run, and those of root, which would change this machine, do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from slime.agent.sandbox import LocalSandbox


class RecordingSandbox(LocalSandbox):
    """Root commands are kept in ``root_commands`` and answered from ``answers``: the reply of the first key that
    the command contains, or success."""

    prepare_agent: Any = None  # users are made by root's commands

    def __init__(self, answers: dict[str, tuple[int, str, str]] | None = None) -> None:
        super().__init__(paths="words")
        self.answers = answers or {}
        self.root_commands: list[str] = []
        self.written: dict[str, bytes] = {}

    @property
    def sandbox_id(self) -> str:
        return "local"

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.path = (self.root / "bin",)
        (self.root / "bin").mkdir(mode=0o755)
        return self

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
        return await super().exec(cmd, user=user, env=env, timeout=timeout, check=check)

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        self.written[sandbox_path] = data.encode() if isinstance(data, str) else data
        if user != "root":
            await super().write_file(sandbox_path, content, user=user)

    def add_command(self, name: str, script: str) -> None:
        """Put a shell script on the path."""
        file = self.root / "bin" / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)
