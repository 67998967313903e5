"""The small process beside a guarded one: it outlives its owner by a few seconds, to end what the owner started.

Run as a script by ``slime.utils.process_guard``, with the standard library only, so that it starts in milliseconds and
holds about 10 MB. Two verbs:

``supervise``  start one command and own it: it and everything it starts, daemonized processes included (the supervisor
               is their sub-reaper, so orphans become its children), end when the command exits, when ``stop`` arrives
               on the control socket, or when the owner is gone.
``janitor``    wait until the owner is gone, then end every process of this host whose environment holds a given tag.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OWNER_POLL_S = 0.5
DRAIN_S = 1.0
"""Seconds that the end of a command waits for its last lines to reach the log."""
ORPHAN_GRACE_S = 1.5
"""Time between SIGTERM and SIGKILL for what a dead owner leaves behind."""


def parents() -> dict[int, int]:
    """Return ``{pid: parent pid}`` of every live process of this host; zombies are left out."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as f:
                # The command name is in parentheses and may hold anything: fields are counted after the last one.
                state, parent = f.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            found[int(entry)] = int(parent)
    return found


def descendants(root: int) -> list[int]:
    """Return the live processes that descend from ``root``, which is not among them."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found, stack = [], [root]
    while stack:
        for pid in children.get(stack.pop(), ()):
            found.append(pid)
            stack.append(pid)
    return found


def tagged(tag: str) -> list[int]:
    """Return the live processes of this host that were started with ``tag`` (``NAME=value``) in their environment."""
    needle = tag.encode()
    found = []
    for pid in parents():
        if pid == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if needle in f.read().split(b"\0"):
                    found.append(pid)
        except OSError:
            continue
    return found


def send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


def reap() -> list[tuple[int, int]]:
    """Collect every child that has ended; return ``(pid, exit code)``, negative for a signal."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def end(find: Callable[[], list[int]], grace_s: float, *, limit_s: float = 60.0) -> list[int]:
    """Send SIGTERM to what ``find`` returns, SIGKILL after ``grace_s``, again until it returns nothing.

    Return what is still there after ``limit_s`` more seconds (a process stuck in the kernel), else [].
    """
    started = time.monotonic()
    asked: set[int] = set()
    while True:
        left = find()
        waited = time.monotonic() - started
        if not left or waited > grace_s + limit_s:
            return left
        if waited < grace_s:
            send((pid for pid in left if pid not in asked), signal.SIGTERM)
            asked.update(left)
        else:
            send(left, signal.SIGKILL)
        time.sleep(0.05)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Owner:
    """The other end of the control socket: what it asked for, and, by ``is_gone``, whether it still lives."""

    def __init__(self, fd: int, is_gone: Callable[[], bool]) -> None:
        self.socket = socket.socket(fileno=fd)
        self.is_gone = is_gone
        self.buffer = b""

    def report(self, line: str) -> None:
        try:
            self.socket.sendall(line.encode() + b"\n")
        except OSError:
            return  # the owner is gone, as the caller finds out

    def wait(self, wakeup_fd: int | None) -> float | None:
        """Wait up to half a second. Return the grace in seconds when the end has come, else None.

        The end is a ``stop <seconds>`` line, a closed socket, or an owner that is gone: forks of the owner may hold a
        copy of its socket, so end-of-file alone would wait for them.
        """
        fds = [self.socket.fileno()] + ([] if wakeup_fd is None else [wakeup_fd])
        ready, _, _ = select.select(fds, [], [], OWNER_POLL_S)
        if wakeup_fd is not None and wakeup_fd in ready:
            os.read(wakeup_fd, 4096)
        if self.socket.fileno() in ready:
            try:
                data = self.socket.recv(4096)
            except OSError:
                data = b""
            if not data:
                return ORPHAN_GRACE_S
            self.buffer += data
            if b"\n" in self.buffer:
                return float(self.buffer.split(b"\n")[0].split()[1])
        return ORPHAN_GRACE_S if self.is_gone() else None


def _wakeup_on_signals() -> tuple[int, list[int]]:
    """Make SIGCHLD and SIGTERM readable on a pipe; return its read end and the list that received SIGTERMs go to."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    terms: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda signum, _: terms.append(signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader, terms


class _Log:
    """Copies what the command prints to our own output, by a thread. What a full disk does not take is lost.

    A server that wrote to the file itself would end when that fails.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to copy; after the command was started, since a fork and threads do not go together."""
        os.close(self.writer)
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        while True:
            select.select([self._reader], [], [])
            if not self.drain(-1):
                return

    def drain(self, wait_s: float) -> bool:
        """Copy what has been printed so far, unless the disk takes longer; return whether more may come."""
        if not self._lock.acquire(timeout=wait_s):
            return True
        try:
            while data := os.read(self._reader, 65536):
                _write(data)
            return False
        except BlockingIOError:
            return True
        finally:
            self._lock.release()


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return


def start_command(cwd: str, cmd: list[str], output: int) -> int:
    """Start ``cmd`` with its output to the file descriptor ``output``; return its pid. Raises OSError."""
    return subprocess.Popen(
        cmd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd or None,
        start_new_session=True, preexec_fn=die_with_parent,
    ).pid  # fmt: skip


def supervise(owner: Owner, start: Callable[[int], int]) -> int:
    """Own what ``start(output)`` starts, and everything that this starts, until the end; return 0.

    ``start`` returns a pid, or raises OSError. What is written to the file descriptor ``output`` goes to our own.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, terms = _wakeup_on_signals()
    log = _Log()
    try:
        command = start(log.writer)
    except OSError as e:
        owner.report(f"error {e}")
        return 1
    log.start()
    owner.report(f"pid {command}")
    grace: float | None = None
    exited = False
    while grace is None and not exited:
        grace = owner.wait(wakeup)
        if terms:
            grace = ORPHAN_GRACE_S
        for pid, code in reap():
            if pid == command:
                exited = True
                log.drain(DRAIN_S)
                owner.report(f"exit {code}")
    left = end(lambda: _reap_descendants(owner, command), ORPHAN_GRACE_S if grace is None else grace)
    log.drain(DRAIN_S)
    if left:
        owner.report(f"left {left}")
    return 0


def _reap_descendants(owner: Owner, child: int) -> list[int]:
    """Return our descendants; report the command's exit code to the owner when it ends among them."""
    for pid, code in reap():
        if pid == child:
            owner.report(f"exit {code}")
    return descendants(os.getpid())


def janitor(owner: Owner, tag: str) -> int:
    """Wait for the owner's end, then end every process that carries ``tag``; return 0."""
    _, terms = _wakeup_on_signals()
    owner.report("pid 0")
    grace: float | None = None
    while grace is None:
        grace = owner.wait(None)
        if terms:
            grace = ORPHAN_GRACE_S
    end(lambda: tagged(tag), grace)
    return 0


def main(argv: list[str]) -> int:
    verb, fd, owner_pid, argument = argv[:4]
    owner = Owner(int(fd), lambda: os.getppid() != int(owner_pid))
    if verb == "supervise":
        return supervise(owner, lambda output: start_command(argument, argv[4:], output))
    return janitor(owner, argument)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
