"""What a reward worker may not do: outlive its owner, take too much memory, start processes. Linux only."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal

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
