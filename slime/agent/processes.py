"""Processes that sandboxes start: bounded time and output, and an end for all that they leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

DRAIN_S = 0.5
"""Time that output is still read after a command has ended: a process in its background may hold the pipe open."""
END_S = 20.0
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Limits:
    """The limits of the commands of a sandbox.

    output_bytes is what is kept of a command's output, and of its errors; file_bytes is per file. In a local sandbox
    cpu_s and memory_bytes (address space) are per process, and processes are of the whole sandbox where slime runs as
    root, else more than the user has already when a command starts. In a container memory_bytes and processes are of
    all its processes, cpus are cores, and cpu_s is per process.
    """

    cpu_s: int = 3600
    cpus: float = 2.0
    memory_bytes: int = 16 << 30
    file_bytes: int = 1 << 30
    processes: int = 512
    output_bytes: int = 1 << 20


class _Output:
    """The first ``limit`` bytes of a pipe; the rest is read, so that the writer is not blocked, and counted."""

    def __init__(self, limit: int) -> None:
        self.limit, self.kept, self.left_out = limit, bytearray(), 0

    async def read(self, pipe: IO[bytes]) -> None:
        """Read to the end, or until this is cancelled; the pipe is closed then."""
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        try:
            while chunk := await stream.read(_CHUNK):
                room = self.limit - len(self.kept)
                self.kept += chunk[:room]
                self.left_out += max(len(chunk) - room, 0)
        finally:
            transport.close()

    def text(self) -> str:
        note = f"\n[{self.left_out} bytes left out]\n" if self.left_out else ""
        return self.kept.decode(errors="replace") + note


async def run_captured(
    argv: Sequence[str],
    *,
    timeout: float,
    output_bytes: int,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    uid: int | None = None,
) -> tuple[int, str, str]:
    """Run ``argv`` in a new session; return (exit code, output, errors), both cut at ``output_bytes``.

    ``uid`` is the user and group to become, for a caller that is root. Raises TimeoutError after ``timeout`` s; then,
    and when it is cancelled, the processes of the session are killed. Not ``asyncio.subprocess``, which waits for all
    that hold the pipes open, also when they have outlived the command.
    """
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            argv, env=None if env is None else dict(env), stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, user=uid, group=uid, extra_groups=None if uid is None else [], cwd="/",
        )  # fmt: skip
    outputs = [_Output(output_bytes), _Output(output_bytes)]
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
    readers = [asyncio.ensure_future(out.read(pipe)) for out, pipe in zip(outputs, pipes, strict=True)]
    try:
        async with asyncio.timeout(timeout):
            await _ended(process.pid)
        await asyncio.wait(readers, timeout=DRAIN_S)
    finally:
        try:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                await _ended(process.pid)
            process.wait()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    out, err = (output.text() for output in outputs)
    return process.returncode, out, err


async def _ended(pid: int) -> None:
    """Return when the child ``pid``, which no one has waited for, has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    handle = os.pidfd_open(pid)
    try:
        loop.add_reader(handle, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def pids_where(found: Callable[[int], bool]) -> Iterator[int]:
    """Yield the ids of processes, this one excepted, for which ``found`` is true; those that are gone are not."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if found(int(entry)) and Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                yield int(entry)
        except OSError:
            continue


def has_variable(pid: int, prefix: str) -> bool:
    """True when an entry of the environment that process ``pid`` was started with begins with ``prefix``."""
    with open(f"/proc/{pid}/environ", "rb") as environment:
        return b"\0" + prefix.encode() in b"\0" + environment.read()


def start_time(pid: int) -> str:
    """Return when process ``pid`` was started, in clock ticks since boot; with the id it names a process for good.

    Raises OSError when there is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def end_all(found: Callable[[int], bool]) -> None:
    """Kill the processes for which ``found`` is true until there is none: they may be starting others meanwhile.

    They are stopped first, so that a process whose children die does not replace them. Raises RuntimeError, naming
    some, for those that are there after 20 s.
    """
    deadline = time.monotonic() + END_S
    while pids := list(pids_where(found)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(pids)} processes of a sandbox do not end: {pids[:8]}")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
        time.sleep(0.01)
