"""The process that computes rewards for another one: a loop of one job at a time, under limits.

Run as ``python -m slime.rollout.rm_hub.worker_main`` by ``slime.rollout.rm_hub.workers``. Jobs come on standard input
and replies go to standard output. It may not outlive its owner, take too much memory or start processes. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import platform
import resource
import signal
import sys
import traceback
from typing import Any, BinaryIO

from slime.rollout.rm_hub.workers import read_job, reply_frame

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _REFUSE_WITH = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_CLONE_THREAD = 0x00010000
_CLONE3 = 435
_CALLS = {  # machine -> audit architecture, fork, vfork, clone (where there is no fork: clone again)
    "x86_64": (0xC000003E, 57, 58, 56),
    "aarch64": (0xC00000B7, 220, 220, 220),
}

NICENESS = 5
"""The event loop that waits for rewards goes first."""
RETIRE_BYTES = 1 << 30
"""A worker that has once held this much is replaced: Python seldom gives memory back."""


def _set_timers(cpu_s: float, wall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(function: str, arguments: tuple[Any, ...], cpu_s: float, wall_s: float) -> tuple[Any, ...]:
    """Return ``("ok", result)``, or ``("memory" or "raised", message, traceback)``."""
    from slime.rollout.rm_hub import rules
    from slime.utils.misc import load_function

    try:
        if function == rules.PATH:
            rules.prepare(*arguments)
        _set_timers(cpu_s, wall_s)
        return ("ok", load_function(function)(*arguments))
    except MemoryError as e:
        return ("memory", f"MemoryError: {e}", "".join(traceback.format_exception(e, limit=-20)))
    except BaseException as e:  # noqa: BLE001  (SystemExit too: the worker is there for the next sample)
        return ("raised", f"{type(e).__name__}: {e}", "".join(traceback.format_exception(e, limit=-20)))
    finally:
        _set_timers(0, 0)


def most_memory() -> int:
    """Return the bytes that this process has had in memory at most; ``ru_maxrss`` begins with what its parent had."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:")), 0)


def _reply(answer: tuple[Any, ...]) -> bytes:
    retire = answer[0] == "memory" or most_memory() > RETIRE_BYTES
    try:
        return reply_frame((retire, answer))
    except (TypeError, ValueError) as e:
        return reply_frame((retire, ("raised", f"the result cannot be sent back: {type(e).__name__}: {e}", "")))


def serve(owner_pid: int, cpu_s: float, wall_s: float, memory_bytes: int) -> None:
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
    # Both timers end this process in whatever code it is, after the stack is written to standard error.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        faulthandler.register(number, all_threads=False, chain=True)
    limit_memory(memory_bytes)
    forbid_processes()
    sys.path[:] = read_job(jobs)
    import sympy  # noqa: F401  (the first job should not pay for it)

    _write_all(replies, reply_frame("ready"))
    while True:
        try:
            function, arguments = read_job(jobs)
        except EOFError:
            return
        except Exception as e:  # noqa: BLE001  (an argument whose class cannot be imported here)
            answer: tuple[Any, ...] = ("raised", f"unreadable arguments: {type(e).__name__}: {e}", "")
        else:
            answer = _answer(function, arguments, cpu_s, wall_s)
        _write_all(replies, _reply(answer))


def _write_all(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


# Limits


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def die_with_owner(owner_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; exit when that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner_pid:
        os._exit(1)


def limit_memory(limit_bytes: int) -> None:
    """Bound the address space: what is too much raises MemoryError. Core files are not written."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def forbid_processes() -> bool:
    """Make every attempt to start a process fail with EAGAIN; threads are allowed. Return whether that worked.

    A system call filter does it, which holds for root too. Where the kernel or the machine has none, the limit on the
    user's processes is set to nothing, which does not bind root.
    """
    if platform.machine() in _CALLS and _install(_filter(*_CALLS[platform.machine()])):
        return True
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return os.geteuid() != 0


def _filter(architecture: int, fork: int, vfork: int, clone: int) -> list[_Instruction]:
    """Return the program; its jumps count instructions to skip. ``clone3`` is "not there": libc then uses ``clone``."""
    return [
        _Instruction(_LOAD, 0, 0, 4),  # architecture
        _Instruction(_IF_EQUAL, 0, 9, architecture),  # else allow
        _Instruction(_LOAD, 0, 0, 0),  # number of the call
        _Instruction(_IF_EQUAL, 6, 0, _CLONE3),
        _Instruction(_IF_EQUAL, 4 if fork != clone else 0, 0, fork),
        _Instruction(_IF_EQUAL, 3 if vfork != clone else 0, 0, vfork),
        _Instruction(_IF_EQUAL, 0, 4, clone),  # else allow
        _Instruction(_LOAD, 0, 0, 16),  # flags, the first argument
        _Instruction(_IF_ANY_BIT, 2, 0, _CLONE_THREAD),  # a thread: allow
        _Instruction(_RETURN, 0, 0, _REFUSE_WITH | errno.EAGAIN),
        _Instruction(_RETURN, 0, 0, _REFUSE_WITH | errno.ENOSYS),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    ]


def _install(instructions: list[_Instruction]) -> bool:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    array = (_Instruction * len(instructions))(*instructions)
    program = _Program(len(instructions), array)
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
