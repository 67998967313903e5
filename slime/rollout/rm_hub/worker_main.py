"""The process that computes rewards for another one: a loop of one job at a time, under limits.

Run as ``python -m slime.rollout.rm_hub.worker_main`` by ``slime.rollout.rm_hub.workers``. Jobs come on standard input
and replies go to standard output. It may not outlive its owner, take too much memory or start processes. With
``WorkerLimits.fresh`` every job has a new process, a fork of this one. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import platform
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any, BinaryIO

from slime.rollout.rm_hub.workers import LENGTH, WorkerLimits, read_job, reply_frame

_PR_SET_PDEATHSIG = 1
NICENESS = 5
"""The event loop that waits for rewards goes first."""
RETIRE_BYTES = 1 << 30
"""A worker that has once held this much is replaced: Python seldom gives memory back."""
MOST_ANSWER_BYTES = 64 << 20
"""Of a process that may send anything."""
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _REFUSE_WITH = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ARCHITECTURE, _NUMBER, _FIRST_ARGUMENT = 4, 0, 16
"""Offsets at which a program finds these."""
_CLONE_THREAD = 0x00010000
_CLONE3 = 435


def _set_timers(cpu_s: float, wall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(function: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``("ok", result)``, or ``("memory" or "raised", message, traceback)``."""
    from slime.utils.misc import load_function

    try:
        return ("ok", load_function(function)(*arguments))
    except MemoryError as e:
        return ("memory", f"MemoryError: {e}", "".join(traceback.format_exception(e, limit=-20)))
    except BaseException as e:  # noqa: BLE001  (SystemExit too: the worker continues with the next sample)
        return ("raised", f"{type(e).__name__}: {e}", "".join(traceback.format_exception(e, limit=-20)))


def most_memory() -> int:
    """Return the bytes that this process has had in memory at most; ``ru_maxrss`` begins with what its parent had."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:")), 0)


def _load(function: str, arguments: tuple[Any, ...]) -> None:
    """Load what a job needs and no answer is charged for. Errors are those of the job, which has them again."""
    from slime.rollout.rm_hub import rules
    from slime.utils.misc import load_function

    with contextlib.suppress(Exception):
        load_function(function)
        if function == rules.PATH:
            rules.prepare(*arguments)


def _answer_here(function: str, arguments: tuple[Any, ...], limits: WorkerLimits) -> bytes:
    _load(function, arguments)
    _set_timers(limits.cpu_s, limits.wall_s)
    answer = _answer(function, arguments)
    _set_timers(0, 0)
    return _reply(answer, retire=answer[0] == "memory" or most_memory() > RETIRE_BYTES)


def _answer_in_fork(function: str, arguments: tuple[Any, ...], limits: WorkerLimits, owners: list[int]) -> bytes:
    """Return the reply of a process that is made for this job alone and cannot reach what is between other jobs and
    the ``owners`` of this process. What ends it is ``("ended", exit code)``."""
    _load(function, arguments)
    ours, its = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        try:
            die_with_owner(parent)
            for fd in (ours, *owners):
                os.close(fd)
            limit_memory(limits.memory_bytes)
            os.environ.clear()
            _set_timers(limits.cpu_s, limits.wall_s)
            (allow_computing_only if limits.sealed else forbid_processes)()
            _write_all(os.fdopen(its, "wb", buffering=0), _reply(_answer(function, arguments), retire=False))
        finally:
            os._exit(1)
    os.close(its)
    with os.fdopen(ours, "rb") as stream:
        frame = stream.read(MOST_ANSWER_BYTES + LENGTH.size)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # one that has answered has nothing left to do
    _, status = os.waitpid(child, 0)
    if len(frame) >= LENGTH.size and len(frame) == LENGTH.size + LENGTH.unpack(frame[: LENGTH.size])[0]:
        return frame
    return reply_frame((False, ("ended", os.waitstatus_to_exitcode(status), "")))


def _reply(answer: tuple[Any, ...], *, retire: bool) -> bytes:
    try:
        return reply_frame((retire, answer))
    except (TypeError, ValueError) as e:
        return reply_frame((retire, ("raised", f"the result cannot be sent back: {type(e).__name__}: {e}", "")))


def serve(owner_pid: int, limits: WorkerLimits) -> None:
    """Answer jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's business
    die_with_owner(owner_pid)
    # The two ends to the owner are out of the reach of rewards that print or read.
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    faulthandler.enable()
    # Both timers end this process in any code, after the stack is written to standard error.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        faulthandler.register(number, all_threads=False, chain=True)
    if not limits.fresh:
        limit_memory(limits.memory_bytes)
        forbid_processes()
    sys.path[:] = read_job(jobs)
    if not limits.fresh:
        import mpmath  # noqa: F401  (the first job should not pay for it)

    _write_all(replies, reply_frame("ready"))
    while True:
        try:
            function, arguments = read_job(jobs)
        except EOFError:
            return
        except Exception as e:  # noqa: BLE001  (an argument whose class cannot be imported here)
            reply = _reply(("raised", f"unreadable arguments: {type(e).__name__}: {e}", ""), retire=False)
        else:
            reply = (
                _answer_in_fork(function, arguments, limits, [jobs.fileno(), replies.fileno()])
                if limits.fresh
                else _answer_here(function, arguments, limits)
            )
        _write_all(replies, reply)


def _write_all(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


# Limits. Filters of system calls (seccomp) hold for root too and cannot be taken off; on x86-64 and ARM64


@dataclass(frozen=True)
class _Machine:
    """The audit architecture, and the numbers of calls; where there is no fork, it is that of clone."""

    architecture: int
    fork: int
    vfork: int
    clone: int
    tgkill: int
    computing: tuple[int, ...]


_MACHINES = {
    # read, write, close, fstat, lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, writev,
    # sched_yield, mremap, madvise, nanosleep, getitimer, getpid, exit, getrusage, times, sigaltstack, gettid, futex,
    # set_robust_list, clock_gettime, clock_getres, clock_nanosleep, exit_group, getrandom, membarrier, rseq
    "x86_64": _Machine(
        0xC000003E, 57, 58, 56, 234,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 20, 24, 25, 28, 35, 36, 39, 60, 98, 100, 131, 186, 202, 273, 228,
         229, 230, 231, 318, 324, 334),
    ),
    "aarch64": _Machine(
        0xC00000B7, 220, 220, 220, 131,
        (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 66, 124, 216, 233, 101, 102, 172, 93, 165, 153, 132,
         178, 98, 99, 113, 114, 115, 94, 278, 283, 293),
    ),
}  # fmt: skip


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def forbid_processes() -> bool:
    """Make every attempt to start a process fail with EAGAIN; threads are allowed. Return whether that worked.

    Where the kernel or the machine has no filters, the limit on the user's processes is set to nothing, which does not
    bind root.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is not None and _install(_without_processes(machine)):
        return True
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return os.geteuid() != 0


def allow_computing_only() -> bool:
    """Make every system call fail with EPERM that is not needed to compute: those of files, of the network, of
    processes. Open files stay open. Return whether that worked.

    Where the kernel or the machine has no filters, the limits on files, their size and processes are set to nothing,
    which binds a process that is not root's.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is not None and _install(_computing(machine, os.getpid())):
        return True
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    return os.geteuid() != 0


def _without_processes(m: _Machine) -> list[_Instruction]:
    """Return the program; its jumps count instructions to skip. ``clone3`` is "not there": libc then uses ``clone``."""
    return [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _Instruction(_IF_EQUAL, 0, 9, m.architecture),  # else allow
        _Instruction(_LOAD, 0, 0, _NUMBER),
        _Instruction(_IF_EQUAL, 6, 0, _CLONE3),
        _Instruction(_IF_EQUAL, 4 if m.fork != m.clone else 0, 0, m.fork),
        _Instruction(_IF_EQUAL, 3 if m.vfork != m.clone else 0, 0, m.vfork),
        _Instruction(_IF_EQUAL, 0, 4, m.clone),  # else allow
        _Instruction(_LOAD, 0, 0, _FIRST_ARGUMENT),  # flags
        _Instruction(_IF_ANY_BIT, 2, 0, _CLONE_THREAD),  # a thread: allow
        _Instruction(_RETURN, 0, 0, _REFUSE_WITH | errno.EAGAIN),
        _Instruction(_RETURN, 0, 0, _REFUSE_WITH | errno.ENOSYS),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    ]


def _computing(m: _Machine, pid: int) -> list[_Instruction]:
    """Return the program. ``tgkill`` is for the process itself: its time limits end it so."""
    count = len(m.computing)
    return [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _Instruction(_IF_EQUAL, 0, count + 4, m.architecture),  # else refuse
        _Instruction(_LOAD, 0, 0, _NUMBER),
        *(_Instruction(_IF_EQUAL, count - i + 3, 0, number) for i, number in enumerate(m.computing)),
        _Instruction(_IF_EQUAL, 0, 2, m.tgkill),
        _Instruction(_LOAD, 0, 0, _FIRST_ARGUMENT),
        _Instruction(_IF_EQUAL, 1, 0, pid),
        _Instruction(_RETURN, 0, 0, _REFUSE_WITH | errno.EPERM),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    ]


def _install(instructions: list[_Instruction]) -> bool:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    array = (_Instruction * len(instructions))(*instructions)
    program = _Program(len(instructions), array)
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def die_with_owner(owner_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; exit when that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner_pid:
        os._exit(1)


def limit_memory(limit_bytes: int) -> None:
    """Bound the address space: what is too much raises MemoryError. Core files are not written."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    serve(int(sys.argv[1]), WorkerLimits(**json.loads(sys.argv[2])))
