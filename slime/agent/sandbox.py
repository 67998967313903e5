"""Isolated machines for agents: their interface, and long commands that survive a lost connection."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from slime.agent.docker_sandbox import DockerSandbox
from slime.agent.e2b_sandbox import E2BSandbox
from slime.agent.local_sandbox import LocalSandbox
from slime.agent.processes import Limits

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED", "DockerSandbox", "E2BSandbox", "Limits", "LocalSandbox", "Sandbox",
    "ensure_agent_user", "exec_and_wait",
]  # fmt: skip

EXIT_TIME_BUDGET_EXCEEDED = -1
AGENT_USER = "agent"
FIRST_POLL_S, POLL_S = 0.1, 5.0
"""The first wait before a detached command is polled again, and the longest: each is twice the one before."""
TAIL_BYTES = 512
_TAG = re.compile(r"[A-Za-z0-9._-]+")


@runtime_checkable
class Sandbox(Protocol):
    """A machine with users, files and a shell; an asynchronous context manager that creates and destroys it."""

    @property
    def sandbox_id(self) -> str:
        """The name of this machine at its provider."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> Any: ...

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
        """Run ``cmd`` in a shell; return (exit code, output, errors). With ``check`` another code than 0 raises
        RuntimeError; a command that is not ``idempotent`` is never run again after a lost connection."""
        ...

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write text, bytes, or the file of this machine that a Path names."""

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file."""
        ...


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run ``cmd`` detached, however long it takes, and ask whether it has ended: soon at first, then every 5 s.

    Returns (exit code, output): the whole output with ``want_output``, else the last 512 bytes of a command that
    failed. One that is not done after ``time_budget_sec`` is killed and has the exit code -1
    (``EXIT_TIME_BUDGET_EXCEEDED``). ``tag`` names its files, ``/tmp/.<tag>.*``; output goes to ``out_file`` or there.
    """
    if not _TAG.fullmatch(tag):
        raise ValueError(f"tag {tag!r} names files: only letters, digits, dots, dashes and underscores can be in it")
    base = f"/tmp/.{tag}"
    out = out_file or f"{base}.out"
    lines = ["#!/bin/bash", *([f"cd {shlex.quote(workdir)} || exit 1"] if workdir else []), cmd, ""]
    await sb.write_file(f"{base}.sh", "\n".join(lines), user=user)
    stale = " ".join(shlex.quote(path) for path in (f"{base}.lock", f"{base}.pid", f"{base}.done", out))
    await sb.exec(f"rm -rf {stale}", user=user, check=True)
    # A spawn whose answer is lost is tried again: the directory that only one can make keeps it from running twice.
    run = f"bash {base}.sh; echo $? > {base}.code; mv {base}.code {base}.done"
    spawn = f"setsid nohup bash -c {shlex.quote(run)} > {shlex.quote(out)} 2>&1 < /dev/null"  # in a new session
    detached = f"{{ {spawn} & echo $! > {base}.pid; }}"
    await sb.exec(f"mkdir {base}.lock 2>/dev/null && {detached}; true", user=user, env=env, check=True)
    code = await _poll(sb, f"{base}.done", user, time_budget_sec)
    if code is None:
        # the session, and its leader in case it has none yet
        await sb.exec(f"p=$(cat {base}.pid) && kill -KILL -- -$p $p 2>/dev/null; true", user=user)
        code = EXIT_TIME_BUDGET_EXCEEDED
    if want_output:
        return code, await sb.read_file(out, user=user)
    if code == 0:
        return code, ""
    _, tail, _ = await sb.exec(f"tail -c {TAIL_BYTES} {shlex.quote(out)} 2>/dev/null; true", user=user)
    return code, tail


async def _poll(sb: Sandbox, done: str, user: str, budget: float) -> int | None:
    """Return the exit code in ``done`` once it is written, None when the budget is spent."""
    deadline, wait = time.monotonic() + budget, FIRST_POLL_S
    while True:
        left = deadline - time.monotonic()
        await asyncio.sleep(max(0.0, min(wait, left)))
        _, text, _ = await sb.exec(f"cat {done} 2>/dev/null; true", user=user)
        if text.strip():
            return int(text)
        if left <= wait:
            return None
        wait = min(2 * wait, POLL_S)


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """Make a user ``agent`` without privileges, who owns ``workdir``: agents refuse to work unattended as root.

    Git is configured to trust repositories of other users: those of an image often belong to root. A sandbox with a
    method ``prepare_agent(workdir)`` does it in its own way.
    """
    prepare = getattr(sb, "prepare_agent", None)
    if prepare is not None:
        await prepare(workdir)
        return
    where = shlex.quote(workdir)
    user = f"id -u {AGENT_USER} >/dev/null 2>&1 || useradd --create-home --shell /bin/bash {AGENT_USER}"
    own = f"mkdir -p {where} && chown -R {AGENT_USER}: {where}"
    trusted = "git config --system --get-all safe.directory | grep -Fqx '*'"
    trust = f"! command -v git >/dev/null || {trusted} || git config --system --add safe.directory '*'"
    await sb.exec(f"({user}) && {own} && ({trust})", check=True, timeout=600)
