"""One reward worker as its owner sees it: a process with limits, started, asked and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from slime.rollout.rm_hub.frames import LENGTH, job_frame, read_reply

START_LIMIT_S = 120.0
STOP_GRACE_S = 5.0
"""How much later than its own limit a worker is killed that did not end by itself."""
WALL_PER_CPU = 6.0
STDERR_BYTES = 8192


@dataclass(frozen=True)
class WorkerLimits:
    """What one job may take. The wall-clock limit is wider: a busy machine must not change rewards."""

    cpu_s: float = 5.0
    memory_bytes: int = 4 << 30

    @property
    def wall_s(self) -> float:
        return WALL_PER_CPU * self.cpu_s


class WorkerEnded(Exception):
    """The worker has ended, with this exit code (None: it was killed for its silence)."""

    def __init__(self, code: int | None, last_words: str) -> None:
        self.code = code
        self.last_words = last_words


class Worker:
    """The owner's side of one worker process."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        python_path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        numbers = [os.getpid(), limits.cpu_s, limits.wall_s, limits.memory_bytes]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slime.rollout.rm_hub.worker_main", *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._stdin, self._stdout, self._stderr = (
            pipe.fileno() for pipe in (self.process.stdin, self.process.stdout, self.process.stderr) if pipe
        )
        self._received, self._last_words = bytearray(), b""
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        try:
            self.exchange(job_frame([root, *sys.path]), START_LIMIT_S)
        except BaseException:
            self.kill()
            raise

    def exchange(self, message: bytes, limit_s: float) -> Any:
        """Send a framed message and return the reply. Raises WorkerEnded when none comes within ``limit_s``."""
        deadline = time.monotonic() + limit_s
        self._last_words = b""
        self._send(message, deadline)
        head = self._receive(LENGTH.size, deadline)
        return read_reply(self._receive(LENGTH.unpack(head)[0], deadline))

    def _send(self, message: bytes, deadline: float) -> None:
        view = memoryview(message)
        while view:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _receive(self, size: int, deadline: float) -> bytes:
        while len(self._received) < size:
            self._wait(self._stdout, select.POLLIN, deadline)
            data = os.read(self._stdout, 1 << 20)
            if not data:
                raise self._ended()
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        """Wait until ``fd`` is ready, taking in what the worker writes to standard error."""
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._stderr, select.POLLIN)
        while True:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000.0))
            if not ready:
                self.kill()
                raise WorkerEnded(None, self._words())
            if self._stderr in ready and not self._hear():
                poll.unregister(self._stderr)
            if fd in ready:
                return

    def _hear(self) -> bool:
        """Take in standard error; False when it has ended."""
        try:
            data = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return True
        self._last_words = (self._last_words + data)[-STDERR_BYTES:]
        return bool(data)

    def _words(self) -> str:
        return self._last_words.decode(errors="replace").strip()

    def _ended(self) -> WorkerEnded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)
        while self._hear() and select.select([self._stderr], [], [], 0)[0]:
            pass
        self.kill()
        return WorkerEnded(self.process.returncode, self._words())

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the worker, and what it may have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
