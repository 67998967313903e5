"""A process that has imported the packages of a program, and forks it: a start costs no imports.

``start`` starts the server, ``fork`` asks it for a process. What it forks is a supervisor and, from that, the program:
the two processes that ``process_guard.spawn`` would have started, with the same owner, log, environment and end. They
do not depend on the server afterwards. Only for programs that do not touch a GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from slime.utils import process_supervisor

REPLY_DEADLINE_S = 120.0
"""For a reply: as long as the imports of a busy machine may take."""
REQUEST_DEADLINE_S = 10.0
TITLE_ROOM = 4096
"""Bytes on the command line of the server: the title of a forked program cannot be longer."""


class ForkServerError(RuntimeError):
    """The server cannot run this, or does not answer."""


@dataclass(frozen=True)
class ForkRequest:
    """A command ``[python, "-m", module, ...]``, its whole environment, and its working directory."""

    cmd: list[str]
    env: dict[str, str]
    cwd: str


class ForkedProcess:
    """A process that another one has forked: the part of ``subprocess.Popen`` that a guard needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return None while it runs, else 0: its exit code is known to the server alone."""
        return self._ended(0.0)

    def wait(self, timeout: float) -> int:
        """Return when it has ended. Raises TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self._fd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def _ended(self, wait_s: float) -> int | None:
        if self._fd >= 0 and select.select([self._fd], [], [], wait_s)[0]:
            os.close(self._fd)
            self._fd, self.returncode = -1, 0
        return self.returncode


def start(
    path: str, module: str, preload: str, env: Mapping[str, str], read: Sequence[str], varying: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a server of ``module`` that listens at ``path`` and has imported ``preload``; it ends with this thread.

    ``env`` is its whole environment. ``read`` are the beginnings of the variables that ``preload`` reads, but for the
    names ``varying``: a program for which one has another value is not forked. An error of ``preload`` is the answer
    to every request.
    """
    with socket.socket(socket.AF_UNIX) as listener:  # here, so that it listens before anybody looks for it
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(256)
        words = [str(listener.fileno()), str(os.getpid()), module, preload, ",".join(read), ",".join(varying)]
        return subprocess.Popen(
            [sys.executable, "-m", "slime.utils.fork_server", *words, " " * TITLE_ROOM],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(env),
            start_new_session=True, pass_fds=[listener.fileno()],
        )  # fmt: skip


def fork(path: str, request: ForkRequest, control: socket.socket, log: int) -> ForkedProcess:
    """Have the server at ``path`` fork the supervisor that has ``control``, and the program, whose output is ``log``.

    Raises ForkServerError when it refuses, has ended, or does not answer in time.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    body = json.dumps({**asdict(request), "files": limits}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_DEADLINE_S)
        try:
            connection.connect(path)
            socket.send_fds(connection, [struct.pack("!I", len(body))], [control.fileno(), log])
            connection.sendall(body)
            verb, _, said = connection.makefile().readline().strip().partition(" ")
            if verb == "pid":
                return ForkedProcess(int(said))
        except (OSError, AttributeError) as e:  # the second: a Python without pidfd_open
            raise ForkServerError(f"the fork server at {path} does not answer: {e}") from e
    raise ForkServerError(said or f"the fork server at {path} has ended")


class _Server:
    """The server's side: answers requests until the process ``parent`` ends."""

    def __init__(
        self, listener: int, parent: int, module: str, preload: str, read: Sequence[str], varying: Sequence[str]
    ) -> None:
        process_supervisor.die_with_parent()
        self._listener, self._parent = socket.socket(fileno=listener), parent
        self._module, self._read, self._varying = module, tuple(read), varying
        self._environ = dict(os.environ)
        self._error: str | None = None
        _set_title(f"fork server of slime, which has imported {preload}")
        try:
            importlib.import_module(preload)
        except Exception as e:  # noqa: BLE001  the answer to every request
            self._error = f"{preload} cannot be imported: {type(e).__name__}: {e}"
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page that it shares with this process
        self._kept = _open_files() - {self._listener.fileno()}

    def serve(self) -> None:
        while os.getppid() == self._parent:
            process_supervisor.reap()
            if not select.select([self._listener], [], [], process_supervisor.OWNER_POLL_S)[0]:
                continue
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(REQUEST_DEADLINE_S)
                try:
                    self._answer(connection)
                except (OSError, ValueError, KeyError) as e:
                    with suppress(OSError):
                        connection.sendall(f"no {type(e).__name__}: {e}\n".encode())

    def _answer(self, connection: socket.socket) -> None:
        owner, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        head, (control, log), _, _ = socket.recv_fds(connection, 4, 2)
        try:
            if uid != os.getuid():
                raise PermissionError(f"user {uid} is not the owner of this server")
            body = connection.makefile("rb").read(*struct.unpack("!I", head))
            fields = json.loads(body)
            soft, hard = fields.pop("files")
            request = ForkRequest(**fields)
            self._check(request)
            if select.select([connection], [], [], 0)[0]:
                raise ConnectionAbortedError("whoever asked has not waited")
            pid = os.fork()
            if pid == 0:
                connection.close()
                self._be_supervisor(request, owner, control, log, (soft, hard))
            connection.sendall(f"pid {pid}\n".encode())
        finally:
            os.close(control)
            os.close(log)

    def _check(self, request: ForkRequest) -> None:
        """Raise ValueError for what a process with these imports cannot run."""
        if self._error is not None:
            raise ValueError(self._error)
        expected = [sys.executable, "-m", self._module]
        if request.cmd[:3] != expected:
            raise ValueError(f"expected the command {expected}, got {request.cmd[:3]}")
        read = {name for name in (*self._environ, *request.env) if name.startswith(self._read)}
        names = read.difference(self._varying)
        if other := sorted(name for name in names if self._environ.get(name) != request.env.get(name)):
            raise ValueError(f"the imports were done with another environment: {', '.join(other)}")
        if len(os.listdir("/proc/self/task")) > 1:
            raise ValueError("an import has started a thread, which a fork does not have")

    def _be_supervisor(self, request: ForkRequest, owner: int, control: int, log: int, files: tuple[int, int]) -> None:
        """Be the supervisor of the program; this does not return."""
        code = 1
        try:
            os.setsid()
            _set_title(f"process_supervisor of {self._module}")
            self._listener.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
            owner_fd = os.pidfd_open(owner)
            supervised = process_supervisor.Owner(control, lambda: bool(select.select([owner_fd], [], [], 0)[0]))
            code = process_supervisor.supervise(supervised, lambda output: self._fork_program(request, output))
        except BaseException:  # noqa: BLE001  it must not return into the server's loop
            traceback.print_exc()
        finally:
            os._exit(code)

    def _fork_program(self, request: ForkRequest, output: int) -> int:
        """Fork the program, as ``process_supervisor.start_command`` starts one; return its pid."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            process_supervisor.die_with_parent()
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for fd in _open_files() - self._kept:
                with suppress(OSError):
                    os.close(fd)
            os.chdir(request.cwd)
            _take_environment(request)
            runpy.run_module(self._module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
            if isinstance(e.code, str):
                print(e.code, file=sys.stderr)
        except BaseException:  # noqa: BLE001  as the interpreter does
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)


def _take_environment(request: ForkRequest) -> None:
    """Take the environment, arguments and title of the program, and new seeds: forks would share the server's."""
    for name in os.environ.keys() - request.env.keys():
        del os.environ[name]
    os.environ.update(request.env)
    tempfile.tempdir = None
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    sys.argv = request.cmd[2:]
    _set_title(" ".join(request.cmd))


def _set_title(title: str) -> None:
    """Show ``title`` as this process's command line; the first call comes before a change of the environment."""
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def _open_files() -> set[int]:
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing
            os.fstat(fd)
            found.add(fd)
    return found


def main(argv: list[str]) -> int:
    listener, parent, module, preload, read, varying = argv[:6]
    _Server(int(listener), int(parent), module, preload, read.split(","), varying.split(",")).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
