"""Filters of system calls (seccomp), which hold for root too and cannot be taken off. Linux on x86-64 and ARM64."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
from dataclasses import dataclass

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _REFUSE_WITH = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ARCHITECTURE, _NUMBER, _FIRST_ARGUMENT = 4, 0, 16
"""Offsets at which a program finds these."""
_CLONE_THREAD = 0x00010000
_CLONE3 = 435


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
