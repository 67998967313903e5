"""The process that computes rewards for another one: a loop of one job at a time, under limits.

Run as ``python -m slime.rollout.rm_hub.worker_main`` by ``slime.rollout.rm_hub.workers``. Jobs come on standard input
and replies go to standard output. It may not outlive its owner, take too much memory or start processes. With
``WorkerLimits.fresh`` every job has a new process, a fork of this one. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any, BinaryIO

from slime.rollout.rm_hub.system_calls import allow_computing_only, forbid_processes
from slime.rollout.rm_hub.workers import LENGTH, WorkerLimits, read_job, reply_frame

_PR_SET_PDEATHSIG = 1
NICENESS = 5
"""The event loop that waits for rewards goes first."""
RETIRE_BYTES = 1 << 30
"""A worker that has once held this much is replaced: Python seldom gives memory back."""
MOST_ANSWER_BYTES = 64 << 20
"""Of a process that may send anything."""


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


# Limits


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
