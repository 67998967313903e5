"""Child processes that cannot outlive their owner, however that ends.

``spawn`` starts a command under a small supervisor: when this process ends, by SIGKILL too, the command and everything
it started (daemons such as ``torch_shm_manager`` included) end within seconds. ``guard_self`` does the same for what a
process that someone else started (a Ray worker) leaves behind, ``start_janitor`` for a whole run on this host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from slime.utils import process_supervisor
from slime.utils.atomic_file import open_private, space_left
from slime.utils.fork_server import ForkedProcess, ForkRequest, ForkServerError, fork
from slime.utils.secrets import public_environment

logger = logging.getLogger(__name__)

START_DEADLINE_S = 60.0
"""For the supervisor to report that it has started its command; milliseconds on an idle machine."""
GUARD_TAG = "SLIME_GUARD_ID"
RUN_TAG = "SLIME_RUN_ID"
KEEP_ENVIRON = {"SPT_NOENV": "1"}
"""setproctitle (which SGLang uses) overwrites what ``/proc/<pid>/environ`` shows unless configured not to."""


class ProcessStartError(RuntimeError):
    """A command could not be started at all."""


class _Supervisor:
    """The owner's side of one supervisor process: ``start(theirs)`` starts it with the other end of a socket pair."""

    def __init__(self, start: Callable[[socket.socket], subprocess.Popen[bytes] | ForkedProcess], name: str) -> None:
        self.name = name
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = start(theirs)
        except BaseException:
            self._socket.close()
            raise
        self._lock = threading.Lock()
        self._buffer = b""
        self._lines: dict[str, str] = {}

    def read(self, wait_s: float = 0.0) -> dict[str, str]:
        """Read what the supervisor has reported (``pid``, ``exit``, ``error``, ``left``), waiting up to ``wait_s``."""
        with self._lock:
            while self._socket.fileno() >= 0 and select.select([self._socket], [], [], wait_s)[0]:
                try:
                    data = self._socket.recv(65536)
                except ConnectionResetError:  # the supervisor has ended without reading our "stop"
                    data = b""
                if not data:
                    break
                self._buffer += data
                *complete, self._buffer = self._buffer.split(b"\n")
                for line in complete:
                    key, _, value = line.decode().partition(" ")
                    self._lines[key] = value
                wait_s = 0.0
            return dict(self._lines)

    def wait_started(self) -> int:
        """Return the command's pid. Raises ProcessStartError when it cannot be executed or the supervisor is silent."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            reported = self.read(0.1)
            if "error" in reported:
                raise ProcessStartError(f"cannot start {self.name}: {reported['error']}")
            if "pid" in reported:
                return int(reported["pid"])
            if self.process.poll() is not None:
                raise ProcessStartError(f"the supervisor of {self.name} exited with {self.process.returncode}")
        self.process.kill()
        raise ProcessStartError(f"the supervisor of {self.name} did not answer within {START_DEADLINE_S:.0f} s")

    def stop(self, grace_s: float) -> None:
        """Ask for the end and wait for it; kill the supervisor (and with it the command) when that does not come."""
        with contextlib.suppress(OSError):
            self._socket.sendall(f"stop {grace_s}\n".encode())
        try:
            self.process.wait(grace_s + 30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10.0)
        self.read()
        self._socket.close()


def _start_supervisor(
    verb: str, argument: str, cmd: Sequence[str], env: Mapping[str, str], log: int, theirs: socket.socket
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -I -S: no site-packages, no PYTHONPATH of the command: nothing slow or strange is imported.
        [sys.executable, "-I", "-S", process_supervisor.__file__]
        + [verb, str(theirs.fileno()), str(os.getpid()), argument, *cmd],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(env),
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )


class GuardedProcess:
    """A running command (see ``spawn``). ``pid`` is the command's own process id, not its supervisor's."""

    def __init__(self, supervisor: _Supervisor, log_path: Path, log_start: int) -> None:
        self.name = supervisor.name
        self.log_path = log_path
        self._log_start = log_start
        self._supervisor = supervisor
        self.pid = supervisor.wait_started()

    def poll(self) -> int | None:
        """Return None while the command runs, else its exit code: negative is the signal that ended it."""
        code = self._supervisor.read().get("exit")
        if code is not None:
            return int(code)
        if self._supervisor.process.poll() is None:
            return None
        # The supervisor has gone: either it reported more just before, or it was killed and its child with it.
        return int(self._supervisor.read().get("exit", -signal.SIGKILL))

    def wait(self, timeout_s: float) -> int:
        """Return the exit code. Raises TimeoutError naming the command when it still runs after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout_s:.0f} s")
            time.sleep(0.02)
        return code

    def stop(self, grace_s: float = 10.0) -> int:
        """End the command and all it started: SIGTERM, SIGKILL after ``grace_s`` seconds. Return its exit code."""
        self._supervisor.stop(grace_s)
        return int(self.poll() or 0)

    def last_lines(self, n: int = 30) -> list[str]:
        """Return the last ``n`` lines that this process (not an earlier one with the same log file) has written."""
        try:
            with open(self.log_path, "rb") as f:
                size = f.seek(0, os.SEEK_END)
                f.seek(max(self._log_start, size - 65536))
                return f.read().decode(errors="replace").splitlines()[-n:]
        except OSError as e:
            return [f"(cannot read {self.log_path}: {e})"]


def spawn(
    cmd: Sequence[str],
    env: Mapping[str, str] | None,
    log_path: str | os.PathLike[str],
    name: str,
    cwd: str | None = None,
    fork_server: str | None = None,
) -> GuardedProcess:
    """Start ``cmd`` with stdout and stderr appended to ``log_path``; it ends when this process ends.

    ``env`` is the whole environment (None: this process's own). The command is not reached by a Ctrl-C in the terminal.
    What it starts ends with it: daemonized grandchildren are ended when the command exits. Where ``fork_server``, the
    socket of one, can run the command, it is forked from that (``slime.utils.fork_server``).
    Raises ProcessStartError when ``cmd`` cannot be executed.
    """
    log_path = Path(log_path)
    with _open_log(log_path, name) as log:
        start = log.tell()
        environ = {**(os.environ if env is None else env), **KEEP_ENVIRON}
        supervisor = None
        if fork_server is not None:
            request = ForkRequest(list(cmd), environ, cwd or os.getcwd())
            try:
                supervisor = _Supervisor(lambda theirs: fork(fork_server, request, theirs, log.fileno()), name)
            except ForkServerError as e:
                logger.info("%s imports its packages itself: %s", name, e)
        if supervisor is None:
            supervisor = _Supervisor(
                lambda theirs: _start_supervisor("supervise", cwd or "", cmd, environ, log.fileno(), theirs), name
            )
    return GuardedProcess(supervisor, log_path, start)


def _open_log(path: Path, name: str) -> BinaryIO:
    """Open the log to append to it; nowhere, with a warning, where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(open_private(path), "ab")
    except OSError as e:
        logger.warning("%s has no log: %s cannot be written: %s%s", name, path, e.strerror or e, space_left(path))
        return open(os.devnull, "ab")


class Janitor:
    """A process that ends everything carrying a tag once this process is gone (see ``start_janitor``)."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        # Without the tag in its own environment, and with none of our output files held open.
        env = {k: v for k, v in public_environment().items() if k not in (RUN_TAG, GUARD_TAG)}
        self._supervisor = _Supervisor(
            lambda theirs: _start_supervisor("janitor", tag, [], env, subprocess.DEVNULL, theirs), f"janitor of {tag}"
        )
        self._supervisor.wait_started()

    def sweep(self, grace_s: float = 5.0) -> None:
        """End the tagged processes now, and the janitor with them."""
        self._supervisor.stop(grace_s)


def start_janitor(tag: str) -> Janitor:
    """When this process ends, end every process of this host that has ``tag`` (``NAME=value``) in its environment."""
    return Janitor(tag)


_self_guard: Janitor | None = None
_self_guard_pid = 0


def guard_self() -> None:
    """When this process ends, end what it has started since this call, however far it was daemonized.

    For processes that were started by others (Ray workers). Children are known by a variable that they inherit.
    Calling it again does nothing.
    """
    global _self_guard, _self_guard_pid
    if _self_guard is not None and _self_guard_pid == os.getpid():
        return
    value = uuid.uuid4().hex
    os.environ[GUARD_TAG] = value
    os.environ.update(KEEP_ENVIRON)
    _self_guard, _self_guard_pid = start_janitor(f"{GUARD_TAG}={value}"), os.getpid()
